"""Time the parts of a step of ``--objective rl`` and of TRL's GRPOTrainer, which both sample in process.

Both train SmolLM2-135M in fp32 on the same prompts, with groups and completions of the same size. No completion ends
early, so every step of both samples and trains the same number of tokens. Times are CPU times of one thread.
"""

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, Spread, interleave, run, spread
from benchmarks.packages import install_packages
from benchmarks.report import Report
from benchmarks.rollouts import QUESTIONS
from fabric_train.sample_data import real_data

REPETITIONS = 2
STEPS = 4
WARM_UP_STEPS = 1
GROUP_SIZE = 4
MAX_NEW_TOKENS = 32
TEMPERATURE = 1.0
MAX_CHARACTERS = 60
"""Of completions that get the reward."""
ROW_LENGTH = 64
"""A row of ours has one completion: a mask over rows of several documents costs time on a CPU."""
LR = 1e-6
THREADS = 1
"""The CPU time of several threads has the time in which they wait for each other."""
END_TOKEN = "<gh_stars>"
"""A control token of SmolLM2 that it never writes: as the token that ends a text, it lets no completion end early."""
OURS = "fabric_train"
PEER = "trl"
PARTS = ("sampling", "rewards", "weights", "training")


@dataclass(frozen=True)
class StepSeconds:
    """The CPU seconds of a step by part; ``training`` is the rest of the step."""

    sampling: float
    rewards: float
    weights: float
    """Until the sampler had the weights; 0 where the model samples itself."""
    training: float

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return self.sampling + self.rewards + self.weights + self.training


@dataclass(frozen=True)
class RolloutStepRun:
    """Every step of one run, the first ones included."""

    steps: list[StepSeconds]
    num_tokens: list[int]
    """The tokens of all completions of each step."""
    num_prompt_tokens: int
    """The tokens of the prompts of a step, each counted once for each of its completions."""
    peak_rss_bytes: int
    """Of the whole command."""


@dataclass(frozen=True)
class RolloutStepSystem:
    """One system over its repetitions: the spread of their medians over the steps, in CPU seconds of a step."""

    parts: dict[str, Spread]
    total: Spread
    peak_rss_bytes: Spread


@dataclass(frozen=True)
class RolloutStepSummary:
    """Both systems, and the medians of ours divided by those of TRL."""

    systems: dict[str, RolloutStepSystem]
    ratios: dict[str, float]
    """By part of a step, also of the ``whole step``."""


def measure(work: Path) -> Report:
    """Measure both systems in turn.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or they did not sample the same number of tokens.
    """
    model = work / "model"
    prompts = work / "questions.jsonl"
    target = work / "run"
    _write_model(ROOT / model)
    (ROOT / prompts).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS), encoding="utf-8")
    commands = {OURS: _our_command(model, prompts, target), PEER: _peer_command(model, prompts)}
    systems = {
        OURS: partial(_run_ours, commands[OURS], target),
        PEER: partial(_run_peer, commands[PEER]),
    }
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "rollout_steps")
    check_tokens(runs)
    summaries = {name: _summarize(system_runs) for name, system_runs in runs.items()}
    ratios = {}
    for part in ("sampling", "training"):
        ratios[part] = summaries[OURS].parts[part].median / summaries[PEER].parts[part].median
    ratios["whole step"] = summaries[OURS].total.median / summaries[PEER].total.median
    settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "prompts in a step": len(QUESTIONS),
        "group_size": GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
        "temperature": TEMPERATURE,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
        "threads": THREADS,
        "repetitions": REPETITIONS,
    }
    return Report("rollout_steps", settings, commands, runs, RolloutStepSummary(summaries, ratios))


