"""Write an adapter for peft."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from fabric_train.checkpoint import TrainerJson
from fabric_train.checkpoint.adapter_folder import CONFIG, PREFIX, TIED, WEIGHTS, AdapterTensors
from fabric_train.cli.errors import InputError
from fabric_train.export.model_card import CardFacts, write_card
from fabric_train.export.source import ExportSource
from fabric_train.files.regular_file import copy_folder
from fabric_train.files.typed_json import read_json
from fabric_train.model import hf_model
from fabric_train.model.generation_settings import checkpoint_generation_config, write_generation_config
from fabric_train.model.load_weights import build_on_meta
from fabric_train.model.origin import legal_files


def check_positions(saved: TrainerJson) -> None:
    """Raise an InputError for an adapter whose run extended the positions, which its base's config.json lacks."""
    arguments = saved.arguments
    options = [f"--{name} {arguments[name]}" for name in ("rope_scaling", "rope_theta") if arguments.get(name)]
    if options:
        raise InputError(
            f"{saved.checkpoint}: its run used {' '.join(options)}, which the config.json of its base does not have, "
            "so peft would compute a different model; export the full model with --merge true"
        )


def write_adapter(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write an adapter for peft, with tokenizer, licence and model card, to ``folder``, without verifying it."""
    checkpoint = source.checkpoint
    tied_names = _find_tied_names(checkpoint)
    if tied_names:
        _write_untied_weights(checkpoint, folder / WEIGHTS, tied_names)
    else:
        shutil.copyfile(checkpoint / WEIGHTS, folder / WEIGHTS)
    write_adapter_config(source, folder, facts)
    if (checkpoint / "tokenizer").is_dir():
        copy_folder(checkpoint / "tokenizer", folder)
    for file in legal_files(checkpoint):
        shutil.copyfile(file, folder / file.name)
    write_card(source, folder, facts)


def write_adapter_config(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the configurations of an exported adapter, which name the base on the hub, or if unknown its folder.

    peft does not read ``generation_config.json`` itself; the model card says how to use it.
    """
    # a tied weight is written under each of its names, see ``_write_untied_weights``
    checkpoint = source.checkpoint
    config = read_json(checkpoint / CONFIG, dict, "use another checkpoint")
    tied_names = _find_tied_names(checkpoint)
    if tied_names:
        tied_modules = [name.rpartition(".")[0] for name in tied_names]
        config["modules_to_save"] = [*config["modules_to_save"], *tied_modules]

    # a base that another run trained is not the one on the hub
    saved = source.saved
    repository = None
    revision = None
    if saved.base_model and not saved.stages:
        repository = saved.base_model.repository
        revision = saved.base_model.revision
    if facts.base_model not in (None, repository):  # --base_model names another one
        repository = facts.base_model
        revision = None
    if repository:
        config["base_model_name_or_path"] = repository
        config["revision"] = revision
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    model_config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    write_generation_config(folder, checkpoint_generation_config(checkpoint, model_config))


def _find_tied_names(checkpoint: Path) -> dict[str, str]:
    """Return the second names of weights that trained in full (a tied head), and their names in the adapter."""
    model = build_on_meta(hf_model.read_shape(str(checkpoint)), torch.float32)
    adapter_names = set(AdapterTensors(checkpoint))
    named_parameters = list(model.named_parameters(remove_duplicate=False))  # tied weights come once for each name
    adapter_name_by_id = {id(parameter): name for name, parameter in named_parameters if name in adapter_names}
    tied_names = {}
    for name, parameter in named_parameters:
        adapter_name = adapter_name_by_id.get(id(parameter))
        if adapter_name is not None and adapter_name != name:
            tied_names[name] = adapter_name
    return tied_names


def _write_untied_weights(checkpoint: Path, file: Path, tied_names: dict[str, str]) -> None:
    """Write an adapter with tied weights under each of their names, because peft treats them as two modules."""
    tensors = load_file(checkpoint / WEIGHTS)
    copies = {}
    for name, adapter_name in tied_names.items():
        copies[f"{PREFIX}{name}"] = tensors[f"{PREFIX}{adapter_name}"].clone()
    save_file(tensors | copies, file, metadata={"format": "pt", TIED: " ".join(copies)})
