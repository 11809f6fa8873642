"""The parts of the quarter of an hour with a GPU (``quarter_hour.py``): what each one runs and compares."""

import json
import shutil
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.first_hour_parts import peer_environment, read_notes, write_training_rows
from benchmarks.gpu import (
    ADAPTED,
    LONG_OPTIONS,
    MIDDLE,
    GpuRun,
    our_command,
    peer_command,
    preset_config,
    read_peer,
    read_run,
)
from benchmarks.large_checkpoint import write_checkpoint
from benchmarks.measure import ROOT, Command, CommandError, spread
from benchmarks.timed_parts import Attempt, Measure, MissingPackageError, Outcome
from fabric_train.files.atomic_folder import complete_folder
from tests.support.random_inputs import write_rows
from tests.support.tiny_model import write_tokenizer

LORA = f"{MIDDLE}, LoRA"
QLORA = f"{MIDDLE}, QLoRA"
RECOMPUTED = {"nothing": "none", "everything": "full"}  # and the value of --activation_checkpointing
STEPS = 6
WARM_UP_STEPS = 2
LONG_STEPS = 2  # the last one counts
FLOAT8_OPTIONS = "--parallelism single --compile true --float8 true"


def write_weights(attempt: Attempt) -> None:
    """Write made-up weights in the shape of the preset, the base of all adapters."""
    base = _write_base(attempt)
    num_bytes = sum(file.stat().st_size for file in (ROOT / base).glob("*.safetensors"))
    attempt.outcome = Outcome({"bytes": num_bytes}, f"{num_bytes / 1e9:.1f} GB of random weights in bf16")


def compare_adapters(attempt: Attempt) -> None:
    """Compare losses and gradients of adapters, eager and compiled, with those of transformers and peft."""
    output = attempt.run("parity", "python -m benchmarks.adapter_parity")
    differences = json.loads(output.splitlines()[-1])
    faults = []
    for name, difference in differences.items():
        if not difference["is_allowed"]:
            found = f"losses {difference['losses']:.1e}, gradients {difference['gradients']:.1e}"
            allowed = f"{difference['allowed_losses']:.1e} and {difference['allowed_gradients']:.1e}"
            faults.append(f"{name}: {found} from transformers and peft; allowed are {allowed}")
    largest = {}
    for dtype in ("fp32", "bf16"):
        largest[dtype] = max(found["gradients"] for name, found in differences.items() if dtype in name)
    line = f"gradients differ from those of transformers and peft in fp32 by {largest['fp32']:.1e}"
    line += f", and in bf16 by {largest['bf16']:.1e}"
    attempt.outcome = Outcome(differences, line, faults)


def train_adapter(kind: str, recomputed: str, *, compiles: bool) -> Measure:
    """Return the part that trains an adapter of the made-up weights; ``recomputed`` is a key of ``RECOMPUTED``."""

    def measure(attempt: Attempt) -> None:
        rows = write_training_rows(attempt)
        base = _write_base(attempt)
        _train(attempt, adapter_command(kind, recomputed, rows, base, attempt.folder("run"), compiles=compiles))

    return measure


def train_adapter_with_trl(kind: str) -> Measure:
    """Return the part that trains the same adapter on the same rows with TRL and peft, which recompute everything."""

    def measure(attempt: Attempt) -> None:
        environment = peer_environment(attempt, "trl")
        rows = write_training_rows(attempt)
        command = trl_command(kind, rows, _write_base(attempt))
        found = read_peer(attempt.run("training", " ".join(command.words), environment))
        attempt.outcome = _outcome(found, WARM_UP_STEPS)

    return measure


def train_in_float8(attempt: Attempt) -> None:
    """Train all weights of the preset in float8."""
    if find_spec("torchao") is None:
        raise MissingPackageError("torchao is not installed; pip install -e '.[torchao]' installs it")
    rows = write_training_rows(attempt)
    _train(attempt, float8_command(attempt.sizes.options, rows, attempt.folder("run")))