def table(report: Report) -> Table:
    """Return a table of the medians, with the lowest and highest time of a whole step."""
    summary: RolloutStepSummary = report.summary
    title = (
        f"A step of reinforcement learning: SmolLM2-135M, fp32, {len(QUESTIONS) * GROUP_SIZE} completions of "
        f"{MAX_NEW_TOKENS} tokens, CPU seconds of {THREADS} thread, median of {REPETITIONS} runs"
    )
    columns = ("system", *PARTS, "whole step", "lowest–highest", "RSS, GB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, system in summary.systems.items():
        parts = [f"{system.parts[part].median:.2f}" for part in PARTS]
        between = f"{system.total.lowest:.2f}–{system.total.highest:.2f}"
        memory = f"{system.peak_rss_bytes.median / 1e9:.2f}"
        shown.add_row(name, *parts, f"{system.total.median:.2f}", between, memory)
    ratios = {name: f"{ratio:.2f}×" for name, ratio in summary.ratios.items()}
    shown.add_row(f"{OURS} / {PEER}", *(ratios.get(name, "") for name in (*PARTS, "whole step")), "", "")
    return shown


def read_steps(run_folder: Path) -> list[StepSeconds]:
    """Return where the time of the steps of a run of ours went, from its metrics.csv."""
    with (run_folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = []
    for row in rows:
        sampling = float(row["sampling_time"])
        rewards = float(row["rewards_time"])
        weights = float(row["weights_time"])
        training = float(row["step_time"]) - sampling - rewards - weights
        steps.append(StepSeconds(sampling, rewards, weights, training))
    return steps


def _write_model(folder: Path) -> None:
    """Write SmolLM2-135M with another token at the end of texts."""
    shutil.copytree(real_data.smollm2(), folder)
    added_tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    (end_id,) = (token["id"] for token in added_tokens if token["content"] == END_TOKEN)
    for name, value in {
        "tokenizer_config.json": {"eos_token": END_TOKEN},
        "config.json": {"eos_token_id": end_id},
        "generation_config.json": {"eos_token_id": end_id},
    }.items():
        written = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(written | value), encoding="utf-8")


def _our_command(model: Path, prompts: Path, target: Path) -> Command:
    words = "python -m benchmarks.peers.train_by_cpu_time --parallelism single --accelerator cpu"
    words += f" --precision 32-true --model_name {model} --objective rl --prompts {prompts} --rewards length"
    words += f" --prompts_per_step {len(QUESTIONS)} --group_size {GROUP_SIZE} --max_new_tokens {MAX_NEW_TOKENS}"
    words += f" --temperature {TEMPERATURE} --max_length {ROW_LENGTH} --number_epochs {STEPS} --lr {LR}"
    words += f" --micro_batch_size {len(QUESTIONS) * GROUP_SIZE} --lr_schedule constant --output_dir {target}"
    words += " --loggers csv --report false --log_step_interval 1"
    settings = ("--reward_settings", json.dumps({"length": {"max_characters": MAX_CHARACTERS}}))
    return Command((*words.split(), *settings), {"OMP_NUM_THREADS": str(THREADS)})


def _peer_command(model: Path, prompts: Path) -> Command:
    words = f"python -m benchmarks.peers.trl_rollout_steps --model_name {model} --prompts {prompts}"
    words += f" --group_size {GROUP_SIZE} --max_new_tokens {MAX_NEW_TOKENS} --temperature {TEMPERATURE}"
    words += f" --steps {STEPS} --lr {LR}"
    packages = str(install_packages("trl").relative_to(ROOT))
    return Command(tuple(words.split()), {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": packages})


def _run_ours(command: Command, target: Path) -> RolloutStepRun:
    shutil.rmtree(ROOT / target, ignore_errors=True)
    measured = run(command)
    with (ROOT / target / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    num_completions = len(QUESTIONS) * GROUP_SIZE
    num_tokens = [round(float(row["train_completion_tokens"]) * num_completions) for row in rows]
    num_read = int(rows[0]["num_tokens"])  # of prompts and completions
    return RolloutStepRun(
        steps=read_steps(ROOT / target),
        num_tokens=num_tokens,
        num_prompt_tokens=num_read - num_tokens[0],
        peak_rss_bytes=measured.peak_rss_bytes,
    )


def _run_peer(command: Command) -> RolloutStepRun:
    measured = run(command)
    printed = json.loads(measured.output.splitlines()[-1])
    return RolloutStepRun(
        steps=[StepSeconds(**step) for step in printed["steps"]],
        num_tokens=printed["num_tokens"],
        num_prompt_tokens=printed["num_prompt_tokens"],
        peak_rss_bytes=measured.peak_rss_bytes,
    )


def check_tokens(runs: dict[str, list[RolloutStepRun]]) -> None:
    """Raise a ChildProcessError if the systems did not sample and train the same number of tokens in every step."""
    expected = len(QUESTIONS) * GROUP_SIZE * MAX_NEW_TOKENS
    prompt_tokens = {run.num_prompt_tokens for system_runs in runs.values() for run in system_runs}
    if len(prompt_tokens) > 1:
        raise ChildProcessError(f"the prompts of a step have different numbers of tokens: {sorted(prompt_tokens)}")
    for name, system_runs in runs.items():
        for system_run in system_runs:
            if system_run.num_tokens != [expected] * STEPS:
                raise ChildProcessError(f"{name} sampled {system_run.num_tokens} tokens, not {expected} in each step")


def _summarize(runs: Sequence[RolloutStepRun]) -> RolloutStepSystem:
    counted = [run.steps[WARM_UP_STEPS:] for run in runs]
    parts = {}
    for part in PARTS:
        parts[part] = spread([spread([getattr(step, part) for step in steps]).median for steps in counted])
    return RolloutStepSystem(
        parts=parts,
        total=spread([spread([step.total for step in steps]).median for steps in counted]),
        peak_rss_bytes=spread([run.peak_rss_bytes for run in runs]),
    )
