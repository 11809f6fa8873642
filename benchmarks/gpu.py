"""Train Llama shapes on one GPU: speed, model FLOPs utilization (MFU), adapters, pairs, other trainers, large shapes.

All in bf16 on rows of 4,096 tokens, and a few steps on rows of up to 262,144. Reinforcement learning packs what it
samples into rows of 4,096 tokens.
"""

import csv
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.fake_teacher import TOP_K, write_tokenizer
from benchmarks.large_checkpoint import write_checkpoint
from benchmarks.measure import ROOT, Command, CommandError, Spread, interleave, run, spread
from benchmarks.packages import install_packages
from benchmarks.pair_rows import TEMPLATE_TOKENS, write_chat_tokenizer, write_pairs
from benchmarks.report import Report
from benchmarks.rollout_steps import PARTS, read_steps
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.token_dataset import open_dataset
from fabric_train.files.regular_file import write_atomically
from fabric_train.model.init_weights import new_shape
from tests.support.random_inputs import write_rows

REPETITIONS = 2
STEPS = 10
WARM_UP_STEPS = 4
ACCUMULATION = 4
LENGTH = 4096
LR = 1e-4
SMALL = "llama-3.2-1b"
MIDDLE = "llama-3-8b"
LARGE = "llama-3-70b"
ROWS = {SMALL: 4, MIDDLE: 1, LARGE: 1}  # in a micro-batch
WAYS: dict[str, tuple[str, str]] = {  # preset and options
    f"{preset}, {parallelism}{', compiled' if compiled else ''}": (
        preset,
        f"--parallelism {parallelism} --compile {str(compiled).lower()}",
    )
    for preset in (SMALL, MIDDLE)
    for parallelism in ("single", "fsdp", "fsdp2")
    for compiled in (False, True)
}
WAYS[f"{MIDDLE}, single, compiled, float8"] = (MIDDLE, "--parallelism single --compile true --float8 true")
PEERS = {f"{SMALL}, transformers": "", f"{SMALL}, transformers, compiled": "--compile"}  # and options
ADAPTED = {  # options of ours, and of TRL with peft
    f"{MIDDLE}, LoRA": ("--adapter lora --lora_rank 16", "--lora_rank 16"),
    f"{MIDDLE}, QLoRA": ("--adapter lora --lora_rank 16 --base_weights nf4", "--lora_rank 16 --nf4"),
}
OF_PEFT = ", TRL with peft"
OF_TRL = ", TRL"
PAIRED = {  # preset, options of ours, and of TRL: DPO on the same pairs
    f"{MIDDLE}, LoRA, DPO": (MIDDLE, "--adapter lora --lora_rank 16", "--lora_rank 16 --gradient_checkpointing"),
    f"{SMALL}, DPO": (SMALL, "", ""),
}
DISTILLED = {  # options of ``teach``, which stores the teacher's values; none for a live teacher
    f"{SMALL} from {MIDDLE}": "",
    f"{SMALL} from {MIDDLE}, top {TOP_K} stored": f"--top_k {TOP_K}",
    f"{SMALL} from {MIDDLE}, hidden states stored": "--hidden true",
}
REINFORCED = {  # options: reinforcement learning
    f"{MIDDLE}, LoRA, RL": "--adapter lora --lora_rank 16",
    f"{MIDDLE}, QLoRA, RL": "--adapter lora --lora_rank 16 --base_weights nf4",
    f"{MIDDLE}, LoRA, RL with vLLM": "--adapter lora --lora_rank 16 --sampler vllm",
}
REINFORCED_STEPS = 3  # the last one counts
PROMPTS_OF_A_STEP = 8
COMPLETIONS_OF_A_PROMPT = 8
COMPLETION_TOKENS = 512
PAIRS_OF_A_ROW = 4  # in a micro-batch of TRL, padded to the longest of them
# medians of log-normal distributions
PROMPT_WORDS = 60
ANSWER_WORDS = 300
BETA = 0.1
LAYERS_OF_LARGE = (30, 28, 26, 24, 22, 20)  # each of width 8,192; the first number that trains is the result
LARGE_OPTIONS = "--parallelism single --activation_checkpointing full --optimizer_states 8bit"
LONG = {32_768: 3, 131_072: 2, 262_144: 1}  # tokens of a row, and steps; the last step counts
LONG_OPTIONS = f"{LARGE_OPTIONS} --activation_offload true --mlp_tile_size 4096"


