"""Find the base model of an adapter, and build it, alone or with the adapter.

A checkpoint has no copy of the base model. It records the base's name and a hash of its weights (``base_weights``),
which tells a base that has changed from one that has only moved.
"""

import copy
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fabric_train.checkpoint.adapter_folder import AdapterTensors, check_fits, is_adapter
from fabric_train.checkpoint.base_weights import open_base_weights, same_weights
from fabric_train.checkpoint.peft_settings import CONFIG, SAVE_ADVICE
from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.cli.errors import InputError, naming_option, note
from fabric_train.cli.launcher import is_first_on_machine
from fabric_train.files.typed_json import read_json
from fabric_train.model.adapter import AdaptedWeights, attach, is_adapter_parameter, materialize, start_magnitudes
from fabric_train.model.hf_model import ModelShape, read_shape, trains_head_apart
from fabric_train.model.load_weights import MetaModel, build_on_meta, open_checkpoint, open_pretrained
from fabric_train.model.nf4 import DOUBLE, QuantizedWeights, quantize_layers
from fabric_train.model.origin import AdapterBase, find_origin
from fabric_train.model.weight_files import Weights


def find_base(name: str | None, checkpoint: Path | None, option: str | None = None) -> AdapterBase:
    """Find the base of an adapter, and check that it has the weights that the adapter was trained on.

    The first rank of each machine compares the weights.

    Args:
        name: Hub name or folder of a new adapter's base; for a checkpoint's adapter, the folder to which its base
            has moved.
        checkpoint: The checkpoint with the adapter. If it has none, it is itself the base of a new adapter.
        option: The option that sets ``name``, for messages.

    Raises:
        InputError: the checkpoint's base is missing, or has other weights.
    """
    # a new adapter
    if checkpoint is None or not is_adapter(checkpoint):
        return _base_at(str(checkpoint or name))

    # the base that the checkpoint names, or the folder to which it has moved
    saved = read_trainer_json(checkpoint)
    saved_base = saved.adapter_base
    if saved_base is None:
        raise InputError(f"{checkpoint}: trainer.json does not name the base of its adapter; use another checkpoint")
    is_missing = os.path.isabs(saved_base.location) and not Path(saved_base.location).is_dir()
    # the run's former --model_name does not count as a new folder if there is no such folder now
    is_former_name = name == saved.arguments["model_name"] and not Path(str(name)).is_dir()
    names_new_folder = name is not None and not is_former_name
    if is_missing and not names_new_folder:
        alternative = f", or give its current folder with {option}" if option else ""
        raise InputError(
            f"{checkpoint}: its base {saved_base.location} no longer exists; restore the base{alternative}"
        )
    base = _base_at(str(name) if is_missing else saved_base.location)

    # compare the weights, once on each machine
    if saved_base.fingerprint is None:
        note(
            f"{checkpoint}: an earlier version saved it without a hash of its base, so {base.location} cannot be "
            "checked"
        )
        return base
    if not is_first_on_machine():
        return base
    compared_base = same_weights(base, saved_base)
    if compared_base is not None:
        return compared_base
    if is_missing:
        raise InputError(
            f"{checkpoint}: its base {saved_base.location} no longer exists, and {base.location} has different "
            f"weights; use {option} to give the model that the adapter was trained on"
        )
    raise InputError(f"{checkpoint}: the weights of its base {base.location} have changed; restore them")


def _base_at(name: str) -> AdapterBase:
    open_base_weights(name)  # reports missing and damaged files
    return AdapterBase(os.path.realpath(name) if Path(name).is_dir() else name)


def note_on_other_base(adapter_dir: Path, base: AdapterBase) -> str | None:
    """Return a note if the adapter of ``--init_adapter`` was trained on another base than ``base``.

    A checkpoint records a hash of the base's weights; any other adapter may only name its base.
    """
    saved = None
    if (adapter_dir / "trainer.json").is_file():
        saved = read_trainer_json(adapter_dir).adapter_base
    if saved is not None and saved.fingerprint is not None:
        if same_weights(base, saved) is not None:
            return None
        if saved.location == base.location:
            return (
                f"--init_adapter {adapter_dir}: the weights of {base.location} have changed since the adapter was "
                "trained on them"
            )
        return (
            f"--init_adapter {adapter_dir}: it was trained on the weights of {saved.location}, not on those of "
            f"{base.location}"
        )
    base_name = read_json(adapter_dir / CONFIG, dict, SAVE_ADVICE).get("base_model_name_or_path")
    if not isinstance(base_name, str) or _is_same_model(base_name, base.location):
        return None
    return f"--init_adapter {adapter_dir}: it names {base_name} as its base, but this run uses it with {base.location}"


def _is_same_model(base_name: str, model_name: str) -> bool:
    """Return whether the base named in an adapter's configuration is this model, or its origin on the hub."""
    if base_name == model_name or os.path.realpath(base_name) == os.path.realpath(model_name):
        return True
    origin, _ = find_origin(model_name)
    return origin.repository == base_name


