"""Sources of a stream in shares: who is read how often, the mix of every stretch, and the same after a resume."""

import gzip
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.arguments import DataArguments
from fabric_train.cli.errors import InputError
from fabric_train.data.stream_batches import LaneCursor, LaneOrder, StreamBatches
from fabric_train.data.stream_documents import (
    Document,
    StreamedDocuments,
    StreamedSource,
    interleave,
    read_share,
    shuffle,
    times_read,
)
from fabric_train.data.streaming import open_stream
from fabric_train.reading.documents import EncodedDocument
from fabric_train.reading.hf_datasets import DatasetName, StreamSource
from fabric_train.reading.sources import open_sources

shares = st.fractions(min_value="0.02", max_value=4, max_denominator=50)


@given(st.integers(0, 10**12), shares, st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(1, 60))
def test_passes_read_a_document_in_its_share(document: int, share: Fraction, key: int, first: int, count: int) -> None:
    times = [times_read(document, epoch, share, key) for epoch in range(first, first + count)]
    assert set(times) <= {math.floor(share), math.ceil(share)}
    assert abs(sum(times) - count * share) < 1
    if share.numerator == 1 and count == share.denominator:
        assert sum(times) == 1  # each document once, without repetition


@given(shares, st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 200))
def test_a_pass_reads_a_share_of_any_stretch(share: Fraction, key: int, epoch: int, first: int, length: int) -> None:
    times = sum(times_read(document, epoch, share, key) for document in range(first, first + length))
    assert abs(times - length * share) < 4  # of 200 documents drawn by lot, 14 more or fewer would be no surprise


def test_a_share_above_one_reads_the_source_again() -> None:
    documents = [((number + 1) / 4, number) for number in range(4)]
    first_pass = list(read_share(lambda: documents, Fraction(5, 2), epoch=0, key=0))
    second_pass = list(read_share(lambda: documents, Fraction(5, 2), epoch=1, key=0))
    assert [number for _, number in first_pass[:8]] == [0, 1, 2, 3] * 2
    assert [part_read for part_read, _ in first_pass[:8]] == pytest.approx([tenth / 10 for tenth in range(1, 9)])
    # the half that is left of the share: two documents in this pass, and the others in the next
    third_time = {number for _, number in first_pass[8:]}
    assert len(first_pass[8:]) == 2
    assert third_time.isdisjoint(number for _, number in second_pass[8:])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 50), max_size=30), min_size=1, max_size=5))
def test_after_any_document_equal_parts_of_all_sources_are_read(sizes: list[list[int]]) -> None:
    """A document stands for (its source, where it ends in that source); ``sizes`` are those of each source."""
    sources = []
    largest_part = 0.0  # that a document is of its source
    for source, document_sizes in enumerate(sizes):
        ends = list(itertools.accumulate(document_sizes))
        sources.append([(end / ends[-1], (source, end)) for end in ends])
        largest_part = max([largest_part, *(size / ends[-1] for size in document_sizes)])
    order = list(interleave([iter(documents) for documents in sources]))
    for source, documents in enumerate(sources):
        assert [document for document in order if document[0] == source] == [document for _, document in documents]
    parts_read = {source: 0.0 for source, documents in enumerate(sources) if documents}
    for source, end in order:
        parts_read[source] = end / sum(sizes[source])
        assert max(parts_read.values()) - min(parts_read.values()) <= largest_part + 1e-12


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_a_shuffled_pass_has_each_document_once(num_documents: int, buffer_size: int, seed: int, epoch: int) -> None:
    order = list(shuffle(range(num_documents), buffer_size, seed, epoch))
    assert sorted(order) == list(range(num_documents))
    for position, document in enumerate(order):
        assert document < position + buffer_size  # the buffer has not read further yet
    assert order == list(shuffle(range(num_documents), buffer_size, seed, epoch))
    if buffer_size == 1:
        assert order == list(range(num_documents))