@dataclass(frozen=True)
class GpuRun:
    """Every step of one run.

    ``mfu`` follows ``fabric_train/model/flops.py``; None for the peer, which reports none, and on a device without a
    known peak. ``step_seconds`` says where the time of each step of reinforcement learning went, by part.
    """

    tokens_per_second: list[float]
    mfu: list[float] | None
    peak_bytes: int
    step_seconds: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class WaySummary:
    """One way to train.

    ``mfu`` belongs to the median speed; None on a device without a known peak, and for a peer if none of our runs
    trained its shape. ``step_seconds`` are medians by part; None unless it is reinforcement learning.
    """

    tokens_per_second: Spread
    mfu: float | None
    peak_bytes: Spread
    step_seconds: dict[str, float] | None = None


@dataclass(frozen=True)
class GpuSummary:
    """All ways to train; ``gpu`` is the device's name, ``left_out`` maps a system to why it has no result."""

    gpu: str
    ways: dict[str, WaySummary]
    left_out: dict[str, str]


class _Kept:
    """The runs of all systems that a pattern finds; each is written into a file when it ends, and is not run again."""

    def __init__(self, file: Path, pattern: str) -> None:
        self._file = file
        self._pattern = re.compile(pattern)
        kept = json.loads(file.read_bytes()) if file.exists() else {}
        self.runs = {name: [GpuRun(**found) for found in of_system] for name, of_system in kept.items()}
        self.left_out: dict[str, str] = {}

    def wants(self, name: str) -> bool:
        """Return whether the pattern finds the name of a system."""
        return bool(self._pattern.search(name))

    def add(self, systems: Mapping[str, Callable[[], GpuRun]], repetitions: int) -> None:
        """Run the systems that are wanted as often as they have not been run."""
        left = {name: repetitions - len(self.runs.get(name, [])) for name in systems if self.wants(name)}
        wanted = {name: partial(self._record, name, systems[name]) for name in left if name not in self.left_out}
        if wanted:
            interleave(wanted, left, "gpu", self.left_out)

    def _record(self, name: str, system: Callable[[], GpuRun]) -> GpuRun:
        found = system()
        self.runs.setdefault(name, []).append(found)
        written = {name: [asdict(found) for found in of_system] for name, of_system in self.runs.items()}
        write_atomically(self._file, json.dumps(written))
        return found


