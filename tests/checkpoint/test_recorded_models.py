"""The models that a run does not train itself are read from checkpoints of this version and of earlier ones."""

from dataclasses import asdict
from pathlib import Path

import pytest

from fabric_train.checkpoint.trainer_json import read_trainer_json
from fabric_train.model.origin import AdapterBase, ReferenceModel, TeacherModel
from tests.support.bad_input_folder import edit_json
from tests.support.checkpoint_examples import trained_weights, write_full

RECORDS: dict[str, AdapterBase | ReferenceModel | TeacherModel] = {
    "adapter_base": AdapterBase("owner/Model", "0" * 64),
    "reference": ReferenceModel("/models/reference", "1" * 64),
    "teacher": TeacherModel("/models/teacher", "2" * 64),
}


@pytest.mark.parametrize("key", ["location", "place"])
def test_the_location_of_a_model_is_read_by_its_name_and_its_former_one(
    tmp_path: Path, tiny_model_dir: Path, key: str
) -> None:
    checkpoint = write_full(tmp_path / "step-00000001", tiny_model_dir, trained_weights(tiny_model_dir), step=1)
    records = {name: asdict(record) for name, record in RECORDS.items()}
    for record in records.values():
        record[key] = record.pop("location")
    edit_json(checkpoint / "trainer.json", lambda content: content.update(records))
    saved = read_trainer_json(checkpoint)
    assert {name: getattr(saved, name) for name in RECORDS} == RECORDS