def test_any_order_of_the_buffer_is_as_likely_as_another() -> None:
    orders = Counter(tuple(shuffle(range(4), 4, seed, epoch)) for seed in range(24) for epoch in range(100))
    assert len(orders) == 24
    assert sum((count - 100) ** 2 / 100 for count in orders.values()) < 49.7  # chi-square, 23 degrees, 99.9 %
    firsts = Counter(next(shuffle(range(100), 10, seed, 0)) for seed in range(1000))
    assert sum((count - 100) ** 2 / 100 for count in firsts.values()) < 27.9  # 9 degrees
    assert set(firsts) == set(range(10))


def test_the_order_of_a_seed_is_that_of_earlier_versions() -> None:
    """Else a stream that an earlier version began would go on in another order."""
    assert list(shuffle(range(10), 3, 5, 1)) == [0, 1, 2, 4, 6, 3, 5, 8, 9, 7]


# ----------------------------------------------------------------------------------------------------- real sources


def text_of(document: Document) -> str:
    assert isinstance(document.content, str)
    return document.content


def texts_of(name: str, num_texts: int, mean_length: int) -> list[str]:
    """Return documents of up to about twice ``mean_length`` letters."""
    return [f"{name}{number} " + name * (number * 7919 % (2 * mean_length)) for number in range(num_texts)]


def write_lines(file: Path, texts: Sequence[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_lines(folder / "a.jsonl", texts_of("a", 400, 20))
    write_lines(folder / "b.jsonl", texts_of("b", 60, 50))
    write_lines(folder / "c.jsonl", texts_of("c", 20, 90))
    return folder


def documents_of(
    places: Sequence[object], given_shares: Sequence[float] | None, shuffle_buffer: int = 0, seed: int = 5
) -> StreamedDocuments:
    sources = open_sources([str(place) for place in places], "--streaming_dataset", stream=True, downloads=Path())
    streamed = [
        StreamedSource(str(place), source, "text", ("text",)) for place, source in zip(places, sources, strict=True)
    ]
    return StreamedDocuments(streamed, given_shares, shuffle_buffer, seed)


def test_every_stretch_of_a_pass_has_the_mix_of_the_whole(folder: Path) -> None:
    places = [folder / f"{name}.jsonl" for name in "abc"]
    given_shares = [0.5, 1, 2]
    order = list(documents_of(places, given_shares).read(epoch=3))
    lengths = np.zeros((len(order), 3))  # of each document, in bytes of its line, in the column of its source
    for position, document in enumerate(order):
        lengths[position, document.source] = len(text_of(document)) + len('{"text": ""}\n')
    parts_read = np.cumsum(np.concatenate([np.zeros((1, 3)), lengths]), axis=0) / lengths.sum(axis=0)
    # of a half, up to 4 documents more
    largest_part = (lengths / lengths.sum(axis=0)).max() + 4 * 55 / lengths[:, 0].sum()
    for begin in range(len(parts_read)):
        of_stretch = parts_read[begin:] - parts_read[begin]
        assert (of_stretch.max(axis=1) - of_stretch.min(axis=1)).max() <= 2 * largest_part
    num_documents = np.count_nonzero(lengths, axis=0).tolist()
    assert num_documents == pytest.approx([200, 60, 40], abs=3)


def test_passes_of_a_share_read_each_document_once_before_any_twice(folder: Path) -> None:
    documents = documents_of([folder / "a.jsonl", folder / "b.jsonl"], [0.15, 2])
    passes_of_a = []
    for epoch in range(20):
        times_read_by_text = Counter(text_of(document) for document in documents.read(epoch))
        times_read_of_a = Counter({text: n for text, n in times_read_by_text.items() if text.startswith("a")})
        assert times_read_by_text - times_read_of_a == dict.fromkeys(texts_of("b", 60, 50), 2)
        assert 58 <= len(times_read_of_a) <= 62  # 15 % of 400 are 60
        assert set(times_read_of_a.values()) == {1}
        passes_of_a.append(times_read_of_a)
    assert sum(passes_of_a, Counter()) == dict.fromkeys(texts_of("a", 400, 20), 3)
    for texts_of_pass, texts_of_next_pass in itertools.pairwise(passes_of_a):
        assert texts_of_pass.keys().isdisjoint(texts_of_next_pass)
    of_another_seed = documents_of([folder / "a.jsonl", folder / "b.jsonl"], [0.15, 2], seed=6)
    texts = [text_of(document) for document in documents.read(0)]
    assert [text_of(document) for document in of_another_seed.read(0)] != texts


def test_without_shares_the_places_are_read_one_after_the_other(folder: Path) -> None:
    documents = documents_of([folder / "b.jsonl", folder / "a.jsonl"], None)
    for epoch in (0, 1):
        texts = [text_of(document) for document in documents.read(epoch)]
        assert texts == texts_of("b", 60, 50) + texts_of("a", 400, 20)
    assert [document.source for document in documents.read(0)] == [0] * 60 + [1] * 400


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "csv", "parquet", "saved"])
def test_sources_of_every_kind_are_mixed_over_the_whole_pass(folder: Path, tmp_path: Path, kind: str) -> None:
    texts = texts_of("a", 400, 200)
    table = datasets.Dataset.from_dict({"text": texts, "other": texts})
    place = tmp_path / f"a.{kind}"
    if kind == "jsonl.gz":
        write_lines(place, texts)
    elif kind == "json":
        place.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        {"csv": table.to_csv, "parquet": table.to_parquet, "saved": table.save_to_disk}[kind](str(place))
    order = [document.source for document in documents_of([place, folder / "b.jsonl"], [1, 1]).read(0)]
    for quarter in range(4):
        share = order[115 * quarter : 115 * (quarter + 1)].count(1)
        assert 7 <= share <= 23, f"{share} of 15"  # a csv is read in blocks of 8 KiB


