"""A real run and its export, environments of the software that exports are used in, and the table of all checks.

Each environment is created once under ``.cache/downstream/``.
"""

import datetime
import os
import platform
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from fabric_train.programs import tokenize_dataset
from tests.support.downstream_uses import OPTIONS, Checked, ModelOutputs, use_in_transformers
from tests.support.environments import downstream_environment
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

CHATS = 120
INTRODUCTION = """\
# Exports in other software

Exports were loaded into the software below, in these versions, and compared as described. `make test-downstream` runs
the checks and writes this page.

Unless a line says otherwise, the model is SmolLM2-135M-Instruct after {steps} training steps on chats, exported in bf16
by `fabric-train convert`. Each program has its own environment with pinned versions (`tests/downstream/requirements/`).
llama.cpp's converter comes from llama-cpp-python's source, and vLLM is the release for CPUs. Nothing was run on a GPU.

Last run: {machine}

| software | version | checked |
|---|---|---|
"""


@pytest.fixture(scope="session")
def rows() -> Iterator[list[tuple[str, ...]]]:
    """Collect the rows of the table; write it into the file that ``DOWNSTREAM_TABLE`` names, after the last test."""
    rows: list[tuple[str, ...]] = []
    yield rows
    file = os.environ.get("DOWNSTREAM_TABLE")
    if file:
        where = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
        machine = f"{datetime.date.today():%d %B %Y}, on {where}."
        lines = [f"| {' | '.join(row)} |\n" for row in rows]
        text = INTRODUCTION.format(steps=OPTIONS["max_step"], machine=machine)
        Path(file).write_text(text + "".join(lines), encoding="utf-8")


@pytest.fixture
def checked(rows: list[tuple[str, ...]]) -> Checked:
    """Return ``checked(software, version, what)``, which adds a row to the table; tests call it at their end."""

    def add(software: str, version: str, what: str) -> None:
        rows.append((software, version, what))

    return add


@pytest.fixture(scope="session")
def run(
    tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, chats_jsonl: Path, forked_runs: ForkedRuns
) -> Path:
    """SmolLM2-135M continued a few steps on chats, in fp32, with a validation after the last step."""
    folder = tmp_path_factory.mktemp("smollm2")
    with chats_jsonl.open(encoding="utf-8") as chats:
        (folder / "chats.jsonl").write_text("".join(islice(chats, CHATS)), encoding="utf-8")
    words = f"--dataset {folder / 'chats.jsonl'} --tokenizer_name {smollm2_dir} --output_dir {folder / 'tokens'}"
    tokenize_dataset.main(f"{words} --max_length 128 --validation_split 0.2 --num_proc 1".split())
    forked_runs.start(argv(smollm2_dir, folder / "tokens", folder / "run", **OPTIONS), 1).finish(900)
    return folder / "run"


@pytest.fixture(scope="session")
def export(run: Path, forked_runs: ForkedRuns) -> Path:
    """The run's last checkpoint, converted by the program."""
    return convert_run(forked_runs, run.parent / "export", "--checkpoint", run)


@pytest.fixture(scope="session")
def used(export: Path) -> ModelOutputs:
    """What the transformers of this environment, which trained the model, makes of the export."""
    return use_in_transformers(sys.executable, export)


@pytest.fixture(scope="session")
def lm_eval_python() -> Path:
    """Python with lm_eval, on top of the project's own packages."""
    return downstream_environment("lm_eval")
