# PYTHON_ARGCOMPLETE_OK
"""Collect what a run needs without internet:  python -m fabric_train.bundle --model NAME --data DIR --output BUNDLE"""

from pathlib import Path

from arguments import BundleArguments, TrainArguments, parse
from fabric_train.bundle.recipe import read_recipe
from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, run_program


def main(argv: list[str] | None = None) -> None:
    """Write the bundle, then print what is in it and what to do with it."""
    arguments = parse(BundleArguments, argv)
    recipe = read_recipe(arguments.recipe)
    model = str(arguments.model or recipe.given.get("model_name") or "")
    data: list[str] = arguments.data or recipe.data
    faults = [] if model else ["--model is required, or a recipe with model_name"]
    faults += [] if data else ["--data is required, or a recipe with train_data_dir"]
    if faults:
        raise InputError(*faults)
    recipe.check(data)
    if recipe.path:
        _check_arguments(recipe.path, model, data if recipe.mixes else data[:1])

    from fabric_train.bundle.collect import Request, collect  # slow
    from fabric_train.bundle.wheels import Target
    from fabric_train.checkpoint import find_whole_checkpoint, means_checkpoint

    if means_checkpoint(Path(model)):
        model = str(find_whole_checkpoint(Path(model)))
    target = Target(arguments.python, arguments.cuda)
    output = Path(arguments.output)
    parts, notes, digest = collect(Request(model, tuple(map(Path, data)), target, recipe, arguments.tasks), output)
    width = max(len(part.name) for part in parts)
    for part in parts:
        print(f"{part.name:<{width}} {show_size(part.num_bytes):>10}  {part.num_files:>4} files  {part.description}")
    print(f"{'written':<{width}} {show_size(sum(part.num_bytes for part in parts)):>10}  {output}")
    for note in notes:
        print(f"note     {note}")
    print(f"next     copy {output} to the other machine, compare this hash, and run the file there:")
    print(f"         {digest}  install.sh")


def _check_arguments(recipe: str, model: str, data: list[str]) -> None:
    """Check a recipe as training will, with this model and these token datasets."""
    try:
        parse(TrainArguments, ["--config", recipe, "--model_name", model, "--train_data_dir", *data])
    except InputError as error:
        raise InputError(*(fault.replace("--config ", "--recipe ") for fault in error.faults)) from error


if __name__ == "__main__":
    run_program(main)