def train_long_rows(attempt: Attempt) -> None:
    """Train all weights of the preset on long rows, in tiles."""
    length = attempt.sizes.long_length
    rows = attempt.work / f"rows-{length}"
    if not (ROOT / rows).exists():
        with complete_folder(ROOT / rows) as folder:
            write_rows(folder, LONG_STEPS, length)
    command = long_command(attempt.sizes.options, length, rows, attempt.folder("run"))
    _train(attempt, command, warm_up_steps=LONG_STEPS - 1)


def adapter_command(kind: str, recomputed: str, rows: Path, base: Path, target: Path, *, compiles: bool) -> Command:
    """Return the command that trains an adapter of ``base`` into the run folder ``target``."""
    options, _ = ADAPTED[kind]
    options += f" --parallelism single --compile {str(compiles).lower()}"
    options += f" --activation_checkpointing {RECOMPUTED[recomputed]}"
    return our_command(MIDDLE, options, rows, target, base, STEPS)


def trl_command(kind: str, rows: Path, base: Path) -> Command:
    """Return the command that trains the same adapter with TRL and peft."""
    _, options = ADAPTED[kind]
    return peer_command(MIDDLE, f"--trl --gradient_checkpointing {options}", rows, base, STEPS)


def float8_command(sizes: str, rows: Path, target: Path) -> Command:
    """Return the command that trains all weights in float8; ``sizes`` are options for smaller models."""
    return our_command(MIDDLE, f"{FLOAT8_OPTIONS} {sizes}", rows, target, steps=STEPS)


def long_command(sizes: str, length: int, rows: Path, target: Path) -> Command:
    """Return the command that trains all weights on rows of ``length`` tokens, one in each step."""
    options = f"{LONG_OPTIONS} --max_context_width {length} {sizes}"
    return our_command(MIDDLE, options, rows, target, steps=LONG_STEPS, accumulation=1)


def _write_base(attempt: Attempt) -> Path:
    """Return a folder with made-up weights of the preset and a tokenizer; write it once.

    Raises:
        CommandError: it cannot be written, such as on a full disk.
    """
    weights = attempt.work / "weights"
    base = weights / "base"
    if (ROOT / weights).exists():
        return base
    tokenizer = attempt.folder("tokenizer")
    try:
        write_tokenizer(ROOT / tokenizer, ["TRL asks for a tokenizer; the rows are token ids"])
        with complete_folder(ROOT / weights) as folder:
            config = preset_config(MIDDLE, attempt.sizes.options)
            write_checkpoint(folder / base.name, config, ROOT / tokenizer, sharded=False)
            shutil.copytree(ROOT / tokenizer, folder / base.name, dirs_exist_ok=True)  # where TRL looks for one
    except OSError as error:
        raise CommandError(f"the weights cannot be written: {error}") from error
    return base


def _train(attempt: Attempt, command: Command, warm_up_steps: int = WARM_UP_STEPS) -> None:
    target = Path(command.words[command.words.index("--output_dir") + 1])
    attempt.run("training", " ".join(command.words))
    attempt.outcome = _outcome(read_run(target), warm_up_steps)
    attempt.outcome.figures["notes"] = read_notes(target)


def _outcome(found: GpuRun, warm_up_steps: int) -> Outcome:
    """Return speed, MFU and memory of a run.

    Raises:
        CommandError: it took no more steps than those that are not counted.
    """
    counted = found.tokens_per_second[warm_up_steps:]
    if not counted:
        raise CommandError(f"it took {len(found.tokens_per_second)} steps, and {warm_up_steps} of them are not counted")
    speed = spread(counted)
    mfu = spread(found.mfu[warm_up_steps:]).median if found.mfu else None
    figures: dict[str, Any] = {
        "tokens_per_second": asdict(speed),
        "tokens_per_second_of_steps": found.tokens_per_second,
        "mfu": mfu,
        "peak_bytes": found.peak_bytes,
    }
    line = f"{speed.median:,.0f} tokens/s, "
    if mfu is not None:
        line += f"MFU {mfu:.1%}, "
    return Outcome(figures, f"{line}{found.peak_bytes / 1e9:.1f} GB")
