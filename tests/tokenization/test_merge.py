"""python -m fabric_train.tokenization.merge writes all rows and a balanced manifest, or one error line and nothing."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.inspection import __main__ as inspect
from fabric_train.token_dataset.document_index import row_checksum
from fabric_train.token_dataset.manifest import Manifest
from fabric_train.tokenization import merge
from tests.support.token_datasets import manifest_of

IGNORED = -100
COLUMNS = ("input_ids", "document_starts", "labels")


def merged(target: Path, *folders: Path) -> Manifest:
    merge.main([*map(str, folders), "--output_dir", str(target)])
    return manifest_of(target)  # raises if the ledger does not balance


def rows_of(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    loaded = datasets.load_from_disk(folder)[split]
    return list(loaded.select_columns([name for name in COLUMNS if name in loaded.column_names]))


def edit_manifest(folder: Path, *path: str, value: Any) -> None:
    file = folder / "manifest.json"
    content = json.loads(file.read_text())
    entry = content
    for name in path[:-1]:
        entry = entry[name]
    entry[path[-1]] = value
    file.write_text(json.dumps(content))


@pytest.fixture
def masked_dir(tmp_path: Path, tiny_tokens_dir: Path) -> Path:
    """A copy of the tiny token dataset without validation; the first three tokens of its rows are not supervised."""
    # rows with labels
    train = datasets.load_from_disk(tiny_tokens_dir)["train"]
    labels = [[IGNORED] * 3 + ids[3:] for ids in train["input_ids"]]
    datasets.disable_progress_bars()
    masked_train = train.add_column("labels", labels, feature=train.features["input_ids"])
    saved = tmp_path / "saved"
    datasets.DatasetDict(train=masked_train).save_to_disk(saved)

    # the index, with the checksums of these rows
    shutil.copytree(tiny_tokens_dir / "train" / "index", saved / "train" / "index")
    checksums = []
    for ids, row_labels, starts in zip(train["input_ids"], labels, train["document_starts"], strict=True):
        checksums.append(row_checksum(np.int32(ids), np.int32(row_labels), np.int32(starts)))
    np.save(saved / "train" / "index" / "checksums.npy", np.array(checksums, np.uint64))

    # the folder and its manifest
    folder = tmp_path / "masked"
    shutil.copytree(tiny_tokens_dir, folder, ignore=shutil.ignore_patterns("train", "validation"))
    shutil.copytree(saved / "train", folder / "train")
    shutil.copy(saved / "dataset_dict.json", folder)
    content = json.loads((folder / "manifest.json").read_text())
    ledger = content["ledger"]
    validation = ledger.pop("validation")
    ledger["documents_read"] -= validation["documents"]
    ledger["documents_kept"] -= validation["documents"]
    ledger["train"]["tokens_supervised"] -= 3 * len(train)
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def test_merged_rows_are_in_order_and_splits_are_joined(
    tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path
) -> None:
    merged(tmp_path / "out", masked_dir, tiny_tokens_dir)
    tiny_rows = rows_of(tiny_tokens_dir)
    assert "labels" not in tiny_rows[0]
    labelled_tiny_rows = [{**row, "labels": row["input_ids"]} for row in tiny_rows]
    assert rows_of(tmp_path / "out") == [*rows_of(masked_dir), *labelled_tiny_rows]
    assert rows_of(tmp_path / "out", "validation") == rows_of(tiny_tokens_dir, "validation")
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").is_file()


def test_merged_ledger_is_the_sum_and_matches_the_rows(
    tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = merged(tmp_path / "out", tiny_tokens_dir, masked_dir)
    tiny = manifest_of(tiny_tokens_dir)
    masked = manifest_of(masked_dir)
    assert manifest.ledger.documents_read == tiny.ledger.documents_read + masked.ledger.documents_read
    train = manifest.ledger.splits["train"]
    tiny_train = tiny.ledger.splits["train"]
    masked_train = masked.ledger.splits["train"]
    for name in ("documents", "characters", "tokens_in", "tokens_in_rows", "tokens_supervised", "rows"):
        assert getattr(train, name) == getattr(tiny_train, name) + getattr(masked_train, name), name
    assert Counter(train.tokens_dropped) == Counter(tiny_train.tokens_dropped) + Counter(masked_train.tokens_dropped)
    assert manifest.ledger.splits["validation"] == tiny.ledger.splits["validation"]
    assert [source.name for source in manifest.sources] == [source.name for source in tiny.sources + masked.sources]
    inspect.main([str(tmp_path / "out")])  # exits if there are problems
    assert "no problems found" in capsys.readouterr().out


def test_merged_manifest_lists_its_parts(tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path) -> None:
    edit_manifest(masked_dir, "settings", "seed", value=7)
    manifest = merged(tmp_path / "out", tiny_tokens_dir, masked_dir)
    tiny = manifest_of(tiny_tokens_dir)
    tiny_part, masked_part = manifest.parts
    assert (tiny_part.name, masked_part.name) == (str(tiny_tokens_dir), str(masked_dir))
    assert tiny_part.settings == tiny.settings
    assert masked_part.settings == manifest_of(masked_dir).settings
    num_rows = {name: split.rows for name, split in tiny.ledger.splits.items()}
    assert tiny_part.rows == num_rows
    assert masked_part.rows == {"train": num_rows["train"]}
    assert tiny_part.manifest_sha256 != masked_part.manifest_sha256

    # the parts of a merged dataset are parts of a further merge
    third_dir = Path(shutil.copytree(masked_dir, tmp_path / "third"))
    further = merged(tmp_path / "further", tmp_path / "out", third_dir)
    assert [part.name for part in further.parts] == [str(tiny_tokens_dir), str(masked_dir), str(third_dir)]
    assert further.ledger.splits["train"].rows == 3 * num_rows["train"]


def test_notes_name_differing_settings_and_files_read_twice(
    tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(masked_dir, "settings", "seed", value=7)
    merged(tmp_path / "out", tiny_tokens_dir, masked_dir)
    output = capsys.readouterr().out
    assert "note     --seed differs: 0, 7; manifest.json records each part's value\n" in output
    assert "note     slice.jsonl of" in output
    assert output.count("note     ") == 2


def test_inspect_accepts_a_document_cut_at_the_end_of_a_part(
    tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged(tmp_path / "out", tiny_tokens_dir, masked_dir)
    inspect.main([str(tmp_path / "out"), "--rows", "0"])
    assert "Cut off at the end of the split or of a merged part: 2." in capsys.readouterr().out


def test_fingerprint_depends_on_the_parts_and_their_order(
    tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path
) -> None:
    fingerprints = {}
    orders = {
        "a": (tiny_tokens_dir, masked_dir),
        "b": (tiny_tokens_dir, masked_dir),
        "c": (masked_dir, tiny_tokens_dir),
    }
    for name, folders in orders.items():
        merged(tmp_path / name, *folders)
        fingerprints[name] = datasets.load_from_disk(tmp_path / name)["train"]._fingerprint
    assert fingerprints["a"] == fingerprints["b"] != fingerprints["c"]


def spoil_tokenizer(folder: Path) -> str:
    digests = json.loads((folder / "manifest.json").read_text())["tokenizer"]["sha256"]
    edit_manifest(folder, "tokenizer", "sha256", value={**digests, "tokenizer.json": "0" * 64})
    return "its tokenizer differs from .*'s: tokenizer.json differs; "


def spoil_template(folder: Path) -> str:
    digests = json.loads((folder / "manifest.json").read_text())["tokenizer"]["sha256"]
    edit_manifest(folder, "tokenizer", "sha256", value={**digests, "chat_template.jinja": "0" * 64})
    (folder / "tokenizer" / "chat_template.jinja").write_text("")
    return f"its chat template differs from .* again with --chat_template {folder}/tokenizer/chat_template.jinja"


def spoil_length(folder: Path) -> str:
    content = json.loads((folder / "manifest.json").read_text())
    content["settings"]["max_length"] = 32
    content["ledger"]["train"]["rows"] *= 2
    (folder / "manifest.json").write_text(json.dumps(content))
    return "its rows have 32 tokens, but the rows of .* have 64; "


def spoil_format(folder: Path) -> str:
    edit_manifest(folder, "format", value=1)
    return "has format 1, but this version reads 2; "


def spoil_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "no manifest.json, so its tokenizer is unknown"


def spoil_listing(folder: Path) -> str:
    (folder / "dataset_dict.json").unlink()
    return "not a token dataset"


def spoil_splits(folder: Path) -> str:
    shutil.copytree(folder / "train", folder / "validation")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    return "its splits differ from its manifest.json"


@pytest.mark.parametrize(
    "spoil", [spoil_tokenizer, spoil_template, spoil_length, spoil_format, spoil_manifest, spoil_listing, spoil_splits]
)
def test_bad_input_is_one_error_line_and_nothing_is_written(
    tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path, spoil: Any
) -> None:
    pattern = spoil(masked_dir)
    with pytest.raises(InputError) as error:
        merged(tmp_path / "out", tiny_tokens_dir, masked_dir)
    (fault,) = error.value.faults
    assert re.search(pattern, fault)
    assert str(masked_dir) in fault
    assert not (tmp_path / "out").exists()


def test_all_faults_are_reported_at_once(tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path) -> None:
    third = Path(shutil.copytree(masked_dir, tmp_path / "third"))
    spoil_length(masked_dir)
    spoil_tokenizer(masked_dir)
    spoil_tokenizer(third)
    with pytest.raises(InputError) as error:
        merged(tmp_path / "out", tiny_tokens_dir, masked_dir, third)
    assert len(error.value.faults) == 3


def test_a_dataset_given_twice_or_alone_is_an_error(tmp_path: Path, tiny_tokens_dir: Path) -> None:
    with pytest.raises(InputError, match="is given twice"):
        merged(tmp_path / "out", tiny_tokens_dir, tiny_tokens_dir / ".." / tiny_tokens_dir.name)
    with pytest.raises(InputError, match="two token datasets or more"):
        merged(tmp_path / "out", tiny_tokens_dir)


def test_merge_runs_as_a_module(tmp_path: Path, tiny_tokens_dir: Path, masked_dir: Path, run_program: Any) -> None:
    command = ("-m", "fabric_train.tokenization.merge", tiny_tokens_dir, masked_dir, "--output_dir", tmp_path / "out")
    finished = run_program(*command)
    assert (finished.returncode, finished.stderr) == (0, "")
    finished = run_program(*command)
    assert finished.returncode == 2
    assert "already exists and is not empty" in finished.stderr
