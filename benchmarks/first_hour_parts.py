"""The parts of the first hour with a GPU (``first_hour.py``): what each one runs, compares and reports."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu import (
    ACCUMULATION,
    MIDDLE,
    ROWS,
    STEPS,
    WARM_UP_STEPS,
    GpuRun,
    our_command,
    peer_command,
    read_peer,
    read_run,
)
from benchmarks.gpu_sizes import Sizes
from benchmarks.measure import ROOT, Command, CommandError, CommandTimeoutError, spread
from benchmarks.packages import install_packages
from benchmarks.timed_parts import Attempt, Measure, MissingPackageError, Outcome
from fabric_train.arguments import TrainArguments, parse
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.model.flops import peak_flops
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.init_weights import new_shape
from tests.support.random_inputs import write_rows
from tests.support.run_comparison import differences
from tests.support.tiny_model import write_tiny_model, write_tokenizer

PARITY_STEPS = 8
PARITY_LENGTH = 128
TOLERANCES = {"32-true": 1e-4, "bf16-true": 3e-2}  # relative, of each step's loss from the CPU's in fp32
STRATEGIES = ("single", "ddp", "fsdp", "fsdp2")
RESUMED = ("single", "ddp", "fsdp", "fsdp --state_dict_type sharded", "fsdp2 --state_dict_type sharded")
SAVED_STEP = 3
LAST_STEP = 6
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # docs.nvidia.com/cuda/cublas, "Results reproducibility"

CHECKPOINTED_BY_PEERS = (MIDDLE,)  # fabric_train decides by itself
SHARES_OF_LAYERS = (1, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)  # the first one that fits into memory is trained
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)


class TooLargeError(CommandError):
    """A training that does not fit into memory, as planned or as tried."""


def measure_environment(attempt: Attempt) -> None:
    """Report devices, driver and versions, and how fast the device multiplies matrices."""
    size = attempt.sizes.products
    output = attempt.run("environment", f"python -m benchmarks.environment --size {size}")
    found = json.loads(output.splitlines()[-1])
    devices = f"{len(found['devices'])} × {found['devices'][0]['name']}"
    versions = f"torch {found['versions']['torch']}, driver {found['driver'] or 'unknown'}"
    line = f"{devices}, {versions}, {found['tflops']:,.1f} TFLOP/s in bf16 products of {size}²"
    attempt.outcome = Outcome(found, line)


def run_tests(attempt: Attempt) -> None:
    """Run the tests with the marker ``cuda``."""
    report = attempt.work / "tests.xml"
    (ROOT / report).unlink(missing_ok=True)
    faults: list[str] = []
    try:
        attempt.run("tests", f"python -m pytest -n 0 -m cuda --junitxml={report}")
    except CommandTimeoutError:
        raise
    except CommandError as error:
        faults += [str(error), *error.last_lines]
        if not (ROOT / report).exists():
            raise
    suite = next(ElementTree.parse(ROOT / report).iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    passed = 2 * counts["tests"] - sum(counts.values())
    skipped = {
        case.attrib["name"]: skip.attrib["message"] for case in suite.iter("testcase") for skip in case.iter("skipped")
    }
    if not passed:
        faults.append("no test passed on the GPU")
    line = f"{passed} passed, {counts['skipped']} skipped"
    attempt.outcome = Outcome({**counts, "why_skipped": skipped}, line, faults)


def compare_strategies(attempt: Attempt) -> None:
    """Train in every strategy and variant, with packed documents, and compare each loss with fp32 on the CPU.

    ``single`` runs on one device, the others on all of the machine, or on the largest power of two of them.
    """
    import torch

    small = _small_training(attempt)
    count = 1 << (min(8, torch.cuda.device_count()).bit_length() - 1)
    expected = _losses(attempt, small, "cpu", "--accelerator cpu --parallelism single --precision 32-true")
    outcome = attempt.outcome
    outcome.figures["cpu"] = {"losses": expected}
    worst = dict.fromkeys(TOLERANCES, 0.0)
    ways = [(precision, f"--parallelism {name}") for precision in TOLERANCES for name in STRATEGIES]
    installed = [option for option, package in attempt.sizes.variants.items() if not package or find_spec(package)]
    ways += [("bf16-true", f"--parallelism single {option}") for option in installed]
    for precision, way in ways:
        name = f"--precision {precision} {way} --devices {1 if 'single' in way else count}"
        try:
            losses = _losses(attempt, small, name, f"--accelerator cuda {name}")
        except CommandTimeoutError:
            raise
        except CommandError as error:
            outcome.faults += [f"{name}: {error}", *error.last_lines]
            continue
        largest = max(abs(here / there - 1) for here, there in zip(losses, expected, strict=True))
        worst[precision] = max(worst[precision], largest)
        tolerance = TOLERANCES[precision]
        outcome.figures[name] = {"losses": losses, "largest_difference": largest, "tolerance": tolerance}
        if not largest <= tolerance:
            outcome.faults.append(f"{name}: a loss is {largest:.1e} from the CPU's, above {tolerance:.0e}")
    differences_ = ", ".join(f"{largest:.1e} in {precision}" for precision, largest in worst.items())
    outcome.line = f"{len(outcome.figures) - 1} runs; losses differ from the CPU's by at most {differences_}"


def compare_resumed(attempt: Attempt) -> None:
    """Compare runs that resume from a checkpoint, which was written in the background, with uninterrupted ones."""
    small = _small_training(attempt)
    outcome = attempt.outcome
    for system in RESUMED:
        whole = attempt.folder("whole")
        resumed = attempt.folder("resumed")
        # the faster implementations of attention add up gradients in any order
        options = f"--accelerator cuda --devices 1 --attention eager --max_step {LAST_STEP} --parallelism {system}"
        options += f" --save_step_interval {SAVED_STEP}"
        try:
            attempt.run(system, f"{small} {options} --output_dir {whole}", DETERMINISTIC)
            shutil.copytree(ROOT / whole, ROOT / resumed)
            shutil.rmtree(ROOT / resumed / "checkpoints" / f"step-{LAST_STEP:08d}")
            again = f"{small} {options} --output_dir {resumed} --resume true"
            attempt.run(f"{system}, resumed", again, DETERMINISTIC)
        except CommandTimeoutError:
            raise
        except CommandError as error:
            outcome.faults += [f"{system}: {error}", *error.last_lines]
            continue
        found = differences(ROOT / resumed, ROOT / whole)
        outcome.figures[system] = {"differences": len(found)}
        outcome.faults += [f"{system}: {difference}" for difference in found]
    outcome.line = f"{len(outcome.figures)} ways to save; losses, weights and moments are the same bit for bit"


def train_ours(preset: str) -> Measure:
    """Return the part that trains a preset with ``fabric_train`` and compares its memory with the plan."""

    def measure(attempt: Attempt) -> None:
        def train(layers: int) -> tuple[GpuRun, dict[str, Any]]:
            target = attempt.folder("run")
            command = training_command(attempt.sizes, preset, layers, rows, target)
            planned = _plan(attempt, command, layers)
            attempt.run(f"{layers} layers", " ".join(command.words))
            found = read_run(target)
            plan_error = planned / found.peak_bytes - 1
            return found, {"planned_bytes": planned, "plan_error": plan_error, "notes": read_notes(target)}

        rows = write_training_rows(attempt)
        _train_as_many_layers_as_fit(attempt, preset, train)

    return measure


def read_notes(target: Path) -> list[str]:
    """Return the notes of a run, such as the kernels that were chosen."""
    log = (ROOT / target / "run.log").read_text(encoding="utf-8")
    return re.findall("note: (.*)", log)


def train_peer(preset: str, trainer: str) -> Measure:
    """Return the part that trains a preset with ``transformers`` or ``trl``, on the same rows."""

    def measure(attempt: Attempt) -> None:
        def train(layers: int) -> tuple[GpuRun, dict[str, Any]]:
            config = attempt.folder("config")
            _shape(attempt.sizes, preset, layers).config.save_pretrained(ROOT / config)
            write_tokenizer(ROOT / config, [_sums(1)])  # trl asks for one; the rows are token ids
            command = peer_command(preset, options, rows, config)
            return read_peer(attempt.run(f"{layers} layers", " ".join(command.words), environment)), {}

        environment = peer_environment(attempt, trainer)
        options = "--trl " * (trainer == "trl") + "--gradient_checkpointing" * (preset in CHECKPOINTED_BY_PEERS)
        rows = write_training_rows(attempt)
        _train_as_many_layers_as_fit(attempt, preset, train)

    return measure


def peer_environment(attempt: Attempt, trainer: str) -> dict[str, str]:
    """Return the variables for a peer's command; TRL is installed first.

    Raises:
        MissingPackageError: TRL cannot be installed.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "0"}  # with several, their Trainer copies the model to all of them
    if trainer == "trl":
        try:
            packages = install_packages(trainer, attempt.seconds_left)
        except ChildProcessError as error:
            raise MissingPackageError(str(error)) from error
        environment["PYTHONPATH"] = str(packages.relative_to(ROOT))
    return environment


