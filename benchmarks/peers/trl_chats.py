"""Train on chats with TRL's SFTTrainer, padded or packed (``bfd``); print its speed and memory as JSON."""

import argparse
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.huggingface_trainers import InOrder, train, trainer_options


class ChatTrainer(InOrder, SFTTrainer):
    """An SFTTrainer whose steps are timed."""


def main() -> None:
    """Train one epoch on all tokens of the chats."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--dataset"):
        parser.add_argument(name, required=True)
    for name in ("--max_length", "--micro_batch_size", "--accumulation"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--packing", action="store_true")
    given = parser.parse_args()

    options: dict[str, Any] = trainer_options(given.accumulation, given.lr, compiles=False)
    options["per_device_train_batch_size"] = given.micro_batch_size
    trainer = ChatTrainer(
        AutoModelForCausalLM.from_pretrained(given.model_name, dtype=torch.float32),
        SFTConfig(**options, max_length=given.max_length, packing=given.packing),
        train_dataset=load_dataset("json", data_files=given.dataset, split="train"),
        processing_class=AutoTokenizer.from_pretrained(given.model_name),
    )
    train(trainer)


if __name__ == "__main__":
    main()
