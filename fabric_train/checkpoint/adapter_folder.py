"""The files of an adapter: adapter_model.safetensors and adapter_config.json, which peft reads, and its base model.

The adapter is the same on all ranks, and is written once, in one file. Its base is not copied: the checkpoint names it,
and has a hash of its weights (``base_weights``), by which one that has moved or changed is found.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric_train.checkpoint.base_weights import open_base_weights, same_weights
from fabric_train.checkpoint.peft_settings import (
    CONFIG,
    SAVE_ADVICE,
    WEIGHTS,
    check_weights,
    depends_on_documents,
    read_lora_config,
    uncomputed_settings,
)
from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.cli.errors import InputError, note
from fabric_train.cli.launcher import is_first_on_machine
from fabric_train.distributed.ranks import original_name
from fabric_train.files.regular_file import read_json
from fabric_train.model.adapter import (
    Adapter,
    adapted_layers,
    attach,
    is_adapter_parameter,
    materialize,
    start_magnitudes,
)
from fabric_train.model.hf_model import ModelShape, read_shape, trains_head_apart
from fabric_train.model.init_weights import AdaptedWeights
from fabric_train.model.load_weights import (
    MetaModel,
    build_on_meta,
    open_checkpoint,
    open_pretrained,
)
from fabric_train.model.nf4 import QuantizedWeights, check_installed, quantize_layers
from fabric_train.model.origin import AdapterBase, find_origin
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, Weights

if TYPE_CHECKING:
    from fabric_train.arguments import AdapterArguments

PREFIX = "base_model.model."
"""What peft's names begin with, before the name in transformers' model."""
TIED = "tied"
"""The key in the file's metadata for second names of tied weights: peft takes embedding and head for two modules."""


def is_adapter(folder: Path) -> bool:
    """Return whether this is a folder with an adapter, also if it is a checkpoint of a run."""
    return (folder / CONFIG).is_file() and not (folder / "model.safetensors").is_file()


def is_exported_adapter(folder: Path) -> bool:
    """Return whether this is a folder with an adapter that is no checkpoint of a run."""
    return is_adapter(folder) and not (folder / "trainer.json").is_file()


def can_be_taken_off(folder: Path) -> bool:
    """Return whether an adapter only adds matrices beside its base's, which peft can take off again."""
    config = read_json(folder / CONFIG, dict, SAVE_ADVICE)
    is_lora = config.get("peft_type") == "LORA"
    return is_lora and not config.get("modules_to_save") and not uncomputed_settings(config)


def check_keeps_documents_apart(folder: Path) -> None:
    """Raise an InputError if peft computes an adapter for a row as a whole, whose documents would change each other."""
    if depends_on_documents(read_json(folder / CONFIG, dict, SAVE_ADVICE)):
        raise InputError(
            f"{folder / CONFIG}: alora_invocation_tokens is not supported here: a row has several documents; "
            "evaluate that adapter with peft"
        )


def files_of_adapter(folder: Path) -> list[Path]:
    """Return the configuration and the weights of an adapter's folder; neither need be there."""
    return [folder / CONFIG, folder / WEIGHTS]


def check_files(folder: Path) -> None:
    """Raise an InputError if a folder's adapter has no weights, or only a pickle, or its configuration is damaged."""
    read_json(folder / CONFIG, dict, SAVE_ADVICE)
    check_weights(folder)


def read_base_name(folder: Path) -> str:
    """Return the name or folder of the model that an adapter was trained on; raise an InputError if there is none."""
    name = read_json(folder / CONFIG, dict, SAVE_ADVICE).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / CONFIG}: it names no base model; give it by --base_model")
    return name


def peft_config(model: nn.Module, base: AdapterBase) -> dict[str, Any]:
    """Return the content of adapter_config.json for a model with an adapter, as peft's ``LoraConfig`` has it."""
    names = {name for name, _ in adapted_layers(model)}
    leaves = sorted({name.rpartition(".")[2] for name in names})
    linear = (original_name(f"{name}.")[:-1] for name, module in model.named_modules() if isinstance(module, nn.Linear))
    others = {name.rpartition(".")[2] for name in linear if name not in names}
    adapter = next(layer.adapter for _, layer in adapted_layers(model))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.place,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.is_rank_stabilized,
        "use_dora": adapter.kind == "dora",
        "target_modules": sorted(names) if others & set(leaves) else leaves,
        "modules_to_save": list(adapter.train_also) or None,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def read_adapter(folder: Path) -> Adapter:
    """Return the settings in an adapter_config.json.

    Raises:
        InputError: it is damaged, or of a kind that is not computed here.
    """
    config = read_lora_config(folder)
    # peft's own rule for modules_to_save is the end of a name, also within a word
    whole = {name.rpartition(".")[0] for name in AdapterTensors(folder) if not is_adapter_parameter(name)}
    targets = config.target_modules
    return Adapter(
        kind="dora" if config.use_dora else "lora",
        rank=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=(targets,) if isinstance(targets, str) else tuple(targets),
        is_rank_stabilized=config.use_rslora,
        train_also=tuple(sorted(whole)),
    )


