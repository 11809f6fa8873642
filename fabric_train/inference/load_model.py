"""Load a model and its tokenizer from a checkpoint, an exported folder or the hub."""

from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint import checkpoint_generation_config, find_whole_checkpoint, is_short_name
from fabric_train.model.generation_config import read_generation_config
from fabric_train.model.hf_model import build_model, load_model, quiet_transformers, read_shape
from fabric_train.model.hf_tokenizer import load_hf_tokenizer
from fabric_train.model.weight_files import open_weights


def load_for_inference(name: str) -> tuple[Any, Any]:
    """Load model and tokenizer from a checkpoint (see ``find_checkpoint``), a Hugging Face folder or the hub.

    The weights are bfloat16 on a GPU; on CPU they keep the dtype in which they are stored.

    Raises:
        InputError: the model does not exist, or its weights or its tokenizer are missing or damaged.
    """
    quiet_transformers()
    folder = Path(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if is_short_name(folder) or (folder.is_dir() and not _is_export(folder)):
        checkpoint = find_whole_checkpoint(folder)
        weights = open_weights(checkpoint)
        dtype = torch.bfloat16 if device == "cuda" else weights.dtype(next(iter(weights)))
        tensors = {name: weights.read(name).to(dtype) for name in weights}
        shape = read_shape(str(checkpoint))
        model: Any = build_model(shape, tensors, dtype)
        generation_config = checkpoint_generation_config(checkpoint, shape.config)
        tokenizer_source = str(checkpoint / "tokenizer")
    else:
        shape = read_shape(name)
        stored: Any = shape.config.dtype or torch.float32
        generation_config = read_generation_config(name, shape.config)
        model, tokenizer_source = load_model(shape, torch.bfloat16 if device == "cuda" else stored), name
    model.generation_config = generation_config
    return model.to(device).eval(), load_hf_tokenizer(tokenizer_source)


def _is_export(folder: Path) -> bool:
    """Whether this is a Hugging Face model folder and not a checkpoint, which also has trainer.json."""
    return (folder / "config.json").is_file() and not (folder / "trainer.json").is_file()