def open_base(shape: ModelShape, base: AdapterBase, dtype: torch.dtype) -> MetaModel:
    """Build the base of an adapter in ``dtype``, without the adapter that ``shape`` may have.

    If the base ties the head to the embedding and the adapter trains them apart, the head is built as a separate
    weight, which is read from the embedding's.
    """
    base_shape = replace(shape, source=base.location)  # the adapter's configuration, the base's files
    tied_names = _names_of_untied_head(shape, base)
    if not tied_names:
        return _open_model(base_shape, dtype)
    # read it as it is stored, with one weight for both
    tied_config = copy.deepcopy(shape.config)
    tied_config.tie_word_embeddings = True
    tied_model = _open_model(replace(base_shape, config=tied_config), dtype)
    if tied_model.weights is None:
        raise InputError(
            f"{base.location}: its weights cannot be read tensor by tensor; save the model again with save_pretrained"
        )
    return MetaModel(build_on_meta(base_shape, dtype), _RenamedWeights(tied_model.weights, tied_names))


def _open_model(shape: ModelShape, dtype: torch.dtype) -> MetaModel:
    """Build a model from a checkpoint of a run, or from pretrained weights."""
    if (Path(shape.source) / "trainer.json").is_file():
        return open_checkpoint(shape, Path(shape.source), dtype)
    return open_pretrained(shape, dtype)


def _names_of_untied_head(shape: ModelShape, base: AdapterBase) -> dict[str, str]:
    """Return {name of the head's weight: name of the embedding's} if only the base ties them; otherwise {}."""
    if shape.adapter is None or shape.config.tie_word_embeddings or not shape.adapter.train_also:
        return {}
    base_model: Any = build_on_meta(read_shape(base.location), torch.float32)
    if not trains_head_apart(base_model, shape.adapter):
        return {}
    tied_weight = base_model.get_output_embeddings().weight
    names = []
    for name, parameter in base_model.named_parameters(remove_duplicate=False):
        if parameter is tied_weight:
            names.append(name)
    embedding_name, *head_names = names  # a model registers its embedding before its head
    return dict.fromkeys(head_names, embedding_name)


class _RenamedWeights:
    """Weights that read some tensors under other names; see ``Weights``."""

    def __init__(self, weights: Weights, stored_names: dict[str, str]) -> None:
        self._weights = weights
        self._stored_names = stored_names

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self._weights.read_block(self._stored_names.get(name, name), offsets, shape)


def open_frozen(shape: ModelShape, base: AdapterBase, dtype: torch.dtype) -> MetaModel:
    """Build the base of an adapter as :func:`open_base` does; ``shape.adapter`` may ask for its layers in 4 bits."""
    opened = open_base(shape, base, dtype)
    if shape.adapter is None or not shape.adapter.base_weights:
        return opened
    option = f"--base_weights {shape.adapter.base_weights}: the weights of {base.location}"
    return hold_in_4_bits(opened, shape, dtype, shape.adapter.base_weights, option, shape.adapter.train_also)


def hold_in_4_bits(
    opened: MetaModel,
    shape: ModelShape,
    dtype: torch.dtype,
    base_weights: str,
    subject: str,
    skipped: Collection[str] = (),
) -> MetaModel:
    """Return a model whose decoder layers are in 4 bits.

    Args:
        opened: The model as it is stored.
        shape: Its shape.
        dtype: The dtype of the other weights, and of the tensors that store the bytes.
        base_weights: A value of ``--base_weights``.
        subject: The option and its weights, for messages.
        skipped: The names of linear layers that are not quantized.

    Raises:
        InputError: The weights cannot be read in parts.
    """
    if opened.weights is None:
        raise InputError(f"{subject} cannot be read tensor by tensor; save the model again with save_pretrained")
    layers = [module for module in opened.model.modules() if type(module) in shape.layer_classes]
    option = subject.partition(" ")[0]
    with naming_option(option, instead_of="--base_weights"):
        quantize_layers(layers, dtype, skipped, has_8bit_scales=base_weights == DOUBLE)
    return replace(opened, weights=QuantizedWeights(opened.model, opened.weights, dtype))


def open_adapted(
    shape: ModelShape, base: AdapterBase, dtype: torch.dtype, seed: int, adapter_dir: Path | None
) -> MetaModel:
    """Build a base model with an adapter.

    Args:
        shape: The shape of the model with the adapter.
        base: The base of the adapter.
        dtype: The dtype of the base's weights.
        seed: The seed for the weights of a new adapter.
        adapter_dir: Folder of the adapter; None for a new one.

    Returns:
        The model on the meta device with its weights. If the base's weights cannot be read in parts, the model in
        memory, with nothing more to read.
    """
    assert shape.adapter is not None
    stored = None
    if adapter_dir is not None:
        stored = AdapterTensors(adapter_dir)
        check_fits(stored, shape.trained, adapter_dir)
    opened = open_frozen(shape, base, dtype)
    attach(opened.model, shape.adapter, base.location)
    weights = AdaptedWeights(opened.weights, seed, stored)
    if opened.weights is not None:
        return MetaModel(opened.model, weights)

    # the base is in memory already: read the adapter now
    materialize(opened.model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in opened.model.named_parameters():
            if name not in shape.trained:
                continue
            # Modules that train whole keep the base's weights until an adapter stores others.
            if weights.is_new and not is_adapter_parameter(name):
                continue
            parameter.copy_(weights.read_block(name, (0,) * parameter.dim(), parameter.shape))
    if weights.is_new:
        start_magnitudes(opened.model, None)
    return MetaModel(opened.model, None)
