"""Token datasets on a stand-in for the hub: files, a manifest without private names, the card, pushing again."""

import re
from pathlib import Path

import datasets
import pytest
from huggingface_hub import metadata_load

from fabric_train.cli.errors import InputError, RunError
from fabric_train.tokenization.cleaning.boilerplate import Boilerplate, write_repeated_lines
from fabric_train.tokenization.packing.document_index import open_index
from tests.support import pair_datasets
from tests.support.stand_in_hub import TOKEN, Fault, StandInHub, account
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

PLACE = "datasets/alice/tokens"
MANIFEST, CARD = "manifest.json", "README.md"


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Two files of one name in folders that nobody should hear of."""
    files = [tmp_path / "home-of-alice" / name / "texts.jsonl" for name in ("secret", "hidden")]
    for file in files:
        file.parent.mkdir(parents=True)
        write_jsonl(file)
    return files


def fetched(hub: StandInHub, folder: Path) -> Path:
    """Return the folder that a download of the repository makes."""
    for name, data in hub.repositories[PLACE].files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_pushed_token_dataset_can_be_read_and_has_no_private_name(
    tmp_path: Path, tiny_model_dir: Path, sources: list[Path], hub: StandInHub
) -> None:
    folder = tmp_path / "tokens"
    (lines := sources[0].parent / "lines").mkdir()
    write_repeated_lines(lines, Boilerplate(2), "text")
    options = {"push_to_hub": "alice/tokens", "license": "cc-by-4.0", "card_language": "en", "validation_split": 0.2}
    options["boilerplate"] = lines
    rows = tokenize(folder, tiny_model_dir, sources[0], f"es={sources[1]}", **options)
    copy = fetched(hub, tmp_path / "copy")
    own = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    there = hub.repositories[PLACE].files()
    assert {*there} == {*own, CARD, ".gitattributes"}
    assert {name: data for name, data in there.items() if name in own and name != MANIFEST} == {
        name: data for name, data in own.items() if name != MANIFEST
    }
    for name, data in there.items():
        for private in (str(tmp_path), str(tiny_model_dir), "home-of-alice", "secret", "hidden"):
            assert private.encode() not in data, name
    assert {name: split["input_ids"][:] for name, split in datasets.load_from_disk(copy).items()} == rows
    manifest = manifest_of(copy)
    assert [(one.name, one.place, one.files[0].path) for one in manifest.sources] == [
        ("texts.jsonl", "texts.jsonl", "texts.jsonl"),
        ("es", "texts.jsonl", "texts.jsonl"),
    ]
    index = open_index(copy, manifest, "train")
    assert index is not None
    assert sum(one.documents for one in manifest.ledger.splits["train"].sources.values()) == len(index.documents)
    metadata = metadata_load(copy / CARD)
    assert metadata is not None
    assert (metadata["license"], metadata["language"]) == ("cc-by-4.0", ["en"])
    files = metadata["configs"][0]["data_files"]
    assert [one["split"] for one in files if list(copy.glob(one["path"]))] == ["train", "validation"]
    card = (copy / CARD).read_text()
    assert "hf download alice/tokens --repo-type dataset" in card
    assert f"| train | {len(rows['train'])} |" in card
    assert "| `texts.jsonl` | 40 |" in card


def test_the_card_of_pairs_says_what_they_are_and_their_reference_stays_here(tmp_path: Path, hub: StandInHub) -> None:
    model = pair_datasets.write_model(tmp_path / "model")
    source = pair_datasets.write_source(tmp_path / "pairs.jsonl", range(12))
    folder = pair_datasets.tokenize(tmp_path / "tokens", model, [source])
    (folder / "reference" / "0123").mkdir(parents=True)  # as training writes it
    (folder / "reference" / "0123" / "reference.json").write_text(f'{{"model": "{model}"}}')
    pair_datasets.tokenize(folder, model, [source], push_to_hub="alice/tokens")
    there = hub.repositories[PLACE].files()
    assert not [name for name, data in there.items() if name.startswith("reference") or str(tmp_path).encode() in data]
    card = there[CARD].decode()
    assert "--model_name MODEL --objective dpo --output_dir RUN" in card
    section = card.partition("## Preference pairs\n")[2].partition("\n## ")[0]
    ledger = manifest_of(fetched(hub, tmp_path / "copy")).ledger
    for name, split in ledger.splits.items():
        assert split.pairs is not None
        assert (
            f"- {name}: {split.documents} with answers of {split.pairs.chosen_tokens / split.documents:.1f}" in section
        )


def test_the_same_command_pushes_a_token_dataset_that_is_finished(
    tmp_path: Path,
    tiny_model_dir: Path,
    sources: list[Path],
    hub: StandInHub,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "tokens"
    hub.faults.append(Fault("POST .*/repos/create", 500))
    line = f"{folder} is complete, but pushing it to alice/tokens failed: the hub answered 500 ("
    with pytest.raises(RunError, match=re.escape(line)):
        tokenize(folder, tiny_model_dir, sources[0], push_to_hub="alice/tokens")
    hub.faults.clear()
    made = (folder / MANIFEST).stat().st_mtime_ns
    with pytest.raises(InputError, match=r"was made with other arguments: --max_length 16, not 32; choose"):
        tokenize(folder, tiny_model_dir, sources[0], push_to_hub="alice/tokens", max_length=32)
    with pytest.raises(InputError, match=r"--dataset .*secret.*, not .*hidden"):
        tokenize(folder, tiny_model_dir, sources[1], push_to_hub="alice/tokens")
    assert PLACE not in hub.repositories
    tokenize(folder, tiny_model_dir, sources[0], push_to_hub="alice/tokens", commit_message="Again")
    assert (folder / MANIFEST).stat().st_mtime_ns == made
    assert hub.repositories[PLACE].messages == ["Again"]
    assert capfd.readouterr().out.splitlines()[-2:] == [
        f"{folder} has this token dataset already: it is only pushed",
        f"pushed to  {hub.address}/datasets/alice/tokens",
    ]


def test_nothing_is_tokenized_for_a_token_without_rights(
    tmp_path: Path, tiny_model_dir: Path, sources: list[Path], hub: StandInHub
) -> None:
    hub.accounts[TOKEN] = account("alice", "read")
    with pytest.raises(InputError, match="can only read"):
        tokenize(tmp_path / "tokens", tiny_model_dir, sources[0], push_to_hub="alice/tokens")
    assert not (tmp_path / "tokens").exists()