def measure(
    work: Path, sizes: str = "", pattern: str = "", repetitions: int = REPETITIONS, kept: Path | None = None
) -> Report:
    """Measure the ways to train.

    Args:
        work: folder for the files, relative to the project's root.
        sizes: options that are added to every preset, for smaller models.
        pattern: regular expression that a system's name must contain.
        repetitions: of each system.
        kept: file with the runs of an earlier call, which are not done again; by default in ``work``.

    Raises:
        InputError: there is no GPU.
        ChildProcessError: none of our runs trained.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError("torch finds no GPU; run the benchmark gpu on a machine with one")
    rows = work / "rows"
    target = work / "run"
    write_rows(ROOT / rows, num_rows=STEPS * ACCUMULATION * max(ROWS.values()), length=LENGTH)
    config = work / "config"
    tokenizer = write_chat_tokenizer(ROOT / work / "tokenizer")
    preset_config(SMALL, sizes).save_pretrained(ROOT / config)
    shutil.copytree(tokenizer, ROOT / config, dirs_exist_ok=True)  # trl asks for one; the rows are token ids
    commands = {
        name: our_command(preset, f"{options} {sizes}", rows, target) for name, (preset, options) in WAYS.items()
    }
    commands |= {name: peer_command(SMALL, options, rows, config) for name, options in PEERS.items()}
    done = _Kept(kept or ROOT / work / "runs.json", pattern)
    commands |= _further_commands(work, sizes, done)
    commands |= _distillation_commands(work, sizes, done)
    done.add(
        {
            name: partial(_run_peer if _is_peer(name) else partial(_run_ours, target), command)
            for name, command in commands.items()
        },
        repetitions,
    )
    commands |= _measure_rollouts(work, sizes, done, repetitions)
    commands |= _measure_largest(work, sizes, done)
    settings = {
        "precision": "bf16-true",
        "length": LENGTH,
        "accumulation": ACCUMULATION,
        "rows of a micro-batch": ROWS,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "repetitions": repetitions,
        "steps by tokens of a long row": LONG,
        "medians of the words of pairs": {"prompt": PROMPT_WORDS, "answer": ANSWER_WORDS},
        "steps of reinforcement learning": REINFORCED_STEPS,
        "prompts, completions of each, and their tokens": [
            PROMPTS_OF_A_STEP,
            COMPLETIONS_OF_A_PROMPT,
            COMPLETION_TOKENS,
        ],
        "pairs of TRL's micro-batch for each row of ours": PAIRS_OF_A_ROW,
    }
    commands = {name: command for name, command in commands.items() if name in {**done.runs, **done.left_out}}
    summary = summarize(done.runs, done.left_out, torch.cuda.get_device_name())
    return Report("gpu", settings, commands, done.runs, summary)


def _measure_rollouts(work: Path, sizes: str, done: _Kept, repetitions: int) -> dict[str, Command]:
    """Train the middle shape with reinforcement learning; return the commands.

    The prompts have one length. Of the tokens that random weights sample, hardly any ends a completion. A system whose
    files cannot be written, or that has no vLLM, gets a reason in ``done.left_out``. If no system is wanted, nothing is
    written.
    """
    wanted = [name for name in REINFORCED if done.wants(name)]
    if not wanted:
        return {}
    base = work / "sampled_base"
    tokenizer = ROOT / work / "sampled_tokenizer"
    prompts = work / "prompts.jsonl"
    config = preset_config(MIDDLE, sizes)
    write_tokenizer(tokenizer, config.vocab_size, ends=True)
    draw = random.Random(0)
    with (ROOT / prompts).open("w", encoding="utf-8") as file:
        for _ in range(PROMPTS_OF_A_STEP * REINFORCED_STEPS):
            words = [str(draw.randrange(config.vocab_size)) for _ in range(PROMPT_WORDS)]
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
    try:
        write_checkpoint(ROOT / base, config, tokenizer, sharded=False)
        shutil.copytree(tokenizer, ROOT / base, dirs_exist_ok=True)
    except OSError as error:  # such as a full disk
        done.left_out |= dict.fromkeys(wanted, f"no base: {error}")
        return {}
    commands = {}
    systems = {}
    for name in wanted:
        commands[name] = rollout_command(REINFORCED[name], prompts, base, work / "run")
        systems[name] = partial(_run_ours, work / "run", commands[name], enough=0)
    done.add(systems, repetitions)
    return commands


def rollout_command(options: str, prompts: Path, base: Path, target: Path) -> Command:
    """Return the command that trains ``base`` with reinforcement learning, into the run folder ``target``."""
    words = f"python -m benchmarks.peers.train_without_saving --model_name {base} --objective rl --prompts {prompts}"
    words += f" --rewards length --prompts_per_step {PROMPTS_OF_A_STEP} --group_size {COMPLETIONS_OF_A_PROMPT}"
    words += f" --max_new_tokens {COMPLETION_TOKENS} --max_length {LENGTH} --micro_batch_size {ROWS[MIDDLE]}"
    words += f" --output_dir {target} --accelerator cuda --devices 1 --parallelism single --precision bf16-true"
    words += f" --number_epochs 1 --lr {LR} --lr_schedule constant --loggers csv --log_step_interval 1 {options}"
    setting = json.dumps({"length": {"max_characters": 4 * COMPLETION_TOKENS}})
    return Command((*words.split(), "--reward_settings", setting))


def _measure_largest(work: Path, sizes: str, done: _Kept) -> dict[str, Command]:
    """Train the most layers of the largest shape that fit, and the middle shape on long rows; return the commands."""
    commands = {}
    for layers in LAYERS_OF_LARGE:
        if any(name.startswith(LARGE) for name in done.runs):
            break
        name = f"{LARGE} with {layers} layers, single, 8-bit moments, full checkpointing"
        commands[name] = our_command(LARGE, f"{LARGE_OPTIONS} --num_layers {layers}", work / "rows", work / "run")
        done.add({name: partial(_run_ours, work / "run", commands[name])}, 1)
    for length, steps in LONG.items():
        long_rows = work / f"rows-{length}"
        name = f"{MIDDLE} with rows of {length // 1024}k tokens, single, in tiles"
        options = f"{LONG_OPTIONS} --max_context_width {length} {sizes}"
        commands[name] = our_command(MIDDLE, options, long_rows, work / "run", steps=steps, accumulation=1)
        if done.wants(name):
            write_rows(ROOT / long_rows, num_rows=steps, length=length)
        done.add({name: partial(_run_ours, work / "run", commands[name], enough=0)}, 1)
    return commands


def table(report: Report) -> Table:
    """Return a table of the medians."""
    summary: GpuSummary = report.summary
    title = f"{summary.gpu}, bf16, rows of {LENGTH} tokens, median of {report.settings['repetitions']} runs"
    if not any(way.mfu for way in summary.ways.values()):
        title += "\nno MFU: the peak of this device is not in fabric_train/model/flops.py"
    columns = ["system", "tokens/s", "lowest–highest", "MFU", "memory, GB"]
    shows_parts = any(way.step_seconds for way in summary.ways.values())
    if shows_parts:
        columns.append(f"s of a step: {', '.join(PARTS)}")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, way in summary.ways.items():
        speeds = way.tokens_per_second
        between = f"{speeds.lowest:,.0f}–{speeds.highest:,.0f}"
        memory = f"{way.peak_bytes.median / 1e9:.1f}"
        cells = [name, f"{speeds.median:,.0f}", between, f"{way.mfu:.1%}" if way.mfu else "", memory]
        if way.step_seconds:
            cells.append(", ".join(f"{way.step_seconds[part]:.1f}" for part in PARTS))
        shown.add_row(*cells)
    for name, reason in summary.left_out.items():
        shown.add_row(name, "–", "", "", reason[-80:])
    return shown


def our_command(
    preset: str,
    options: str,
    rows: Path,
    target: Path,
    base: Path | None = None,
    steps: int | None = None,
    accumulation: int = ACCUMULATION,
) -> Command:
    """Return the command that trains a preset with random weights, or the ``base``, into the run folder ``target``.

    It takes ``STEPS`` steps unless ``steps`` says otherwise.
    """
    model = f"--model_name {base}" if base else f"--config configs/{preset}.yaml"
    words = f"python -m benchmarks.peers.train_without_saving {model} --train_data_dir {rows}"
    words += f" --output_dir {target} --accelerator cuda --devices 1 --precision bf16-true --max_step {steps or STEPS}"
    words += f" --micro_batch_size {ROWS[preset]} --gradient_accumulation_steps {accumulation}"
    words += f" --lr {LR} --lr_schedule constant --loggers csv {options}"
    return Command(tuple(words.split()))


def peer_command(preset: str, options: str, rows: Path, config: Path, steps: int | None = None) -> Command:
    """Return the command that trains a model like the preset, of the configuration in ``config``, with a peer.

    Adapters are of the model in that folder, which has weights too.
    """
    words = (
        f"python -m benchmarks.peers.huggingface_gpu --config {config} --train_data_dir {rows} --steps {steps or STEPS}"
    )
    words += f" --accumulation {ACCUMULATION} --micro_batch_size {ROWS[preset]} --lr {LR} {options}"
    return Command(tuple(words.split()))


def preset_config(preset: str, sizes: str) -> Any:
    """Return the configuration of a preset; ``sizes`` are options for smaller models."""
    given = parse(TrainArguments, list(our_command(preset, sizes, Path("rows"), Path("run")).words[3:]))
    return new_shape(given.model, given.fsdp.auto_wrap_policy).config


def _further_commands(work: Path, sizes: str, done: _Kept) -> dict[str, Command]:
    """Write a base of the middle shape, and pairs, and return the commands that train on them, ours and TRL's.

    Systems that lack what they need get a reason in ``done.left_out``. Without a wanted system nothing is written.
    """
    base = work / "base"
    pairs = work / "pairs"
    target = work / "run"
    if not any(done.wants(name) or done.wants(name + OF_PEFT) for name in [*ADAPTED, *PAIRED]):
        return {}
    write_pairs(ROOT / pairs, ROOT / work / "tokenizer", _pair_lengths(), LENGTH)
    commands = adapter_commands(work / "rows", base, target)
    order = WindowOrder(len(open_dataset(str(ROOT / pairs)).train), 1, 1, world_size=1, rank=0, seed=0).epoch_order(0)
    commands |= pair_commands(pairs, {MIDDLE: base, SMALL: work / "config"}, target, order.tolist(), sizes)
    try:
        if any(done.wants(name) for name in commands if name.startswith(MIDDLE)):
            write_checkpoint(ROOT / base, preset_config(MIDDLE, sizes), ROOT / work / "tokenizer", sharded=False)
            shutil.copytree(ROOT / work / "tokenizer", ROOT / base, dirs_exist_ok=True)  # where trl looks for one
    except OSError as error:  # such as a full disk
        done.left_out |= {name: f"no base: {error}" for name in commands if name.startswith(MIDDLE)}
    environment = {"CUDA_VISIBLE_DEVICES": "0"}  # with several, their Trainer copies the model to all of them
    try:
        environment["PYTHONPATH"] = str(install_packages("trl").relative_to(ROOT))
    except ChildProcessError as error:
        done.left_out |= {name: str(error) for name in commands if _is_peer(name) and done.wants(name)}
    return {
        name: replace(command, environment=environment) if _is_peer(name) else command
        for name, command in commands.items()
    }


def _distillation_commands(work: Path, sizes: str, done: _Kept) -> dict[str, Command]:
    """Write a teacher and rows with its tokenizer, store the teacher's values, and return the commands of the students.

    The tokenizer has a token for each row of the heads, as Llama-3's has. A system whose files cannot be written gets a
    reason in ``done.left_out``. If no system is wanted, nothing is written.
    """
    wanted = [name for name in DISTILLED if done.wants(name)]
    if not wanted:
        return {}
    teacher = work / "teacher"
    rows = work / "distilled_rows"
    tokenizer = ROOT / rows / "tokenizer"
    config = preset_config(MIDDLE, sizes)
    write_rows(ROOT / rows, num_rows=STEPS * ACCUMULATION * ROWS[SMALL], length=LENGTH)
    write_tokenizer(tokenizer, config.vocab_size)
    try:
        write_checkpoint(ROOT / teacher, config, tokenizer, sharded=False)
    except OSError as error:  # such as a full disk
        done.left_out |= dict.fromkeys(wanted, f"no teacher: {error}")
        return {}
    commands = {}
    for index, name in enumerate(wanted):
        form = DISTILLED[name]
        source = f"--teacher {teacher}"
        if form:
            states = work / f"states-{index}"
            words = f"python -m fabric_train.teacher_states --teacher {teacher} --train_data_dir {rows} {form}"
            words += f" --precision bf16-true --output_dir {states}"
            try:
                run(Command(tuple(words.split())))
            except CommandError as error:
                done.left_out[name] = f"no stored values: {error}"
                continue
            source = f"--teacher_states {states}"
        options = f"--parallelism single --objective distill {source} {sizes}"
        commands[name] = our_command(SMALL, options, rows, work / "run")
    return commands


def _pair_lengths() -> list[tuple[int, int, int]]:
    """Draw the words of prompt, chosen and rejected answer of as many pairs as the largest number of rows takes."""
    most = LENGTH // 4 - TEMPLATE_TOKENS - 1
    left = STEPS * ACCUMULATION * max(ROWS.values()) * LENGTH
    draw = random.Random(0)
    pairs: list[tuple[int, int, int]] = []

    def words(median: int) -> int:
        return max(1, min(most, round(draw.lognormvariate(math.log(median), 0.6))))

    while left > 0:
        pairs.append((words(PROMPT_WORDS), words(ANSWER_WORDS), words(ANSWER_WORDS)))
        left -= 2 * pairs[-1][0] + pairs[-1][1] + pairs[-1][2]
    return pairs


def adapter_commands(rows: Path, base: Path, target: Path) -> dict[str, Command]:
    """Return the commands that train adapters of ``base``: ours into the run folder ``target``, and the peer's."""
    commands = {}
    for name, (ours, peer) in ADAPTED.items():
        commands[name] = our_command(MIDDLE, f"--parallelism single {ours}", rows, target, base)
        options = f"--trl --gradient_checkpointing {peer}"
        commands[f"{name}{OF_PEFT}"] = peer_command(MIDDLE, options, rows, base)
    return commands


