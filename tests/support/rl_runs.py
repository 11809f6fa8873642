"""Short runs of ``--objective rl`` in a folder with a tiny model, prompts and a reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric_train.rollouts.store import read_rollouts, step_folder
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import option_words
from tests.support.run_comparison import metrics

MAX_STEP = 4
TOLERANCE = 1e-5
"""Relative, in fp32: sums of a few hundred terms in another order."""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
VOWELS = """
import os

def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]

def vowels_of_odd_prompts(completions, answer, **columns):
    odd = [int(number) % 2 for number in answer]
    return [value if is_odd else 0 for value, is_odd in zip(vowels(completions), odd)]

def vowels_but_one(completions, **columns):
    values = vowels(completions)
    if os.environ["RANK"] == "1":
        values[0] = None
    return values
"""
SETTINGS = {
    "objective": "rl",
    "model_name": "model",
    "prompts": "add=prompts.jsonl",
    "rewards": "judge.py:vowels",
    "accelerator": "cpu",
    "precision": "32-true",
    "max_length": 64,
    "max_new_tokens": 12,
    "prompts_per_step": 4,
    "group_size": 4,
    "sampler_batch_size": 6,
    "max_step": MAX_STEP,
    "lr": 1e-3,
    "save_step_interval": 2,
    "keep_checkpoints": 9,
    "log_step_interval": 1,
    "loggers": "csv",
    "report": "false",
}


@dataclass
class Reinforcing:
    """Starts runs in a folder that has the files of the ``settings``."""

    folder: Path
    runs: ForkedRuns
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)

    def words(self, run: str, **options: Any) -> list[str]:
        settings = {**self.settings, "output_dir": run, **options}
        return option_words({name: value for name, value in settings.items() if value is not None})

    def start(self, run: str, num_ranks: int = 1, before: str = "", **options: Any) -> ForkedRun:
        return self.runs.start(self.words(run, **options), num_ranks, cwd=self.folder, before=before)

    def train(self, run: str, num_ranks: int = 1, before: str = "", **options: Any) -> ForkedRun:
        started = self.start(run, num_ranks, before, **options)
        started.finish()
        return started

    def tokens(self, run: str, step: int) -> list[list[int]]:
        """Return the tokens of each completion of a step."""
        stored = read_rollouts(step_folder(self.folder / run, step))
        return [completion.token_ids.tolist() for completion in stored.completions]

    def column(self, run: str, name: str) -> list[float]:
        return [float(row[name]) for row in metrics(self.folder / run)]
