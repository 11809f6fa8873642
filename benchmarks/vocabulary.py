"""Train SmolLM2-135M on Catalan by the same number of steps, with its own vocabulary and with an extended one."""

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, run
from benchmarks.report import Report
from fabric_train.sample_data import real_data

NUM_TOKENS = 2000  # that are added
STEPS = 60
LR = 5e-4
MAX_LENGTH = 128
BATCH = 4
OWN = "own vocabulary"
EXTENDED = "extended"
ROWS_FIRST = "extended, rows first"
PHASES = "[{from: 1, train_only: embed_tokens}, {from: 0.25, train_only: all}]\n"
VARIANTS = {OWN: "", EXTENDED: "", ROWS_FIRST: "--phases {work}/phases.yaml"}
SOURCES = ("ca", "ca-guide", "en-guide")
_HELD_OUT = 10  # every tenth page is not trained on
# characters of a page that are evaluated
_NUM_PIECES = 10
_PIECE = 800


@dataclass(frozen=True)
class SourceLoss:
    """The loss of a model on the held-out pages of a source; ``tokens`` depend on its tokenizer."""

    bits_per_byte: float
    tokens: int
    bytes: float


@dataclass(frozen=True)
class ModelLosses:
    """The losses of a model by source."""

    sources: dict[str, SourceLoss]


@dataclass(frozen=True)
class VocabularySummary:
    """Bits per byte on Catalan after training, by variant, and the difference to the model's own vocabulary."""

    catalan: dict[str, float]
    to_own: dict[str, float]


def measure(work: Path) -> Report:
    """Extend the vocabulary, train each variant with one thread, and evaluate models and runs on held-out pages.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a program failed.
    """
    own = real_data.smollm2().relative_to(ROOT)
    extended = work / "extended"
    write_texts(ROOT / work)
    commands = {"extend": extend_command(own, work, extended)}
    for name, model in (("own", own), ("extended", extended)):
        commands[f"tokens, {name}"] = _tokenize_command(model, work, work / f"tokens-{name}")
    for number, variant in enumerate(VARIANTS):
        model, tokens = (own, "tokens-own") if variant == OWN else (extended, "tokens-extended")
        commands[variant] = training_command(variant, work, model, work / tokens, work / f"run-{number}")
    models = {"before": own, "extended, before": extended}
    models |= {variant: work / f"run-{number}" for number, variant in enumerate(VARIANTS)}
    commands["evaluate"] = _evaluate_command(list(models.values()), work)
    for name in ("extend", "tokens, own", "tokens, extended"):
        _run(commands[name])
    with ThreadPoolExecutor(len(VARIANTS)) as pool:
        list(pool.map(_run, (commands[variant] for variant in VARIANTS)))
    _run(commands["evaluate"])
    found = read_losses(ROOT / work / "evaluation" / "documents.jsonl")
    return report_of({name: found[str(model)] for name, model in models.items()}, commands)


def report_of(losses: Mapping[str, ModelLosses], commands: Mapping[str, Command]) -> Report:
    """Return the report on the losses of the models before training and of the variants after it."""
    settings = {
        "model": "SmolLM2-135M",
        "text": "LilyPond's manuals in Catalan",
        "added tokens": NUM_TOKENS,
        "steps": STEPS,
        "tokens a step": MAX_LENGTH * BATCH,
        "lr": f"{LR:g}, cosine to a tenth",
        "phases of the last variant": PHASES.strip(),
        "threads of a run": 1,
    }
    catalan = {name: losses[name].sources["ca"].bits_per_byte for name in VARIANTS}
    summary = VocabularySummary(catalan, {name: value - catalan[OWN] for name, value in catalan.items()})
    return Report("vocabulary", settings, commands, {name: [one] for name, one in losses.items()}, summary)


def table(report: Report) -> Table:
    """Return a table of bits per byte and tokens by model and source."""
    title = f"Bits per byte (tokens) on held-out pages, {STEPS} steps of {MAX_LENGTH * BATCH} tokens"
    shown = Table("model", *SOURCES, title=title, title_justify="left", box=box.SIMPLE)
    for name, (losses,) in report.runs.items():
        found = (losses.sources[source] for source in SOURCES)
        shown.add_row(name, *(f"{one.bits_per_byte:.4f} ({one.tokens:,})" for one in found))
    return shown


def write_texts(folder: Path) -> None:
    """Write the pages to train on, the held-out pieces of each source, and the phases."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "phases.yaml").write_text(PHASES, encoding="utf-8")
    manuals = _texts(real_data.catalan())
    _write(folder / "train.jsonl", [text for number, text in enumerate(manuals) if number % _HELD_OUT])
    _write(folder / "ca.jsonl", [text[:_PIECE] for text in manuals[::_HELD_OUT]][:_NUM_PIECES])
    for language in ("ca", "en"):
        pages = [text[:_PIECE] for text in _texts(real_data.guide(language)) if len(text) > _PIECE]
        _write(folder / f"{language}-guide.jsonl", pages[:_NUM_PIECES])


def extend_command(model: Path, work: Path, extended: Path) -> Command:
    """Return the command that writes the model with more tokens."""
    words = f"python -m fabric_train.vocabulary extend --model {model} --texts ca={work}/train.jsonl"
    return Command(tuple(f"{words} --num_tokens {NUM_TOKENS} --output_dir {extended}".split()))


def training_command(variant: str, work: Path, model: Path, tokens: Path, target: Path) -> Command:
    """Return the command that trains a variant into ``target``."""
    words = f"python -m fabric_train --accelerator cpu --parallelism single --precision 32-true --model_name {model}"
    words += f" --train_data_dir {tokens} --output_dir {target} --max_step {STEPS} --lr {LR} --min_lr {LR / 10}"
    words += f" --warmup_steps 10 --micro_batch_size {BATCH} --total_batch_size {BATCH} --loggers csv --num_workers 0"
    words += f" --rank_timeout 0 --eval_at_start false --eval_iters 1 --save_step_interval {STEPS} {VARIANTS[variant]}"
    return Command(tuple(words.format(work=work).split()), {"OMP_NUM_THREADS": "1"})


def read_losses(file: Path) -> dict[str, ModelLosses]:
    """Return the loss of each model on each source from ``documents.jsonl`` of ``evaluate.py``."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = {}
    for model in dict.fromkeys(line["model"] for line in lines):
        sources = {}
        for source in SOURCES:
            own = [line for line in lines if (line["model"], line["source"]) == (model, source)]
            num_bytes = sum(line["bytes"] for line in own)
            bits = sum(line["nats"] for line in own) / math.log(2) / num_bytes
            tokens = sum(line["tokens"] for line in own)
            sources[source] = SourceLoss(bits, tokens, num_bytes)
        found[model] = ModelLosses(sources)
    return found


def _tokenize_command(model: Path, work: Path, tokens: Path) -> Command:
    words = f"python tokenize_dataset.py --dataset {work}/train.jsonl --tokenizer_name {model}"
    return Command(tuple(f"{words} --max_length {MAX_LENGTH} --output_dir {tokens}".split()))


def _evaluate_command(models: list[Path], work: Path) -> Command:
    texts = " ".join(f"{source}={work}/{source}.jsonl" for source in SOURCES)
    words = f"python evaluate.py --models {' '.join(map(str, models))} --texts {texts} --output_dir {work}/evaluation"
    return Command(tuple(words.split()))


def _run(command: Command) -> None:
    print(f"vocabulary: {command}", flush=True)
    run(command)


def _texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def _write(file: Path, texts: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