def pair_commands(
    pairs: Path, models: dict[str, Path], target: Path, order: list[int], sizes: str = ""
) -> dict[str, Command]:
    """Return the commands of DPO on the same rows of ``pairs``: ours into the run folder ``target``, and TRL's.

    Args:
        pairs: a token dataset.
        models: by preset, the base of its adapters, or a folder with its configuration.
        target: of our runs.
        order: in which our runs read the rows.
        sizes: options that are added to a preset when all its weights are trained.
    """
    commands = {}
    for name, (preset, ours, peer) in PAIRED.items():
        base, further = (models[preset], "") if ours else (None, sizes)
        options = f"--parallelism single --objective dpo --dpo_beta {BETA} {ours} {further}"
        commands[name] = our_command(preset, options, pairs, target, base)
        rows = ",".join(map(str, order[: STEPS * ACCUMULATION * ROWS[preset]]))
        words = f"python -m benchmarks.peers.trl_preference --cuda --model_name {models[preset]} --rows {rows}"
        words += f" --train_data_dir {pairs} --loss sigmoid --beta {BETA} --lr {LR} --accumulation {ACCUMULATION}"
        words += f" --micro_batch_size {PAIRS_OF_A_ROW * ROWS[preset]} {peer}"
        commands[f"{name}{OF_PEFT if ours else OF_TRL}"] = Command(tuple(words.split()))
    return commands


