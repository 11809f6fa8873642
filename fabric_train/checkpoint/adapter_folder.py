"""Read and check the files of an adapter, adapter_model.safetensors and adapter_config.json, which peft reads.

The adapter is the same on all ranks, and is written once, in one file. ``adapter_base`` finds and opens its base.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
from fabric_train.cli.errors import InputError
from fabric_train.distributed.sharded_parameters import original_name
from fabric_train.files.typed_json import read_json
from fabric_train.model.adapter import Adapter, adapted_layers, is_adapter_parameter
from fabric_train.model.nf4 import check_installed
from fabric_train.model.origin import AdapterBase
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors

if TYPE_CHECKING:
    from fabric_train.arguments import AdapterArguments

PREFIX = "base_model.model."
"""The prefix that peft puts before a name in transformers' model."""
TIED = "tied"
"""The metadata key for the second names of tied weights, because peft treats embedding and head as two modules."""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter; a checkpoint of a run may have one too."""
    return (folder / CONFIG).is_file() and not (folder / "model.safetensors").is_file()


def is_exported_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter and is not a checkpoint of a run."""
    return is_adapter(folder) and not (folder / "trainer.json").is_file()


def can_be_taken_off(folder: Path) -> bool:
    """Return whether peft can remove an adapter from its model: if it only adds matrices to the base's."""
    config = read_json(folder / CONFIG, dict, SAVE_ADVICE)
    is_lora = config.get("peft_type") == "LORA"
    return is_lora and not config.get("modules_to_save") and not uncomputed_settings(config)


def check_keeps_documents_apart(folder: Path) -> None:
    """Check that an adapter does not depend on the full row, in which documents would then change one another.

    Raises:
        InputError: peft computes the adapter from a full row.
    """
    if depends_on_documents(read_json(folder / CONFIG, dict, SAVE_ADVICE)):
        raise InputError(
            f"{folder / CONFIG}: alora_invocation_tokens is not supported, because a row has several documents; "
            "evaluate this adapter with peft"
        )


def files_of_adapter(folder: Path) -> list[Path]:
    """Return the paths of an adapter's configuration and weights in a folder; they need not exist."""
    return [folder / CONFIG, folder / WEIGHTS]


def check_files(folder: Path) -> None:
    """Raise an InputError if a folder's adapter has no weights, or only a pickle, or its configuration is damaged."""
    read_json(folder / CONFIG, dict, SAVE_ADVICE)
    check_weights(folder)


def read_base_name(folder: Path) -> str:
    """Return the name or folder of the model that an adapter was trained on; raise an InputError if it names none."""
    name = read_json(folder / CONFIG, dict, SAVE_ADVICE).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / CONFIG}: it does not name a base model; give one with --base_model")
    return name


def peft_config(model: nn.Module, base: AdapterBase) -> dict[str, Any]:
    """Return the content of adapter_config.json for a model with an adapter, as the fields of peft's ``LoraConfig``."""
    adapted_names = {name for name, _ in adapted_layers(model)}
    adapter = next(layer.adapter for _, layer in adapted_layers(model))

    # peft adapts every module whose name ends like a target: name the ends only if no other linear layer has them
    name_ends = {name.rpartition(".")[2] for name in adapted_names}
    other_ends = set()
    for wrapped_name, module in model.named_modules():
        name = original_name(f"{wrapped_name}.").removesuffix(".")
        if isinstance(module, nn.Linear) and name not in adapted_names:
            other_ends.add(name.rpartition(".")[2])
    targets = name_ends if name_ends.isdisjoint(other_ends) else adapted_names

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.location,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.is_rank_stabilized,
        "use_dora": adapter.kind == "dora",
        "target_modules": sorted(targets),
        "modules_to_save": list(adapter.train_also) or None,
        "bias": "none",
        "fan_in_fan_out": False,
    }


def read_adapter(folder: Path) -> Adapter:
    """Return the settings in an adapter_config.json.

    Raises:
        InputError: it is damaged, or this program cannot compute this kind of adapter.
    """
    config = read_lora_config(folder)

    # modules that train as a whole are found by their tensors, since peft's modules_to_save also matches ends of words
    whole_modules = set()
    for name in AdapterTensors(folder):
        if not is_adapter_parameter(name):
            whole_modules.add(name.rpartition(".")[0])

    targets = config.target_modules  # a regular expression, or names
    return Adapter(
        kind="dora" if config.use_dora else "lora",
        rank=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=(targets,) if isinstance(targets, str) else tuple(targets),
        is_rank_stabilized=config.use_rslora,
        train_also=tuple(sorted(whole_modules)),
    )


