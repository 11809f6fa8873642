"""Write a bf16 checkpoint in the shape of Llama-3 8B with random weights, without a model in memory."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from fabric_train.checkpoint.files import hash_file
from fabric_train.checkpoint.rank_writer import join_rank_hashes, write_rank_hashes
from fabric_train.checkpoint.tensors import LocalTensor, Write, full_writes, sharded_writes
from fabric_train.checkpoint.trainer_json import FORMAT, TrainerState
from fabric_train.model.origin import ModelOrigin

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    bos_token_id=128000,
    eos_token_id=128001,
    dtype="bfloat16",
)
NUM_SHARDS = 8
_POOL = 2**25 + 39  # odd, so that tensors do not repeat each other's rows


def write_checkpoint(folder: Path, config: LlamaConfig, tokenizer: Path, sharded: bool) -> int:
    """Write a complete checkpoint without optimizer state, and return the bytes of its weights.

    Args:
        folder: a folder that does not exist yet.
        config: the model.
        tokenizer: a folder with a tokenizer.
        sharded: whether as ``NUM_SHARDS`` ranks save it, each in its own file; else in one file.
    """
    (folder / "model").mkdir(parents=True) if sharded else folder.mkdir(parents=True)
    for writes in _sharded(config) if sharded else [full_writes("model", _tensors(config, 0, 1), 0)]:
        for path in {folder / write.file for write in writes}:
            _write(path, [write for write in writes if folder / write.file == path])
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    shutil.copytree(tokenizer, folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copyfile(tokenizer / "tokenizer_config.json", folder / "tokenizer" / "tokenizer_config.json")
    (folder / "trainer.json").write_text(json.dumps(_trainer(sharded)))
    files = [file for file in folder.rglob("*") if file.is_file()]
    write_rank_hashes(folder, 0, {file.relative_to(folder).as_posix(): hash_file(file) for file in files})
    join_rank_hashes(folder)
    return sum(file.stat().st_size for file in files if file.suffix == ".safetensors")


def _sharded(config: LlamaConfig) -> Iterator[list[Write]]:
    for rank in range(NUM_SHARDS):
        yield sharded_writes("model", _tensors(config, rank, NUM_SHARDS), rank)


def _tensors(config: LlamaConfig, rank: int, num_ranks: int) -> list[LocalTensor]:
    """Return a rank's rows of all weights; they are views of the same random numbers, so they take no memory."""
    pool = random_pool(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = []
    start = 0
    for name, parameter in model.named_parameters():
        row = parameter.shape[1:].numel()
        each = -(-parameter.shape[0] // num_ranks)
        first = min(rank * each, parameter.shape[0])
        last = min((rank + 1) * each, parameter.shape[0])
        parts = _views(pool, start + first * row, (last - first) * row)
        tensors.append(LocalTensor(name, parameter.shape, torch.bfloat16, first * row, parts, 1, 0))
        start += parameter.numel()
    return tensors


def random_pool(config: LlamaConfig) -> torch.Tensor:
    """Return the numbers that the weights repeat, so that 16 GB need not be drawn."""
    numbers = torch.randn(_POOL, generator=torch.Generator().manual_seed(0))
    return numbers.mul_(config.initializer_range).bfloat16()


def _views(pool: torch.Tensor, begin: int, count: int) -> tuple[torch.Tensor, ...]:
    """Return ``count`` elements of the endlessly repeated pool from ``begin``, as views."""
    views = []
    while count:
        begin %= len(pool)
        views.append(pool[begin : begin + count])
        begin = begin + len(views[-1])
        count = count - len(views[-1])
    return tuple(views)


def _write(path: Path, writes: list[Write]) -> None:
    with path.open("wb") as file:
        for write in writes:
            file.seek(write.offset)
            file.write(write.data.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _trainer(sharded: bool) -> dict[str, object]:
    return {
        "format": FORMAT,
        **asdict(TrainerState(step=1, num_tokens=1, num_samples=1, train_loss=1.0, val_loss=1.0)),
        "state_dict_type": "sharded" if sharded else "full",
        "weights_dtype": "bfloat16",
        "data": {"fingerprint": "0", "num_rows": 8, "rows_per_window": 1, "seed": 0},
        "arguments": {"model_name": "random"},
        "versions": {"torch": torch.__version__},
        "base_model": asdict(ModelOrigin("random")),
    }
