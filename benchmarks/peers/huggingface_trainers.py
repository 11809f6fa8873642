"""Train with transformers' Trainer, or TRL's SFTTrainer with ``--trl``; print its speed, losses and memory as JSON."""

import sys
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from benchmarks.peers.step_clock import StepClock
from benchmarks.peers.training_task import Task, parse_task


class InOrder:
    """A mixin for trainers that reads the rows in their order on disk and times its steps."""

    clock: StepClock

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        rows: Any = self.train_dataset  # type: ignore[attr-defined]
        return SequentialSampler(rows)

    def training_step(self, model: Any, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        """Return a micro-batch's share of the step's loss."""
        masks = [int(mask.sum()) for name, mask in inputs.items() if name.endswith("attention_mask")]
        num_tokens = sum(masks) if masks else inputs["input_ids"].numel()  # a batch without padding has no mask
        loss: torch.Tensor = super().training_step(model, inputs, *others)  # type: ignore[misc]
        self.clock.add_micro_batch(loss, num_tokens)
        return loss


class StartClock(TrainerCallback):
    """A callback that starts the clock once the optimizer exists."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Start the clock."""
        self._clock.start(optimizer.optimizer)  # the one that accelerate wraps


def main() -> None:
    """Train on the rows given on the command line."""
    uses_trl = "--trl" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--trl"]
    task = parse_task()
    train(_trl_trainer(task) if uses_trl else _trainer(task))


def train(trainer: Any) -> None:
    """Run a trainer that has the mixin ``InOrder`` to its end and print the result."""
    trainer.clock = clock = StepClock()
    trainer.add_callback(StartClock(clock))
    trainer.train()
    clock.print_result()


def trainer_options(accumulation: int, lr: float, *, compiles: bool) -> dict[str, Any]:
    """Return the options of either trainer for one epoch in micro-batches of one row."""
    return {
        "output_dir": ".cache/unused",  # the trainer creates it
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
    given = TrainingArguments(**trainer_options(task.accumulation, task.lr, compiles=task.compile))
    return RowTrainer(model, given, train_dataset=rows, data_collator=default_data_collator)


def _trl_trainer(task: Task) -> Any:
    from trl import SFTConfig, SFTTrainer  # installed outside this environment

    class RowTrainer(InOrder, SFTTrainer):
        pass

    options = trainer_options(task.accumulation, task.lr, compiles=task.compile)
    unprepared = {"skip_prepare_dataset": True}
    model: Any = AutoModelForCausalLM.from_pretrained(task.model_name, dtype=torch.float32)
    if task.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, task.adapter, is_trainable=True)
    return RowTrainer(model, SFTConfig(**options, max_length=None, dataset_kwargs=unprepared), train_dataset=task.rows)


if __name__ == "__main__":
    main()
