"""Skip the rehearsal where there can be no pretended CUDA devices, and say why."""

from pathlib import Path

import pytest

from tests.support.forked_runs import ForkedRuns
from tests.support.pretended_cuda.rehearsal import Rehearsal
from tests.support.pretended_cuda.run import why_not


@pytest.fixture(scope="session", autouse=True)
def pretended_devices() -> None:
    """Build the devices, or skip."""
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def rehearsal(
    tmp_path_factory: pytest.TempPathFactory,
    pretended_devices: None,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    forked_runs: ForkedRuns,
) -> Rehearsal:
    """Starts runs of the tiny model on pretended devices."""
    return Rehearsal(tmp_path_factory.mktemp("rehearsal"), tiny_model_dir, tiny_tokens_dir, forked_runs)
