"""Read the config.yaml of a run."""

from pathlib import Path
from typing import Any

from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError

CONFIG = "config.yaml"


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the arguments in a run's config.yaml, by name.

    Raises:
        InputError: The file is missing or damaged.
    """
    file = run_dir / CONFIG
    content = yaml_core.load_file(str(file), CONFIG)
    if not isinstance(content, dict):
        raise InputError(f"{file}: not a configuration file")
    return content