def trained_adapter(checkpoint: Path) -> Adapter:
    """Return the settings of a checkpoint's adapter; its base weights are as the run had them, also in 4 bits.

    Raises:
        InputError: the adapter cannot be read, or bitsandbytes is missing.
    """
    base_weights = read_trainer_json(checkpoint).arguments.get("base_weights")
    if base_weights:
        check_installed()
    return replace(read_adapter(checkpoint), base_weights=base_weights)


class AdapterTensors:
    """The tensors of an adapter_model.safetensors by the names in transformers' model; see ``StoredTensors``."""

    def __init__(self, folder: Path) -> None:
        check_weights(folder)
        self._tensors = CheckpointTensors([folder / WEIGHTS], SAVE_ADVICE)
        tied = self._tensors.metadata.get(TIED, "").split()
        self._stored = {name.removeprefix(PREFIX): name for name in self._tensors if name not in tied}

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> torch.Size:
        return self._tensors.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._stored[name])

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.read(self._stored[name])

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self._tensors.read_block(self._stored[name], offsets, shape)


def choose_adapter(given: "AdapterArguments") -> Adapter | None:
    """Return the adapter that the arguments ask for, None to train all weights; ``--init_adapter`` as it is.

    Raises:
        InputError: another argument contradicts the adapter to begin with.
    """
    if given.init_adapter is None:
        if given.adapter is None or given.lora_rank is None or given.lora_alpha is None:
            return None
        return Adapter(
            kind=given.adapter,
            rank=given.lora_rank,
            alpha=given.lora_alpha,
            dropout=given.lora_dropout,
            targets=tuple(given.lora_targets),
            is_rank_stabilized=given.lora_rslora,
            train_also=tuple(given.train_also or ()),
            base_weights=given.base_weights,
        )
    there = read_adapter(Path(given.init_adapter))
    asked = {"adapter": given.adapter, "lora_rank": given.lora_rank, "lora_alpha": given.lora_alpha}
    has = {"adapter": there.kind, "lora_rank": there.rank, "lora_alpha": there.alpha}
    faults = [
        f"--{name} {value}: the adapter of --init_adapter {given.init_adapter} has {has[name]}; leave it out"
        for name, value in asked.items()
        if value is not None and value != has[name]
    ]
    if faults:
        raise InputError(*faults)
    return replace(there, dropout=given.lora_dropout, base_weights=given.base_weights)


def find_base(name: str | None, checkpoint: Path | None, option: str | None = None) -> AdapterBase:
    """Return the base of an adapter: the ``checkpoint``'s, or ``name`` if it is new or that base is gone.

    The first rank of each machine compares the weights. ``option`` is the one by which the user may give ``name``.

    Raises:
        InputError: the base of the checkpoint is not there any more, or has other weights.
    """
    if checkpoint is None or not is_adapter(checkpoint):
        return _base_at(str(checkpoint or name))
    trainer = read_trainer_json(checkpoint)
    saved = trainer.adapter_base
    if saved is None:
        raise InputError(f"{checkpoint}: trainer.json names no base of its adapter; use another checkpoint")
    is_gone = os.path.isabs(saved.place) and not Path(saved.place).is_dir()
    is_named_again = name == trainer.arguments["model_name"] and not Path(str(name)).is_dir()
    if is_gone and (name is None or is_named_again):
        elsewhere = f", or give the folder where it is now by {option}" if option else ""
        raise InputError(f"{checkpoint}: its base {saved.place} is gone; put it or a link to it back there{elsewhere}")
    base = _base_at(str(name) if is_gone else saved.place)
    if saved.fingerprint is None:
        note(f"{checkpoint}: an earlier version saved it without a hash of its base, so {base.place} is not compared")
        return base
    if not is_first_on_machine():
        return base
    found = same_weights(base, saved)
    if found is None:
        advice = f"give the model that it was trained on by {option}" if is_gone else "put back the weights"
        moved = f"its base {saved.place} is gone, and " if is_gone else "its base "
        raise InputError(f"{checkpoint}: {moved}{base.place} has other weights; {advice}")
    return found


def _base_at(name: str) -> AdapterBase:
    open_base_weights(name)  # reports missing and damaged files
    return AdapterBase(os.path.realpath(name) if Path(name).is_dir() else name)


def note_on_other_base(begins_with: Path, base: AdapterBase) -> str | None:
    """Return a note if the adapter in a folder was trained on another base than ``base``, as far as that is known."""
    saved = read_trainer_json(begins_with).adapter_base if (begins_with / "trainer.json").is_file() else None
    if saved is not None and saved.fingerprint is not None:
        if same_weights(base, saved) is not None:
            return None
        return f"--init_adapter {begins_with}: it was trained on the weights of {saved.place}, not of {base.place}"
    named = read_json(begins_with / CONFIG, dict, SAVE_ADVICE).get("base_model_name_or_path")
    if not isinstance(named, str) or _names_same_model(named, base.place):
        return None
    return f"--init_adapter {begins_with}: it names {named} as its base, and this run puts it on {base.place}"


