"""Token datasets on a stand-in for the hub: files, a manifest without private names, the card, pushing again, parts."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from huggingface_hub import metadata_load

from fabric_train.cleaning.boilerplate import Boilerplate, write_repeated_lines
from fabric_train.cleaning.dropped import CONTAMINATION_FILE, DROPPED_FILE
from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.export import publish
from fabric_train.export.publish import dataset_card, public_copy, public_manifest
from fabric_train.programs import tokenize_dataset
from fabric_train.token_dataset.document_index import open_index
from fabric_train.token_dataset.manifest import write_manifest
from fabric_train.tokenization import merge
from fabric_train.tokenization.shards import ShardSizes
from tests.support import pair_datasets
from tests.support.stand_in_hub import TOKEN, Fault, StandInHub
from tests.support.stand_in_hub_accounts import account
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

PLACE = "datasets/alice/tokens"
MANIFEST = "manifest.json"
CARD = "README.md"


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Two files of one name in folders that nobody should hear of."""
    files = [tmp_path / "home-of-alice" / name / "texts.jsonl" for name in ("secret", "hidden")]
    for file in files:
        file.parent.mkdir(parents=True)
        write_jsonl(file)
    return files


def fetched(hub: StandInHub, folder: Path, place: str = PLACE) -> Path:
    """Return the folder that a download of the repository makes."""
    for name, data in hub.repositories[place].files().items():
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
    assert "source_datasets" not in metadata  # the sources are files, and no data sets of the hub
    files = metadata["configs"][0]["data_files"]
    assert [one["split"] for one in files if list(copy.glob(one["path"]))] == ["train", "validation"]
    card = (copy / CARD).read_text()
    assert "hf download alice/tokens --repo-type dataset" in card
    assert f"| train | {len(rows['train'])} |" in card
    assert "| `texts.jsonl` | 40 |" in card


SECRET = "t0psecret0token"
PRIVATE = (
    f"https://alice:{SECRET}@host.example/{{}}",
    f"https://host.example/{{}}?token={SECRET}",
    f"s3://{SECRET}@bucket/{{}}?X-Amz-Signature={SECRET}&x=1",
)


