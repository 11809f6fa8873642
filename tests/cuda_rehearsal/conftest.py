"""Skip the rehearsal where there can be no pretended CUDA devices, and say why."""

import pytest

from tests.support.pretended_cuda.run import why_not


@pytest.fixture(scope="session", autouse=True)
def pretended_devices() -> None:
    """Build the devices, or skip."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
