"""The examples of docs/api.md as functions, which tests/programs/test_api.py runs; mypy checks this file strictly.

They run in a folder with ``model`` and ``texts.jsonl``.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fabric_train


def three_lines() -> None:
    fabric_train.tokenize(dataset="texts.jsonl", tokenizer_name="model", max_length=64, output_dir="data")
    run = fabric_train.train(
        train_data_dir="data", model_name="model", output_dir="run", max_step=4, total_batch_size=2, precision="32-true"
    )
    print(run.state, run.val_loss, fabric_train.generate(model_name=run.folder, prompt="To be", num_tokens=8))


def results() -> None:
    export = fabric_train.convert(checkpoint="run/best", output_dir="export")
    losses = fabric_train.evaluate(
        models=["model", "run/best"], texts=["ours=texts.jsonl"], max_length=64, output_dir="losses"
    )
    run = fabric_train.load_run("run")
    print(export.path, export.verification.tensors.compared, losses["run/best"]["ours"]["loss"])
    print(run.metrics["train_loss"], run.checkpoints, run.best, run.report)


def own_documents() -> None:
    def documents() -> Iterator[dict[str, str]]:
        for line in Path("texts.jsonl").read_text().splitlines():
            yield {"text": json.loads(line)["text"].upper()}

    made = fabric_train.tokenize(dataset=documents(), tokenizer_name="model", max_length=64, output_dir="upper")
    print(made.path, made.ledger.documents_read)


def own_metric() -> None:
    from fabric_train.training.evaluation import Metric

    fabric_train.METRICS["above_one_nat"] = Metric(lambda losses: losses > 1)
    fabric_train.train(
        train_data_dir="data", model_name="model", output_dir="own", max_step=2, total_batch_size=2, precision="32-true"
    )
    print(fabric_train.load_run("own").metrics["val_above_one_nat"])


def errors() -> None:
    try:
        fabric_train.train(train_data_dir="data", lr=-1, warmup_steps=10, max_step=5)
    except fabric_train.InputError as error:
        print(*error.faults, sep="\n")


def refused_by_mypy() -> None:
    """Each line has an error, or mypy reports its comment as not used."""
    fabric_train.train(learning_rate=1e-4)  # type: ignore[call-arg]
    fabric_train.train(lr="high")  # type: ignore[arg-type]
    fabric_train.train(precision="bf16")  # type: ignore[arg-type]
    fabric_train.tokenize(dataset="texts.jsonl", output_dir="data")  # type: ignore[call-arg]
    print(fabric_train.generate(model_name="run", prompt="To be").text)  # type: ignore[attr-defined]


def main() -> None:
    """Run the examples that the command line names, in the current folder."""
    for name in sys.argv[1:]:
        globals()[name]()