def _small_training(attempt: Attempt) -> str:
    """Return the command that trains a small model on packed documents; write both once."""
    model = attempt.work / "model"
    tokens = attempt.work / "tokens"
    if not (ROOT / tokens).exists():
        texts = [_sums(number) for number in range(200)]
        write_tiny_model(ROOT / model, texts)
        documents = attempt.work / "documents.jsonl"
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (ROOT / documents).write_text("".join(lines), encoding="utf-8")
        words = f"python tokenize_dataset.py --dataset {documents} --tokenizer_name {model} --output_dir {tokens}"
        attempt.run("tokens", f"{words} --max_length {PARITY_LENGTH} --validation_split 0.1 --num_proc 1")
    words = f"python -m fabric_train --model_name {model} --train_data_dir {tokens} --micro_batch_size 2"
    words += " --number_epochs 100 --total_batch_size 16 --lr 1e-3 --lr_schedule constant"
    return f"{words} --eval_at_start false --loggers csv"


def _sums(number: int) -> str:
    """Return a text of one to nine sentences that a small model begins to learn in a few steps."""
    return " ".join(f"{number} and {other} are {number + other}." for other in range(1 + number % 9))


def _losses(attempt: Attempt, training: str, name: str, options: str) -> list[float]:
    target = attempt.folder("run")
    attempt.run(name, f"{training} --output_dir {target} --max_step {PARITY_STEPS} {options}")
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        losses = [float(step["train_loss"]) for step in csv.DictReader(file)]
    if len(losses) != PARITY_STEPS or not losses[-1] < 0.99 * losses[0]:
        raise CommandError(f"{name}: expected {PARITY_STEPS} falling losses, got {losses}")
    return losses