def _names_same_model(named: str, place: str) -> bool:
    if named == place or os.path.realpath(named) == os.path.realpath(place):
        return True
    origin, _ = find_origin(place)
    return origin.repository == named


def open_base(shape: ModelShape, base: AdapterBase, dtype: torch.dtype) -> MetaModel:
    """Build the base of an adapter in ``dtype``, without the adapter; ``shape`` may have one.

    A head that the adapter trains apart from the embedding begins with the embedding's weights.
    """
    of_base = replace(shape, source=base.place)
    if shape.adapter is None or not (tied := _untied_head(shape, base)):
        return _open_whole(of_base, dtype)
    as_stored = copy.deepcopy(shape.config)
    as_stored.tie_word_embeddings = True
    opened = _open_whole(replace(of_base, config=as_stored), dtype)
    if opened.weights is None:
        raise InputError(f"{base.place}: its weights cannot be read in parts; save it again with save_pretrained")
    return MetaModel(build_on_meta(of_base, dtype), _Renamed(opened.weights, tied))


def _open_whole(shape: ModelShape, dtype: torch.dtype) -> MetaModel:
    if (Path(shape.source) / "trainer.json").is_file():
        return open_checkpoint(shape, Path(shape.source), dtype)
    return open_pretrained(shape, dtype)


def _untied_head(shape: ModelShape, base: AdapterBase) -> dict[str, str]:
    """Return the embedding's name for the head's, if the adapter's model has a head apart and its base has not."""
    assert shape.adapter is not None
    if shape.config.tie_word_embeddings or not shape.adapter.train_also:
        return {}
    own: Any = build_on_meta(read_shape(base.place), torch.float32)
    if not trains_head_apart(own, shape.adapter):
        return {}
    head = own.get_output_embeddings().weight
    named = own.named_parameters(remove_duplicate=False)
    first, *others = (name for name, parameter in named if parameter is head)
    return dict.fromkeys(others, first)


class _Renamed:
    """Weights, some of them read under other names; see ``Weights``."""

    def __init__(self, weights: Weights, names: dict[str, str]) -> None:
        self._weights = weights
        self._names = names

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self._weights.read_block(self._names.get(name, name), offsets, shape)


def open_frozen(shape: ModelShape, base: AdapterBase, dtype: torch.dtype) -> MetaModel:
    """Build the base of an adapter as :func:`open_base` does, its layers in 4 bits if ``shape.adapter`` says so."""
    opened = open_base(shape, base, dtype)
    if shape.adapter is None or not shape.adapter.base_weights:
        return opened
    if opened.weights is None:
        raise InputError(f"--base_weights nf4: the weights of {base.place} cannot be read in parts; save it again")
    layers = [module for module in opened.model.modules() if type(module) in shape.layer_classes]
    quantize_layers(layers, dtype, shape.adapter.train_also)
    return replace(opened, weights=QuantizedWeights(opened.model, opened.weights, dtype))


def open_adapted(
    shape: ModelShape, base: AdapterBase, dtype: torch.dtype, seed: int, adapter: Path | None
) -> MetaModel:
    """Build a base model in ``dtype`` with an adapter, a new one or the one in the folder ``adapter``.

    ``shape`` is of the model with the adapter; ``seed`` is for the weights of a new one.
    """
    assert shape.adapter is not None
    stored = AdapterTensors(adapter) if adapter else None
    if stored is not None and adapter is not None:
        check_fits(stored, shape.trained, adapter)
    opened = open_frozen(shape, base, dtype)
    attach(opened.model, shape.adapter, base.place)
    weights = AdaptedWeights(opened.weights, seed, stored)
    if opened.weights is not None:
        return MetaModel(opened.model, weights)
    materialize(opened.model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in opened.model.named_parameters():
            if name in shape.trained and (stored is not None or is_adapter_parameter(name)):
                parameter.copy_(weights.read_block(name, (0,) * parameter.dim(), parameter.shape))
    if weights.is_new:
        start_magnitudes(opened.model, None)
    return MetaModel(opened.model, None)


def check_fits(tensors: StoredTensors, trained: dict[str, torch.Size], folder: Path) -> None:
    """Check that the tensors of an adapter's file have the names and shapes of the parameters that train."""
    there = {name: tensors.shape(name) for name in tensors}
    wrong = sorted(name for name in {*there, *trained} if there.get(name) != trained.get(name))
    if wrong:
        name = wrong[0]
        found, expected = (dict(each).get(name) for each in (there, trained))
        raise InputError(
            f"{folder}: {len(wrong)} tensors of this adapter do not fit, {name} first: "
            f"{_shown(found)} there, {_shown(expected)} here; give the arguments and the base that it was trained with"
        )


def _shown(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))
