"""Load a model and its tokenizer from a checkpoint, an exported folder, the hub or a folder with an adapter."""

from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint import checkpoint_generation_config, find_whole_checkpoint, is_short_name
from fabric_train.cli.errors import InputError
from fabric_train.inference.adapter import add_adapter, is_adapter, read_base_name
from fabric_train.inference.placement import load_onto_devices
from fabric_train.model.generation_config import read_generation_config
from fabric_train.model.hf_model import quiet_transformers, read_shape
from fabric_train.model.hf_tokenizer import load_hf_tokenizer
from fabric_train.model.load_weights import open_checkpoint, open_pretrained
from fabric_train.model.weight_files import open_weights


def load_for_inference(name: str, *, base_model: str | None = None, gpu_bytes: int | None = None) -> tuple[Any, Any]:
    """Load model and tokenizer from a checkpoint (see ``find_checkpoint``), a Hugging Face folder or the hub.

    The weights are bfloat16 on a GPU; on CPU they keep the dtype in which they are stored. ``model.name_or_path`` is
    where they come from.

    Args:
        name: of the model; or a folder with an adapter of peft, which is put on its base model.
        base_model: of an adapter, instead of the one that its configuration names.
        gpu_bytes: largest size of the weights on one GPU; see ``load_onto_devices``.

    Raises:
        InputError: the model does not exist, its weights or its tokenizer are missing or damaged, or it does not fit
            into the devices.
    """
    quiet_transformers()
    folder = Path(name)
    if is_adapter(folder):
        base = base_model or read_base_name(folder)
        model, tokenizer = load_for_inference(base, gpu_bytes=gpu_bytes)
        has_own = (folder / "tokenizer_config.json").is_file()
        return add_adapter(model, folder, base), load_hf_tokenizer(folder) if has_own else tokenizer
    if base_model is not None:
        raise InputError(f"--base_model {base_model}: {name} is not a folder with an adapter; leave it out")
    on_gpu = torch.cuda.is_available()
    if is_short_name(folder) or (folder.is_dir() and not _is_export(folder)):
        checkpoint = find_whole_checkpoint(folder)
        weights = open_weights(checkpoint)
        dtype = torch.bfloat16 if on_gpu else weights.dtype(next(iter(weights)))
        shape = read_shape(str(checkpoint))
        model = load_onto_devices(open_checkpoint(shape, checkpoint, dtype), gpu_bytes)
        model.generation_config = checkpoint_generation_config(checkpoint, shape.config)
        return model, load_hf_tokenizer(checkpoint / "tokenizer")
    shape = read_shape(name)
    stored: Any = shape.config.dtype or torch.float32
    model = load_onto_devices(open_pretrained(shape, torch.bfloat16 if on_gpu else stored), gpu_bytes)
    model.generation_config = read_generation_config(name, shape.config)
    return model, load_hf_tokenizer(name)


def _is_export(folder: Path) -> bool:
    """Whether this is a Hugging Face model folder and not a checkpoint, which also has trainer.json."""
    return (folder / "config.json").is_file() and not (folder / "trainer.json").is_file()