def _train_as_many_layers_as_fit(
    attempt: Attempt, preset: str, train: Callable[[int], tuple[GpuRun, dict[str, Any]]]
) -> None:
    """Measure speed, MFU and memory of the largest number of layers that fits, among ``SHARES_OF_LAYERS``.

    Raises:
        CommandError: the smallest number does not fit, or the training fails for another reason.
    """
    whole = _shape(attempt.sizes, preset).config.num_hidden_layers
    numbers = sorted({max(1, round(whole * share)) for share in SHARES_OF_LAYERS}, reverse=True)
    for layers in numbers:
        try:
            found, beside = train(layers)
            break
        except CommandError as error:
            is_too_large = isinstance(error, TooLargeError) or _OUT_OF_MEMORY.search("\n".join(error.last_lines))
            if isinstance(error, CommandTimeoutError) or not is_too_large or layers == numbers[-1]:
                raise
            print(f"  {layers} layers do not fit", flush=True)
    speed = spread(found.tokens_per_second[WARM_UP_STEPS:])
    mfu = _mfu(_shape(attempt.sizes, preset, layers), attempt.sizes.length, speed.median)
    figures = {"layers": layers, "layers_of_preset": whole, "tokens_per_second": asdict(speed), "mfu": mfu}
    figures |= {"tokens_per_second_of_steps": found.tokens_per_second, "peak_bytes": found.peak_bytes, **beside}
    memory = f"{found.peak_bytes / 1e9:.1f} GB"
    if beside:
        memory += f", planned {beside['planned_bytes'] / 1e9:.1f} GB ({beside['plan_error']:+.1%})"
    share = f"MFU {mfu:.1%}" if mfu is not None else "no MFU (the peak of this device is not known)"
    line = f"{layers} of {whole} layers, {speed.median:,.0f} tokens/s, {share}, {memory}"
    attempt.outcome = Outcome(figures, line)


def _mfu(shape: ModelShape, length: int, tokens_per_second: float) -> float | None:
    """Return the model FLOPs utilization, or None if the device's peak is not known."""
    import torch

    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    return shape.flops.count([length]) / length * tokens_per_second / peak if peak else None


def write_training_rows(attempt: Attempt) -> Path:
    """Return a dataset of random rows; write it once."""
    rows = attempt.work / "rows"
    if not (ROOT / rows).exists():
        with complete_folder(ROOT / rows) as folder:
            write_rows(folder, STEPS * ACCUMULATION * max(ROWS.values()), attempt.sizes.length)
    return rows


def training_command(sizes: Sizes, preset: str, layers: int | None, rows: Path, target: Path) -> Command:
    """Return the command that trains a preset with recommended settings, without saves; ``layers``: None for all."""
    options = f"--parallelism single {sizes.options}" + " --compile true" * sizes.compiles
    if layers:
        options = f"{re.sub('--num_layers [0-9]+', '', options)} --num_layers {layers}"
    return our_command(preset, options, rows, target)


def _shape(sizes: Sizes, preset: str, layers: int | None = None) -> ModelShape:
    command = training_command(sizes, preset, layers, Path("rows"), Path("run"))
    given = parse(TrainArguments, list(command.words[3:]))
    return new_shape(given.model, given.fsdp.auto_wrap_policy)


def _plan(attempt: Attempt, command: Command, layers: int) -> int:
    """Return the planned bytes of a device for a training command.

    What the plan sets aside for CUDA is left out: torch does not count it either.

    Raises:
        TooLargeError: the plan is above the device's memory.
    """
    words = " ".join(("python", "-m", "fabric_train", *command.words[3:], "--plan", "true"))
    try:
        printed = attempt.run(f"plan of {layers} layers", words)
    except CommandTimeoutError:
        raise
    except CommandError as error:  # also if a checkpoint, which is not written here, has no room on the disk
        printed = error.output
    at_most = re.search(r"at most +([\d.,]+) GB +(\d+)% of", printed)
    aside = re.search(r"reserved +([\d.,]+)", printed)
    if not at_most or not aside:
        raise CommandError(f"the plan of {layers} layers has no memory in it", printed)
    if int(at_most[2]) > 100:
        raise TooLargeError(f"{layers} layers take {at_most[2]}% of the memory, as planned")
    return round((float(at_most[1].replace(",", "")) - float(aside[1].replace(",", ""))) * 1e9)
