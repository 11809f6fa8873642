"""Train on preference pairs with TRL's DPOTrainer; print its speed, losses and memory as JSON.

The pairs are those of a token dataset, so TRL sees the same token ids. Its own tokenization is left out.
"""

import argparse
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.peers.huggingface_gpu import lora_config, model_on_gpu
from benchmarks.peers.huggingface_trainers import InOrder, train, trainer_options
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.token_dataset import StoredRow, open_dataset


class PairTrainer(InOrder, DPOTrainer):
    """A DPOTrainer whose steps are timed, and which takes token ids as they are."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def pairs_of(row: StoredRow) -> list[dict[str, list[int]]]:
    """Return the pairs of a row as TRL names them: the ids of the prompt and of both answers."""
    ids, labels, starts = row
    assert starts is not None
    sequences = []
    for begin, end in zip(starts.tolist(), [*starts.tolist()[1:], len(ids)], strict=True):
        supervised = begin + np.flatnonzero(labels[begin:end] != IGNORED_LABEL)
        sequences.append((ids[begin : supervised[0]].tolist(), ids[supervised[0] : supervised[-1] + 1].tolist()))
    return [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for (prompt, chosen), (_, rejected) in zip(sequences[::2], sequences[1::2], strict=True)
    ]


def main() -> None:
    """Train one epoch on the pairs of the rows given on the command line: in fp32 on a CPU, or in bf16 on a GPU."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--train_data_dir", "--rows", "--loss"):
        parser.add_argument(name, required=True)
    for name in ("--micro_batch_size", "--accumulation"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--lr", "--beta"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--lora_rank", type=int, default=0)
    for name in ("--cuda", "--gradient_checkpointing"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()
    rows = open_dataset(given.train_data_dir).train.read([int(row) for row in given.rows.split(",")])
    options: dict[str, Any] = trainer_options(given.accumulation, given.lr, compiles=False)
    options["per_device_train_batch_size"] = given.micro_batch_size
    options |= {"beta": given.beta, "loss_type": given.loss, "precompute_ref_log_probs": True, "max_length": None}
    options["gradient_checkpointing"] = given.gradient_checkpointing
    if given.cuda:
        model = model_on_gpu(given.model_name)
        options |= {"use_cpu": False, "optim": "adamw_torch_fused"}
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model_name, dtype=torch.float32)
    trainer = PairTrainer(
        model,
        args=DPOConfig(**options),
        train_dataset=Dataset.from_list([pair for row in rows for pair in pairs_of(row)]),
        processing_class=AutoTokenizer.from_pretrained(given.model_name),
        peft_config=lora_config(given.lora_rank) if given.lora_rank else None,
    )
    train(trainer)


if __name__ == "__main__":
    main()
