"""Generation stops at every token that ends a document or a turn; damaged settings are refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig

from fabric_train.cli.errors import InputError
from fabric_train.model.generation_settings import (
    GENERATION_CONFIG,
    add_stop_tokens,
    checkpoint_generation_config,
    read_generation_config,
    write_generation_config,
)
from fabric_train.token_dataset.manifest import load_manifest

NAMES = ["eos_token_id", "temperature", "max_new_tokens", "watermarking_config", "suppress_tokens", "streamer", "x"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "before, after",
    [(None, [7, 9]), (7, [7, 9]), (9, [9, 7]), ([5], [5, 7, 9]), ([9, 7], [9, 7])],
)
def test_stop_tokens_come_after_those_of_the_model(before: Any, after: list[int]) -> None:
    config = GenerationConfig(eos_token_id=before)
    add_stop_tokens(config, (7, 9))
    assert config.eos_token_id == after


def test_a_single_stop_token_stays_a_number() -> None:
    config = GenerationConfig(eos_token_id=7)
    add_stop_tokens(config, (7,))
    assert config.eos_token_id == 7


def test_settings_with_contradicting_flags_are_written_as_they_are(tmp_path: Path) -> None:
    published = {"eos_token_id": 7, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(published))
    config = read_generation_config(str(tmp_path), LlamaConfig())
    add_stop_tokens(config, (9,))
    write_generation_config(tmp_path, config)
    written = json.loads((tmp_path / GENERATION_CONFIG).read_text())
    assert {name: written[name] for name in published} == published | {"eos_token_id": [7, 9]}


def test_without_a_file_the_models_configuration_decides(tmp_path: Path) -> None:
    assert read_generation_config(str(tmp_path), LlamaConfig(eos_token_id=11)).eos_token_id == 11


def test_an_older_checkpoint_stops_at_the_end_of_turns_too(tmp_path: Path, tiny_tokens_dir: Path) -> None:
    shutil.copy(tiny_tokens_dir / "manifest.json", tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    del content["tokenizer"]["turn_end_token_ids"]
    content["tokenizer"]["end_of_turn_token_id"] = 42
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    manifest = load_manifest(tmp_path)
    assert manifest is not None
    assert manifest.tokenizer.stop_token_ids == (1, 42)
    assert checkpoint_generation_config(tmp_path, LlamaConfig(eos_token_id=1)).eos_token_id == [1, 42]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"eos_token_id": "x"}',
        b'{"eos_token_id": [1, true]}',
        b'{"streamer": 1}',
    ],
)
def test_a_tampered_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / GENERATION_CONFIG).write_bytes(content)
    with pytest.raises(InputError) as error:
        read_generation_config(str(tmp_path), LlamaConfig())
    (fault,) = error.value.faults
    assert fault.startswith(f"{tmp_path / GENERATION_CONFIG}: ")
    assert "\n" not in fault


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4) | json_values)
def test_any_json_is_read_or_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(content))
    faults: tuple[str, ...] = ()
    try:
        config = read_generation_config(str(tmp_path), LlamaConfig())
        add_stop_tokens(config, (1, 2))
        write_generation_config(tmp_path, config)
    except InputError as error:
        faults = error.faults
    assert len(faults) <= 1
    assert "\n" not in "".join(faults)
