"""The presets in configs/ have the published sizes, seen on the meta device."""

import pytest

from fabric_train.arguments import TrainArguments, parse
from fabric_train.model.hf_model import DEFAULT_LAYER_CLASS
from fabric_train.model.init_weights import new_shape
from tests.support.programs import ROOT

CONFIGS = ROOT / "configs"
PUBLISHED = {  # of the models on the hub, tied weights counted once
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-neox-20b": 20_554_567_680,
}
GIVEN = ["--train_data_dir", "tokens", "--output_dir", "run"]


def test_every_preset_is_counted() -> None:
    presets = {file.stem for file in CONFIGS.glob("*.yaml") if "from_scratch" in file.read_text()}
    assert presets == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    arguments = parse(TrainArguments, [*GIVEN, "--config", str(CONFIGS / f"{name}.yaml")])
    shape = new_shape(arguments.model, DEFAULT_LAYER_CLASS)
    assert shape.num_parameters == PUBLISHED[name]
    assert len(shape.layer_classes) == 1
