"""A model card names a teacher that a run has trained by its run and step, with its base model's licence."""

from dataclasses import asdict
from pathlib import Path

import pytest

from fabric_train.checkpoint.teacher_origin import find_teacher_origin
from fabric_train.model.origin import ModelOrigin
from tests.support.bad_input_folder import edit_json
from tests.support.checkpoint_examples import trained_weights, write_full

BASE_MODEL = ModelOrigin("owner/Model", "owner/Model", "0" * 40, "apache-2.0")


@pytest.mark.parametrize(
    "base_model, origin",
    [
        (BASE_MODEL, ModelOrigin("run/step-00000001, trained from owner/Model", license="apache-2.0")),
        (None, ModelOrigin("run/step-00000001")),
    ],
)
def test_a_teacher_of_a_run_is_named_by_run_and_step(
    tmp_path: Path, tiny_model_dir: Path, base_model: ModelOrigin | None, origin: ModelOrigin
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint = write_full(folder, tiny_model_dir, trained_weights(tiny_model_dir), step=1)
    edit_json(checkpoint / "trainer.json", lambda content: content.update(base_model=base_model and asdict(base_model)))
    assert find_teacher_origin(str(checkpoint)) == origin


def test_a_teacher_that_no_run_has_trained_is_named_by_its_folder(tiny_model_dir: Path) -> None:
    assert find_teacher_origin(str(tiny_model_dir)).name == tiny_model_dir.name
