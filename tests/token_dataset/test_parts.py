"""merge --parts true copies no row, and what it writes is read as the full merge of the same token datasets."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_train.cli.errors import InputError, RunError
from fabric_train.cli.shares import Shares
from fabric_train.data.mixture_sources import find_source_rows
from fabric_train.data.token_dataset import open_dataset
from fabric_train.data.token_mixture import open_mixture
from fabric_train.inspection import __main__ as inspect
from fabric_train.token_dataset import parts as parts_module
from fabric_train.token_dataset.document_index import DocumentIndex, open_index
from fabric_train.token_dataset.parts import open_parts
from fabric_train.token_dataset.token_folder import open_splits, read_arrow
from fabric_train.tokenization import merge
from tests.support.token_datasets import alter_token, manifest_of, tokenize, write_jsonl

PACKINGS = ("concat", "best_fit", "concat")


def merge_all(folders: list[Path], target: Path, *flags: str) -> Path:
    merge.main([*map(str, folders), "--output_dir", str(target), *flags])
    return target


@pytest.fixture(scope="module")
def merges(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A folder with three token datasets in rows of 16 tokens, ``part-0`` to ``part-2``, and two merges of them.

    ``whole`` has copies of all their rows, and ``parts`` only refers to them.
    """
    folder = tmp_path_factory.mktemp("parts")
    part_folders = []
    for part, packing in enumerate(PACKINGS):
        sources = []
        for name in ("es", "va"):
            texts = [f"{name} {part} {number} " * (1 + number % 5) for number in range(30)]
            file = write_jsonl(folder / f"{name}{part}.jsonl", texts)
            sources.append(f"{name}={file}")
        part_folder = folder / f"part-{part}"
        tokenize(part_folder, tiny_model_dir, *sources, packing=packing, validation_split=0.2)
        part_folders.append(part_folder)
    merge_all(part_folders, folder / "whole")
    merge_all(part_folders, folder / "parts", "--parts", "true")
    return folder


def index_of(folder: Path, split: str) -> DocumentIndex:
    index = open_index(folder, manifest_of(folder), split)
    assert index is not None
    return index


def test_a_dataset_of_parts_has_the_rows_of_the_full_merge(merges: Path) -> None:
    whole = open_dataset(str(merges / "whole"))
    parts = open_dataset(str(merges / "parts"))
    assert parts.fingerprint == whole.fingerprint  # so a run may go on with either
    assert not list((merges / "parts").rglob("*.arrow"))
    for split, whole_split in ((parts.train, whole.train), (parts.validation, whole.validation)):
        assert split is not None
        assert whole_split is not None
        assert len(split) == len(whole_split)
        assert split.lengths() == whole_split.lengths()
        assert split.source_names == whole_split.source_names

        # rows and their pieces, in any order
        row_indices = np.random.default_rng(0).permutation(len(whole_split)).tolist()
        for row, whole_row in zip(split.read(row_indices), whole_split.read(row_indices), strict=True):
            for array, whole_array in zip(row, whole_row, strict=True):
                np.testing.assert_array_equal(array, whole_array)
        whole_pieces = whole_split.pieces(row_indices)
        for name, column in vars(split.pieces(row_indices)).items():
            np.testing.assert_array_equal(column, getattr(whole_pieces, name), name)
        assert np.array_equal(split.main_sources(), whole_split.main_sources())
        assert split.id_range() == whole_split.id_range()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_document_indexes_of_parts_read_as_the_joined_one(merges: Path, split: str) -> None:
    index = index_of(merges / "parts", split)
    whole_index = index_of(merges / "whole", split)
    for name in ("documents", "rows", "continuations", "checksums"):
        records = getattr(index, name)
        whole_records = getattr(whole_index, name)
        assert len(records) == len(whole_records)
        assert np.array_equal(records[:], whole_records)
        order = np.random.default_rng(1).permutation(len(whole_records))
        assert np.array_equal(records[order], whole_records[order])
        assert records[0] == whole_records[0]
        assert records[-1] == whole_records[-1]
    assert np.array_equal(index.rows["documents"][5:9], whole_index.rows["documents"][5:9])
    assert str(index.origin(0)) == str(whole_index.origin(0))


