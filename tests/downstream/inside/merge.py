"""Merge models with mergekit: ``RECIPE.yaml OUTPUT``; prints JSON with the version."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions


def main() -> None:
    """Write what mergekit makes of its recipe into a folder."""
    recipe, output = sys.argv[1:]
    config = MergeConfiguration.model_validate(yaml.safe_load(Path(recipe).read_text(encoding="utf-8")))
    run_merge(config, output, MergeOptions(quiet=True))
    print(json.dumps(version("mergekit")))


if __name__ == "__main__":
    main()
