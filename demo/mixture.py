"""Train on two sources with shares, a phase and a branch, then trace and replay: ``python -m demo.mixture``.

This takes about five minutes on two cores. docs/mixture.md shows the output.
"""

import shutil

from demo.stages import ROOT, exit_on_failure, run_stage
from fabric_train.sample_data import real_data
from fabric_train.training.loss_curves import draw_loss_curves
from fabric_train.training.metrics_table import join_tables, read_metrics_table

FOLDER = "demo_run/mixture"
TOKENS, TRUNK, DECAY, PICTURE = (f"{FOLDER}/{name}" for name in ("tokens", "trunk", "decay", "losses.png"))
SOURCES = ("es", "en")


def run_stages() -> None:
    """Run the stages in turn."""
    documents = [
        f"{name}={path.relative_to(ROOT)}"
        for name, path in zip(SOURCES, (real_data.bible_es(), real_data.shakespeare()), strict=True)
    ]
    tokenizer = real_data.smollm2().relative_to(ROOT)
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    rows = ["--tokenizer_name", tokenizer, "--max_length", 256, "--validation_split", 0.03]
    run_stage("tokenization", "python", "tokenize_dataset.py", "--dataset", *documents, *rows, "--output_dir", TOKENS)
    train = ["fabric", "run", "fabric_train", "--devices", 2, "--accelerator", "cpu"]
    train += ["--config", "demo/mixture.yaml"]
    run_stage("training", *train, "--output_dir", TRUNK)
    schedule = ["--lr_schedule", "wsd", "--decay_steps", 10, "--max_step", 70]
    run_stage("the branch", *train, "--branch", f"{TRUNK}@60", *schedule, "--output_dir", DECAY)
    run_stage("the trace of a step", "python", "-m", "fabric_train.trace", DECAY, "--step", 65, "--rank", 1)
    document = ["--document", "bible-es.jsonl:141"]
    run_stage("the trace of a document", "python", "-m", "fabric_train.trace", DECAY, *document)
    run_stage("the replay", "python", "-m", "fabric_train.replay", TRUNK, "--steps", "41:43")
    trunk, decay = (read_metrics_table(ROOT / run / "metrics.csv") for run in (TRUNK, DECAY))
    branched_after = [int(trunk.steps[-1])]
    draw_loss_curves(
        join_tables([trunk, decay]), ROOT / PICTURE, "Spanish and English: a trunk and its decay", branched_after
    )
    print(f"\nlosses of each source: {PICTURE}")


if __name__ == "__main__":
    with exit_on_failure():
        run_stages()
