"""Distill a model with half its layers from the whole one, and compare: ``python -m demo.distillation``.

Three runs train the same student on Spanish and Catalan texts: without a teacher, with the whole model as its teacher,
and with an adapted teacher, which is the whole model after a few steps on these texts. All models are then evaluated on
held-out texts in both languages and in English, which no run reads. docs/distill.md shows the results.

This takes about 28 minutes of CPU time and needs 5 GB of disk space. If it was interrupted, start it again: what is
finished is kept, and a run continues from its last checkpoint. Delete ``demo_run/distillation`` to start over.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.stages import ROOT, exit_on_failure, print_heading, run_stage
from fabric_train.run_folder.run_folder import RunFolder
from fabric_train.sample_data import real_data
from fabric_train.training.metrics_table import read_metrics_table


@dataclass(frozen=True)
class Language:
    """The texts of a language."""

    name: str
    documents: Callable[[], Path]
    """Returns a jsonl file with a document in each line."""
    held_out_every: int
    """One document in this many is held out from training, and evaluated."""


LANGUAGES = {
    "es": Language("Spanish", real_data.bible_es, held_out_every=40),
    "ca": Language("Catalan", real_data.catalan, held_out_every=11),
    "en": Language("English", lambda: real_data.guide("en"), held_out_every=2),
}
TRAINED_LANGUAGES = ("es", "ca")
HELD_OUT_CHARACTERS = 200
"""The length to which a held-out document is cut."""
KEPT_LAYERS = "0-7,23-29"  # 15 of 30

FOLDER = Path("demo_run/distillation")
STUDENT = FOLDER / "student"
ADAPTED_TEACHER = FOLDER / "adapted-teacher"
WITHOUT_TEACHER = FOLDER / "sft"
DISTILLED = FOLDER / "distilled"
DISTILLED_ADAPTED = FOLDER / "distilled-adapted"
COMPARISON = FOLDER / "compared"


def main() -> None:
    """Run the stages in turn, then print a table of the results."""
    started = time.monotonic()
    print_heading("1/6  download SmolLM2-135M and the texts, hold out documents")
    whole_model = real_data.smollm2().relative_to(ROOT)
    for code, language in LANGUAGES.items():
        hold_out_documents(language, ROOT / _training_texts(code), ROOT / _held_out_texts(code))

    print_heading("2/6  tokenize Spanish and Catalan")
    for code in TRAINED_LANGUAGES:
        tokenize: list[object] = ["python", "tokenize_dataset.py", "--dataset", f"{code}={_training_texts(code)}"]
        tokenize += ["--tokenizer_name", whole_model, "--max_length", 256, "--validation_split", 0.02]
        run_unless_found("tokenization", FOLDER / "tokens" / code, *tokenize)

    print_heading("3/6  remove half of the layers: the student")
    prune: list[object] = ["python", "-m", "fabric_train.merge_models", "--method", "passthrough"]
    prune += ["--models", whole_model, "--layers", KEPT_LAYERS]
    run_unless_found("removing layers", STUDENT, *prune)

    print_heading("4/6  train the whole model for 24 steps: the adapted teacher")
    train_unless_ended(ADAPTED_TEACHER, "--model_name", whole_model, "--lr", 1e-4, "--max_step", 24)

    print_heading("5/6  train the student for 80 steps: without a teacher, and with each of the two teachers")
    student = ["--model_name", STUDENT, "--lr", 3e-4, "--max_step", 80]
    train_unless_ended(WITHOUT_TEACHER, *student)
    train_unless_ended(DISTILLED, *student, "--objective", "distill", "--teacher", whole_model)
    train_unless_ended(DISTILLED_ADAPTED, *student, "--objective", "distill", "--teacher", ADAPTED_TEACHER)

    print_heading("6/6  evaluate all models on the held-out documents")
    runs = [WITHOUT_TEACHER, DISTILLED, DISTILLED_ADAPTED]
    compare = ["python", "evaluate.py", "--models", *runs, STUDENT, ADAPTED_TEACHER, whole_model, "--texts"]
    compare += [f"{code}={_held_out_texts(code)}" for code in LANGUAGES]
    run_stage("the evaluation", *compare, "--output_dir", COMPARISON)

    evaluation = json.loads((ROOT / COMPARISON / "evaluation.json").read_text(encoding="utf-8"))
    speeds = {str(run): median_speed(ROOT / run) for run in [*runs, ADAPTED_TEACHER]}
    Console(highlight=False).print(results_table(evaluation, speeds))
    seconds = int(time.monotonic() - started)
    print(f"took {seconds // 60} min {seconds % 60} s; 95 % intervals are above and in {COMPARISON}")


def hold_out_documents(language: Language, training_texts: Path, held_out_texts: Path) -> None:
    """Write a language's documents to two files: those to train on, and the beginnings of those to evaluate."""
    training_lines = []
    held_out_lines = []
    for index, line in enumerate(language.documents().read_text(encoding="utf-8").splitlines()):
        if index % language.held_out_every == language.held_out_every - 1:
            beginning = json.loads(line)["text"][:HELD_OUT_CHARACTERS]
            held_out_lines.append(json.dumps({"text": beginning}, ensure_ascii=False))
        else:
            training_lines.append(line)
    for file, lines in ((training_texts, training_lines), (held_out_texts, held_out_lines)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def run_unless_found(name: str, output_dir: Path, *command: object) -> None:
    """Run a program, unless there already is its output folder, which is complete or absent."""
    if (ROOT / output_dir).exists():
        print(f"found {output_dir}", flush=True)
        return
    run_stage(name, *command, "--output_dir", output_dir)


def train_unless_ended(run: Path, *arguments: object) -> None:
    """Train on the CPU with half of the tokens from each language, unless the run has ended; continue a stopped run."""
    if RunFolder(ROOT / run).has_ended:
        print(f"found {run}", flush=True)
        return
    train: list[object] = ["python", "-m", "fabric_train", "--devices", 1, "--accelerator", "cpu"]
    train += ["--precision", "bf16-mixed", *arguments]
    train += ["--train_data_dir", *(FOLDER / "tokens" / code for code in TRAINED_LANGUAGES)]
    train += ["--token_shares", 0.5, 0.5, "--micro_batch_size", 4, "--total_batch_size", 4, "--warmup_steps", 5]
    train += ["--eval_step_interval", 20, "--eval_iters", 2, "--save_best", "false", "--loggers", "csv"]
    run_stage("training", *train, "--output_dir", run, "--resume", "true")


def median_speed(run: Path) -> float:
    """Return a run's median speed in tokens per second, without the first step, which includes warm-up."""
    speeds = read_metrics_table(run / "metrics.csv").columns["tokens_per_second"]
    return statistics.median(speeds[1:].tolist())


def results_table(evaluation: dict[str, Any], speeds: dict[str, float]) -> Table:
    """Return the final table: bits per byte of each model in each language, and training speeds.

    Args:
        evaluation: the content of evaluation.json, figures by model and source.
        speeds: tokens per second of the models that were trained here.
    """
    table = Table(title="\nBits per byte on held-out documents", title_justify="left")
    table.add_column("model")
    for language in LANGUAGES.values():
        table.add_column(language.name, justify="right")
    table.add_column("tokens/s", justify="right")
    for model, figures_by_source in evaluation.items():
        cells = [Path(model).name]
        for code in LANGUAGES:
            bits_per_byte = figures_by_source[code]["bits_per_byte"]
            cells.append(f"{bits_per_byte:.3f}")
        cells.append(f"{speeds[model]:,.0f}" if model in speeds else "")
        table.add_row(*cells)
    return table


def _training_texts(code: str) -> Path:
    return FOLDER / "train" / f"{code}.jsonl"


def _held_out_texts(code: str) -> Path:
    return FOLDER / "held-out" / f"{code}.jsonl"


if __name__ == "__main__":
    with exit_on_failure():
        main()
