"""The validation loss of one source decides which checkpoint is the best, and when a run ends."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fabric_train.checkpoint import Evaluation, LossProgress, TokenLoss, TrainerState, best_checkpoint
from fabric_train.checkpoint.discovery import prune
from fabric_train.training.early_stopping import EarlyStopping
from tests.support.checkpoint_examples import write_checksums, write_full
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.short_runs import TERMINATE, argv, at_point, metrics, saved_steps
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

MAX_STEP = 8
PATIENCE = 2


def test_progress_counts_evaluations_without_a_new_lowest_loss() -> None:
    progress = LossProgress("es")
    found = []
    for step, loss in enumerate([math.nan, 3.0, 3.0, 2.5, math.inf, 2.6, 2.4]):
        whole = TokenLoss(9.0, 1)
        progress = progress.after(Evaluation(whole, {"es": TokenLoss(loss * 2, 2)}, step))
        found.append((progress.best, progress.best_step, progress.num_since))
    assert found == [(None, 0, 1), (3.0, 1, 0), (3.0, 1, 1), (2.5, 3, 0), (2.5, 3, 1), (2.5, 3, 2), (2.4, 6, 0)]


def test_a_higher_accuracy_or_agreement_is_better_and_a_lower_loss() -> None:
    progress = LossProgress("accuracy")
    of_all = LossProgress("all")
    for step, (accuracy, loss) in enumerate([(0.5, 0.7), (0.7, 0.6), (0.6, 0.5)]):
        pairs = TokenLoss(4 * loss, 4, further={"accuracy": accuracy}, of_pairs=True)
        evaluation = Evaluation(pairs, step=step)
        progress = progress.after(evaluation)
        of_all = of_all.after(evaluation)
        state = TrainerState(step=step, val_loss=loss, evaluation=evaluation)
        assert (state.cost_of("accuracy"), state.cost_of("all")) == (-accuracy, loss)
    assert (progress.best, progress.best_step, progress.num_since) == (0.7, 1, 1)
    assert (of_all.best_step, of_all.num_since) == (2, 0)
    assert of_all.best == pytest.approx(0.5)
    distilled = TokenLoss(1.0, 1, further={"agreement": 0.5, "divergence": 1.0}, has_own_unit=True)
    assert [Evaluation(distilled).sign_of(figure) for figure in ("agreement", "divergence", "all")] == [-1, 1, 1]
    said = EarlyStopping("accuracy", 1).describe(
        TrainerState(step=2, evaluation=evaluation, first_evaluation=evaluation, progress=progress)
    )
    assert "the validation's accuracy has not risen above 0.7000, its value at step 1" in said


def test_the_count_begins_anew_where_another_source_decides() -> None:
    evaluation = Evaluation(TokenLoss(9.0, 1), {"es": TokenLoss(5.0, 1), "va": TokenLoss(4.0, 1)}, 7)
    before = LossProgress("va", best=3.0, best_step=2, num_since=1)
    assert EarlyStopping("va", 2).after(before, evaluation) == LossProgress("va", 3.0, 2, 2)
    for earlier in (before, None):
        assert EarlyStopping("es", 2).after(earlier, evaluation) == LossProgress("es", 5.0, 7, 0)
    assert [EarlyStopping(name, 1).ends(TrainerState(progress=before)) for name in ("va", "es")] == [True, False]


class Stopping:
    """Trains on es alone with a learning rate that is far too high; es and va are validated after every step."""

    def __init__(self, folder: Path, forked: ForkedRuns, model: Path) -> None:
        self.folder = folder
        self._forked = forked
        self._model = model
        self.whole: ForkedRun
        train = write_jsonl(folder / "es.jsonl", [f"es {text}" for text in TEXTS])
        texts = {"es": TEXTS[:4], "va": [text[::-1] for text in TEXTS[:4]]}
        held_out = [write_jsonl(folder / f"{name}-held-out.jsonl", texts[name]) for name in ("es", "va")]
        names = [f"{name}={file}" for name, file in zip(("es", "va"), held_out, strict=True)]
        more = {"validation_split": 0, "packing": "best_fit"}
        tokenize(folder / "tokens", model, f"es={train}", "--validation_dataset", *names, **more)

    def start(self, name: str, before: str = "", **options: Any) -> ForkedRun:
        given: dict[str, Any] = {"max_step": MAX_STEP, "lr": 0.02, "lr_schedule": "constant", "number_epochs": 9}
        given |= {
            "micro_batch_size": 8,
            "eval_step_interval": 1,
            "eval_iters": None,
            "eval_at_start": None,
            "save_step_interval": 2,
            **options,
        }
        words = argv(self._model, self.folder / "tokens", self.folder / name, **given)
        return self._forked.start(words, 1, before=before, draws=name == "whole")

    def losses(self, name: str, source: str) -> list[float]:
        with (self.folder / name / "metrics.csv").open(newline="", encoding="utf-8") as file:
            return [float(row[f"val_loss/{source}"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path) -> Stopping:
    made = Stopping(tmp_path_factory.mktemp("stopping"), forked_runs, tiny_model_dir)
    made.whole = made.start("whole", best_by="va", loggers="tensorboard")
    made.whole.finish()
    return made


def expected_end(losses: list[float]) -> int:
    """Return the first step at which no loss of the last ``PATIENCE`` steps is below all before them."""
    return next(
        step
        for step in range(PATIENCE, len(losses))
        if min(losses[: step - PATIENCE + 1]) <= min(losses[step - PATIENCE + 1 : step + 1])
    )


@pytest.mark.slow
def test_a_run_ends_after_a_save_when_a_loss_has_stopped_falling(stopping: Stopping) -> None:
    end = expected_end(stopping.losses("whole", "va"))
    assert 2 < end < MAX_STEP
    given = {"early_stopping": f"va:{PATIENCE}"}
    run = stopping.start("early", **given)
    run.finish()
    wanted = metrics(stopping.folder / "whole")[: end + 1]
    assert metrics(stopping.folder / "early") == wanted
    assert saved_steps(stopping.folder / "early")[-1] == end
    reason = f"early stopping after step {end}: the validation loss of va has not fallen below "
    assert reason in run.stdout()
    again = stopping.start("early", resume="true", **given)
    again.finish()
    assert f"step {end} of {MAX_STEP}: nothing left to train" in again.stdout()
    assert reason in again.stdout()
    killed = stopping.start("killed", at_point("os.kill(os.getpid(), signal.SIGKILL)", end, "OPTIMIZER"), **given)
    assert killed.wait() == [-9]
    stopping.start("killed", resume="true", **given).finish()
    assert metrics(stopping.folder / "killed") == wanted
    stopping.start("early", resume="true", early_stopping="va:100").finish()
    assert metrics(stopping.folder / "early") == metrics(stopping.folder / "whole")


def counters_of_checkpoints(run: Path) -> dict[str, tuple[object, object]]:
    """Return the validation loss of each checkpoint, and whether it is an interim one; hidden folders too."""
    contents = {
        folder.name: json.loads((folder / "trainer.json").read_text()) for folder in (run / "checkpoints").iterdir()
    }
    return {name: (content["val_loss"], content["interim"]) for name, content in contents.items()}


DIE_WHILE_REPLACING = """
import os, pathlib, signal
def dying(self, target, rename=pathlib.Path.rename):
    renamed = rename(self, target)
    if str(target).endswith(".replaced"):
        os.kill(os.getpid(), signal.SIGKILL)
    return renamed