def _is_peer(name: str) -> bool:
    return name in PEERS or OF_TRL in name


def _run_ours(target: Path, command: Command, enough: int | None = None) -> GpuRun:
    shutil.rmtree(ROOT / target, ignore_errors=True)
    run(command)
    return _with_enough_steps(read_run(target), enough)


def _run_peer(command: Command) -> GpuRun:
    return _with_enough_steps(read_peer(run(command).output))


def _with_enough_steps(found: GpuRun, enough: int | None = None) -> GpuRun:
    """Raise a CommandError if there are no more than ``enough`` steps, by default ``WARM_UP_STEPS``."""
    if len(found.tokens_per_second) <= (WARM_UP_STEPS if enough is None else enough):
        raise CommandError(f"it took {len(found.tokens_per_second)} steps, and {WARM_UP_STEPS} of them are not counted")
    return found


def read_run(target: Path) -> GpuRun:
    """Return the metrics in a run folder."""
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    speeds = [float(step["tokens_per_second"]) for step in steps]
    shares = [float(step["mfu"]) for step in steps] if steps[-1]["mfu"] else None  # empty without a known peak
    peak_bytes = round(float(steps[-1]["peak_memory_gb"]) * 1e9)
    step_seconds = None
    if steps[-1].get("sampling_time"):  # a run with prompts
        step_seconds = [asdict(seconds) for seconds in read_steps(ROOT / target)]
    return GpuRun(speeds, shares, peak_bytes, step_seconds)


