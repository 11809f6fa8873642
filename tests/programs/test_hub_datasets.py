"""Subsets, splits and revisions of hub datasets, here from a server with the hub's interface, and of local copies."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest

from fabric_train.cleaning.boilerplate import Boilerplate, hash_lines, write_repeated_lines
from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError
from fabric_train.reading.hf_datasets import DatasetName, parse_dataset_name
from fabric_train.reading.sources import open_sources
from tests.support import pair_datasets
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.stand_in_hub import Repository, StandInHub
from tests.support.token_datasets import documents_in, manifest_of, tokenize

Start = Callable[..., ForkedRun]
TOKENIZE = "fabric_train.programs.tokenize_dataset"
OLD = "0" * 39 + "1"
NEW = "0" * 39 + "2"
README = """---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train-*.jsonl}
  - {split: test, path: en/test.jsonl}
- config_name: es
  data_files: es/*.jsonl
---
# Texts
"""


def texts(what: str) -> list[str]:
    return [f"{what}: text number {number}" for number in range(30)]


def lines(what: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(what)).encode()


def content(version: str) -> dict[str, bytes]:
    """Return the files of a dataset with two subsets."""
    names = {"en/train-0.jsonl": "en 0", "en/train-1.jsonl": "en 1", "en/test.jsonl": "en test", "es/all.jsonl": "es"}
    return {"README.md": README.encode(), **{name: lines(f"{version} {what}") for name, what in names.items()}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of preference pairs."""
    return pair_datasets.write_source(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", range(12))


@pytest.fixture(scope="module")
def hub(pairs: Path) -> Iterator[str]:
    """The address of a hub with two datasets; the tag v1 of one is an older commit than its branch main."""
    with StandInHub() as server:
        server.add("datasets/owner/pairs", {"train.jsonl": pairs.read_bytes()})
        commits = {OLD: content("old"), NEW: content("new")}
        server.repositories["datasets/owner/texts"] = Repository(commits, {"v1": OLD, "main": NEW})
        yield server.address


# what the libraries take from HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME when they are imported, which the server has done
USE_THE_HUB = """
import datasets
from huggingface_hub import constants, hf_api
constants.ENDPOINT = datasets.config.HF_ENDPOINT = hf_api.api.endpoint = ADDRESS
constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = False
constants.HUGGINGFACE_CO_URL_TEMPLATE = ADDRESS + "/{repo_id}/resolve/{revision}/{filename}"
constants.HF_HUB_CACHE = HOME + "/hub"
datasets.config.HF_DATASETS_CACHE = datasets.config.HF_MODULES_CACHE = HOME + "/datasets"
"""


@pytest.fixture(scope="module")
def online(hub: str, tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns) -> Start:
    """Return ``start(program, *words)``, a finished program that uses the hub."""
    home = str(tmp_path_factory.mktemp("online"))
    env = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": home}
    before = USE_THE_HUB.replace("ADDRESS", repr(hub)).replace("HOME", repr(home))

    def start(program: str, *words: object) -> ForkedRun:
        started = forked_runs.start(words, 1, program=program, env=env, before=before)
        started.wait()
        return started

    return start


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the dataset on this machine."""
    for name, data in content("new").items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("owner/name", ("owner/name", None, None, None)),
        ("owner/name:en", ("owner/name", "en", None, None)),
        ("owner/name:20231101.es:train", ("owner/name", "20231101.es", "train", None)),
        ("name::test+train", ("name", None, "test+train", None)),
        ("owner/name@refs/convert/parquet", ("owner/name", None, None, "refs/convert/parquet")),
        ("owner/name:en@v1.0", ("owner/name", "en", None, "v1.0")),
        ("a:b:c@d", ("a", "b", "c", "d")),
        ("a:b:c:d", None),
        ("a:b:train[:10%]", None),
        ("@main", None),
    ],
)
def test_names_of_datasets_have_four_parts(value: str, parts: tuple[str | None, ...] | None) -> None:
    assert parse_dataset_name(value) == (DatasetName(*parts) if parts else None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_part_of_a_hub_dataset_is_read_at_its_commit_and_cleaned(
    online: Start, tmp_path: Path, tiny_model_dir: Path, stream: str
) -> None:
    removed = texts("new en 1")[3]
    ((_, hashed),) = hash_lines([removed])
    (tmp_path / "lines").mkdir()
    write_repeated_lines(tmp_path / "lines", Boilerplate(2, np.array([hashed], np.uint64)), "text")
    options = ["--tokenizer_name", tiny_model_dir, "--max_length", 16, "--num_proc", 1, "--validation_split", 0]
    options += ["--boilerplate", tmp_path / "lines"]
    names = ["owner/texts:en", "owner/texts:en:test@v1", "owner/texts:es"]
    out = tmp_path / "out"
    done = online(TOKENIZE, "--dataset", *names, *options, "--stream", stream, "--output_dir", out)
    assert done.codes() == [0], done.report()
    found = documents_in(datasets.load_from_disk(out)["train"]["input_ids"][:], out)
    expected = [text for what in ("new en 0", "new en 1", "old en test", "new es") for text in texts(what)]
    expected.remove(removed)
    assert found == expected[: len(found)]
    assert len(found) >= len(expected) - 1
    records = [(one.hub_name, one.kind, one.subset, one.splits, one.revision) for one in manifest_of(out).sources]
    assert records == [
        ("owner/texts", "hub", "en", ("train",), NEW),
        ("owner/texts", "hub", "en", ("test",), OLD),
        ("owner/texts", "hub", "es", ("train",), NEW),
    ]


@pytest.mark.slow
def test_pairs_of_a_hub_dataset_are_streamed(online: Start, tmp_path: Path, pairs: Path) -> None:
    model = pair_datasets.write_model(tmp_path / "model")
    out = tmp_path / "out"
    options = ["--tokenizer_name", model, "--max_length", 192, "--num_proc", 1, "--validation_split", 0]
    options += ["--packing", "none", "--stream", "true", "--output_dir", out]
    done = online(TOKENIZE, "--dataset", "owner/pairs", *options)
    assert done.codes() == [0], done.report()
    pair_datasets.tokenize(tmp_path / "local", model, [pairs], validation_split=0, packing="none")
    streamed, read = (datasets.load_from_disk(folder)["train"].to_list() for folder in (out, tmp_path / "local"))
    assert sorted(map(str, streamed)) == sorted(map(str, read))
    assert manifest_of(out).has_pairs


@pytest.mark.slow
def test_parts_that_the_hub_does_not_have_are_refused_with_those_there_are(
    online: Start, tmp_path: Path, tiny_model_dir: Path
) -> None:
    nothing = "no such file or folder here, and the hub"
    faults = {
        "owner/texts": "it has several subsets; give one as NAME:SUBSET; it has en, es",
        "owner/texts:de": f"{nothing} answers: BuilderConfig 'de' not found. Available: ['en', 'es']",
        "owner/texts:en:dev": "no split 'dev'; it has train, test",
        "owner/texts:en@v9": f"{nothing} answers: Revision 'v9' doesn't exist for dataset 'owner/texts' on the Hub.",
        "owner/nothing:en": f"{nothing} has nothing of this name that this login can read",
    }
    argv = ["--tokenizer_name", tiny_model_dir, "--output_dir", tmp_path / "out", "--dataset", *faults]
    done = online(TOKENIZE, *argv)
    assert done.codes() == [2]
    printed = [line for line in done.stderr().splitlines() if line.startswith("error: ")]
    assert printed == [f"error: --dataset {name}: {fault}" for name, fault in faults.items()]


@pytest.mark.slow
def test_a_part_of_a_hub_dataset_is_streamed_into_training(online: Start, tmp_path: Path, tiny_model_dir: Path) -> None:
    options = ["--model_name", tiny_model_dir, "--max_length", 16, "--total_batch_size", 1, "--accelerator", "cpu"]
    run = tmp_path / "run"
    argv = ["--streaming_dataset", "owner/texts:en@v1", *options, "--max_step", 2, "--output_dir", run]
    done = online("fabric_train.__main__", *argv)
    assert done.codes() == [0], done.report()
    (state,) = run.glob("checkpoints/step-00000002/trainer.json")
    assert f"owner/texts, subset en, train, commit {OLD}" in state.read_text()


def texts_of(name: str, tmp_path: Path) -> list[str]:
    (source,) = open_sources([name], "--dataset", False, tmp_path / "downloads")
    rows = [row for part in source.parts(1 << 20) for _, row in source.reader(part, ("text",))]
    return [row["text"] for row in rows if not isinstance(row, BadRowError)]


def test_a_part_of_a_copy_is_read_as_files(copy: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    assert texts_of(f"{copy}:en", tmp_path) == [*texts("new en 0"), *texts("new en 1")]
    assert texts_of(f"{copy}:en:test", tmp_path) == texts("new en test")
    assert texts_of(f"{copy}:en:test+train", tmp_path)[:31] == [*texts("new en test"), "new en 0: text number 0"]
    assert texts_of(f"{copy}:es", tmp_path) == texts("new es")
    tokenize(tmp_path / "out", tiny_model_dir, f"{copy}:en:test")
    (record,) = manifest_of(tmp_path / "out").sources
    assert (record.kind, [file.path for file in record.files]) == ("files", ["en/test.jsonl"])


def test_a_split_of_a_saved_dataset_can_be_chosen(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_dict({"text": texts(name)}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert texts_of(f"{tmp_path}/saved", tmp_path) == texts("train")
    assert texts_of(f"{tmp_path}/saved::test", tmp_path) == texts("test")
    with pytest.raises(InputError, match="no subsets"):
        texts_of(f"{tmp_path}/saved:en", tmp_path)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (":de", r"copy:de: BuilderConfig 'de' not found. Available: \['en', 'es'\]"),
        ("::test", "it has several subsets; give one as NAME:SUBSET; it has en, es"),
        (":en:dev", "no split 'dev'; it has train, test"),
        (":en@main", "a folder has no revisions; leave out @main"),
    ],
)
def test_parts_that_a_copy_does_not_have_are_refused(copy: Path, tmp_path: Path, given: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault) as caught:
        texts_of(f"{copy}{given}", tmp_path)
    assert len(caught.value.faults) == 1


def test_a_copy_without_a_subset_is_what_the_name_on_the_hub_is(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it has several subsets; give one as NAME:SUBSET; it has en, es"):
        texts_of(str(copy), tmp_path)
    (copy / "README.md").write_text("---\nlicense: mit\n" + README.removeprefix("---\n").replace("es\n", "default\n"))
    assert texts_of(str(copy), tmp_path) == texts("new es")
    only = "---\nconfigs:\n- config_name: en\n" + README.partition("config_name: en\n")[2].partition("- config_name")[0]
    (copy / "README.md").write_text(f"{only}---\n")
    assert texts_of(str(copy), tmp_path) == [*texts("new en 0"), *texts("new en 1")]
    (copy / "README.md").write_text("---\ntitle: texts\n---\nconfigs: none\n")
    assert len(texts_of(str(copy), tmp_path)) == 4 * len(texts(""))


@pytest.mark.parametrize(
    ("splits", "read"),
    [
        (("train", "test", "train_gen"), ("train",)),
        (("train_sft", "test_sft", "train_gen", "test_gen"), ("train_sft",)),
        (("train_prefs", "train_sft", "test_prefs"), ("train_prefs", "train_sft")),
        (("corpus", "validation"), ("corpus",)),
        (("test", "dev"), ("test", "dev")),
    ],
)
@pytest.mark.parametrize("kind", ["README", "names of files", "saved"])
def test_only_splits_to_train_on_are_read_by_default(
    kind: str, splits: tuple[str, ...], read: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "dataset"
    if kind == "saved":
        rows = {split: datasets.Dataset.from_dict({"text": texts(split)}) for split in splits}
        datasets.DatasetDict(rows).save_to_disk(folder)
    else:
        (folder / "data").mkdir(parents=True)
        for split in splits:
            (folder / "data" / f"{split}-00000-of-00001.jsonl").write_bytes(lines(split))
    if kind == "README":
        files = [f"  - {{split: {split}, path: data/{split}-*}}\n" for split in splits]
        readme = f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(files)}---\n"
        (folder / "README.md").write_text(readme)
    expected = [text for split in read for text in texts(split)]
    assert sorted(texts_of(str(folder), tmp_path)) == sorted(expected)


@pytest.mark.parametrize("path", ["../secret.jsonl", "/etc/hostname", "nothing.jsonl", "["])
def test_a_readme_that_names_other_files_is_refused(copy: Path, tmp_path: Path, path: str) -> None:
    shutil.copy(copy / "es" / "all.jsonl", tmp_path / "secret.jsonl")
    (copy / "README.md").write_text(README.replace("path: en/test.jsonl", f"path: {path}"))
    with pytest.raises(InputError) as caught:
        texts_of(f"{copy}:en:test", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_dataset_script_is_refused_in_one_line(copy: Path, tmp_path: Path) -> None:
    (copy / "copy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="Dataset scripts are no longer supported"):
        texts_of(f"{copy}:en", tmp_path)
    assert not (tmp_path / "ran").exists()