pathlib.Path.rename = dying
"""


@pytest.mark.slow
def test_a_run_shows_the_losses_of_sources_and_says_where_to_look(stopping: Stopping) -> None:
    run = stopping.folder / "whole"
    printed = stopping.whole.stdout()
    for step in (1, MAX_STEP):
        of_sources = "; ".join(f"{name} {stopping.losses('whole', name)[step]:.4f}" for name in ("es", "va"))
        assert re.search(rf"step {step}: validation loss [^;]+; {of_sources}\n", printed)
    start, end = printed.split("Done\n")
    for table in (start, end):
        for place in ("loss_curves.png", f"tensorboard --logdir {run}/tensorboard"):
            assert place in table
    assert (run / "loss_curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_best_step_is_saved_whatever_the_interval(stopping: Stopping) -> None:
    losses = stopping.losses("whole", "va")
    best = min(range(1, MAX_STEP + 1), key=losses.__getitem__)
    assert best % 2  # between two saves
    whole = counters_of_checkpoints(stopping.folder / "whole")
    every_two = [f"step-{step:08d}" for step in range(2, MAX_STEP + 1, 2)]
    assert {name: interim for name, (_, interim) in whole.items()} == {
        **dict.fromkeys(every_two, False),
        f"step-{best:08d}": True,
    }
    stopping.start("every-two", best_by="va", save_best="false").finish()
    assert sorted(counters_of_checkpoints(stopping.folder / "every-two")) == every_two
    for name, action, step, phase, code in (
        ("killed-after", "os.kill(os.getpid(), signal.SIGKILL)", best + 1, "OPTIMIZER", -9),
        ("stopped-in", TERMINATE, best, "VALIDATION", 75),
    ):
        run = stopping.folder / name
        assert stopping.start(name, at_point(action, step, phase), best_by="va").wait() == [code]
        if code == 75:
            assert counters_of_checkpoints(run)[f"step-{best:08d}"] == (None, True)
            killed = stopping.start(name, DIE_WHILE_REPLACING, best_by="va", resume="true")
            assert killed.wait() == [-9]
            assert f"step-{best:08d}" not in counters_of_checkpoints(run)
        stopping.start(name, best_by="va", resume="true").finish()
        assert counters_of_checkpoints(run) == whole
        assert metrics(run) == metrics(stopping.folder / "whole")


def test_interim_checkpoints_are_not_among_the_newest_that_are_kept(tmp_path: Path, tiny_model_dir: Path) -> None:
    def save(step: int, loss: float, interim: bool, keep: int | None) -> list[int]:
        folder = write_full(tmp_path / "checkpoints" / f"step-{step:08d}", tiny_model_dir, {}, step)
        content = json.loads((folder / "trainer.json").read_text())
        (folder / "trainer.json").write_text(json.dumps({**content, "val_loss": loss, "interim": interim}))
        write_checksums(folder)
        prune(folder, keep, set())
        return saved_steps(tmp_path)

    assert save(1, 5.0, interim=True, keep=None) == [1]
    assert save(2, 6.0, interim=False, keep=None) == [1, 2]
    assert save(3, 4.0, interim=True, keep=None) == [2, 3]
    assert save(4, 5.0, interim=False, keep=2) == [2, 3, 4]
    assert save(5, 3.0, interim=True, keep=2) == [2, 4, 5]
    assert save(6, 4.0, interim=False, keep=2) == [4, 5, 6]
    assert save(7, 2.0, interim=False, keep=2) == [6, 7]


@pytest.mark.slow
def test_best_checkpoint_is_the_one_of_the_deciding_source(stopping: Stopping) -> None:
    losses = stopping.losses("whole", "va")
    steps = range(1, MAX_STEP + 1)
    best = min(steps, key=losses.__getitem__)
    assert best != min(steps, key=stopping.losses("whole", "es").__getitem__)
    assert best_checkpoint(stopping.folder / "whole") == stopping.folder / f"whole/checkpoints/step-{best:08d}"
    run = stopping.start("kept", best_by="va", keep_checkpoints=1)
    run.finish()
    assert saved_steps(stopping.folder / "kept") == sorted({best, MAX_STEP})
    assert f"step-{best:08d}, validation loss of va {losses[best]:.4f}" in "".join(run.stdout().split("\n"))


@pytest.mark.slow
def test_an_unknown_deciding_source_is_one_line_that_lists_them(stopping: Stopping) -> None:
    run = stopping.start("unknown", best_by="en", early_stopping="va:x")
    assert run.wait() == [2]
    assert run.stderr().splitlines() == [
        f"error: --{option}: the validation split has no such source; give all, es, va"
        for option in ("best_by en", "early_stopping va:x")
    ]
    run = stopping.start("unknown", early_stopping=3)
    assert run.wait() == [2]
    assert run.stderr() == "error: --early_stopping 3: the number needs a source before it; give all:3 or es:3\n"
    assert not (stopping.folder / "unknown").exists()
