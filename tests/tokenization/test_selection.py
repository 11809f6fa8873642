"""Selection of documents: mixing by weights, deduplication, caps, bad rows and validation sources."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_train.cli.errors import InputError
from fabric_train.inspection.__main__ import main as inspect
from fabric_train.token_dataset.manifest import read_manifest
from fabric_train.tokenization.selection import _count_within_caps, draw_validation, mix
from tests.support.bad_input_folder import edit_json
from tests.support.token_datasets import documents_in, manifest_of, tokenize, write_jsonl

A = [f"a{number} from the first source" for number in range(30)]
B = [f"b{number} from another source, which has longer documents" for number in range(10)]


def test_weights_sample_whole_epochs_first_and_print_them(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [write_jsonl(tmp_path / "a.jsonl", A), write_jsonl(tmp_path / "b.jsonl", B)]
    options = {"weights": [1, 3], "validation_split": 0}
    rows = tokenize(tmp_path / "out", tiny_model_dir, *sources, **options)
    printed = " ".join(capsys.readouterr().out.split())

    # each source has its share of the tokens, in the manifest and on the terminal
    manifest = manifest_of(tmp_path / "out")
    train = manifest.ledger.splits["train"]
    num_tokens = sum(record.tokens for record in manifest.sources)
    for record, weight, share in zip(manifest.sources, (1, 3), (0.25, 0.75), strict=True):
        assert record.weight == weight
        assert record.share_asked == share
        assert record.train_tokens is not None
        assert record.train_tokens == pytest.approx(num_tokens * share, rel=0.1)
        assert record.share_reached == pytest.approx(record.train_tokens / train.tokens_in, abs=1e-6)
        assert record.epochs == pytest.approx(record.train_tokens / record.tokens, abs=1e-4)
        assert (
            f"weight {weight}: {record.train_tokens:,} tokens in train, {record.share_reached:.2%} of all "
            f"({share:.2%} asked), {record.epochs:.2f} epochs"
        ) in printed

    # the rows have as many tokens and documents, of which the last may be cut, in any number of processes
    assert train.tokens_in == sum(record.train_tokens or 0 for record in manifest.sources)
    num_whole_documents = len(documents_in(rows["train"], tmp_path / "out"))
    assert train.documents - 1 <= num_whole_documents <= train.documents
    assert tokenize(tmp_path / "again", tiny_model_dir, *sources, **options, num_proc=2) == rows


def test_the_document_that_reaches_a_cap_is_the_last() -> None:
    lengths = np.array([3, 4, 5])
    for max_tokens, num_documents in {1: 1, 3: 1, 4: 2, 7: 2, 8: 3, 12: 3, 13: 3}.items():
        assert _count_within_caps(lengths, max_documents=None, max_tokens=max_tokens) == num_documents
    for max_documents, num_documents in {1: 1, 2: 2, 3: 2, 4: 2}.items():
        assert _count_within_caps(lengths, max_documents=max_documents, max_tokens=7) == num_documents
    for max_documents, num_documents in {1: 1, 3: 3, 4: 3}.items():
        assert _count_within_caps(lengths, max_documents=max_documents, max_tokens=None) == num_documents


def test_epochs_count_tokens_and_not_documents(tmp_path: Path, tiny_model_dir: Path) -> None:
    uneven = write_jsonl(tmp_path / "uneven.jsonl", ["word " * 200, *["a"] * 99])
    even = write_jsonl(tmp_path / "even.jsonl", B)
    options = {"weights": [1, 1], "max_tokens": 200, "validation_split": 0}
    tokenize(tmp_path / "out", tiny_model_dir, uneven, even, **options)
    record = manifest_of(tmp_path / "out").sources[0]
    assert record.train_tokens is not None
    assert record.epochs == round(record.train_tokens / record.tokens, 4)


@pytest.mark.parametrize("weights", [(1e-320, 3e-320), (5e-324, 1e308), (8e307, 8e307)])
def test_weights_of_any_size_end(weights: tuple[float, float]) -> None:
    sources = np.repeat([0, 1], 10)  # ten documents of ten tokens each
    order = mix(np.full(20, 10), sources, weights, 10_000, 0)
    num_second = np.count_nonzero(sources[order] == 1)
    assert num_second == round(1000 * (weights[1] / sum(weights)))


def test_a_mixture_has_the_requested_number_of_tokens(tmp_path: Path, tiny_model_dir: Path) -> None:
    sources = [write_jsonl(tmp_path / "a.jsonl", A), write_jsonl(tmp_path / "b.jsonl", B)]
    tokenize(tmp_path / "out", tiny_model_dir, *sources, "--weights", 2, 2, max_tokens=5_000, validation_split=0)
    assert 5_000 <= manifest_of(tmp_path / "out").ledger.splits["train"].tokens_in < 5_100


@given(
    lengths_of_sources=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=20), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    num_tokens=st.integers(1, 3_000),
    seed=st.integers(0, 5),
)
def test_each_source_reaches_its_share_in_balanced_epochs(
    lengths_of_sources: list[list[int]], weights: list[float], num_tokens: int, seed: int
) -> None:
    weights = weights[: len(lengths_of_sources)]
    lengths = np.concatenate(lengths_of_sources)
    sources = np.repeat(range(len(lengths_of_sources)), [len(source) for source in lengths_of_sources])
    order = mix(lengths, sources, weights, num_tokens, seed)
    for source, weight in enumerate(weights):
        # the last document may exceed the share
        documents = order[sources[order] == source]
        tokens_asked = num_tokens * weight / sum(weights)
        longest = max(lengths_of_sources[source])
        assert tokens_asked - 1e-6 <= lengths[documents].sum() < tokens_asked + longest + 1e-6

        # no document is repeated before all others of its source were read
        times_read = np.bincount(documents, minlength=len(lengths))[sources == source]
        assert times_read.max() - times_read.min() <= 1


def test_duplicates_across_sources_are_skipped_and_counted(tmp_path: Path, tiny_model_dir: Path) -> None:
    sources = [write_jsonl(tmp_path / "a.jsonl", [*A, A[3], A[3]]), write_jsonl(tmp_path / "b.jsonl", [A[0], *B])]
    rows = tokenize(tmp_path / "out", tiny_model_dir, *sources, deduplicate="true", validation_split=0, max_length=4)
    documents = documents_in(rows["train"], tmp_path / "out")
    assert documents == [*A, *B][: len(documents)]  # what does not fill the last row is left out
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_read, ledger.documents_kept) == (43, 40)
    assert ledger.documents_skipped == {"duplicate": 3}


def test_the_ledger_says_what_was_left_out_of_each_source(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [*A, "", A[3], A[3]])
    second = write_jsonl(tmp_path / "b.jsonl", [A[0], *B, "", ""])
    held_out = write_jsonl(tmp_path / "v.jsonl", [B[0], "held out " * 9])
    options = ["--deduplicate", "true", "--validation_dataset", f"v={held_out}"]
    tokenize(tmp_path / "out", tiny_model_dir, f"a={first}", f"b={second}", *options, max_length=4)
    expected = {"a": {"empty": 1, "duplicate": 2}, "b": {"empty": 2, "duplicate": 1}, "v": {"duplicate": 1}}
    manifest = manifest_of(tmp_path / "out")
    assert {source.name: source.documents_skipped for source in manifest.sources} == expected
    assert [source.documents_read for source in manifest.sources] == [len(A) + 3, len(B) + 3, 2]
    output = capsys.readouterr().out
    assert "10 documents, " in output
    assert "; left out: 2 empty, 1 duplicate\n" in output

    # the inspector shows the sources below each reason
    inspect([str(tmp_path / "out"), "--rows", "0"])
    first_cells = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    heading = first_cells.index(["skipped:", "duplicate"])
    assert first_cells[heading + 1 : heading + 4] == [["a", "2"], ["b", "1"], ["v", "1"]]


def test_a_manifest_whose_sources_do_not_add_up_is_damaged(tmp_path: Path, tiny_tokens_dir: Path) -> None:
    shutil.copy(tiny_tokens_dir / "manifest.json", tmp_path)
    edit_json(tmp_path / "manifest.json", lambda content: content["sources"][0]["documents_skipped"].update(empty=1))
    with pytest.raises(InputError, match=r"is damaged: documents skipped of the sources, empty: 0 is not 1; tokenize"):
        read_manifest(tmp_path)


def test_duplicates_do_not_count_toward_a_cap(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [A[0], A[0], "", *A[1:]])
    tokenize(tmp_path / "out", tiny_model_dir, source, deduplicate="true", max_documents=5, validation_split=0)
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_read, ledger.documents_kept) == (7, 5)
    assert ledger.documents_skipped == {"duplicate": 1, "empty": 1}


def test_a_given_validation_source_is_not_mixed_into_train(tmp_path: Path, tiny_model_dir: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", A)
    held_out = write_jsonl(tmp_path / "v.jsonl", [*B, A[0]])
    options = {"validation_dataset": held_out, "deduplicate": "true", "max_documents": 20}
    rows = tokenize(tmp_path / "out", tiny_model_dir, train, **options, max_length=4)
    assert set(documents_in(rows["train"], tmp_path / "out")) <= set(A[:20])
    assert set(documents_in(rows["validation"], tmp_path / "out")) <= set(B)
    manifest = manifest_of(tmp_path / "out")
    assert manifest.ledger.splits["train"].documents == 20
    assert manifest.ledger.splits["validation"].documents == 10
    assert [source.documents for source in manifest.sources] == [20, 10]


def test_validation_split_depends_on_number_share_and_seed() -> None:
    is_held_out = draw_validation(1000, 0.05, seed=3)
    assert is_held_out.sum() == 50
    assert (is_held_out == draw_validation(1000, 0.05, seed=3)).all()
    assert (is_held_out != draw_validation(1000, 0.05, seed=4)).any()


def test_a_weight_for_a_source_without_documents_is_an_error(tmp_path: Path, tiny_model_dir: Path) -> None:
    sources = [write_jsonl(tmp_path / "a.jsonl", A), write_jsonl(tmp_path / "b.jsonl", [""])]
    with pytest.raises(InputError, match=r"b\.jsonl: no document with text"):
        tokenize(tmp_path / "out", tiny_model_dir, *sources, "--weights", 1, 1)


def test_bad_rows_are_skipped_and_counted_on_request(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    good_lines = "".join(json.dumps({"text": text}) + "\n" for text in A)
    source.write_bytes(b'{"text": 3}\n' + good_lines.encode() + b'nonsense\n{"txt": "a"}\n{"text": "\xff"}\n')
    tokenize(tmp_path / "out", tiny_model_dir, source, on_bad_rows="skip", validation_split=0)
    ledger = manifest_of(tmp_path / "out").ledger
    assert ledger.documents_read == len(A) + 4
    assert ledger.documents_kept == len(A)
    assert ledger.documents_skipped == {"bad_row": 4}
    assert "first bad row that was skipped" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"line 1: column 'text' holds int.*--on_bad_rows skip skips such rows"):
        tokenize(tmp_path / "strict", tiny_model_dir, source, validation_split=0)