def read_peer(output: str) -> GpuRun:
    """Return what a peer printed."""
    printed = json.loads(output.splitlines()[-1])
    return GpuRun(printed["tokens_per_second"], None, printed["peak_device_bytes"])


def summarize(runs: dict[str, list[GpuRun]], left_out: dict[str, str], gpu: str) -> GpuSummary:
    """Return the medians of all runs.

    Raises:
        ChildProcessError: none of our runs trained.
    """
    if all(map(_is_peer, runs)):
        raise ChildProcessError("; ".join(left_out.values()))
    mfu_per_speed = {  # MFU at one token per second, which depends on the shape and on what trains alone
        _trained(name): of_way[0].mfu[-1] / of_way[0].tokens_per_second[-1]
        for name, of_way in runs.items()
        if of_way[0].mfu
    }
    ways = {}
    for name, of_way in runs.items():
        counted = (found.tokens_per_second[WARM_UP_STEPS:] or found.tokens_per_second[-1:] for found in of_way)
        speeds = spread([spread(steps).median for steps in counted])
        factor = mfu_per_speed.get(_trained(name))
        mfu = factor * speeds.median if factor else None
        peaks = spread([found.peak_bytes for found in of_way])
        ways[name] = WaySummary(speeds, mfu, peaks, _median_step_seconds(of_way))
    return GpuSummary(gpu, ways, left_out)


def _median_step_seconds(runs: Sequence[GpuRun]) -> dict[str, float] | None:
    """Return the medians of the last step's parts over all runs; None if the runs do not know them."""
    last_steps = [run.step_seconds[-1] for run in runs if run.step_seconds]
    if not last_steps:
        return None
    return {part: spread([seconds[part] for seconds in last_steps]).median for part in PARTS}


def _trained(name: str) -> str:
    """Return the part of a system's name that says what it trains: a shape, or an adapter of one."""
    name = name.partition(OF_TRL)[0]
    return name if name in {*ADAPTED, *PAIRED, *DISTILLED, *REINFORCED} else name.split(",")[0]
