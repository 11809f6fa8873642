# PYTHON_ARGCOMPLETE_OK
"""Collect what a run needs without internet:  python -m fabric_train.bundle --model NAME --data DIR --output BUNDLE"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fabric_train.arguments import TrainArguments, parse
from fabric_train.bundle.recipe import read_recipe
from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.parser import parse_arguments


@dataclass(frozen=True)
class BundleArguments:
    """Collect everything that a run needs on a machine without internet

    PROGRAM --model meta-llama/Meta-Llama-3-8B --data data/tokens --output bundle
    PROGRAM --model models/8b --data data/ca data/es --recipe configs/recipes/llama-3-8b-chat.yaml --output bundle
    PROGRAM --model runs/1-hf --data data/tokens --python 3.12 --cuda none --output bundle
    """

    output: str
    """Folder to write; must not exist yet."""
    model: str | None = None
    """Model and tokenizer: a hub name, a Hugging Face folder with safetensors, or a full checkpoint: RUN, RUN/best,
    RUN/latest, RUN/step-500 or its folder. Of an adapter, also a folder of peft, the bundle has the base model too, and
    its run begins with both. Default: model_name of the recipe.
    """
    data: list[str] | None = None
    """Token datasets from tokenize_dataset.py: for a recipe that mixes, all of its train_data_dir in the same order;
    otherwise the first one is trained on. Default: train_data_dir of the recipe.
    """
    recipe: str | None = None
    """YAML file with arguments of the run, as in configs/recipes/ or RUN/config.yaml; the bundle's model, data and
    output replace those in it, and files of phases and prompts are copied. Default: the defaults of training.
    """
    tasks: str | None = None
    """YAML file of evaluate.py --watch: the bundle has it and the task files that it names, at their places in this
    folder, and the wheels of lm_eval. Data on the hub is not in the bundle.
    """
    python: Literal["3.10", "3.11", "3.12", "3.13", "3.14"] | None = None
    """Python of the other machine; default: this machine's."""
    cuda: str = "13.0"
    """CUDA version that torch is built for, such as 12.6; none takes the build for CPUs."""

    def faults(self) -> list[str]:
        """Return a --data without a folder, and a --cuda that is no version."""
        faults = ["--data names nothing: give a token dataset"] if self.data == [] else []
        if not re.fullmatch(r"none|1[0-9]\.[0-9]", self.cuda):
            faults.append(f"--cuda: expected a version such as 13.0, or none; got {self.cuda!r}")
        return faults


def main(argv: list[str] | None = None) -> None:
    """Write the bundle, then print its content and what to do with it."""
    arguments = parse_arguments(BundleArguments, argv)
    recipe = read_recipe(arguments.recipe)
    model = str(arguments.model or recipe.given.get("model_name") or "")
    data: list[str] = arguments.data or recipe.data
    faults = [] if model else ["--model is required, or a recipe with model_name"]
    faults += [] if data else ["--data is required, or a recipe with train_data_dir"]
    if faults:
        raise InputError(*faults)
    recipe.check(data)

    from fabric_train.bundle.collect import Request, collect, find_adapter  # slow
    from fabric_train.bundle.recipe import Target
    from fabric_train.checkpoint import find_whole_checkpoint, means_checkpoint

    if means_checkpoint(Path(model)):
        model = str(find_whole_checkpoint(Path(model)))
    adapter = find_adapter(model, recipe)
    model = adapter.base if adapter else model
    if recipe.path:  # as training will, with this model and these token datasets
        trained = data if recipe.mixes else data[:1]
        try:
            parse(TrainArguments, ["--config", recipe.path, "--model_name", model, "--train_data_dir", *trained])
        except InputError as error:
            raise InputError(*(fault.replace("--config ", "--recipe ") for fault in error.faults)) from error

    target = Target(arguments.python, arguments.cuda)
    output = Path(arguments.output)
    request = Request(model, tuple(map(Path, data)), target, recipe, arguments.tasks, adapter)
    parts, notes, digest = collect(request, output)
    width = max(len(part.name) for part in parts)
    for part in parts:
        print(f"{part.name:<{width}} {show_size(part.num_bytes):>10}  {part.num_files:>4} files  {part.description}")
    print(f"{'written':<{width}} {show_size(sum(part.num_bytes for part in parts)):>10}  {output}")
    for note in notes:
        print(f"note     {note}")
    print(f"next     copy {output} to the other machine, compare this hash, and run the file there:")
    print(f"         {digest}  install.sh")


if __name__ == "__main__":
    run_program(main)
