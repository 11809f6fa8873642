"""Train with Lightning's Trainer; print its speed, losses and memory as JSON."""

import logging
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from benchmarks.peers.step_clock import StepClock
from benchmarks.peers.training_task import Task, adamw_groups, parse_task


class CausalLM(LightningModule):
    """A causal language model with its loss and its optimizer."""

    def __init__(self, task: Task, clock: StepClock) -> None:
        super().__init__()
        self._task = task
        self._clock = clock
        self.model: Any = AutoModelForCausalLM.from_pretrained(task.model_name, dtype=torch.float32)
        if task.compile:
            self.model.compile()

    def on_train_start(self) -> None:
        """Switch the model to training mode: ``from_pretrained`` returns it in evaluation mode."""
        self.model.train()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a row."""
        input_ids = batch["input_ids"]
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        self._clock.add_micro_batch(loss / self._task.accumulation, input_ids.numel())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        optimizer = torch.optim.AdamW(adamw_groups(self.model), lr=self._task.lr, betas=(0.9, 0.95), fused=True)
        self._clock.start(optimizer)
        return optimizer


def main() -> None:
    """Train on the rows given on the command line."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    task = parse_task()
    clock = StepClock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=task.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows: Any = task.rows
    trainer.fit(CausalLM(task, clock), DataLoader(rows, batch_size=1))
    clock.print_result()


if __name__ == "__main__":
    main()
