"""Train with TRL's GRPOTrainer, which samples in process; print the CPU time of each step by part, as a line of JSON.

The settings are those that do the same work as ``--objective rl``: one update of the model for its own completions,
sampling from the full distribution, no reference, and no recomputation of activations.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.huggingface_trainers import trainer_options
from benchmarks.rollout_steps import MAX_CHARACTERS, StepSeconds
from fabric_train.rollouts.builtin_rewards import length


class TimedTrainer(GRPOTrainer):
    """A GRPOTrainer that counts the CPU time of its steps; a step begins where the one before ends."""

    def start_clock(self, optimizer: torch.optim.Optimizer) -> None:
        """Start to time the steps of the optimizer; the first one starts now."""
        self.steps: list[StepSeconds] = []
        self.num_tokens: list[int] = []
        self.num_prompt_tokens = 0
        self._sampling_seconds = 0.0
        self._reward_seconds = 0.0
        optimizer.register_step_post_hook(self._end_step)
        self._started = time.process_time()

    def _generate(self, prompts: list[Any]) -> Any:
        started = time.process_time()
        outputs = super()._generate(prompts)
        self._sampling_seconds += time.process_time() - started
        prompt_ids, completion_ids, *_ = outputs
        self.num_prompt_tokens = sum(len(ids) for ids in prompt_ids)
        self.num_tokens.append(sum(len(ids) for ids in completion_ids))
        return outputs

    def _calculate_rewards(self, *arguments: Any, **named_arguments: Any) -> torch.Tensor:
        started = time.process_time()
        rewards: torch.Tensor = super()._calculate_rewards(*arguments, **named_arguments)
        self._reward_seconds += time.process_time() - started
        return rewards

    def _end_step(self, *_: Any) -> None:
        now = time.process_time()
        training_seconds = now - self._started - self._sampling_seconds - self._reward_seconds
        self.steps.append(StepSeconds(self._sampling_seconds, self._reward_seconds, 0.0, training_seconds))
        self._started = now
        self._sampling_seconds = 0.0
        self._reward_seconds = 0.0


def main() -> None:
    """Train the steps given on the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--prompts"):
        parser.add_argument(name, required=True)
    for name in ("--group_size", "--max_new_tokens", "--steps"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--temperature", "--lr"):
        parser.add_argument(name, type=float, required=True)
    options = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model_name)
    prompts = []
    with Path(options.prompts).open(encoding="utf-8") as file:
        for line in file:
            # a text begins with BOS, as ``fabric_train`` encodes it
            prompts.append({"prompt": tokenizer.bos_token + json.loads(line)["prompt"]})
    configuration = GRPOConfig(
        **{
            **trainer_options(accumulation=1, lr=options.lr, compiles=False),
            "per_device_train_batch_size": len(prompts) * options.group_size,
            "num_train_epochs": options.steps,
        },
        num_generations=options.group_size,
        max_completion_length=options.max_new_tokens,
        temperature=options.temperature,
        top_p=1.0,
        top_k=0,
        num_iterations=1,
        beta=0.0,
        scale_rewards="none",
    )
    trainer: Any = TimedTrainer(
        AutoModelForCausalLM.from_pretrained(options.model_name, dtype=torch.float32),
        reward_funcs=[reward_length],
        args=configuration,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )
    trainer.add_callback(StartClock(trainer))
    trainer.train()
    result = {
        "steps": [asdict(step) for step in trainer.steps],
        "num_tokens": trainer.num_tokens,
        "num_prompt_tokens": trainer.num_prompt_tokens,
    }
    print(json.dumps(result))


def reward_length(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Return the reward ``length`` with the setting of the benchmark."""
    return length(completions, prompts, max_characters=[MAX_CHARACTERS] * len(completions))


class StartClock(TrainerCallback):
    """A callback that starts the clock once the optimizer exists."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Start the clock."""
        self._trainer.start_clock(optimizer.optimizer)  # the one that accelerate wraps


if __name__ == "__main__":
    main()
