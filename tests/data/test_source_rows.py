"""Shares of sources inside a token dataset: which rows they have, and how many of these an epoch takes."""

import math
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares
from fabric_train.data.mixture_sources import find_source_rows
from fabric_train.data.token_dataset import open_dataset
from fabric_train.data.token_mixture import TokenMixture, open_mixture
from fabric_train.token_dataset.document_index import open_index
from fabric_train.tokenization import merge
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

LENGTHS = {"va": (20, 7), "es": (40,), "en": (3,)}  # documents of the files of each source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """Token datasets of each packing, one with weights, and a merge; the source va comes before and after es."""
    made = tmp_path_factory.mktemp("sources")
    files: dict[str, Path] = {}
    for name, nums_documents in LENGTHS.items():
        for index, num_documents in enumerate(nums_documents):
            texts = [f"{name} {number} " * (1 + number % 9) for number in range(num_documents)]
            files[f"{name}{index}"] = write_jsonl(made / f"{name}{index}.jsonl", texts)
    sources = [f"va={files['va0']}", f"es={files['es0']}", f"en={files['en0']}", f"va={files['va1']}"]
    for packing in ("concat", "best_fit", "none"):
        tokenize(made / packing, tiny_model_dir, *sources, packing=packing, validation_split=0.1)
    tokenize(made / "other", tiny_model_dir, f"es={files['va1']}", f"eu={files['es0']}", validation_split=0.1)
    tokenize(made / "weighted", tiny_model_dir, *sources[:2], "--weights", "1", "2", validation_split=0.1)
    merge.main([str(made / "concat"), str(made / "other"), "--output_dir", str(made / "merged")])
    merge.main([str(made / "weighted"), str(made / "other"), "--output_dir", str(made / "merged-weighted")])
    return made


@pytest.mark.parametrize("name", ["concat", "best_fit", "none", "merged"])
def test_the_rows_of_a_source_are_those_that_begin_with_it(folder: Path, name: str) -> None:
    dataset = open_dataset(str(folder / name))
    manifest = manifest_of(folder / name)
    index = open_index(folder / name, manifest, "train")
    assert index is not None
    pieces = index.pieces(np.arange(len(dataset.train)))
    sources = index.source_numbers(pieces.documents)
    expected: dict[str, list[int]] = {}
    begins_row = pieces.positions == 0
    for row, source in zip(pieces.rows[begins_row], sources[begins_row], strict=True):
        expected.setdefault(index.sources.names[source], []).append(int(row))
    source_ranges = find_source_rows(dataset)
    assert {source: list(chain.from_iterable(ranges)) for source, ranges in source_ranges.items()} == expected
    assert len(source_ranges["va"]) == 2

    # only concat has rows of two sources
    num_shared = 0
    for row in range(len(dataset.train)):
        if len(set(sources[pieces.rows == row])) > 1:
            num_shared += 1
    if name in ("best_fit", "none"):
        assert num_shared == 0
    else:
        assert 0 < num_shared <= 5


def mixture(folder: Path, *shares: str | float, of_tokens: bool = False, datasets: tuple[str, ...]) -> TokenMixture:
    folders = [str(folder / name) for name in datasets]
    values = [share.replace("@", f"{folder}/") if isinstance(share, str) else share for share in shares]
    return open_mixture(folders, Shares("--shares", values, of_tokens), True, folder)  # type: ignore[arg-type]


