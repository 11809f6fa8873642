"""Train a random model in bf16, or an adapter, on a GPU with transformers' Trainer or TRL's; print speed and memory."""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from benchmarks.peers.huggingface_trainers import InOrder, train, trainer_options


def main() -> None:
    """Train on the first rows."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--train_data_dir"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--accumulation", "--micro_batch_size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--lora_rank", type=int, default=0)
    for name in ("--compile", "--gradient_checkpointing", "--trl", "--nf4"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()

    rows = load_from_disk(given.train_data_dir)["train"].select_columns("input_ids")
    rows = rows.select(range(given.steps * given.accumulation * given.micro_batch_size))
    if given.lora_rank:
        model = _adapted(given.config, given.lora_rank, in_4bit=given.nf4)
    else:
        model = model_on_gpu(given.config)
    options: dict[str, Any] = trainer_options(given.accumulation, given.lr, compiles=given.compile)
    options |= {"use_cpu": False, "per_device_train_batch_size": given.micro_batch_size, "optim": "adamw_torch_fused"}
    options |= {"gradient_checkpointing": given.gradient_checkpointing}
    train(_trl_trainer(model, options, rows) if given.trl else _trainer(model, options, rows))


def model_on_gpu(folder: str, quantization: BitsAndBytesConfig | None = None) -> Any:
    """Return the model in a folder in bf16, with random weights if the folder has a configuration alone."""
    if not list(Path(folder).glob("*.safetensors")):
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cuda:0"}, quantization_config=quantization
    )


def lora_config(rank: int) -> Any:
    """Return peft's configuration of a new adapter."""
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def _adapted(folder: str, rank: int, *, in_4bit: bool) -> Any:
    """Return the model in a folder with a new adapter; its inputs need a gradient for checkpointed layers."""
    from peft import get_peft_model

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = model_on_gpu(folder, nf4 if in_4bit else None)
    model.enable_input_require_grads()
    return get_peft_model(model, lora_config(rank))


def _trainer(model: Any, options: dict[str, Any], rows: Dataset) -> Any:
    class RowTrainer(InOrder, Trainer):
        pass

    labelled = rows.map(lambda row: {"labels": row["input_ids"]})
    return RowTrainer(model, TrainingArguments(**options), train_dataset=labelled, data_collator=default_data_collator)


def _trl_trainer(model: Any, options: dict[str, Any], rows: Dataset) -> Any:
    from trl import SFTConfig, SFTTrainer  # installed outside this environment

    class RowTrainer(InOrder, SFTTrainer):
        pass

    unprepared = {"skip_prepare_dataset": True}
    return RowTrainer(model, SFTConfig(**options, max_length=None, dataset_kwargs=unprepared), train_dataset=rows)


if __name__ == "__main__":
    main()