def trained_adapter(checkpoint: Path) -> Adapter:
    """Return the settings of a checkpoint's adapter, which also say whether the run had the base's weights in 4 bits.

    Raises:
        InputError: the adapter cannot be read, or bitsandbytes is missing.
    """
    base_weights = read_trainer_json(checkpoint).arguments.get("base_weights")
    if base_weights:
        check_installed()
    return replace(read_adapter(checkpoint), base_weights=base_weights)


class AdapterTensors:
    """The tensors in an adapter_model.safetensors, under their names in transformers' model; see ``StoredTensors``."""

    def __init__(self, folder: Path) -> None:
        check_weights(folder)
        self._tensors = CheckpointTensors([folder / WEIGHTS], SAVE_ADVICE)
        second_names = self._tensors.metadata.get(TIED, "").split()
        self._stored_names = {}  # by the name in transformers' model
        for stored_name in self._tensors:
            if stored_name not in second_names:
                self._stored_names[stored_name.removeprefix(PREFIX)] = stored_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def __len__(self) -> int:
        return len(self._stored_names)

    def shape(self, name: str) -> torch.Size:
        return self._tensors.shape(self._stored_names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._stored_names[name])

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.read(self._stored_names[name])

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self._tensors.read_block(self._stored_names[name], offsets, shape)


def choose_adapter(arguments: "AdapterArguments") -> Adapter | None:
    """Return the adapter that the arguments ask for: a new one, or the one in ``--init_adapter``; None for no adapter.

    Raises:
        InputError: another argument contradicts the adapter of ``--init_adapter``.
    """
    # a new adapter
    if arguments.init_adapter is None:
        if arguments.adapter is None or arguments.lora_rank is None or arguments.lora_alpha is None:
            return None
        return Adapter(
            kind=arguments.adapter,
            rank=arguments.lora_rank,
            alpha=arguments.lora_alpha,
            dropout=arguments.lora_dropout,
            targets=tuple(arguments.lora_targets),
            is_rank_stabilized=arguments.lora_rslora,
            train_also=tuple(arguments.train_also or ()),
            base_weights=arguments.base_weights,
        )

    # a saved one; its settings may be repeated in the arguments, but not changed
    adapter = read_adapter(Path(arguments.init_adapter))
    settings = (
        ("adapter", arguments.adapter, adapter.kind),
        ("lora_rank", arguments.lora_rank, adapter.rank),
        ("lora_alpha", arguments.lora_alpha, adapter.alpha),
    )
    faults = []
    for name, value, saved_value in settings:
        if value is not None and value != saved_value:
            faults.append(
                f"--{name} {value} differs from the adapter of --init_adapter {arguments.init_adapter}, which has "
                f"{saved_value}; leave out --{name}"
            )
    if faults:
        raise InputError(*faults)
    return replace(adapter, dropout=arguments.lora_dropout, base_weights=arguments.base_weights)


def check_fits(tensors: StoredTensors, trained: dict[str, torch.Size], folder: Path) -> None:
    """Check that the tensors in an adapter's file have the names and shapes of the parameters that train.

    Args:
        tensors: The tensors in the adapter's file.
        trained: Shapes of the parameters that train, by name.
        folder: The adapter's folder, for the message.

    Raises:
        InputError: they differ.
    """
    stored_shapes = {name: tensors.shape(name) for name in tensors}
    names = sorted({*stored_shapes, *trained})
    mismatched_names = [name for name in names if stored_shapes.get(name) != trained.get(name)]
    if mismatched_names:
        name = mismatched_names[0]
        raise InputError(
            f"{folder}: {len(mismatched_names)} tensors of this adapter do not fit; the first is {name}, "
            f"{_format_shape(stored_shapes.get(name))} in the adapter and {_format_shape(trained.get(name))} in this "
            "model; give the arguments and the base that the adapter was trained with"
        )


def _format_shape(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))
