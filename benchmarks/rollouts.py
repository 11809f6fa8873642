"""Compare the loss of ``--objective rl`` and its gradients with those of TRL's GRPOTrainer on the same completions."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.measure import ROOT, Command, run
from benchmarks.packages import install_packages
from benchmarks.report import Report
from fabric_train.sample_data import real_data

QUESTIONS = (
    "Name three animals that live in the sea.",
    "How do I make a cup of tea?",
    "Which fruits are red?",
    "Which countries are in South America?",
)
GROUP_SIZE = 4
MAX_NEW_TOKENS = 24
TEMPERATURE = 0.9
THREADS = 2
LARGEST_GRADIENT_DISTANCE = 1e-4
"""Relative to the norm. By this order of magnitude, fp32 also rounds TRL's gradients otherwise without padding."""
LARGEST_LOSS_DIFFERENCE = 1e-5
_ANOTHER_VALUE = ("dapo", "dr_grpo")
"""The forms whose loss has the gradient of ours, but another value."""


@dataclass(frozen=True)
class Comparison:
    """One form of TRL's loss; ``gradient_distance`` is relative to the norm of the gradients."""

    gradient_distance: float
    loss_difference: float
    loss: float
    cut_share: float


@dataclass(frozen=True)
class RolloutSummary:
    """The comparisons by the name of the form in TRL and the weight of the divergence from the reference."""

    comparisons: dict[str, Comparison]


def measure(work: Path) -> Report:
    """Sample the completions of a step with a run of ours, and let TRL compute the loss of the same completions.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or losses or gradients differ.
    """
    model = real_data.smollm2().relative_to(ROOT)
    prompts = work / "questions.jsonl"
    chats = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    (ROOT / prompts).write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    words = f"python -m fabric_train --parallelism single --accelerator cpu --precision 32-true --model_name {model}"
    words += f" --objective rl --prompts {prompts} --rewards length --prompts_per_step {len(QUESTIONS)}"
    words += f" --group_size {GROUP_SIZE} --max_new_tokens {MAX_NEW_TOKENS} --temperature {TEMPERATURE}"
    words += f" --max_length 512 --max_step 1 --lr 1e-5 --output_dir {work / 'run'}"
    settings = ("--reward_settings", json.dumps({"length": {"max_characters": 60}}))
    environment = {"OMP_NUM_THREADS": str(THREADS)}
    sampling = Command((*words.split(), *settings), environment)

    words = f"python -m benchmarks.peers.trl_rollouts --model_name {model}"
    words += f" --step_folder {work / 'run' / 'rollouts' / 'step-000001'}"
    words += f" --max_new_tokens {MAX_NEW_TOKENS} --temperature {TEMPERATURE}"
    packages = str(install_packages("trl").relative_to(ROOT))
    comparing = Command(tuple(words.split()), {**environment, "PYTHONPATH": packages})

    print("rollouts: sampling", flush=True)
    run(sampling)
    print("rollouts: loss and gradients here and in TRL", flush=True)
    printed = json.loads(run(comparing).output.splitlines()[-1])
    comparisons = {name: Comparison(**values) for name, values in printed.items()}
    for name, comparison in comparisons.items():
        if not comparison.gradient_distance <= LARGEST_GRADIENT_DISTANCE:
            raise ChildProcessError(f"the gradients of {name} differ from TRL's by {comparison.gradient_distance:.1e}")
        has_same_value = not name.startswith(_ANOTHER_VALUE)
        if has_same_value and not comparison.loss_difference <= LARGEST_LOSS_DIFFERENCE:
            raise ChildProcessError(f"the loss of {name} differs from TRL's by {comparison.loss_difference:.1e}")
    shown_settings = {
        "model": "SmolLM2-135M",
        "precision": "fp32",
        "completions": len(QUESTIONS) * GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
        "temperature": TEMPERATURE,
    }
    commands = {"fabric_train": sampling, "trl": comparing}
    runs = {name: [comparison] for name, comparison in comparisons.items()}
    return Report("rollouts", shown_settings, commands, runs, RolloutSummary(comparisons))


def table(report: Report) -> Table:
    """Return a table of the differences."""
    summary: RolloutSummary = report.summary
    title = f"--objective rl beside TRL's GRPOTrainer: SmolLM2-135M, fp32, {report.settings['completions']} completions"
    columns = ("loss in TRL", "gradients differ by", "loss differs by", "tokens with a cut weight")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for name, comparison in summary.comparisons.items():
        difference = f"{comparison.loss_difference:.1e}"
        if name.startswith(_ANOTHER_VALUE):
            difference = "another value"
        shown.add_row(name, f"{comparison.gradient_distance:.1e}", difference, f"{comparison.cut_share:.1%}")
    return shown
