"""Distill a model with half its layers from the whole one, and compare: ``python -m demo.distillation``.

Four runs read Spanish and Catalan text: the whole model, which is then a teacher, and the pruned model without a
teacher, with the whole model as its teacher, and with the trained one. docs/distill.md shows the results.
"""

import json
import shutil
from pathlib import Path

from demo.stages import ROOT, exit_on_failure, run_stage
from fabric_train.sample_data import real_data

FOLDER = Path("demo_run/distillation")
STUDENT = FOLDER / "student"
LAYERS = "0-7,23-29"
HELD_OUT_CHARACTERS = 600
"""The characters of a held-out document that are evaluated."""
HELD_OUT_EVERY = {"es": 40, "ca": 11}
"""One document of each source in this many is held out from training."""


def hold_out_documents() -> None:
    """Divide the documents of each source into those to train on, and beginnings of those to evaluate."""
    for kind in ("train", "eval"):
        (ROOT / FOLDER / kind).mkdir(parents=True)
    for source, file in (("es", real_data.bible_es()), ("ca", real_data.catalan())):
        train_lines = []
        held_out_lines = []
        for index, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            if index % HELD_OUT_EVERY[source] == HELD_OUT_EVERY[source] - 1:
                text = json.loads(line)["text"][:HELD_OUT_CHARACTERS]
                held_out_lines.append(json.dumps({"text": text}, ensure_ascii=False))
            else:
                train_lines.append(line)
        for kind, lines in (("train", train_lines), ("eval", held_out_lines)):
            content = "".join(f"{line}\n" for line in lines)
            (ROOT / FOLDER / kind / f"{source}.jsonl").write_text(content, encoding="utf-8")


def run_stages() -> None:
    """Run the stages in turn."""
    whole_model = real_data.smollm2().relative_to(ROOT)
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    hold_out_documents()
    prune = ["python", "-m", "fabric_train.merge_models", "--method", "passthrough", "--models", whole_model]
    run_stage("the student", *prune, "--layers", LAYERS, "--output_dir", STUDENT)
    datasets = []
    for source in HELD_OUT_EVERY:
        dataset = FOLDER / "tokens" / source
        rows = [
            "--tokenizer_name",
            whole_model,
            "--max_length",
            256,
            "--validation_split",
            0.02,
            "--output_dir",
            dataset,
        ]
        documents = f"{source}={FOLDER / 'train' / source}.jsonl"
        run_stage("tokenization", "python", "tokenize_dataset.py", "--dataset", documents, *rows)
        datasets.append(dataset)

    train = ["fabric", "run", "fabric_train", "--devices", 1, "--accelerator", "cpu", "--precision", "bf16-mixed"]
    train += ["--train_data_dir", *datasets, "--token_shares", 0.5, 0.5, "--micro_batch_size", 4]
    train += ["--total_batch_size", 4, "--warmup_steps", 5, "--eval_step_interval", 20, "--eval_iters", 2]
    train += ["--save_best", "false", "--loggers", "csv"]
    teacher = FOLDER / "teacher"
    run_stage(
        "the teacher", *train, "--model_name", whole_model, "--lr", 1e-4, "--max_step", 24, "--output_dir", teacher
    )
    train += ["--model_name", STUDENT, "--lr", 3e-4, "--max_step", 80]
    runs = [FOLDER / "sft", FOLDER / "distilled", FOLDER / "distilled-adapted"]
    run_stage("training without a teacher", *train, "--output_dir", runs[0])
    distill = [*train, "--objective", "distill"]
    run_stage("distillation", *distill, "--teacher", whole_model, "--output_dir", runs[1])
    run_stage("distillation from the trained teacher", *distill, "--teacher", teacher, "--output_dir", runs[2])

    texts = [f"{source}={FOLDER / 'eval' / source}.jsonl" for source in HELD_OUT_EVERY]
    compare = ["python", "evaluate.py", "--models", *runs, whole_model, teacher, "--teacher", whole_model]
    run_stage("the evaluation", *compare, "--texts", *texts, "--output_dir", FOLDER / "compared")


if __name__ == "__main__":
    with exit_on_failure():
        run_stages()