def test_a_mixture_takes_shares_of_sources(folder: Path) -> None:
    shares = ("@concat:es=0.5", "@concat=1", "@other=2", "@concat:en=0")
    mixed = mixture(folder, *shares, datasets=("concat", "other"))
    dataset = open_dataset(str(folder / "concat"))
    rows = find_source_rows(dataset)
    sizes = {name: sum(map(len, ranges)) for name, ranges in rows.items()}
    names = [source.name.removeprefix(f"{folder}/") for source in mixed.sources]
    assert names == ["concat:es", "concat:en", "concat", "other"]
    size_of_other = len(open_dataset(str(folder / "other")).train)
    assert mixed.rows_per_epoch == (round(sizes["es"] / 2), 0, sizes["va"], 2 * size_of_other)
    assert len(mixed.train) == len(dataset.train) + size_of_other
    for row in range(len(mixed.train)):
        part, row_of_part = mixed.train.locate(row)
        ((ids, _, _),) = mixed.train.read([row])
        ((expected_ids, _, _),) = mixed.parts[part].train.read([row_of_part])
        assert ids.tolist() == expected_ids.tolist()

    # the rows of concat: first es, then en, and then the others
    locations = [mixed.train.locate(row) for row in range(len(dataset.train))]
    assert {part for part, _ in locations} == {0}
    rows_of_concat = [row for _, row in locations]
    assert rows_of_concat[: sizes["es"]] == list(chain(*rows["es"]))
    assert rows_of_concat[sizes["es"] + sizes["en"] :] == list(chain(*rows["va"]))


def test_the_token_share_of_a_folder_is_that_of_its_other_sources_together(folder: Path) -> None:
    mixed = mixture(folder, "@merged:es=0.25", "@merged=0.75", of_tokens=True, datasets=("merged",))
    total = len(mixed.train)
    assert mixed.rows_per_epoch[0] in (math.floor(total / 4), math.ceil(total / 4))
    assert sum(mixed.rows_per_epoch) == total
    # a phase that names another source shares the same among more listed sources
    both = Shares("--shares", [{f"{folder}/merged:eu": 0.5}, {f"{folder}/merged": 0.5}], counts_tokens=True)
    folders = [str(folder / "merged")]
    listed = open_mixture(folders, Shares("--shares", [1.0]), True, folder, phase_shares=[both, mixed_shares(folder)])
    assert [source.source for source in listed.sources] == ["eu", "es", None]
    rows = listed.rows_of(mixed_shares(folder))
    assert rows[1] in (math.floor(total / 4), math.ceil(total / 4))
    assert listed.rows_per_epoch == tuple(source.num_rows for source in listed.sources)


def mixed_shares(folder: Path) -> Shares:
    return Shares("--shares", [f"{folder}/merged:es=0.25", f"{folder}/merged=0.75"], counts_tokens=True)


@pytest.mark.parametrize(
    ("datasets", "shares", "fault"),
    [
        (
            ("concat",),
            ("@concat:es=1",),
            "--shares has no number for va, en of @concat; give one for each, or 0 to leave it out",
        ),
        (
            ("concat", "other"),
            ("@concat=1",),
            "--shares has no number for @other; give one for each, or 0 to leave it out",
        ),
        (("concat",), ("@concat=1", "@concat:eu=1"), "@concat has no rows from a source eu; it has va, es, en"),
        (
            ("concat",),
            ("@concat=1", "@other:es=1"),
            "@other:es is neither a folder in --train_data_dir nor a source of one",
        ),
        (("concat",), ("@concat=0",), "--shares: nothing is left to train on; give a number above 0"),
        (
            ("concat",),
            ("@concat=1", "@concat:en=0.0001"),
            "--shares reads none of the ",
        ),
        (
            ("concat",),
            ("@concat=x",),
            "--shares: expected numbers above 0, one for each folder, or NAME=NUMBER such as ",
        ),
        (("weighted",), ("@weighted=1", "@weighted:es=1"), "@weighted was tokenized with --weights, which mixes "),
        (
            ("merged-weighted",),
            ("@merged-weighted:es=1",),
            "@merged-weighted was tokenized with --weights, which mixes",
        ),
    ],
)
def test_shares_that_name_what_is_not_there_are_refused_in_one_line(
    folder: Path, datasets: tuple[str, ...], shares: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(InputError) as refused:
        mixture(folder, *shares, datasets=datasets)
    (line,) = refused.value.faults
    assert fault.replace("@", f"{folder}/") in line


def test_a_dataset_without_index_has_no_shares_of_sources(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "older").symlink_to(folder / "concat")
    dataset = open_dataset(str(tmp_path / "older"))
    assert dataset.manifest is not None
    object.__setattr__(dataset.manifest, "has_index", False)
    with pytest.raises(InputError, match="has no document index, so the rows of its sources are unknown; tokenize"):
        find_source_rows(dataset)
