"""Train SmolLM2-135M on preference pairs on CPU: ``fabric_train`` on packed rows, and TRL."""

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.packages import install_packages
from benchmarks.report import Report
from benchmarks.training import TrainingRun, run_ours, run_peer
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.token_dataset import open_dataset
from fabric_train.sample_data import real_data

REPETITIONS = 2
NUM_PAIRS = 24
MAX_LENGTH = 512  # of a row, which holds both sequences of its pairs
ROWS_PER_STEP = 2  # packed
# pairs in a micro-batch of TRL, padded to the longest of them
PADDED_PAIRS = 2
PADDED_ACCUMULATION = 2
# with one pair in a row and in a micro-batch of TRL
PARITY_STEPS = 2
PAIRS_PER_STEP = 2
WARM_UP_STEPS = 1
LR = 1e-5
THREADS = 2
LOSSES: dict[str, tuple[float, tuple[str, ...]]] = {  # by name of TRL: β, and the options here
    "sigmoid": (0.1, ("--objective", "dpo")),
    "ipo": (0.1, ("--objective", "ipo")),
    "sigmoid_norm": (0.1, ("--objective", "dpo", "--length_normalised", "true")),
    "simpo": (2.0, ("--objective", "simpo")),
    "orpo": (1.0, ("--objective", "orpo")),
}
OURS = "fabric_train"
PEER = "trl, padded"
_LARGEST_DIFFERENCE = 1e-3  # between two losses of a step in fp32, relative to the larger one


@dataclass(frozen=True)
class PreferenceSystem:
    """A system over its repetitions; ``tokens_per_second``, without padding, is from medians over the steps."""

    tokens_per_second: Spread
    peak_rss_bytes: Spread


@dataclass(frozen=True)
class PreferenceSummary:
    """Both systems, ours over TRL's; ``loss_difference`` is the largest relative one of each loss's steps."""

    systems: dict[str, PreferenceSystem]
    speed_ratio: float
    rss_ratio: float
    loss_difference: dict[str, float]


def measure(work: Path) -> Report:
    """Compare the losses of the steps, then measure both systems in turn.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or the losses differ.
    """
    model = real_data.smollm2().relative_to(ROOT)
    pairs = work / "pairs.jsonl"
    write_pairs(ROOT / pairs, NUM_PAIRS)
    print("preference: making the token datasets", flush=True)
    packed = work / "packed"
    single = work / "single"
    for tokens, packing in ((packed, "best_fit"), (single, "none")):
        words = f"python tokenize_dataset.py --dataset {pairs} --tokenizer_name {model} --output_dir {tokens}"
        words += f" --max_length {MAX_LENGTH} --packing {packing} --too_long drop --validation_split 0"
        run(Command(tuple(words.split())))
    commands: dict[str, Command] = {}
    differences = {}
    for loss in LOSSES:
        ours = our_command(model, single, work / "parity", PAIRS_PER_STEP, PARITY_STEPS, loss)
        theirs = _trl_command(model, single, loss, 1, PAIRS_PER_STEP, PARITY_STEPS * PAIRS_PER_STEP)
        print(f"preference: losses of {loss}", flush=True)
        of_both = zip(run_ours(ours, work / "parity").losses, run_peer(theirs).losses, strict=True)
        differences[loss] = max(abs(one - other) / max(abs(one), abs(other)) for one, other in of_both)
        if not differences[loss] <= _LARGEST_DIFFERENCE:
            raise ChildProcessError(f"the losses of {loss} differ from TRL's by up to {differences[loss]:.1e}")
    num_rows = len(open_dataset(str(ROOT / packed)).train)
    commands[OURS] = our_command(model, packed, work / OURS, ROWS_PER_STEP, num_rows // ROWS_PER_STEP, "sigmoid")
    commands[PEER] = _trl_command(model, packed, "sigmoid", PADDED_PAIRS, PADDED_ACCUMULATION, num_rows)
    systems = {OURS: partial(run_ours, commands[OURS], work / OURS), PEER: partial(run_peer, commands[PEER])}
    runs: dict[str, list[TrainingRun]] = interleave(systems, dict.fromkeys(systems, REPETITIONS), "preference")
    of_systems = {
        name: PreferenceSystem(
            spread([spread(one.tokens_per_second[WARM_UP_STEPS:]).median for one in of_system]),
            spread([one.peak_rss_bytes for one in of_system]),
        )
        for name, of_system in runs.items()
    }
    summary = PreferenceSummary(
        of_systems,
        of_systems[OURS].tokens_per_second.median / of_systems[PEER].tokens_per_second.median,
        of_systems[OURS].peak_rss_bytes.median / of_systems[PEER].peak_rss_bytes.median,
        differences,
    )
    settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "pairs": NUM_PAIRS,
        "max_length": MAX_LENGTH,
        "packed rows in a step": ROWS_PER_STEP,
        "padded pairs in a micro-batch and micro-batches in a step": [PADDED_PAIRS, PADDED_ACCUMULATION],
        "warm_up_steps": WARM_UP_STEPS,
        "threads": THREADS,
    }
    return Report("preference", settings, commands, runs, summary)