def test_sources_of_parts_have_the_rows_that_they_have_in_the_full_merge(merges: Path) -> None:
    mixtures = []
    for name in ("parts", "whole"):
        part = str(merges / "part-0")
        merged = str(merges / name)
        shares = Shares("--shares", [f"{part}=0.5", f"{merged}:va=2", f"{merged}=1"])
        mixtures.append(open_mixture([part, merged], shares, isolate_documents=True, manifest_folder=merges))
    of_parts, of_whole = mixtures
    assert of_parts.rows_per_epoch == of_whole.rows_per_epoch
    assert of_parts.fingerprint == of_whole.fingerprint
    all_rows = range(len(of_whole.train))
    for row, whole_row in zip(of_parts.train.read(all_rows), of_whole.train.read(all_rows), strict=True):
        assert row[0].tolist() == whole_row[0].tolist()  # the ids
    assert of_parts.validation is not None
    assert of_whole.validation is not None
    assert of_parts.validation.main_sources().tolist() == of_whole.validation.main_sources().tolist()

    source_rows = find_source_rows(open_dataset(str(merges / "parts")))
    assert source_rows == find_source_rows(open_dataset(str(merges / "whole")))


def test_inspector_and_full_merge_read_parts_as_one_dataset(
    merges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for name in ("whole", "parts"):
        inspect.main([str(merges / name), "--rows", "3"])
        reports.append(capsys.readouterr().out.replace(str(merges / name), "DATASET"))
    assert reports[0] == reports[1]

    # a full merge of the parts writes the same files
    merged_later = merge_all([merges / "parts"], tmp_path / "later")
    for file in sorted((merges / "whole").rglob("*")):
        if file.is_file():
            assert (merged_later / file.relative_to(merges / "whole")).read_bytes() == file.read_bytes(), file

    # parts of parts are listed as plain parts
    nested = merge_all([merges / "parts", merges / "part-1"], tmp_path / "nested", "--parts", "true")
    paths = [(nested / part.path).resolve() for part in open_parts(nested).record.parts]
    assert paths == [(merges / f"part-{part}").resolve() for part in (0, 1, 2, 1)]


def copied(merges: Path, folder: Path) -> Path:
    """Copy the parts and the folder that joins them, so that the relative paths between them stay."""
    for name in ("parts", *(f"part-{part}" for part in range(len(PACKINGS)))):
        shutil.copytree(merges / name, folder / name)
    return folder / "parts"


def test_parts_move_together_and_open_when_a_row_is_read(
    merges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(merges, tmp_path / "moved")
    monkeypatch.setenv("RANK", "1")  # only rank 0 looks at all parts
    monkeypatch.setenv("WORLD_SIZE", "2")
    shutil.rmtree(tmp_path / "moved" / "part-1")
    dataset = open_dataset(str(folder))
    num_first_rows = open_parts(folder).record.parts[0].splits["train"].rows
    assert maps_in(tmp_path / "moved") == set()

    # rows of the first part open this part alone
    assert len(dataset.train.__getitems__([0, num_first_rows - 1]).input_ids) == 2
    mapped_folders = {path.relative_to(tmp_path / "moved").parts[0] for path in maps_in(tmp_path / "moved")}
    assert mapped_folders == {"part-0", "parts"}

    # the next row is of the part that is missing
    with pytest.raises(InputError, match=r"part 2 of 3, \.\./part-1, is missing .* restore it, or merge the parts"):
        dataset.train.read([num_first_rows])
    monkeypatch.delenv("RANK")
    with pytest.raises(InputError, match="part 2 of 3"):
        open_dataset(str(folder))


def test_a_changed_part_is_named(merges: Path, tmp_path: Path) -> None:
    folder = copied(merges, tmp_path / "changed")
    dataset = open_dataset(str(folder))
    part = tmp_path / "changed" / "part-2"
    num_rows = [part_record.splits["train"].rows for part_record in open_parts(folder).record.parts]

    # a token, the size of a file, and the manifest
    alter_token(part, "train", 1)
    with pytest.raises(RunError, match=r"part-2/train/data-.*\.arrow: row 1 \(\d+ of the split\) has changed"):
        dataset.train.read([num_rows[0] + num_rows[1] + 1])
    (file,) = (part / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(InputError, match=r"part-2/train/data.* bytes instead of .*tokenize this part again"):
        open_dataset(str(folder)).train.read([len(dataset.train) - 1])
    manifest = part / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(InputError, match=r"part 3 of 3, \.\./part-2, has changed since the merge"):
        open_dataset(str(folder))


def test_a_damaged_list_of_parts_is_one_line(merges: Path, tmp_path: Path) -> None:
    folder = copied(merges, tmp_path / "damaged")
    last_row = len(open_dataset(str(folder)).train) - 1

    # parts.json: cut, a path with a zero byte, a path out of the part
    list_file = folder / "parts.json"
    text = list_file.read_text()
    for damaged_text in (text[:-9], text.replace("../part-1", "../part\\u0000"), text.replace(".arrow", "/../x")):
        list_file.write_text(damaged_text)
        with pytest.raises(InputError, match=r"parts\.json|part 2 of 3"):
            open_dataset(str(folder))
    list_file.write_text(text)

    # the table of record batches
    batches_file = folder / "train" / "batches.npy"
    batches = np.load(batches_file)
    for field, batch, value in (("offset", -1, 1 << 40), ("offset", -1, 8), ("file", -1, 99), ("row", 0, 7)):
        damaged_batches = batches.copy()
        damaged_batches[field][batch] = value
        np.save(batches_file, damaged_batches)
        with pytest.raises(InputError, match=r"damaged"):
            open_dataset(str(folder)).train.read([last_row])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(8))


def open_a_bracket(file: Path) -> None:
    """Damage the header, which numpy parses as Python."""
    file.write_bytes(file.read_bytes().replace(b"}", b"(", 1))


def unorder(file: Path) -> None:
    np.save(file, np.load(file)[::-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("part-1/train/data-00000-of-00001.arrow", cut),
        ("part-2/validation/data-00000-of-00001.arrow", Path.unlink),
        ("part-1/train/index/documents.npy", cut),
        ("part-1/train/index/checksums.npy", lengthen),
        ("part-2/validation/index/rows.npy", Path.unlink),
        ("part-2/train/index/rows.npy", open_a_bracket),
        ("parts/train/batches.npy", cut),
        ("parts/train/batches.npy", unorder),
        ("parts/validation/sources.npy", cut),
        ("parts/validation/batches.npy", Path.unlink),
    ],
)
def test_a_damaged_file_of_a_part_is_named_when_the_rows_are_opened(
    merges: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    folder = copied(merges, tmp_path / "damaged")
    damage(tmp_path / "damaged" / name)
    for read in (lambda: open_dataset(str(folder)), lambda: open_splits(folder)):
        with pytest.raises(InputError) as caught:
            read()
        (fault,) = caught.value.faults
        assert os.path.normpath(fault.split()[0].rstrip(":")) == str(tmp_path / "damaged" / name)


def test_an_index_of_another_part_is_named(merges: Path, tmp_path: Path) -> None:
    folder = copied(merges, tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "part-0" / "train")
    shutil.copytree(tmp_path / "mixed" / "part-1" / "train", tmp_path / "mixed" / "part-0" / "train")
    for read in (lambda: open_dataset(str(folder)), lambda: open_splits(folder)):
        with pytest.raises(InputError, match=r"part-0/train/.* instead of .*tokenize this part again"):
            read()


@pytest.mark.parametrize("name", ["whole", "parts"])
def test_rows_that_an_index_does_not_have_are_damage(merges: Path, name: str) -> None:
    index = index_of(merges / name, "train")
    last_row = index.num_rows - 1
    assert len(index.pieces(np.array([last_row])).documents)
    with pytest.raises(InputError, match="the document index is damaged; tokenize again"):
        index.pieces(np.array([0, last_row + 1]))


def test_lists_outside_of_their_values_are_damage(merges: Path, tmp_path: Path) -> None:
    """pyarrow itself would end the process."""
    shutil.copytree(merges / "part-0", tmp_path / "part")
    (file,) = (tmp_path / "part" / "train").glob("*.arrow")
    first_batch = next(iter(read_arrow(file)))
    offsets = first_batch.column("document_starts").offsets.to_numpy()
    damaged_offsets = offsets.copy()
    damaged_offsets[len(offsets) // 2] = 1 << 30
    content = file.read_bytes()
    assert offsets.tobytes() in content
    file.write_bytes(content.replace(offsets.tobytes(), damaged_offsets.tobytes(), 1))
    with pytest.raises(InputError, match=r"data-.*\.arrow: damaged"):
        list(open_splits(tmp_path / "part")["train"].batches())
    with pytest.raises((InputError, RunError), match=r"data-.*\.arrow"):
        read_all(tmp_path / "part")


def read_all(folder: Path) -> None:
    rows = open_dataset(str(folder)).train
    for row in range(len(rows)):
        rows.read([row])


def maps_in(folder: Path) -> set[Path]:
    """Return the files below a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if str(folder) in line}


def test_at_most_64_parts_are_open(merges: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"copy-{number}" for number in range(parts_module.MOST_OPEN + 6)]
    for folder in folders:
        shutil.copytree(merges / "part-0", folder, copy_function=os.link)
    dataset = open_dataset(str(merge_all(folders, tmp_path / "joined", "--parts", "true")))

    # read the first row of each copy
    first_row = [ids.tolist() for ids, *_ in dataset.train.read([0])]
    rows_of_part = len(dataset.train) // len(folders)
    for part in range(len(folders)):
        batch = dataset.train.__getitems__([part * rows_of_part])
        assert batch.input_ids.tolist() == first_row
        assert batch.pieces is not None

    # the first copies have been closed again
    mapped_files = {path for path in maps_in(tmp_path) if path.suffix == ".arrow"}
    mapped_indexes = {path.parent for path in maps_in(tmp_path) if path.parent.name == "index"}
    assert len(mapped_files) == parts_module.MOST_OPEN
    assert len(mapped_indexes) == parts_module.MOST_OPEN
    assert folders[0] not in {path.parents[1] for path in mapped_files}


def test_a_file_in_many_parts_is_one_note(merges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / f"{copy:02d}" for copy in range(20)]
    for folder in folders:
        shutil.copytree(merges / "part-0", folder)
    capsys.readouterr()
    merge_all(folders, tmp_path / "parts", "--parts", "true")
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note "))
    files = r"\S*es0\.jsonl and 1 more of \S+/00 were also read for \S+/01 and 18 more"
    assert re.fullmatch(rf"note     {files}; documents may occur twice", note)


def test_parts_that_cannot_be_joined_are_refused(merges: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(merges / "part-0", tmp_path / "older"))
    manifest = json.loads((older / "manifest.json").read_text())
    (older / "manifest.json").write_text(json.dumps(manifest | {"has_index": False}))
    with pytest.raises(InputError, match=r"older has no document index.* merge without --parts"):
        merge_all([merges / "part-1", older], tmp_path / "out", "--parts", "true")
    assert not (tmp_path / "out").exists()
