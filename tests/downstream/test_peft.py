"""peft trains LoRA on an export, and loads the adapter again."""

from pathlib import Path

import pytest

from tests.support.downstream_uses import Checked
from tests.support.environments import downstream_environment, run_inside

pytestmark = [pytest.mark.slow, pytest.mark.downstream]


def test_lora_learns_and_its_adapter_loads_again(tmp_path: Path, export: Path, checked: Checked) -> None:
    adapter = tmp_path / "adapter"
    found = run_inside(downstream_environment("peft"), "lora.py", export, adapter)
    assert found["after"] < found["before"]
    assert found["difference"] == 0
    assert (adapter / "adapter_model.safetensors").is_file()
    what = "trains LoRA on the export for one step; after saving and reloading, the adapter gives the same logits"
    checked("peft", found["version"], what)
