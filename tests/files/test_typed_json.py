"""Whatever a JSON file contains, its reader returns or raises one InputError of one line."""

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_train.checkpoint import read_trainer_json
from fabric_train.checkpoint.discovery import newest_checkpoint
from fabric_train.checkpoint.files import find_damage
from fabric_train.checkpoint.stream_cursors import read_cursors
from fabric_train.cli.errors import InputError
from fabric_train.data.data_order import DataOrder
from fabric_train.data.token_dataset import open_dataset
from fabric_train.export.card_facts import read_record
from fabric_train.export.model_card import CardFacts, write_model_card
from fabric_train.export.verification_report import OutputReport, TensorReport, VerificationReport
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import load_hf_tokenizer, read_shape
from fabric_train.model.origin import find_origin
from fabric_train.model.weight_files import shard_names
from fabric_train.token_dataset.manifest import read_manifest
from fabric_train.token_dataset.token_folder import open_splits
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_comparison import compare_tokenizers
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.token_datasets import tokenize, write_jsonl


@dataclass(frozen=True)
class Numbers:
    count: int
    share: float


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"[]", "no JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of more than 128 bits"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "some.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_json(file, dict, "fetch it again")
    assert str(refused.value).startswith(f"{file}: damaged (")
    assert reason in str(refused.value)
    assert str(refused.value).endswith("; fetch it again")


