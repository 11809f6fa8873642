"""Convert a checkpoint to a Hugging Face folder, which gets its name only after it has been verified.

``convert_to_hf.py`` plans the exports (``plan.py``), and calls :func:`convert` for each folder.
"""

import json
import shutil
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fabric_train.checkpoint import run_of
from fabric_train.cli.errors import InputError, describe_os_error
from fabric_train.cli.output import redact
from fabric_train.export.adapter_export import check_positions, write_adapter
from fabric_train.export.card_facts import EXPORTS, ExportRecord
from fabric_train.export.hub_format import add_former_names, published, raise_tokenizer_limit, write_weights
from fabric_train.export.model_card import CardFacts, write_card
from fabric_train.export.source import ExportSource
from fabric_train.export.verification import VerificationError, verify_in_fresh_process
from fabric_train.export.verification_report import VerificationReport
from fabric_train.files.atomic_folder import check_not_inside, complete_folder
from fabric_train.files.regular_file import open_to_write
from fabric_train.model import hf_model
from fabric_train.model.generation_settings import checkpoint_generation_config, write_generation_config
from fabric_train.model.load_weights import build_on_meta
from fabric_train.model.origin import legal_files
from fabric_train.pages.markdown import last_part
from fabric_train.reading.listing import sha256
from fabric_train.token_dataset.manifest import read_manifest


def convert(
    source: ExportSource, target: Path, dtype: torch.dtype, max_shard_size: str, facts: CardFacts
) -> VerificationReport:
    """Export ``source`` as the Hugging Face folder ``target``, which only exists if a fresh process has verified it.

    Args:
        source: What is exported.
        target: The folder to write.
        dtype: The type of the weights; for an adapter, always float32.
        max_shard_size: Limits the size of a safetensors file, such as 5GB.
        facts: Facts for the model card that are not in the checkpoint.

    Raises:
        InputError: the source is damaged, or cannot be exported as asked.
        VerificationError: the export does not match the checkpoint.
    """
    # report faults before anything is written
    checkpoint = source.checkpoint
    if source.is_adapter:
        check_positions(source.saved)
        dtype = torch.float32
    check_not_inside(target, checkpoint)
    for averaged in source.averaged:
        check_not_inside(target, averaged.checkpoint)
    source.saved  # noqa: B018 - an InputError if it is damaged
    read_manifest(checkpoint)
    hf_model.read_shape(str(checkpoint))
    if (checkpoint / "tokenizer").is_dir():
        hf_model.load_hf_tokenizer(checkpoint / "tokenizer")

    # write and verify; the folder gets its name at the end of the context
    try:
        with complete_folder(target) as folder:
            if source.is_adapter:
                write_adapter(source, folder, facts)
            else:
                write_export(source, folder, dtype, max_shard_size, facts)
            report = verify_in_fresh_process(folder, source, dtype)
            if report.trained:
                write_card(source, folder, facts)  # again, with the difference from the trained model
    except VerificationError as error:
        _record_export(source, target, dtype, str(error))
        raise
    _record_export(source, target, dtype, report)
    return report


def _record_export(source: ExportSource, target: Path, dtype: torch.dtype, result: VerificationReport | str) -> None:
    """Append a line to RUN/exports.jsonl, for the report of the run; for a read-only run, print a note instead.

    ``result`` is the report of a good export, or the reason why the export was given up.
    """
    run = run_of(source.checkpoint)
    if not (run / "checkpoints").is_dir():  # a checkpoint apart from its run
        return

    # the record of a failure, to which a good export adds what was verified
    record = ExportRecord(
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=source.describe(),
        folder=last_part(str(target.absolute())),
        dtype=str(dtype).removeprefix("torch."),
        num_tensors=0,
        logit_difference=None,
        weights={},
        faults="",
    )
    if isinstance(result, VerificationReport):
        weight_files = sorted(target.glob("*.safetensors"))
        record = replace(
            record,
            num_tensors=result.tensors.compared,
            logit_difference=result.logits.max_difference if result.logits else None,
            weights={file.name: sha256(file) for file in weight_files},
        )
    else:
        # a report is shown to others: without the path of the checkpoint
        faults = redact(result).replace(str(source.checkpoint), source.checkpoint.name)
        record = replace(record, faults=faults)

    try:
        with open_to_write(run / EXPORTS, "a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
    except (InputError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        print(f"note: this export is not in the run's report: {reason}", file=sys.stderr)


def write_export(source: ExportSource, folder: Path, dtype: torch.dtype, max_shard_size: str, facts: CardFacts) -> None:
    """Write weights, configurations, tokenizer, licence and model card to ``folder``, without verifying them."""
    write_model(source, folder, dtype, max_shard_size, f"writing {source.checkpoint.name}")
    write_card(source, folder, facts)


def write_model(source: ExportSource, folder: Path, dtype: torch.dtype, max_shard_size: str, title: str) -> None:
    """Write weights, configurations, tokenizer and licence to ``folder``; ``title`` is for the progress bar."""
    # the weights, by their published names
    checkpoint = source.checkpoint
    shape = source.read_shape()
    source_tensors = source.open_tensors()
    tensors = published(build_on_meta(shape, dtype), source_tensors)
    if tensors is source_tensors:
        model_type = shape.config.model_type
        print(
            f"note: {model_type}: weights keep transformers' names, which other software may not support",
            file=sys.stderr,
        )
    write_weights(tensors, folder, dtype, max_shard_size, title)

    # config.json and generation_config.json
    config = source.read_config()
    config.dtype = dtype
    config.use_cache = True  # training turns it off; generation without it is quadratic
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    write_generation_config(folder, checkpoint_generation_config(checkpoint, config))

    # the tokenizer: copied, not loaded and saved, so the chat template and all settings keep their values
    for name, file in source.tokenizer_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    add_former_names(folder)
    manifest = read_manifest(checkpoint)
    if manifest and shape.max_positions:
        row_lengths = [dataset.settings.max_length for dataset in manifest.parts] or [manifest.settings.max_length]
        raise_tokenizer_limit(folder, max(row_lengths), shape.max_positions)

    for file in legal_files(checkpoint):
        shutil.copyfile(file, folder / file.name)
