"""merge --parts true copies no row, and what it writes is read as the full merge of the same token datasets."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fabric_train.cli.argument_types import Shares
from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import find_source_rows, open_mixture
from fabric_train.tokenization import merge
from fabric_train.tokenization.inspect import __main__ as inspect
from fabric_train.tokenization.packing import parts as parts_module
from fabric_train.tokenization.packing.document_index import DocumentIndex, open_index
from fabric_train.tokenization.packing.parts import open_parts
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
        assert ours is not None and theirs is not None
        assert len(ours) == len(theirs)
        assert (ours.lengths(), ours.source_names) == (theirs.lengths(), theirs.source_names)
        random = np.random.default_rng(0).permutation(len(theirs)).tolist()
        for our, their in zip(ours.read(random), theirs.read(random), strict=True):
            assert all(np.array_equal(one, other) for one, other in zip(our, their, strict=True))
        for name, value in vars(ours.pieces(random)).items():
            assert np.array_equal(value, getattr(theirs.pieces(random), name)) or value is None
        assert np.array_equal(ours.main_sources(), theirs.main_sources())
        assert ours.id_range() == theirs.id_range()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_document_indexes_of_parts_read_as_the_joined_one(made: Path, split: str) -> None:
    ours, theirs = index_of(made / "parts", split), index_of(made / "whole", split)
    for name in ("documents", "rows", "continuations", "checksums"):
        joined, written = getattr(ours, name), getattr(theirs, name)
        assert len(joined) == len(written)
        assert np.array_equal(joined[:], written)
        order = np.random.default_rng(1).permutation(len(written))
        assert np.array_equal(joined[order], written[order])
        assert joined[-1] == written[-1] and joined[0] == written[0]
    assert np.array_equal(ours.rows["documents"][5:9], theirs.rows["documents"][5:9])
    assert str(ours.origin(0)) == str(theirs.origin(0))