def test_types_are_checked_with_the_path_of_the_value(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text('{"count": 3, "share": 1}')
    assert read_json(file, Numbers, "fetch it again") == Numbers(3, 1.0)
    for content, path in (('{"count": 3}', "share"), ('{"count": "3", "share": 1}', "count")):
        file.write_text(content)
        with pytest.raises(InputError, match=rf"damaged \({path}: .*\); fetch it again$"):
            read_json(file, Numbers, "fetch it again")
    file.write_text(json.dumps({"count": 1 << 63, "share": 1}))
    with pytest.raises(InputError, match="more than 64 bits"):
        read_json(file, Numbers, "fetch it again")


def test_the_largest_length_of_hub_tokenizers_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    assert read_json(tmp_path / "tokenizer_config.json", dict, "") == {"model_max_length": int(1e30)}


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate((1 << 30) + 1)  # a hole, which takes no space
    with pytest.raises(InputError, match="larger than 1 GiB"):
        read_json(tmp_path / "huge.json", dict, "fetch it again")


# --------------------------------------------------------------------------------------------------- all readers

NUMBERS = st.one_of(st.integers(), st.sampled_from([-1, 10**9, 2**63, 10**30, 10**400]), st.floats())
SPELLED = {'"deep"': "[" * 900 + "]" * 900, '"deeper"': '{"a":' * 9000 + "1" + "}" * 9000, '"long"': "9" * 5000}
"""JSON that json.dumps does not write, by what stands for it in the text."""
TEXTS = ["..", "/etc/passwd", "a\0b", "\ud800", "deep", "deeper", "long"]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(TEXTS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A folder with a checkpoint of a stream, one of a token dataset, a model and a token dataset."""
    folder = tmp_path_factory.mktemp("json")
    weights = trained_weights(tiny_model_dir)
    tokenize(folder / "tokens", tiny_model_dir, write_jsonl(folder / "texts.jsonl"))
    for run in ("run", "stream"):
        checkpoint = write_full(folder / run / "checkpoints" / "step-00000003", tiny_model_dir, weights, step=3)
        shutil.copyfile(folder / "tokens" / "manifest.json", checkpoint / "manifest.json")
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    order = {"text_column": "text", "max_length": 8, "tokenizer": "0", "special_text_is_plain": False}
    trainer["data"] = {**order, "sources": ["a.txt"], "rows_per_window": 1}
    trainer["arguments"] |= {"streaming_dataset": ["a.txt"], "max_step": 5, "number_epochs": 1}
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    (checkpoint / "stream.json").write_text(json.dumps({"cursors": [[0, 1, 2, 0, 1, 0, 5, -5]]}))
    model = Path(shutil.copytree(tiny_model_dir, folder / "model"))
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "hub_source.json").write_text(json.dumps({"repository": "some/model", "revision": "0" * 40}))
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    (model / "added_tokens.json").write_text(json.dumps({"<|end_of_text|>": 1}))
    tensors = TensorReport(1, 1, [], [], [], 0.0)
    output = OutputReport(1, 1.0, 0.0)
    report = VerificationReport("float32", "layer by layer", tensors, [output], output, [], "equal", [])
    (folder / "verification.json").write_text(json.dumps(asdict(report)))
    return folder


def read_checkpoint(file: Path) -> None:
    """Read trainer.json and manifest.json as training and the export do."""
    checkpoint = file.parent
    newest_checkpoint(checkpoint.parents[1])
    read_trainer_json(checkpoint).data_changes(DataOrder("0", 8, 1, 0))
    write_model_card(read_record(read_trainer_json(checkpoint)), checkpoint.parents[2], CardFacts("model"))


def read_stream(file: Path) -> None:
    for cursor in read_cursors(file.parent):
        cursor.numbers()


def read_tokenizer(file: Path) -> None:
    """Load a tokenizer for tokenization, for the inspector and for an export."""
    folder = file.parent
    json_file = file.parent / "tokenizer.json"
    with ExitStack() as others:  # all of them are called, and the last error is raised
        others.callback(load_hf_tokenizer, folder)
        others.callback(compare_tokenizers, json_file, json_file, "")
        others.callback(load_vocabulary, folder)
        others.callback(load_tokenizer, str(folder))


def read_dataset(file: Path) -> None:
    tokens = file.parent if file.name == "dataset_dict.json" else file.parents[1]
    try:
        open_splits(tokens)
    finally:
        open_dataset(str(tokens))


READERS: dict[str, Callable[[Path], Any]] = {
    "run/checkpoints/step-00000003/trainer.json": read_checkpoint,
    "stream/checkpoints/step-00000003/trainer.json": read_checkpoint,
    "run/checkpoints/step-00000003/manifest.json": read_checkpoint,
    "run/checkpoints/step-00000003/checksums.json": lambda file: find_damage(file.parent),
    "stream/checkpoints/step-00000003/stream.json": read_stream,
    "tokens/manifest.json": lambda file: read_manifest(file.parent),
    "tokens/dataset_dict.json": read_dataset,
    "tokens/train/state.json": read_dataset,
    "tokens/train/dataset_info.json": read_dataset,
    "model/config.json": lambda file: read_shape(str(file.parent)),
    "model/hub_source.json": lambda file: find_origin(str(file.parent)),
    "model/model.safetensors.index.json": shard_names,
    "model/tokenizer.json": read_tokenizer,
    "model/tokenizer_config.json": read_tokenizer,
    "model/special_tokens_map.json": read_tokenizer,
    "model/added_tokens.json": read_tokenizer,
    "verification.json": lambda file: read_json(file, VerificationReport, "convert again"),
}


def places_in(content: Any) -> list[tuple[Any, ...]]:
    """Return the path of every value in parsed JSON; of long lists and objects only the first and the last ones."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    items = list(inner)
    return [(), *((key, *path) for key, value in (*items[:12], *items[12:][-4:]) for path in places_in(value))]


def changed(content: Any, path: tuple[Any, ...], value: Any, *, removes: bool) -> Any:
    """Return a copy with another value at a path, or without it."""
    if not path:
        return value
    content = copy.copy(content)
    if removes and len(path) == 1:
        del content[path[0]]
    else:
        content[path[0]] = changed(content[path[0]], path[1:], value, removes=removes)
    return content


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_content_is_read_or_refused_in_one_line(place: Path, name: str, data: st.DataObject) -> None:
    file = place / name
    original = file.read_bytes()
    content = json.loads(original)
    kind = data.draw(st.sampled_from(["another value", "another value", "a value less", "anything", "bytes", "cut"]))
    if kind == "bytes":
        forged = data.draw(st.binary(max_size=64))
    elif kind == "cut":
        forged = original[: data.draw(st.integers(0, len(original) - 1))]
    else:
        path = data.draw(st.sampled_from(places_in(content))) if kind != "anything" else ()
        value = data.draw(VALUES)
        text = json.dumps(changed(content, path, value, removes=kind == "a value less"))
        for word, spelled in SPELLED.items():
            text = text.replace(word, spelled)
        forged = text.encode()
    faults: tuple[str, ...] = ("read",)
    try:
        file.write_bytes(forged)
        READERS[name](file)
    except InputError as error:
        faults = error.faults
    finally:
        file.write_bytes(original)
    assert faults
    assert not any("\n" in fault for fault in faults)
