"""transformers' Trainer, or TRL's SFTTrainer with ``--trl``, on the same rows; prints its speed, losses and memory as
JSON.
"""

import sys
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.peers.step_clock import StepClock
from benchmarks.peers.training_task import Task, parse_task


class InOrder:
    """For a trainer class: takes the rows as they lie and tells the clock of its micro-batches."""

    clock: StepClock

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        rows: Any = self.train_dataset  # type: ignore[attr-defined]
        return SequentialSampler(rows)

    def training_step(self, model: Any, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        """Compute a micro-batch's share of the window's loss."""
        # a batch without padding has no mask
        num_tokens = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()
        loss: torch.Tensor = super().training_step(model, inputs, *others)  # type: ignore[misc]
        self.clock.micro_batch(loss, num_tokens)
        return loss


class Starter(TrainerCallback):
    """Starts the clock when the first step begins, at which there is an optimizer."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Start."""
        self._clock.watch(optimizer.optimizer)  # inside of accelerate's


def main() -> None:
    """Train."""
    uses_trl = "--trl" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--trl"]
    task = parse_task()
    train(_trl_trainer(task) if uses_trl else _trainer(task))


def train(trainer: Any) -> None:
    """Let a trainer, which is an ``InOrder``, train to its end, and print what was measured."""
    trainer.clock = clock = StepClock()
    trainer.add_callback(Starter(clock))
    trainer.train()
    clock.tell()


def settings(accumulation: int, lr: float, *, compiles: bool) -> dict[str, Any]:
    """Return what either trainer is given for a pass over the rows in micro-batches of one row."""
    return {
        "output_dir": ".cache/unused",  # which it makes
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "torch_compile": compiles,
    }


def _trainer(task: Task) -> Any:
    class RowTrainer(InOrder, Trainer):
        pass

    rows = task.rows.map(lambda row: {"labels": row["input_ids"]})
    model = AutoModelForCausalLM.from_pretrained(task.model_name, dtype=torch.float32)
    given = TrainingArguments(**settings(task.accumulation, task.lr, compiles=task.compile))
    return RowTrainer(model, given, train_dataset=rows, data_collator=default_data_collator)


def _trl_trainer(task: Task) -> Any:
    from trl import SFTConfig, SFTTrainer  # a package beside this environment's

    class RowTrainer(InOrder, SFTTrainer):
        pass

    given = settings(task.accumulation, task.lr, compiles=task.compile)
    unprepared = {"skip_prepare_dataset": True}
    model = AutoModelForCausalLM.from_pretrained(task.model_name, dtype=torch.float32)
    return RowTrainer(model, SFTConfig(**given, max_length=None, dataset_kwargs=unprepared), train_dataset=task.rows)


if __name__ == "__main__":
    main()
