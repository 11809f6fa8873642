"""Choose sources and folders of exports, and convert each to a Hugging Face folder, verified before it gets its name.

``convert_to_hf.py`` calls :func:`plan_targets` or :func:`plan_average`, and then :func:`convert` for each folder.
"""

import json
import os
import shutil
import sys
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fabric_train.checkpoint import (
    checkpoints_of_all,
    find_whole_checkpoint,
    means_all,
    read_trainer_json,
    run_of,
    saved_checkpoints,
    whole_checkpoints,
)
from fabric_train.checkpoint.adapter_folder import CONFIG, PREFIX, TIED, WEIGHTS, AdapterTensors, is_adapter
from fabric_train.cli.errors import InputError, describe_os_error
from fabric_train.cli.output import redact
from fabric_train.export.card_facts import EXPORTS, ExportRecord
from fabric_train.export.hub_format import add_former_names, published, raise_tokenizer_limit, write_weights
from fabric_train.export.model_card import CardFacts, write_card
from fabric_train.export.source import AveragePart, ExportSource, MergeInto, check_one_model, is_in_4_bits
from fabric_train.export.verification import (
    VerificationError,
    VerificationReport,
    is_verified_export,
    verify_in_fresh_process,
)
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder
from fabric_train.files.regular_file import copy_folder, open_to_write, read_json
from fabric_train.files.requirements import check_room
from fabric_train.model import hf_model
from fabric_train.model.load_weights import build_on_meta
from fabric_train.model.origin import legal_files
from fabric_train.model.weight_files import check_weight_files
from fabric_train.pages.markdown import last_part
from fabric_train.reading.listing import sha256
from fabric_train.token_dataset.manifest import read_manifest


def convert(
    source: ExportSource, target: Path, dtype: torch.dtype, max_shard_size: str, facts: CardFacts
) -> VerificationReport:
    """Export ``source`` as the Hugging Face folder ``target``, which exists only if a fresh process verified it.

    ``max_shard_size`` limits the size of a safetensors file, such as 5GB. A VerificationError says that the export does
    not match the checkpoint.
    """
    checkpoint = source.checkpoint
    if source.is_adapter:
        _check_positions(checkpoint)
        dtype = torch.float32  # an adapter's type
    for complete in (checkpoint, *(part.checkpoint for part in source.parts)):
        check_not_inside(target, complete)
    read_trainer_json(checkpoint)  # this and the next lines report damage before anything is written
    read_manifest(checkpoint)
    hf_model.read_shape(str(checkpoint))
    if (checkpoint / "tokenizer").is_dir():
        hf_model.load_hf_tokenizer(checkpoint / "tokenizer")
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
        _note_export(source, target, dtype, str(error))
        raise
    _note_export(source, target, dtype, report)
    return report