def test_a_hub_stream_is_mixed_by_rows_if_their_number_is_known(folder: Path, tmp_path: Path) -> None:
    loaded = datasets.load_dataset(
        "json", data_files=str(folder / "a.jsonl"), streaming=True, cache_dir=str(tmp_path / "cache")
    )
    source = StreamSource("hub", loaded, DatasetName("hub", None, None, "c0ffee"))
    place = StreamedSource("hub", source, "text", ("text",))
    assert place.size == 0
    loaded["train"].info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=400)})
    place = StreamedSource("hub", source, "text", ("text",))
    assert place.size == 400
    assert [part for part, _ in place.read(0)] == [number / 400 for number in range(1, 401)]


# ------------------------------------------------------------------------------------------------ rows, and a resume


def letters(document: Document) -> EncodedDocument:
    text = text_of(document)
    return EncodedDocument(np.array([*map(ord, text), 0], np.int32), None, len(text), len(text))


def rows_of(
    read: Callable[[int], Iterator[Document]],
    cut: tuple[int, int, int],
    num_windows: int,
    cursors: Sequence[LaneCursor] | None = None,
) -> tuple[list[np.ndarray], list[list[LaneCursor]]]:
    """Return the rows of all windows of 8 rows, and the cursors of all lanes after each.

    ``cut`` is the micro-batch size, the number of ranks and the number of workers.
    """
    micro_batch_size, world_size, num_workers = cut
    rows = [np.empty((8, 64), np.int64) for _ in range(num_windows)]
    cursor_numbers: list[list[list[int]]] = [[[]] * 8 for _ in range(num_windows)]  # by window and lane
    for rank in range(world_size):
        order = LaneOrder(8, micro_batch_size, world_size, rank)
        batches = StreamBatches(read, letters, 3, 64, True, order, cursors, num_workers, pin_memory=False)
        for index, window in enumerate(batches.windows(0, num_windows)):
            assert window.cursors is not None
            ids = np.concatenate([batch.input_ids.numpy() for batch in window.batches])
            for row, (lane, *numbers) in zip(ids, window.cursors.tolist(), strict=True):
                rows[index][lane] = row
                cursor_numbers[index][lane] = numbers
    return rows, [[LaneCursor.from_numbers(numbers) for numbers in lanes] for lanes in cursor_numbers]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("cut", [(4, 1, 2), (2, 2, 0), (1, 4, 0)])
