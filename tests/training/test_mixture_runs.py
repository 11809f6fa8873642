"""Runs on several token datasets in shares: what is planned is seen, and a resumed run goes on in the same order."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.short_runs import argv, metrics
from tests.support.token_datasets import TEXTS, manifest_of, tokenize, write_jsonl

pytestmark = pytest.mark.slow
NAMES = ("va", "es", "en")
OPTIONS: dict[str, Any] = {"lr_schedule": "constant", "eval_step_interval": 100, "total_batch_size": 8}


class Mixing:
    """Trains on three token datasets in the folder of the runs."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder, self._model, self._runs = folder, model, runs
        for name, texts in zip(NAMES, (TEXTS[:20], TEXTS * 4, TEXTS[:10]), strict=True):
            documents = write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in texts])
            tokenize(folder / name, model, documents, validation_split=0.1)

    def start(self, run: str, num_ranks: int, *shares: object, **options: object) -> ForkedRun:
        words = argv(self._model, Path("TOKENS"), Path(run), **{**OPTIONS, **options})
        place = words.index("TOKENS")
        return self._runs.start(
            [*words[:place], *NAMES, *map(str, shares), *words[place + 1 :]], num_ranks, cwd=self.folder
        )

    def state(self, run: str, step: int) -> dict[str, Any]:
        file = self.folder / run / "checkpoints" / f"step-{step:08d}" / "trainer.json"
        return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Mixing:
    return Mixing(tmp_path_factory.mktemp("mixing"), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def whole(mixing: Mixing) -> ForkedRun:
    """A run on two ranks over two epochs of a mixture."""
    run = mixing.start("whole", 2, "--shares", 1.0, 0.15, 2, max_step=None, number_epochs=2, save_step_interval=4)
    run.finish()
    return run


def last_step(run: ForkedRun) -> int:
    (steps,) = re.findall(r"^steps +([0-9]+), the last", run.stdout(), re.MULTILINE)
    return int(steps)


def test_what_a_run_saw_of_each_source_is_what_was_planned(mixing: Mixing, whole: ForkedRun) -> None:
    rows = [manifest_of(mixing.folder / name).ledger.splits["train"].rows for name in NAMES]
    wanted = [2 * rows[0], 2 * round(0.15 * rows[1]), 4 * rows[2]]
    state = mixing.state("whole", last_step(whole))
    assert state["rows_of_sources"] == wanted
    assert state["num_tokens"] == 16 * sum(wanted)
    before, after = whole.stdout().split("Done\n")
    for name, total, seen in zip(NAMES, rows, wanted, strict=True):
        share, epochs = f"{seen / sum(wanted):.2%}", f"{seen / total:.2f}"
        planned = [name, f"{total * 16:,}", share, epochs, f"{seen * 16:,}"]
        assert planned in [line.split() for line in before.splitlines()]
        assert [*planned, planned[-1]] in [line.split() for line in after.splitlines()]


def test_checkpoint_of_a_mixture_has_its_order_and_describes_all_sources(mixing: Mixing, whole: ForkedRun) -> None:
    order = mixing.state("whole", 4)["data"]
    assert order["version"] == 2
    assert sum(order["rows_per_epoch"]) == order["num_rows"]
    checkpoint = manifest_of(mixing.folder / "whole" / "checkpoints" / "step-00000004")
    parts = [manifest_of(mixing.folder / name).ledger.splits["train"].rows for name in NAMES]
    assert checkpoint.ledger.splits["train"].rows == sum(parts)
    assert [part.name for part in checkpoint.parts] == list(NAMES)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resumed_mixture_reads_the_same_rows_on_any_number_of_ranks(
    mixing: Mixing, whole: ForkedRun, num_ranks: int
) -> None:
    end = last_step(whole)
    checkpoint = mixing.folder / "whole" / "checkpoints" / "step-00000004"
    options = {"checkpoint": checkpoint, "resume": "true", "max_step": None, "number_epochs": 2}
    run = f"resumed-{num_ranks}"
    mixing.start(run, num_ranks, "--shares", 1.0, 0.15, 2, **options).finish()
    here, there = (mixing.state(each, end) for each in (run, "whole"))
    for name in ("rows_hash", "rows_of_sources", "num_tokens", "data"):
        assert here[name] == there[name]
    ours, theirs = metrics(mixing.folder / run), metrics(mixing.folder / "whole")[4:]
    if num_ranks == 2:
        assert ours == theirs
    for row, same in zip(ours, theirs, strict=True):
        assert row[0] == same[0]
        assert float(row[2]) == pytest.approx(float(same[2]), abs=1e-5)


def test_mixture_is_not_resumed_in_other_shares(mixing: Mixing, whole: ForkedRun) -> None:
    options = {"checkpoint": mixing.folder / "whole" / "checkpoints" / "step-00000004", "resume": "true"}
    other = mixing.start("other", 1, "--shares", 1.0, 0.25, 2, **options)
    assert other.wait() == [2]
    assert "an epoch has other numbers of rows of each --train_data_dir" in other.stderr()
    assert not (mixing.folder / "other").exists()


def test_token_shares_are_those_of_every_step(mixing: Mixing) -> None:
    run = mixing.start(
        "tokens", 1, "--token_shares", 0.5, 0.25, 0.25, max_step=3, save_step_interval=1, keep_checkpoints=9
    )
    run.finish()
    assert [mixing.state("tokens", step)["rows_of_sources"] for step in (1, 2, 3)] == [[4, 2, 2], [8, 4, 4], [12, 6, 6]]


def test_share_of_less_than_a_row_is_refused(mixing: Mixing) -> None:
    run = mixing.start("none", 1, "--shares", 1, 0.0001, 1)
    assert run.wait() == [2]
    (line,) = run.stderr().splitlines()
    assert re.fullmatch(
        "error: --shares takes no row of es in an epoch, which has [0-9]+; give it more, or leave it out", line
    )