def table(report: Report) -> Table:
    """Return a table of the medians."""
    summary: PreferenceSummary = report.summary
    title = f"Pairs of up to {MAX_LENGTH} tokens: SmolLM2-135M, DPO, fp32, {THREADS} threads, {REPETITIONS} runs each"
    columns = ("system", "real tokens/s", "lowest–highest", "RSS, GB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        speeds = system.tokens_per_second
        between = f"{speeds.lowest:.1f}–{speeds.highest:.1f}"
        shown.add_row(name, f"{speeds.median:.1f}", between, f"{system.peak_rss_bytes.median / 1e9:.2f}")
    shown.add_row(f"ours / {PEER}", f"{summary.speed_ratio:.2f}×", "", f"{summary.rss_ratio:.2f}×")
    for loss, difference in summary.loss_difference.items():
        shown.add_row(f"losses of {loss} differ from TRL's by", f"{difference:.1e}", "", "")
    return shown


def write_pairs(file: Path, num_pairs: int) -> None:
    """Write pairs of real chats: the first answer is chosen, the first answer of the next chat is rejected."""
    with real_data.chats().open(encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in itertools.islice(lines, num_pairs + 1)]
    firsts = [next(number for number, turn in enumerate(chat) if turn["role"] == "assistant") for chat in chats]
    answers = [chat[first] for chat, first in zip(chats, firsts, strict=True)]
    of_pairs = [
        {"prompt": chat[:first], "chosen": [answer], "rejected": [other]}
        for chat, first, (answer, other) in zip(chats, firsts, itertools.pairwise(answers), strict=False)
    ]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in of_pairs), encoding="utf-8")


def our_command(model: Path, tokens: Path, target: Path, rows: int, steps: int, loss: str) -> Command:
    """Return the command that trains on rows of one micro-batch each, into the run folder ``target``."""
    beta, options = LOSSES[loss]
    words = "python -m fabric_train --parallelism single --accelerator cpu --precision 32-true"
    words += f" --model_name {model} --train_data_dir {tokens} --output_dir {target} --loggers csv --max_step {steps}"
    words += f" --micro_batch_size 1 --total_batch_size {rows} --lr {LR} --lr_schedule constant --dpo_beta {beta}"
    return Command((*words.split(), *options), {"OMP_NUM_THREADS": str(THREADS)})


def _trl_command(model: Path, tokens: Path, loss: str, pairs: int, accumulation: int, num_rows: int) -> Command:
    """Return the command that trains TRL on the first rows in the order of ``fabric_train``."""
    order = WindowOrder(len(open_dataset(str(ROOT / tokens)).train), 1, 1, world_size=1, rank=0, seed=0)
    rows = ",".join(str(row) for row in order.epoch_order(0)[:num_rows])
    words = f"python -m benchmarks.peers.trl_preference --model_name {model} --train_data_dir {tokens} --rows {rows}"
    words += f" --loss {loss} --beta {LOSSES[loss][0]} --lr {LR}"
    words += f" --micro_batch_size {pairs} --accumulation {accumulation}"
    environment = {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": str(install_packages("trl").relative_to(ROOT))}
    return Command(tuple(words.split()), environment)
