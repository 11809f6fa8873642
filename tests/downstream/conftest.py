"""Environments of the software that exports are used in, each created once under ``.cache/downstream/``."""

from pathlib import Path

import pytest

from tests.support.environments import downstream_environment


@pytest.fixture(scope="session")
def lm_eval_python() -> Path:
    """Python with lm_eval, on top of the project's own packages."""
    return downstream_environment("lm_eval")
