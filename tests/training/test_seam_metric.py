"""A metric from outside is in metrics.csv, TensorBoard, the table at the end, the choice of the best, and the card."""

import csv
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fabric_train.checkpoint import best_checkpoint, read_trainer_json
from fabric_train.export.card_facts import read_record
from fabric_train.export.model_card import CardFacts, write_model_card
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

TWO_METRICS = """
import math
from fabric_train import METRICS
from fabric_train.training.evaluation import Metric

METRICS["doubled"] = Metric(lambda losses: 2 * losses)
METRICS["root_of_bytes"] = Metric(lambda losses: losses, lambda sums: math.sqrt(sums.num_bytes))
"""
OPTIONS = {
    "max_step": 2,
    "eval_step_interval": 1,
    "eval_iters": None,
    "loggers": "tensorboard",
    "save_step_interval": 2,
    "best_by": "doubled/es",
    "early_stopping": "doubled:3",
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("metric")
    files = [f"{name}={write_jsonl(folder / f'{name}.jsonl', [f'{name} {one}' for one in TEXTS])}" for name in "ab"]
    tokenize(folder / "tokens", tiny_model_dir, *(file.replace("a=", "es=", 1) for file in files), validation_split=0.3)
    return folder / "tokens"


@pytest.mark.parametrize(("num_ranks", "parallelism"), [(1, "single"), (2, "fsdp")])
def test_a_metric_from_outside_is_wherever_the_loss_is(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tokens: Path, num_ranks: int, parallelism: str
) -> None:
    run = tmp_path / "run"
    line = argv(tiny_model_dir, tokens, run, **OPTIONS, parallelism=parallelism)
    started = forked_runs.start(line, num_ranks, before=TWO_METRICS)
    started.finish()
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for of_source in ("", "/es", "/b"):
            assert float(row[f"val_doubled{of_source}"]) == pytest.approx(2 * float(row[f"val_loss{of_source}"]))
        roots = [float(row[f"val_root_of_bytes{of_source}"]) ** 2 for of_source in ("", "/es", "/b")]
        assert roots[0] == pytest.approx(sum(roots[1:]))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {"val/doubled", "val/es/doubled", "val/root_of_bytes"} <= set(events.Tags()["scalars"])
    end = " ".join(started.stdout().split("Done\n")[1].split())
    assert "doubled at step 1 doubled root of bytes at step 1 root of bytes" in end
    assert f"validation's doubled/es {float(rows[-1]['val_doubled/es']):.4f}" in end
    best = best_checkpoint(run)
    assert best is not None
    saved = read_trainer_json(best)
    assert saved.state.loss_of(saved.best_by) == float(rows[-1]["val_doubled/es"])
    assert saved.state.progress is not None
    assert saved.state.progress.best == float(rows[-1]["val_doubled"])
    # where the metric is not known
    write_model_card(read_record(read_trainer_json(best)), tmp_path, CardFacts("model"))
    card = (tmp_path / "README.md").read_text()
    assert "| loss | perplexity | bits per byte | doubled | root of bytes |" in card
    assert "type: doubled" in card


def test_a_run_without_further_metrics_has_no_traces_of_them(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tokens: Path
) -> None:
    given = {**OPTIONS, "best_by": "all", "early_stopping": None, "max_step": 1}
    forked_runs.start(argv(tiny_model_dir, tokens, tmp_path / "run", **given), 1).finish()
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "trainer.json").read_text())
    assert set(state["evaluation"]["whole"]) == {"nats", "num_tokens", "num_bytes"}
    refused = forked_runs.start(argv(tiny_model_dir, tokens, tmp_path / "no", **OPTIONS), 1)
    assert refused.wait() == [2]
    assert "--best_by doubled/es: the validation split has no such source; give all, es, b" in refused.stderr()
