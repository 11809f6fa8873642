"""Find where a teacher comes from, for the model cards of its students."""

from dataclasses import replace
from pathlib import Path

from fabric_train.checkpoint.trainer_json import read_trainer_json, run_of
from fabric_train.model.origin import ModelOrigin, find_origin


def find_teacher_origin(location: str) -> ModelOrigin:
    """Return the origin of a teacher: of a checkpoint, its run and step, with the licence of the run's base model.

    Args:
        location: A hub name, or the path of a folder or checkpoint.
    """
    checkpoint = Path(location)
    if not (checkpoint / "trainer.json").is_file():
        origin, _ = find_origin(location)
        return origin
    name = f"{run_of(checkpoint).name}/{checkpoint.name}"
    base_model = read_trainer_json(checkpoint).base_model
    if base_model is None:
        return ModelOrigin(name)
    return replace(base_model, name=f"{name}, trained from {base_model.name}", repository=None, revision=None)
