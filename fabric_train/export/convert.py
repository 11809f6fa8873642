"""Convert a checkpoint to a Hugging Face folder, verified before it gets its final name."""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fabric_train.checkpoint import checkpoint_generation_config, read_trainer_json
from fabric_train.export.card_mark import write_card
from fabric_train.export.model_card import CardFacts
from fabric_train.export.published_names import published
from fabric_train.export.source import ExportSource
from fabric_train.export.transformers_4 import add_former_names
from fabric_train.export.verification import verify_in_fresh_process
from fabric_train.export.verification_report import VerificationReport
from fabric_train.export.weight_writer import write_weights
from fabric_train.files.atomic_folder import check_not_inside, complete_folder
from fabric_train.files.safe_paths import copy_folder
from fabric_train.model.generation_config import write_generation_config
from fabric_train.model.hf_model import read_shape
from fabric_train.model.hf_tokenizer import load_hf_tokenizer
from fabric_train.model.load_weights import build_on_meta
from fabric_train.model.origin import legal_files
from fabric_train.tokenization.manifest import read_manifest


def convert(
    source: ExportSource, target: Path, dtype: torch.dtype, max_shard_size: str, facts: CardFacts
) -> VerificationReport:
    """Export ``source`` as the Hugging Face folder ``target``, which exists only if a fresh process verified it.

    Args:
        source: what to export.
        target: a folder that does not exist yet or is empty.
        dtype: dtype of the exported weights.
        max_shard_size: largest safetensors file, such as 5GB; a larger tensor gets its own file.
        facts: for the model card.

    Raises:
        InputError: the checkpoint is damaged, or ``target`` is taken.
        VerificationError: the export does not match the checkpoint; ``target`` is not created.
    """
    checkpoint = source.checkpoint
    for complete in (checkpoint, *(part.checkpoint for part in source.parts)):
        check_not_inside(target, complete)
    read_trainer_json(checkpoint)  # this and the next lines report damage before anything is written
    read_manifest(checkpoint)
    read_shape(str(checkpoint))
    if (checkpoint / "tokenizer").is_dir():
        load_hf_tokenizer(checkpoint / "tokenizer")
    with complete_folder(target) as folder:
        write_export(source, folder, dtype, max_shard_size, facts)
        return verify_in_fresh_process(folder, source, dtype)


def write_export(source: ExportSource, folder: Path, dtype: torch.dtype, max_shard_size: str, facts: CardFacts) -> None:
    """Write weights, configurations, tokenizer, licence and model card into ``folder`` without verification."""
    checkpoint = source.checkpoint
    shape, in_memory = read_shape(str(checkpoint)), source.open_tensors()
    tensors = published(build_on_meta(shape, dtype), in_memory)
    if tensors is in_memory:
        kind = shape.config.model_type
        print(f"note: {kind}: weights keep transformers' own names; other software may not know them", file=sys.stderr)
    write_weights(tensors, folder, dtype, max_shard_size, f"writing {checkpoint.name}")
    _write_configurations(checkpoint, folder, dtype)
    if (checkpoint / "tokenizer").is_dir():
        # copied, not loaded and saved: so the chat template and all settings keep their values
        copy_folder(checkpoint / "tokenizer", folder)
    add_former_names(folder)
    for file in legal_files(checkpoint):
        shutil.copyfile(file, folder / file.name)
    write_card(source, folder, facts)


def _write_configurations(checkpoint: Path, folder: Path, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    config.dtype = dtype
    config.use_cache = True  # training turns it off; generation without it is quadratic
    config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    write_generation_config(folder, checkpoint_generation_config(checkpoint, config))
