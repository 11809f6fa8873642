"""Train on preference pairs with TRL's DPOTrainer, CPOTrainer (SimPO) or ORPOTrainer; print the result as JSON.

The pairs come from a token dataset, so TRL sees the same token ids. Its own tokenization is left out.
"""

import argparse
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.peers.huggingface_gpu import lora_config, model_on_gpu
from benchmarks.peers.huggingface_trainers import InOrder, train, trainer_options
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.token_dataset import StoredRow, open_dataset

Pair = dict[str, list[int]]


class WithReference(InOrder, DPOTrainer):
    """A DPOTrainer whose steps are timed, and which takes token ids as they are."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


class SimPO(InOrder, CPOTrainer):
    """A CPOTrainer whose steps are timed, and which takes token ids as they are."""

    def tokenize_row(self, feature: Pair, *_: Any) -> Pair:
        """Return both whole sequences of a pair."""
        return sequences_of(feature)


class ORPO(InOrder, ORPOTrainer):
    """An ORPOTrainer like the other two, whose cross entropy leaves out the prompt."""

    def tokenize_row(self, feature: Pair, *_: Any) -> Pair:
        """Return both whole sequences of a pair."""
        return sequences_of(feature)

    def concatenated_forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Return what TRL does, but with the cross entropy of the answers alone, without the prompts."""
        *found, _ = super().concatenated_forward(*inputs)
        return (*found, -found[0].mean())


TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "simpo": (SimPO, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5}),
    "orpo": (ORPO, ORPOConfig, {}),
}
"""Trainer, its configuration and its options by loss; other losses are of the DPOTrainer."""


def pairs_of(row: StoredRow) -> list[Pair]:
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


def sequences_of(pair: Pair) -> Pair:
    """Return a pair as the experimental trainers tokenize it: each answer after the prompt, whose labels are -100."""
    found: Pair = {}
    for name in ("chosen", "rejected"):
        ids = pair["prompt_ids"] + pair[f"{name}_ids"]
        labels = [IGNORED_LABEL] * len(pair["prompt_ids"]) + pair[f"{name}_ids"]
        found |= {f"{name}_input_ids": ids, f"{name}_labels": labels, f"{name}_attention_mask": [1] * len(ids)}
    return found


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
    options |= {"per_device_train_batch_size": given.micro_batch_size, "beta": given.beta}
    options["gradient_checkpointing"] = given.gradient_checkpointing
    if given.cuda:
        model = model_on_gpu(given.model_name)
        options |= {"use_cpu": False, "optim": "adamw_torch_fused"}
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model_name, dtype=torch.float32)
    of_dpo = {"loss_type": given.loss, "precompute_ref_log_probs": True, "max_length": None}
    trainer, config, further = TRAINERS.get(given.loss, (WithReference, DPOConfig, of_dpo))
    train(
        trainer(
            model,
            args=config(**options, **further),
            train_dataset=Dataset.from_list([pair for row in rows for pair in pairs_of(row)]),
            processing_class=AutoTokenizer.from_pretrained(given.model_name),
            peft_config=lora_config(given.lora_rank) if given.lora_rank else None,
        )
    )


if __name__ == "__main__":
    main()
