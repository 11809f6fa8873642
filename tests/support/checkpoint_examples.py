"""Checkpoints for the tests of weights, export and generation: a full one, and one sharded by two FSDP2 ranks."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fabric_train.checkpoint.files import CHECKSUMS, hash_file
from fabric_train.checkpoint.rank_writer import join_rank_hashes, write_rank_hashes
from fabric_train.checkpoint.trainer_json import FORMAT, TrainerState
from fabric_train.model.origin import ModelOrigin
from tests.support.forked_runs import ForkedRuns

NUM_RANKS = 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"


def trained_weights(model_dir: Path) -> dict[str, torch.Tensor]:
    """Return fp32 weights by name that all differ from the model's, as after some training.

    The model's head is its embedding, which appears once.
    """
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in _untied_weights(model).items()}


def run_with_two_checkpoints(session_folder: Path, model_dir: Path, runs: ForkedRuns) -> Path:
    """Return a run with the same weights in a full checkpoint at step 1 and a sharded one at step 2.

    It is made once for each ``session_folder``; do not write into it.
    """
    run = session_folder / "run-with-two-checkpoints"
    if not run.exists():
        weights = trained_weights(model_dir)
        write_full(run / "checkpoints" / "step-00000001", model_dir, weights, step=1)
        write_sharded(run / "checkpoints" / "step-00000002", model_dir, weights, step=2, runs=runs)
    return run


def write_full(folder: Path, model_dir: Path, weights: dict[str, torch.Tensor], step: int) -> Path:
    """Write a full checkpoint of these weights, without optimizer states; return its folder."""
    _write_description(folder, model_dir, "full", step)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "optimizer").mkdir()
    write_checksums(folder)
    return folder


def write_sharded(folder: Path, model_dir: Path, weights: dict[str, torch.Tensor], step: int, runs: ForkedRuns) -> Path:
    """Write a sharded checkpoint of these weights from two ranks that hold the model under FSDP2; return its folder."""
    _write_description(folder, model_dir, "sharded", step)
    (folder / "optimizer").mkdir()
    # each rank reads the full weights from a file, and writes its shards: see ``main``
    full_weights = folder / "weights-to-shard.safetensors"
    save_file(weights, full_weights)
    runs.start([model_dir, full_weights, folder], NUM_RANKS, program=__name__).finish()
    full_weights.unlink()
    write_checksums(folder)
    return folder


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in ``folder``."""
    hashes = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != CHECKSUMS:
            hashes[path.relative_to(folder).as_posix()] = hash_file(path)
    write_rank_hashes(folder, 0, hashes)
    join_rank_hashes(folder)


def main() -> None:
    """Write this rank's shards of a checkpoint: ``MODEL_DIR WEIGHTS CHECKPOINT``."""
    model_dir, full_weights, folder = (Path(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.load_state_dict(load_file(full_weights), strict=False)  # lm_head.weight is not there: it is tied
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    writer = HuggingFaceStorageWriter(str(folder / "model"), save_distributed=True)
    dcp.save(_untied_weights(model), storage_writer=writer)
    dist.destroy_process_group()


def _untied_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def _write_description(folder: Path, model_dir: Path, state_dict_type: str, step: int) -> None:
    """Write the configuration, the tokenizer with a chat template, and trainer.json."""
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(model_dir / name, folder / name)
    for name in TOKENIZER_FILES:
        shutil.copyfile(model_dir / name, folder / "tokenizer" / name)
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    state = TrainerState(step=step, num_tokens=64 * step, num_samples=step, train_loss=3.25, val_loss=3.5)
    trainer_json = {
        "format": FORMAT,
        **asdict(state),
        "state_dict_type": state_dict_type,
        "weights_dtype": "float32",
        "data": {"fingerprint": "0", "num_rows": 8, "rows_per_window": 1, "seed": 0},
        "arguments": {
            "model_name": str(model_dir),
            "lr": 0.001,
            "precision": "32-true",
            "train_data_dir": "/home/someone/private/tokens",
            "entity": "someone",
        },
        "versions": {"torch": torch.__version__},
        "base_model": asdict(ModelOrigin(model_dir.name)),
    }
    (folder / "trainer.json").write_text(json.dumps(trainer_json))