@pytest.mark.parametrize("url", PRIVATE)
def test_no_published_byte_has_the_token_of_a_url(
    tmp_path: Path, tiny_model_dir: Path, sources: list[Path], url: str
) -> None:
    """An older version, or another program, may have written manifest.json with the whole URL."""
    folder = tmp_path / "tokens"
    tokenize(folder, tiny_model_dir, sources[0], f"es={sources[1]}", validation_split=0.2)
    manifest = manifest_of(folder)
    places = [url.format("texts.jsonl"), url.format("more/texts.jsonl")]
    of_urls = tuple(
        replace(one, name=name, place=place, folder=None, files=tuple(replace(file, path=place) for file in one.files))
        for one, name, place in zip(manifest.sources, (places[0], "es"), places, strict=True)
    )
    splits = {
        name: replace(split, sources={places[0]: split.sources[manifest.sources[0].name], "es": split.sources["es"]})
        for name, split in manifest.ledger.splits.items()
    }
    settings = replace(
        manifest.settings, validation_dataset=[f"es={places[1]}"], chat_template=places[0], boilerplate=places[0]
    )
    manifest = replace(
        manifest,
        sources=of_urls,
        ledger=replace(manifest.ledger, splits=splits),
        settings=settings,
        tokenizer=replace(manifest.tokenizer, name=places[0]),
        cleaning={"boilerplate": {"lines": places[1]}},
    )
    (folder / MANIFEST).unlink()
    write_manifest(folder, manifest)
    for name in (DROPPED_FILE, CONTAMINATION_FILE):
        (folder / name).write_text(f"a text that cleaning removed, with {SECRET}")
    with public_copy(folder, manifest_of(folder), "alice/tokens", None, None) as copy:
        files = [path for path in copy.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {MANIFEST, CARD}
        for path in files:
            assert SECRET.encode() not in path.read_bytes(), path.name
        assert manifest_of(copy).sources[0].files[0].path == "texts.jsonl"


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
    with pytest.raises(InputError, match=r"was written with different arguments: --max_length 16, not 32; choose"):
        tokenize(folder, tiny_model_dir, sources[0], push_to_hub="alice/tokens", max_length=32)
    with pytest.raises(InputError, match=r"--dataset .*secret.*, not .*hidden"):
        tokenize(folder, tiny_model_dir, sources[1], push_to_hub="alice/tokens")
    assert PLACE not in hub.repositories
    tokenize(folder, tiny_model_dir, sources[0], push_to_hub="alice/tokens", commit_message="Again")
    assert (folder / MANIFEST).stat().st_mtime_ns == made
    assert hub.repositories[PLACE].messages == ["Again"]
    assert capfd.readouterr().out.splitlines()[-2:] == [
        f"{folder} already has this token dataset; only pushing it",
        f"pushed to  {hub.address}/datasets/alice/tokens",
    ]


def test_nothing_is_tokenized_for_a_token_without_rights(
    tmp_path: Path, tiny_model_dir: Path, sources: list[Path], hub: StandInHub
) -> None:
    hub.accounts[TOKEN] = account("alice", "read")
    with pytest.raises(InputError, match=r"only has read access|can only read"):
        tokenize(tmp_path / "tokens", tiny_model_dir, sources[0], push_to_hub="alice/tokens")
    assert not (tmp_path / "tokens").exists()


# ------------------------------------------------------------------------------------------ merged and of parts


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """Two token datasets of one name, the second with labels; ``whole`` with their rows and ``parts`` with none."""
    folder = tmp_path_factory.mktemp("home-of-alice")
    parts = [folder / name / "tokens" for name in ("secret", "hidden")]
    for part, packing in zip(parts, ("concat", "best_fit"), strict=True):
        part.parent.mkdir()
        documents = write_jsonl(part.parent / "texts.jsonl", [f"{packing} {number} " * 4 for number in range(30)])
        tokenize(part, tiny_model_dir, f"{packing}={documents}", packing=packing, validation_split=0.2)
    merge.main([*map(str, parts), "--output_dir", str(folder / "whole")])
    merge.main([*map(str, parts), "--output_dir", str(folder / "parts"), "--parts", "true"])
    return folder


def push_folder(folder: Path, repository: str, *flags: str) -> None:
    publish.main([str(folder), "--push_to_hub", f"alice/{repository}", *flags])


def rows_of(dataset: TokenDataset) -> list[list[list[int]]]:
    assert dataset.validation is not None
    splits = (dataset.train, dataset.validation)
    read = [row for split in splits for row in split.read(range(len(split)))]
    return [[part.tolist() for part in row if part is not None] for row in read]


def test_published_parts_are_the_full_merge_without_private_names(
    merged: Path, tmp_path: Path, tiny_model_dir: Path, hub: StandInHub
) -> None:
    before = sorted(merged.rglob("*"))
    for name in ("whole", "parts"):
        push_folder(merged / name, name, "--license", "cc-by-4.0", "--card_language", "ca")
    assert sorted(merged.rglob("*")) == before
    whole, parts = (hub.repositories[f"datasets/alice/{name}"].files() for name in ("whole", "parts"))
    assert {name: data for name, data in parts.items() if name != CARD} == {
        name: data for name, data in whole.items() if name != CARD
    }
    for name, data in parts.items():
        for private in (str(merged), "home-of-alice", "secret", "hidden", str(tiny_model_dir)):
            assert private.encode() not in data, name
    copy = fetched(hub, tmp_path / "copy", "datasets/alice/parts")
    opened = open_dataset(str(copy))
    own = open_dataset(str(merged / "parts"))
    assert rows_of(opened) == rows_of(own)
    assert opened.train.source_names == own.train.source_names
    loaded = datasets.load_dataset(str(copy), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"]["input_ids"][:] == [row[0] for row in rows_of(own)[: len(own.train)]]
    manifest = manifest_of(copy)
    assert [part.name for part in manifest.parts] == ["tokens", "tokens (2)"]
    card = (copy / CARD).read_text()
    assert "Merged from 2 token datasets" in card
    assert "| `packing` | concat and best_fit |" in card


def test_a_source_that_two_parts_have_read_is_one_row_of_the_card(merged: Path) -> None:
    manifest = manifest_of(merged / "whole")
    source = manifest.sources[0]
    again = replace(source, documents=source.documents + 1, tokens=source.tokens + 2)
    card = str(dataset_card(replace(manifest, sources=(source, again)), "alice/whole", None, None))
    assert f"| `{source.name}` | {2 * source.documents + 1} | {2 * source.tokens + 2:,} |" in card


def test_no_part_of_a_published_merge_has_the_token_of_a_url(merged: Path) -> None:
    manifest = manifest_of(merged / "whole")
    url = PRIVATE[1].format("chat.jinja")
    parts = tuple(
        replace(
            part,
            settings=replace(part.settings, chat_template=url, validation_dataset=[url], boilerplate=url),
            cleaning={"boilerplate": {"lines": url}},
        )
        for part in manifest.parts
    )
    public = public_manifest(replace(manifest, parts=parts))
    assert SECRET not in str(public)
    assert [part.settings.chat_template for part in public.parts] == ["chat.jinja", "chat.jinja"]


def test_the_public_copy_of_parts_links_their_rows(merged: Path) -> None:
    with public_copy(merged / "parts", manifest_of(merged / "parts"), "alice/parts", None, None) as copy:
        files = sorted(copy.glob("train/*.arrow"))
        assert [file.is_symlink() for file in files] == [False, True]  # the first one gets labels
        assert files[1].resolve() == (merged / "hidden" / "tokens" / "train" / "data-00000-of-00001.arrow").resolve()


def test_published_slices_name_each_source_once(
    tmp_path: Path, tiny_model_dir: Path, sources: list[Path], hub: StandInHub
) -> None:
    slices = [tmp_path / "secret" / str(number) for number in (1, 2)]
    for number, folder in enumerate(slices, 1):
        options = ["--shard", f"{number}/2", "--parts", "true", "--max_length", "16", "--num_proc", "1"]
        argv = ["--dataset", f"ca={sources[0].parent}", f"es={sources[1]}", "--tokenizer_name", tiny_model_dir]
        tokenize_dataset.main([*map(str, argv), "--output_dir", str(folder), *options], ShardSizes(500, 1 << 20))
    with pytest.raises(
        InputError, match=r"secret/1 is a slice made with --shard; merge all slices and publish the result"
    ):
        push_folder(slices[0], "tokens")
    merge.main([*map(str, slices), "--parts", "true", "--output_dir", str(tmp_path / "all")])
    hub.faults.append(Fault("POST .*/commit/", 500))
    with pytest.raises(RunError, match=r"all is complete, but pushing it to alice/tokens failed"):
        push_folder(tmp_path / "all", "tokens")
    hub.faults.clear()
    push_folder(tmp_path / "all", "tokens")
    assert not list(tmp_path.glob(".fabric-train-push-*"))
    copy = fetched(hub, tmp_path / "copy")
    assert rows_of(open_dataset(str(copy))) == rows_of(open_dataset(str(tmp_path / "all")))
    card = (copy / CARD).read_text()
    assert [card.count(f"\n| `{name}` | 40 |") for name in ("ca", "es")] == [1, 1]
    assert all(file.sha256 for source in manifest_of(copy).sources for file in source.files)


def test_what_cannot_be_published_is_refused_before_the_hub_is_asked(
    merged: Path, tmp_path: Path, tiny_model_dir: Path, hub: StandInHub
) -> None:
    alone = Path(shutil.copytree(merged / "parts", tmp_path / "parts"))
    older = Path(shutil.copytree(merged / "whole", tmp_path / "older"))
    (older / MANIFEST).unlink()
    for folder, line in {
        tmp_path / "none": "none: no such folder; give the --output_dir of fabric-train tokenize",
        merged: "not a token dataset: it has no dataset_dict.json",
        alone: "part 1 of 2, ../secret/tokens, is missing",
        older: "no manifest.json, so its sources and tokenizer are unknown; tokenize again",
    }.items():
        with pytest.raises(InputError, match=re.escape(line)):
            push_folder(folder, "tokens")
    with pytest.raises(InputError, match="--push_to_hub is required; give OWNER/NAME"):
        publish.main([str(merged / "whole")])
    source = merged / "secret" / "texts.jsonl"
    with pytest.raises(
        InputError, match=r"is a merged token dataset, not one that this command wrote; push it with .*publish"
    ):
        tokenize(merged / "whole", tiny_model_dir, source, push_to_hub="alice/tokens")
    assert hub.calls == []