def _note_export(source: ExportSource, target: Path, dtype: torch.dtype, found: VerificationReport | str) -> None:
    """Append a line to RUN/exports.jsonl, for the report of the run; a run that is read-only gets a note instead."""
    run = run_of(source.checkpoint)
    if not (run / "checkpoints").is_dir():  # a checkpoint apart from its run
        return
    report = found if isinstance(found, VerificationReport) else None
    files = sorted(target.glob("*.safetensors")) if report else []
    record = ExportRecord(
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=source.describe(),
        folder=last_part(str(target.absolute())),
        dtype=str(dtype).removeprefix("torch."),
        num_tensors=report.tensors.compared if report else 0,
        logit_difference=report.logits.max_difference if report and report.logits else None,
        weights={file.name: sha256(file) for file in files},
        faults="" if report else redact(str(found)).replace(f"{source.checkpoint}", source.checkpoint.name),
    )
    try:
        with open_to_write(run / EXPORTS, "a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
    except (InputError, OSError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        print(f"note: not in the run's report: {reason}", file=sys.stderr)


def write_export(source: ExportSource, folder: Path, dtype: torch.dtype, max_shard_size: str, facts: CardFacts) -> None:
    """Write weights, configurations, tokenizer, licence and model card into ``folder`` without verification."""
    write_model(source, folder, dtype, max_shard_size, f"writing {source.checkpoint.name}")
    write_card(source, folder, facts)


def write_model(source: ExportSource, folder: Path, dtype: torch.dtype, max_shard_size: str, title: str) -> None:
    """Write weights, configurations, tokenizer and licence into ``folder``; ``title`` is for the progress bar."""
    checkpoint = source.checkpoint
    shape = hf_model.read_shape(str(checkpoint))
    in_memory = source.open_tensors()
    tensors = published(build_on_meta(shape, dtype), in_memory)
    if tensors is in_memory:
        kind = shape.config.model_type
        print(f"note: {kind}: weights keep transformers' own names; other software may not know them", file=sys.stderr)
    write_weights(tensors, folder, dtype, max_shard_size, title)
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    config.dtype = dtype
    config.use_cache = True  # training turns it off; generation without it is quadratic
    config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    hf_model.write_generation_config(folder, hf_model.checkpoint_generation_config(checkpoint, config))
    for name, file in source.tokenizer_files().items():
        # copied, not loaded and saved: so the chat template and all settings keep their values
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    add_former_names(folder)
    if shape.max_positions and (manifest := read_manifest(checkpoint)):
        settings = [part.settings for part in manifest.parts] or [manifest.settings]
        raise_tokenizer_limit(folder, max(one.max_length for one in settings), shape.max_positions)
    for file in legal_files(checkpoint):
        shutil.copyfile(file, folder / file.name)


def _check_positions(checkpoint: Path) -> None:
    """Raise an InputError for an adapter whose run extended the positions, which its base's folder does not say."""
    arguments = read_trainer_json(checkpoint).arguments
    given = [f"--{name} {arguments[name]}" for name in ("rope_scaling", "rope_theta") if arguments.get(name)]
    if given:
        raise InputError(
            f"{checkpoint}: its run had {' '.join(given)}, which the config.json of its base does not have, so peft "
            "would compute another model; export the whole model with --merge true"
        )


def write_adapter(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write an adapter for peft, with tokenizer, licence and model card, into ``folder`` without verification."""
    checkpoint = source.checkpoint
    if tied := _tied_names(checkpoint):
        _write_apart(checkpoint, folder / WEIGHTS, tied)
    else:
        shutil.copyfile(checkpoint / WEIGHTS, folder / WEIGHTS)
    write_adapter_config(source, folder, facts)
    if (checkpoint / "tokenizer").is_dir():
        copy_folder(checkpoint / "tokenizer", folder)
    for file in legal_files(checkpoint):
        shutil.copyfile(file, folder / file.name)
    write_card(source, folder, facts)


def write_adapter_config(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the configurations of an exported adapter; they name the base on the hub, if known, or else its folder.

    peft itself does not read ``generation_config.json``; the model card says how to use it.
    """
    checkpoint = source.checkpoint
    origin = read_trainer_json(source.checkpoint)
    config = read_json(checkpoint / CONFIG, dict, "use another checkpoint")
    if tied := _tied_names(checkpoint):
        config["modules_to_save"] = [*config["modules_to_save"], *(name.rpartition(".")[0] for name in tied)]
    known = origin.base_model if origin.base_model and not origin.stages else None
    repository, revision = (known.repository, known.revision) if known else (None, None)
    if facts.base_model not in (None, repository):
        repository = facts.base_model
        revision = None
    if repository:
        config |= {"base_model_name_or_path": repository, "revision": revision}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    of_model = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    hf_model.write_generation_config(folder, hf_model.checkpoint_generation_config(checkpoint, of_model))


def _tied_names(checkpoint: Path) -> dict[str, str]:
    """Return the second names of weights that trained whole, such as a tied head's, with their first names."""
    model = build_on_meta(hf_model.read_shape(str(checkpoint)), torch.float32)
    trained = {*AdapterTensors(checkpoint)}
    named = {*model.named_parameters(remove_duplicate=False)}
    first = {id(parameter): name for name, parameter in named if name in trained}
    return {name: first[id(parameter)] for name, parameter in named if first.get(id(parameter), name) != name}


def _write_apart(checkpoint: Path, file: Path, tied: dict[str, str]) -> None:
    """Write an adapter with tied weights under each of their names, which peft takes for two modules."""
    stored = load_file(checkpoint / WEIGHTS)
    twins = {f"{PREFIX}{name}": stored[f"{PREFIX}{first}"].clone() for name, first in tied.items()}
    save_file(stored | twins, file, metadata={"format": "pt", TIED: " ".join(twins)})


def plan_targets(
    paths: list[Path], output_dir: Path, dtype: torch.dtype, push: bool = False, merges: MergeInto | None = None
) -> tuple[dict[Path, ExportSource], list[str]]:
    """Return what to export for each folder to write, and the names of damaged checkpoints of ``RUN/all``.

    The folder is ``output_dir`` for one checkpoint, else one of its subfolders for each. A checkpoint that is in its
    subfolder already, verified, is left out with a note; with ``push`` it is returned, to be pushed.
    """
    is_single = len(paths) == 1 and not means_all(paths[0])
    if is_single and not push:
        check_not_taken(output_dir)
    faults: list[str] = []
    targets: dict[Path, ExportSource] = {}
    kept: list[Path] = []
    damaged: list[str] = []
    for path in paths:
        try:
            whole, left_out = checkpoints_of_all(path) if means_all(path) else ([find_whole_checkpoint(path)], [])
            damaged += [checkpoint.name for checkpoint in left_out]
            for checkpoint in whole:
                source = ExportSource(checkpoint, merges=_check_merge(checkpoint, merges))
                target = output_dir if is_single else output_dir / checkpoint.name
                if target in targets:
                    other = targets[target].checkpoint
                    faults.append(f"{other} and {checkpoint} have the same name: convert them one at a time")
                elif is_verified_export(target, source, torch.float32 if source.is_adapter else dtype):
                    if not source.is_adapter:
                        check_weight_files(target)
                    kept.append(target)
                else:
                    check_not_taken(target)
                    source.check_needs()
                targets[target] = source
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    new = {target: source for target, source in targets.items() if target not in kept}
    _check_room(output_dir, new.values(), dtype)
    if push:
        return targets, damaged
    for target in kept:
        print(f"note: {target} is a verified export of this checkpoint already, and is kept", file=sys.stderr)
    return new, damaged


def _check_room(output_dir: Path, sources: Collection[ExportSource], dtype: torch.dtype) -> None:
    """Raise an InputError if the disk has no room for the exports of a run's checkpoints, which are alike."""
    if not sources:
        return
    source = next(iter(sources))
    if source.is_adapter:
        num_bytes = (source.checkpoint / WEIGHTS).stat().st_size
    else:
        num_bytes = hf_model.read_shape(str(source.checkpoint)).num_parameters * dtype.itemsize
    what = "the export" if len(sources) == 1 else f"{len(sources)} exports"
    check_room(output_dir, num_bytes * len(sources), what)


def plan_average(
    paths: list[Path],
    output_dir: Path,
    average: str,
    decay: float,
    dtype: torch.dtype,
    push: bool = False,
    merges: MergeInto | None = None,
) -> dict[Path, ExportSource]:
    """Return the average that ``--average`` asks for, to be written as ``output_dir``.

    Args:
        paths: a run, or checkpoints as :func:`find_checkpoint` reads them, the oldest first.
        output_dir: with ``push``, it may be a verified export of this average already.
        average: last:K for the K newest checkpoints of the run, without the ones that a signal or a loss saved, or all.
        decay: weight of each checkpoint, relative to the next.
    """
    if not push:
        check_not_taken(output_dir)
    count = int(average.partition(":")[2] or 0)  # 0: all
    if len(paths) == 1 and means_all(paths[0]):
        paths = [paths[0].parent]
    is_run = len(paths) == 1 and bool(saved_checkpoints(paths[0]))
    if count and not is_run:
        raise InputError(f"--average {average} needs a single --checkpoint, a run; --average all averages a list")
    if is_run:
        whole = whole_checkpoints(paths[0])
        checkpoints = list(islice(filter(_is_scheduled, whole) if count else whole, count or None))[::-1]
    else:
        checkpoints = [find_whole_checkpoint(path) for path in paths]
    needed = count or 2
    if len({os.path.realpath(checkpoint) for checkpoint in checkpoints}) < max(len(checkpoints), needed):
        raise InputError(
            f"--average {average} needs {needed} different checkpoints, but there is only "
            f"{', '.join(map(str, checkpoints)) or 'none'}; give others or a lower number"
        )
    check_one_model(checkpoints)
    ages = reversed(range(len(checkpoints)))
    parts = [AveragePart(checkpoint, decay**age) for checkpoint, age in zip(checkpoints, ages, strict=True)]
    source = ExportSource(checkpoints[-1], tuple(parts), merges=_check_merge(checkpoints[-1], merges))
    if source.is_adapter:
        raise InputError(
            f"--average {average}: the product of averaged matrices is not the average of the adapters; average whole "
            "models, with --merge true"
        )
    if not (push and is_verified_export(output_dir, source, dtype)):
        check_not_taken(output_dir)
        source.check_needs()
        _check_room(output_dir, [source], dtype)
    return {output_dir: source}


def _check_merge(checkpoint: Path, into: MergeInto | None) -> MergeInto | None:
    if into and not is_adapter(checkpoint):
        raise InputError(f"--merge true: {checkpoint} is a whole model, without an adapter; leave it out")
    if into == "dequantized" and not is_in_4_bits(checkpoint):
        raise InputError(f"--merge_into dequantized: the base of {checkpoint} was not in 4 bits; leave it out")
    return into


def _is_scheduled(checkpoint: Path) -> bool:
    if scheduled := read_trainer_json(checkpoint).scheduled:
        return scheduled
    print(f"note: {checkpoint} was saved for a signal or a loss, not at an interval; it is left out", file=sys.stderr)
    return False