def test_a_mixed_stream_resumes_bit_for_bit_on_other_ranks(folder: Path, cut: tuple[int, int, int]) -> None:
    read = documents_of([folder / f"{name}.jsonl" for name in "abc"], [0.15, 1, 0.4], shuffle_buffer=25).read
    rows, after = rows_of(read, (1, 1, 0), 40)
    assert {cursor.next_row.epoch for cursor in after[19]} <= {1, 2}
    for step in (19, 33):
        resumed, resumed_after = rows_of(read, cut, 40 - step, after[step - 1])
        np.testing.assert_array_equal(resumed, rows[step:])
        for cursors, cursors_of_resumed in zip(after[step:], resumed_after, strict=True):
            assert [cursor.numbers() for cursor in cursors_of_resumed] == [cursor.numbers() for cursor in cursors]
    num_ids = np.bincount(np.concatenate(rows).ravel(), minlength=128)
    letters_by_source = num_ids[[ord(name) for name in "abc"]]
    tokens_by_source = np.sum([cursor.tokens_read for cursor in after[-1]], axis=0)
    assert tokens_by_source.sum() == 40 * 8 * 64
    assert (tokens_by_source >= letters_by_source).all()
    assert (tokens_by_source <= letters_by_source * 1.3 + 200).all()  # with numbers, spaces and ends


def test_tokens_that_an_older_checkpoint_did_not_count_stay_uncounted(folder: Path) -> None:
    read = documents_of([folder / "b.jsonl"], None).read
    _, after = rows_of(read, (1, 1, 0), 3)
    older = [LaneCursor.from_numbers(cursor.numbers()[:8]) for cursor in after[0]]
    _, resumed = rows_of(read, (1, 1, 0), 2, older)
    assert resumed[-1] == after[-1]
    assert {cursor.tokens_read for cursor in resumed[-1]} == {()}


# --------------------------------------------------------------------------------------------------- refusals


def refusal(places: list[str], tokenizer: Path, **options: object) -> str:
    arguments = DataArguments(streaming_dataset=places, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError) as error:
        open_stream(arguments, str(tokenizer), None, tokenizer / "copy", None)
    (fault,) = error.value.faults
    assert "\n" not in fault
    return fault


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_share_of_less_than_a_document_is_refused(folder: Path, tiny_model_dir: Path, name: str) -> None:
    texts = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(texts))
    num_documents = len(texts.splitlines())
    places = [f"a={folder / name}", f"b={folder / 'a.jsonl'}"]
    fault = refusal(places, tiny_model_dir, shares=["a=1e-9", "b=1"])
    assert fault.startswith("--shares: a pass with the share 1e-09 reads less than one of the ")
    estimated_documents = int(fault.split()[13].replace(",", ""))
    assert 0.5 * num_documents < estimated_documents < 2 * num_documents
    refusal(places, tiny_model_dir, shares=[1.0, 0.2 / num_documents])


def test_a_source_without_text_or_name_is_refused(folder: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    blank = write_lines(tmp_path / "blank.jsonl", [" "])
    places = [f"es={blank}", str(folder / "a.jsonl")]
    fault = refusal(places, tiny_model_dir, shares=[1.0, 2.0])
    assert fault == "--streaming_dataset es has no documents with text; give other sources"
    stream = open_stream(DataArguments(streaming_dataset=places), str(tiny_model_dir), None, tmp_path, None)
    assert stream.source_names == ("es", str(folder / "a.jsonl"))
    fault = refusal(places, tiny_model_dir, shares=["va=2"])
    assert fault == f"--shares: va is not a source of --streaming_dataset; its sources are: es, {folder / 'a.jsonl'}"
    arguments = DataArguments(streaming_dataset=[f"es={folder / 'b.jsonl'}", *places[1:]], shares=["es=0.5"])
    assert open_stream(arguments, str(tiny_model_dir), None, tmp_path, None).documents.shares == [0.5, 1]
