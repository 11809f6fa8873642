"""Load a model from a checkpoint, an exported folder, the hub or a folder with an adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint import find_whole_checkpoint, is_short_name, read_trainer_json
from fabric_train.checkpoint.adapter_base import find_base, open_adapted, open_base
from fabric_train.checkpoint.adapter_folder import is_adapter, is_exported_adapter, read_base_name, trained_adapter
from fabric_train.cli.argument_types import parse_size
from fabric_train.cli.errors import InputError, program
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.devices import load_onto_devices
from fabric_train.inference.peft_adapter import add_adapter, check_adapter
from fabric_train.model import hf_model
from fabric_train.model.generation_settings import (
    GENERATION_CONFIG,
    checkpoint_generation_config,
    read_generation_config,
)
from fabric_train.model.load_weights import MetaModel
from fabric_train.model.origin import AdapterBase
from fabric_train.model.weight_files import open_weights


def load_to_generate(arguments: GenerateArguments) -> tuple[Any, Any]:
    """Load the model for ``generate``, and its tokenizer."""
    program.memory_advice = "give a smaller --batch_size or --num_tokens, or a smaller --device_memory"
    gpu_bytes = parse_size(arguments.device_memory) if arguments.device_memory else None
    return load_for_inference(arguments.model_name, base_model=arguments.base_model, gpu_bytes=gpu_bytes)


def load_for_inference(
    name: str, *, base_model: str | None = None, gpu_bytes: int | None = None, tokenizer_dir: Path | None = None
) -> tuple[Any, Any]:
    """Load model and tokenizer from a checkpoint (see ``find_checkpoint``), a Hugging Face folder or the hub.

    An adapter in a folder is put on its base model with peft; the base is ``base_model`` or the one that its
    configuration names. The weights are bfloat16 on a GPU; on the CPU they keep the dtype in which they are stored.
    ``model.name_or_path`` is their location. For ``gpu_bytes`` see ``load_onto_devices``. ``tokenizer_dir`` has the
    tokenizer of an adapter on this model, which then needs no tokenizer.
    """
    hf_model.quiet_transformers()
    if is_exported_adapter(Path(name)):
        return _load_exported_adapter(Path(name), base_model, gpu_bytes, tokenizer_dir)
    checkpoint = find_own_checkpoint(name)
    has_adapter = checkpoint is not None and is_adapter(checkpoint)
    if base_model is not None and not has_adapter:
        raise InputError(f"--base_model {base_model}: {name} is not a folder with an adapter; leave out --base_model")
    described = describe(name, checkpoint, base_model, "--base_model")
    # tokenizer and settings first: what is missing is found before the weights are read
    if checkpoint is None:
        tokenizer = hf_model.load_hf_tokenizer(tokenizer_dir or name)
        generation_config = read_generation_config(name, described.shape.config)
    else:
        tokenizer = hf_model.load_hf_tokenizer(tokenizer_dir or checkpoint / "tokenizer")
        generation_config = checkpoint_generation_config(checkpoint, described.shape.config)
    model = load_onto_devices(described.open(), gpu_bytes)
    model.generation_config = generation_config
    return model, tokenizer


def _load_exported_adapter(
    folder: Path, base_model: str | None, gpu_bytes: int | None, tokenizer_dir: Path | None
) -> tuple[Any, Any]:
    """Load the base model of an exported adapter, put the adapter on it, and return it with its tokenizer.

    Tokenizer and generation settings are the adapter's if it has them, or else the base's. If another adapter is on
    this one, ``tokenizer_dir`` has its tokenizer.
    """
    base = base_model or read_base_name(folder)
    check_adapter(folder)
    if tokenizer_dir is None and (folder / "tokenizer_config.json").is_file():
        tokenizer_dir = folder
    model, tokenizer = load_for_inference(base, gpu_bytes=gpu_bytes, tokenizer_dir=tokenizer_dir)
    adapted = add_adapter(model, folder, base)
    if (folder / GENERATION_CONFIG).is_file():
        adapted.generation_config = read_generation_config(str(folder), model.config)
    return adapted, tokenizer


def find_own_checkpoint(name: str) -> Path | None:
    """Return the checkpoint that a name means (see ``find_checkpoint``); None for a hub name or Hugging Face folder."""
    folder = Path(name)
    # a checkpoint has a trainer.json; a folder that has only a config.json is a Hugging Face folder
    is_export = (folder / "config.json").is_file() and not (folder / "trainer.json").is_file()
    is_ours = is_short_name(folder) or (folder.is_dir() and not is_export)
    return find_whole_checkpoint(folder) if is_ours else None


@dataclass(frozen=True)
class DescribedModel:
    """A model whose weights have not been read yet."""

    shape: hf_model.ModelShape
    base: AdapterBase
    """The location of the weights."""
    dtype: torch.dtype
    """The dtype in which they are read."""
    adapter: Path | None = None
    """The checkpoint whose adapter is put on them, if any."""

    def open(self) -> MetaModel:
        """Build the model on the meta device and open its weights."""
        if self.adapter is not None:
            return open_adapted(self.shape, self.base, self.dtype, 0, self.adapter)
        return open_base(self.shape, self.base, self.dtype)


def describe(
    name: str, checkpoint: Path | None, base_model: str | None = None, option: str | None = None
) -> DescribedModel:
    """Describe the model in a ``checkpoint``, or if it is None, in a Hugging Face folder or on the hub.

    The base of an adapter may have moved to ``base_model``, which the argument ``option`` gives, if the program has it.
    An adapter that was trained on weights in 4 bits gets weights in 4 bits.
    """
    on_gpu = torch.cuda.is_available()
    if checkpoint is not None and is_adapter(checkpoint):
        saved = read_trainer_json(checkpoint)
        base = find_base(base_model, checkpoint, option)
        shape = hf_model.read_shape(str(checkpoint), adapter=trained_adapter(checkpoint))
        training_dtype = getattr(torch, saved.content["weights_dtype"])
        # weights in 4 bits are quantized from the dtype of the training, to be the same ones
        in_4_bits = shape.adapter is not None and shape.adapter.base_weights is not None
        dtype = torch.bfloat16 if on_gpu and not in_4_bits else training_dtype
        return DescribedModel(shape, base, dtype, checkpoint)

    # a full model: the dtype of a checkpoint is that of its tensors, whatever its configuration says
    source = str(checkpoint or name)
    shape = hf_model.read_shape(source)
    stored_dtype: Any = shape.config.dtype or torch.float32
    if checkpoint is not None:
        weights = open_weights(checkpoint)
        first_name = next(iter(weights))
        stored_dtype = weights.dtype(first_name)
    dtype = torch.bfloat16 if on_gpu else stored_dtype
    return DescribedModel(shape, AdapterBase(source), dtype)
