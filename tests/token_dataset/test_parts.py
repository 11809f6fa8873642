"""merge --parts true copies no row, and what it writes is read as the full merge of the same token datasets."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric_train.cli.argument_types import Shares
from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.mixture_sources import find_source_rows
from fabric_train.data.token_dataset import TokenDataset, open_dataset
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
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """Three token datasets in rows of 16 tokens, ``whole`` with all their rows, and ``parts`` with none."""
    folder = tmp_path_factory.mktemp("parts")
    for number, packing in enumerate(PACKINGS):
        texts = {name: [f"{name} {number} {n} " * (1 + n % 5) for n in range(30)] for name in ("es", "va")}
        files = [f"{name}={write_jsonl(folder / f'{name}{number}.jsonl', own)}" for name, own in texts.items()]
        tokenize(folder / f"part-{number}", tiny_model_dir, *files, packing=packing, validation_split=0.2)
    folders = [folder / f"part-{number}" for number in range(len(PACKINGS))]
    merge_all(folders, folder / "whole")
    merge_all(folders, folder / "parts", "--parts", "true")
    return folder


def index_of(folder: Path, split: str) -> DocumentIndex:
    index = open_index(folder, manifest_of(folder), split)
    assert index is not None
    return index


def both(made: Path) -> tuple[TokenDataset, TokenDataset]:
    return open_dataset(str(made / "whole")), open_dataset(str(made / "parts"))


def test_a_dataset_of_parts_has_the_rows_of_the_full_merge(made: Path) -> None:
    whole, parts = both(made)
    assert parts.fingerprint == whole.fingerprint  # so a run may go on with either
    assert not list((made / "parts").rglob("*.arrow"))
    for ours, theirs in ((parts.train, whole.train), (parts.validation, whole.validation)):
        assert ours is not None
        assert theirs is not None
        assert len(ours) == len(theirs)
        assert (ours.lengths(), ours.source_names) == (theirs.lengths(), theirs.source_names)
        random = np.random.default_rng(0).permutation(len(theirs)).tolist()
        for our, their in zip(ours.read(random), theirs.read(random), strict=True):
            for one, other in zip(our, their, strict=True):
                np.testing.assert_array_equal(one, other)
        for name, value in vars(ours.pieces(random)).items():
            np.testing.assert_array_equal(value, getattr(theirs.pieces(random), name), name)
        assert np.array_equal(ours.main_sources(), theirs.main_sources())
        assert ours.id_range() == theirs.id_range()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_document_indexes_of_parts_read_as_the_joined_one(made: Path, split: str) -> None:
    ours = index_of(made / "parts", split)
    theirs = index_of(made / "whole", split)
    for name in ("documents", "rows", "continuations", "checksums"):
        joined = getattr(ours, name)
        written = getattr(theirs, name)
        assert len(joined) == len(written)
        assert np.array_equal(joined[:], written)
        order = np.random.default_rng(1).permutation(len(written))
        assert np.array_equal(joined[order], written[order])
        assert (joined[-1], joined[0]) == (written[-1], written[0])
    assert np.array_equal(ours.rows["documents"][5:9], theirs.rows["documents"][5:9])
    assert str(ours.origin(0)) == str(theirs.origin(0))


def test_sources_of_parts_have_the_rows_that_they_have_in_the_full_merge(made: Path) -> None:
    whole, parts = both(made)
    assert find_source_rows(parts) == find_source_rows(whole)
    shares = {str(made / "part-0"): 0.5, f"{made}/JOINED:va": 2.0, f"{made}/JOINED": 1.0}
    orders = []
    for name in ("parts", "whole"):
        given = [f"{place.replace('JOINED', name)}={share}" for place, share in shares.items()]
        folders = [str(made / "part-0"), str(made / name)]
        mixture = open_mixture(folders, Shares("--shares", given), isolate_documents=True, manifest_folder=made)
        rows = [ids.tolist() for ids, *_ in mixture.train.read(range(len(mixture.train)))]
        assert mixture.validation is not None
        orders.append((mixture.rows_per_epoch, rows, mixture.fingerprint, mixture.validation.main_sources().tolist()))
    assert orders[0] == orders[1]


def test_inspector_and_full_merge_read_parts_as_one_dataset(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for name in ("whole", "parts"):
        inspect.main([str(made / name), "--rows", "3"])
        reports.append(capsys.readouterr().out.replace(str(made / name), "DATASET"))
    assert reports[0] == reports[1]
    again = merge_all([made / "parts"], tmp_path / "again")
    for file in sorted((made / "whole").rglob("*")):
        if file.is_file():
            assert (again / file.relative_to(made / "whole")).read_bytes() == file.read_bytes(), file
    nested = merge_all([made / "parts", made / "part-1"], tmp_path / "nested", "--parts", "true")
    paths = [(nested / part.path).resolve() for part in open_parts(nested).record.parts]
    assert paths == [(made / f"part-{number}").resolve() for number in (0, 1, 2, 1)]


def copied(made: Path, folder: Path) -> Path:
    """Copy the parts and the folder that joins them, which lie as before seen from each other."""
    for name in ("parts", *(f"part-{number}" for number in range(len(PACKINGS)))):
        shutil.copytree(made / name, folder / name)
    return folder / "parts"


def test_parts_move_together_and_open_when_a_row_is_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(made, tmp_path / "moved")
    monkeypatch.setenv("RANK", "1")  # only rank 0 looks at all parts
    monkeypatch.setenv("WORLD_SIZE", "2")
    shutil.rmtree(tmp_path / "moved" / "part-1")
    dataset = open_dataset(str(folder))
    num_first = open_parts(folder).record.parts[0].splits["train"].rows
    assert maps_in(tmp_path / "moved") == set()
    assert len(dataset.train.__getitems__([0, num_first - 1]).input_ids) == 2
    opened = {path.relative_to(tmp_path / "moved").parts[0] for path in maps_in(tmp_path / "moved")}
    assert opened == {"part-0", "parts"}
    with pytest.raises(InputError, match=r"part 2 of 3, \.\./part-1, is missing .* put it back, or merge the parts"):
        dataset.train.read([num_first])
    monkeypatch.delenv("RANK")
    with pytest.raises(InputError, match="part 2 of 3"):
        open_dataset(str(folder))


def test_a_changed_part_is_named(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "changed")
    dataset = open_dataset(str(folder))
    part = tmp_path / "changed" / "part-2"
    rows = [split.splits["train"].rows for split in open_parts(folder).record.parts]
    alter_token(part, "train", 1)
    with pytest.raises(RunError, match=r"part-2/train/data-.*\.arrow: row 1 \(\d+ of the split\) has changed"):
        dataset.train.read([rows[0] + rows[1] + 1])
    (file,) = (part / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(InputError, match=r"part-2/train/data.* bytes instead of .*tokenize this part again"):
        open_dataset(str(folder)).train.read([len(dataset.train) - 1])
    manifest = part / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(InputError, match=r"part 3 of 3, \.\./part-2, has changed since the merge"):
        open_dataset(str(folder))


def test_a_damaged_list_of_parts_is_one_line(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "damaged")
    listed = folder / "parts.json"
    batches = folder / "train" / "batches.npy"
    written = listed.read_text()
    right = np.load(batches)
    last = len(open_dataset(str(folder)).train) - 1
    for text in (written[:-9], written.replace("../part-1", "../part\\u0000"), written.replace(".arrow", "/../x")):
        listed.write_text(text)
        with pytest.raises(InputError, match=r"parts\.json|part 2 of 3"):
            open_dataset(str(folder))
    listed.write_text(written)
    for field, number in (("offset", 1 << 40), ("offset", 8), ("file", 99), ("row", 7)):
        wrong = right.copy()
        wrong[field][0 if field == "row" else -1] = number
        np.save(batches, wrong)
        with pytest.raises(InputError, match=r"damaged"):
            open_dataset(str(folder)).train.read([last])


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
    made: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    folder = copied(made, tmp_path / "damaged")
    damage(tmp_path / "damaged" / name)
    for read in (lambda: open_dataset(str(folder)), lambda: open_splits(folder)):
        with pytest.raises(InputError) as caught:
            read()
        (fault,) = caught.value.faults
        assert os.path.normpath(fault.split()[0].rstrip(":")) == str(tmp_path / "damaged" / name)


def test_an_index_of_another_part_is_named(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "part-0" / "train")
    shutil.copytree(tmp_path / "mixed" / "part-1" / "train", tmp_path / "mixed" / "part-0" / "train")
    for read in (lambda: open_dataset(str(folder)), lambda: open_splits(folder)):
        with pytest.raises(InputError, match=r"part-0/train/.* instead of .*tokenize this part again"):
            read()


@pytest.mark.parametrize("name", ["whole", "parts"])
def test_rows_that_an_index_does_not_have_are_damage(made: Path, name: str) -> None:
    index = index_of(made / name, "train")
    num_rows = len(index.rows) - 1
    assert len(index.pieces(np.array([num_rows - 1])).documents)
    with pytest.raises(InputError, match="the document index is damaged; tokenize again"):
        index.pieces(np.array([0, num_rows]))


def test_lists_outside_of_their_values_are_damage(made: Path, tmp_path: Path) -> None:
    """pyarrow itself would end the process."""
    shutil.copytree(made / "part-0", tmp_path / "part")
    (file,) = (tmp_path / "part" / "train").glob("*.arrow")
    borders = [batch.column("document_starts").offsets.to_numpy() for batch in read_arrow(file)]
    whole = file.read_bytes()
    assert borders[0].tobytes() in whole
    wrong = borders[0].copy()
    wrong[len(wrong) // 2] = 1 << 30
    file.write_bytes(whole.replace(borders[0].tobytes(), wrong.tobytes(), 1))
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


def test_at_most_64_parts_are_open(made: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"copy-{number}" for number in range(parts_module.MOST_OPEN + 6)]
    for folder in folders:
        shutil.copytree(made / "part-0", folder, copy_function=os.link)
    dataset = open_dataset(str(merge_all(folders, tmp_path / "joined", "--parts", "true")))
    first = [ids.tolist() for ids, *_ in dataset.train.read([0])]
    each = len(dataset.train) // len(folders)
    for number in range(len(folders)):
        batch = dataset.train.__getitems__([each * number])
        assert batch.input_ids.tolist() == first
        assert batch.pieces is not None
    data = {path for path in maps_in(tmp_path) if path.suffix == ".arrow"}
    indexes = {path.parent for path in maps_in(tmp_path) if path.parent.name == "index"}
    assert (len(data), len(indexes)) == (parts_module.MOST_OPEN, parts_module.MOST_OPEN)
    assert folders[0] not in {path.parents[1] for path in data}


def test_a_file_in_many_parts_is_one_note(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / f"{number:02d}" for number in range(20)]
    for folder in folders:
        shutil.copytree(made / "part-0", folder)
    capsys.readouterr()
    merge_all(folders, tmp_path / "parts", "--parts", "true")
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note "))
    read = r"\S*es0\.jsonl and 1 more of \S+/00 were also read for \S+/01 and 18 more"
    assert re.fullmatch(rf"note     {read}: documents may come twice", note)


def test_parts_that_cannot_be_joined_are_refused(made: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(made / "part-0", tmp_path / "older"))
    manifest = json.loads((older / "manifest.json").read_text())
    (older / "manifest.json").write_text(json.dumps(manifest | {"has_index": False}))
    with pytest.raises(InputError, match=r"older has no document index.* merge without --parts"):
        merge_all([made / "part-1", older], tmp_path / "out", "--parts", "true")
    assert not (tmp_path / "out").exists()
