"""Train with transformers' Trainer in micro-batches of one row; print losses and gradient norms as JSON."""

import argparse
import json
from typing import Any

import torch
from datasets import load_from_disk
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator


class UnroundedTrainer(Trainer):
    """A Trainer that reads the rows in their order on disk and keeps the exact losses, which its log rounds."""

    losses: list[float]

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        rows: Any = self.train_dataset
        return SequentialSampler(rows)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return a micro-batch's share of the window's loss."""
        loss = super().training_step(*arguments, **options)
        self.losses.append(float(loss))
        return loss


def main() -> None:
    """Train one epoch with ``--rows_per_window`` micro-batches a step."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--train_data_dir", "--output_dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows_per_window", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--grad_clip", type=float, required=True)
    arguments = parser.parse_args()

    rows = load_from_disk(arguments.train_data_dir)["train"]
    settings = TrainingArguments(
        output_dir=arguments.output_dir,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=arguments.rows_per_window,
        num_train_epochs=1,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=arguments.grad_clip,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name, dtype=torch.float32)
    trainer = UnroundedTrainer(model, settings, train_dataset=rows, data_collator=default_data_collator)
    trainer.losses = []
    trainer.train()
    parts = [
        trainer.losses[first : first + arguments.rows_per_window]
        for first in range(0, len(rows), arguments.rows_per_window)
    ]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    print(json.dumps({"losses": [sum(part) for part in parts], "grad_norms": norms}))


if __name__ == "__main__":
    main()
