"""Check the folders and files that a run's arguments name, before torch is imported.

``prepare.py`` checks their content later, with the same functions and others.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.checkpoint.peft_settings import read_lora_config
from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError
from fabric_train.files.atomic_folder import check_no_dead_link, check_not_inside, nearest_existing
from fabric_train.files.regular_file import check_regular_or_absent
from fabric_train.inference.prompt_file import check_prompts
from fabric_train.model.model_folder import check_model_folder
from fabric_train.preflight.beginning import choose_beginning
from fabric_train.preflight.rollout_check import faults_of_rollouts
from fabric_train.reading.sources import check_name, split_names
from fabric_train.rollouts.store import ROLLOUTS
from fabric_train.token_dataset.token_folder import check_token_dataset

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


def check_paths(arguments: "TrainArguments") -> None:
    """Check the output folder and the run in it, the checkpoint, the data and the model, if they are local.

    Raises:
        InputError: a folder or file is missing or of another kind, or a run would overwrite another one.
    """
    faults = list(faults_of_rollouts(arguments))
    if faults:
        raise InputError(*faults)
    folder = Path(arguments.save.output_dir)
    check_output_dir(folder, *arguments.data.data_dirs, arguments.checkpoint.checkpoint)
    if arguments.data.prompts is not None:
        _check_rollout_folder(folder / ROLLOUTS)
    beginning = choose_beginning(arguments, folder, damages=None)
    arguments = beginning.arguments

    # the data
    data = arguments.data
    if data.phases is not None and not arguments.evaluation.only_reads:
        yaml_core.load_file(data.phases, "--phases")
    validation_prompts = arguments.evaluation.validation_prompts
    entries_by_option = {
        "--streaming_dataset": data.streaming_dataset,
        "--prompts": data.prompts,
        "--validation_prompts": validation_prompts,
    }
    for option, names in entries_by_option.items():
        for _, source in split_names(names or [], option):
            check_name(source, option)
    for dataset_dir in data.data_dirs:
        check_token_dataset(dataset_dir)

    # the model, an adapter and prompts
    if beginning.saved is None and not arguments.model.family:
        check_model_folder(arguments.model.model_name)
    if arguments.adapter.init_adapter is not None:
        read_lora_config(Path(arguments.adapter.init_adapter))
    if arguments.evaluation.sample_prompts is not None and not arguments.evaluation.only_reads:
        check_prompts(Path(arguments.evaluation.sample_prompts))


def check_output_dir(folder: Path, *inputs: str | None) -> None:
    """Check that the output folder, or what exists of its path, can be written to, and is not inside an input."""
    check_no_dead_link(folder)
    if os.path.realpath(folder) == os.path.abspath(os.sep):
        raise InputError(f"--output_dir {folder} is the root of the file system; give a folder for the run")
    checkpoint_folder = folder / "checkpoints"
    if os.path.lexists(checkpoint_folder) and not checkpoint_folder.is_dir():
        raise InputError(f"{checkpoint_folder} is not a folder, but the run needs a folder there; remove or rename it")
    for name in ("metrics.csv", "samples.jsonl", "run.log"):
        check_regular_or_absent(folder / name)
    for input_path in inputs:
        if input_path and not (Path(input_path) / "checkpoints").is_dir():  # a run may continue in its own folder
            check_not_inside(folder, Path(input_path))
    nearest = nearest_existing(folder)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "is not writable" if nearest.is_dir() else "is a file"
        raise InputError(f"--output_dir {folder}: {nearest} {reason}; give another folder")


def _check_rollout_folder(folder: Path) -> None:
    """Check that the folder for the completions of a run can be created or written to."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder, but the run stores completions there; remove or rename it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder} is not writable, but the run stores completions there; make it writable, or give another "
            "--output_dir"
        )
