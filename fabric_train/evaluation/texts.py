"""The texts of an evaluation, documents or the validation split of a token dataset, as a model reads and predicts them.

Open :class:`EncodedText` first: a text in the tokens of one tokenizer, in parts and forward passes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fabric_train.checkpoint import read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Documents, Targets, find_targets
from fabric_train.data.stream_documents import StreamedSource
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.data.token_mixture import unpredicted_tokens
from fabric_train.reading.documents import utf8_length
from fabric_train.reading.sources import open_sources, split_names
from fabric_train.token_dataset.manifest import FILE_NAME
from fabric_train.tokenization.corpus import find_kind

NUM_DIGITS = 16
"""Hexadecimal digits that tell weights and texts from others in ``documents.jsonl``."""
_PART_TOKENS = 1 << 18
_ROWS_AT_ONCE = 64
_TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class DocumentTexts:
    """The documents of a source as text. ``places`` says where each is: file and line."""

    name: str
    texts: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The validation split of a token dataset. ``name`` is the source of all documents; None: each has its own."""

    name: str | None
    dataset: TokenDataset


EvaluatedText = DocumentTexts | HeldOutRows


def open_texts(given: Sequence[str], text_column: str, downloads: Path) -> list[EvaluatedText]:
    """Read the documents that ``--texts`` names as NAME=PLACE or PLACE; files at a URL come into ``downloads``."""
    opened: list[EvaluatedText] = []
    faults: list[str] = []
    for value, (name, place) in zip(given, split_names(given, "--texts"), strict=True):
        try:
            if (Path(place) / FILE_NAME).is_file():
                opened.append(_open_rows(place, None if value == place else name, isolates=True))
            else:
                opened.append(_read_documents(name, place, text_column, downloads))
        except InputError as error:
            faults += (fault.replace("--train_data_dir", "--texts") for fault in error.faults)
    if faults:
        raise InputError(*faults)
    return opened


def open_validation_of(checkpoint: Path) -> list[EvaluatedText]:
    """Open the validation split of what a checkpoint's run was trained on, to be read as the run itself does."""
    saved = read_trainer_json(checkpoint)
    if saved.stream is not None:
        raise InputError(f"{checkpoint}: its run read a stream, which has no validation split; give --texts")
    arguments = saved.arguments
    folders = arguments.get("train_data_dir") or []
    isolates = bool(arguments.get("isolate_documents", True))
    try:
        return [_open_rows(place, None, isolates) for place in ([folders] if isinstance(folders, str) else folders)]
    except InputError as error:
        raise InputError(*(f"the validation split of {checkpoint}: {fault}" for fault in error.faults)) from None


def _open_rows(place: str, name: str | None, isolates: bool) -> HeldOutRows:
    dataset = open_dataset(place, isolates)
    if dataset.validation is None:
        raise InputError(f"{place}: the token dataset has no validation split; tokenize with --validation_split")
    return HeldOutRows(name, dataset)


def _read_documents(name: str, place: str, text_column: str, downloads: Path) -> DocumentTexts:
    (source,) = open_sources([place], "--texts", False, downloads)
    kind = find_kind(source, text_column, skips_bad_rows=True, prefers_text=True)  # reading it refuses a bad row
    if kind != "text":
        raise InputError(
            f"--texts {place}: its rows are chats or instructions, which are texts only with a template; tokenize them "
            "with fabric-train tokenize and give the token dataset"
        )
    read = [document for _, document in StreamedSource(name, source, kind, (text_column,)).read(0)]
    if not read:
        raise InputError(f"--texts {place}: no document has text; give another place")
    return DocumentTexts(name, tuple(str(document.content) for document in read), tuple(each.place() for each in read))


@dataclass(frozen=True)
class PredictedBatch:
    """A forward pass: ``input_ids`` int64 [B, T], the borders of its documents, and the tokens that it predicts.

    ``places`` int64 [N] are the places of the targets among all predicted tokens of the text.
    """

    input_ids: torch.Tensor
    documents: Documents | None
    targets: Targets
    places: np.ndarray


@dataclass(frozen=True)
class ScoredPart:
    """Documents or rows ``units`` of a text: the predicted tokens ``tokens``, and what identifies their content.

    ``longest_input`` is the text's ``input_tokens``, by which some models choose how they compute.
    """

    units: range
    tokens: range
    content: str
    longest_input: int


class EncodedText(Protocol):
    """The documents of a text as the tokens of one tokenizer: D documents, N predicted tokens."""

    name: str  # for messages
    identity: str  # see ``identity_of``
    target_ids: np.ndarray  # int32 [N], the predicted tokens
    owners: np.ndarray  # int64 [N], the documents that they belong to
    source_names: tuple[str, ...]
    sources: np.ndarray  # int64 [D], the source of each document
    num_bytes: np.ndarray  # fp64 [D], the UTF-8 bytes that its predicted tokens stand for; NaN if they are not known
    input_tokens: int  # tokens of the longest sequence that a model reads
    highest_id: int  # of all ids

    def place(self, document: int) -> str:
        """Return where a document is: its file and line."""

    def parts(self) -> Iterator[ScoredPart]:
        """Yield consecutive parts of about ``_PART_TOKENS`` predicted tokens."""

    def batches(self, part: ScoredPart, batch_tokens: int) -> Iterator[PredictedBatch]:
        """Yield forward passes of at most ``batch_tokens`` tokens, or of one sequence, that predict a part's tokens."""


@dataclass(frozen=True)
class TextWindow:
    """A forward pass over tokens ``begin`` to ``stop`` of a document; the tokens from ``first`` on predict."""

    document: int
    begin: int
    first: int
    stop: int


def cut_windows(document: int, num_tokens: int, max_length: int, overlap: int) -> Iterator[TextWindow]:
    """Yield windows of at most ``max_length`` tokens in which each of a document's tokens is predicted exactly once.

    Token 0 is the one that stands before the document, and tokens 1 to ``num_tokens`` are its own. A window predicts
    the tokens after its own. The first one predicts as many as it can. Each further one has at least ``overlap`` tokens
    up to the one before its first predicted token, and the last one is as long as the others. With an overlap of 1 they
    are lm_eval's windows (``get_rolling_token_windows`` with ``context_len=1``). A document of 10 tokens, with a
    max_length of 4 and an overlap of 2::

        reads 0-3, predicts 1-4;  reads 3-6, predicts 5-7;  reads 6-9, predicts 8-10
    """
    predicted = min(max_length, num_tokens)
    if predicted:
        yield TextWindow(document, 0, 0, predicted)
    while predicted < num_tokens:
        stop = min(predicted + max_length - overlap + 1, num_tokens)
        yield TextWindow(document, stop - max_length, predicted, stop)
        predicted = stop


class WindowedText(EncodedText):
    """Texts, each document on its own: BOS (EOS for a tokenizer without it), then its tokens, see ``cut_windows``."""

    def __init__(self, documents: DocumentTexts, tokenizer: Any, max_length: int, overlap: int) -> None:
        self._documents = documents
        self._max_length = max_length
        self._overlap = overlap
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.name = documents.name
        self.identity = identity_of(documents, max_length, overlap)
        ids = list(_encode(documents.texts, tokenizer, prefix))
        self._starts = np.cumsum([0, *map(len, ids)])
        self._prefix = np.array([prefix], dtype=np.int32)
        self.target_ids = np.concatenate(ids)
        self.owners = np.repeat(np.arange(len(ids)), np.diff(self._starts))
        self.source_names = (documents.name,)
        self.sources = np.zeros(len(ids), dtype=np.int64)
        self.num_bytes = np.array(list(map(utf8_length, documents.texts)), dtype=np.float64)
        self.input_tokens = min(max_length, max(map(len, ids)))
        self.highest_id = int(self.target_ids.max(initial=prefix))

    def place(self, document: int) -> str:
        return self._documents.places[document]

    def parts(self) -> Iterator[ScoredPart]:
        for units in _split(self._starts):
            tokens = range(int(self._starts[units.start]), int(self._starts[units.stop]))
            settings = np.array([self._max_length, self._overlap, self._prefix[0]])
            lengths = np.diff(self._starts[units.start : units.stop + 1])
            content = _digest(settings, lengths, self.target_ids[tokens.start : tokens.stop])
            yield ScoredPart(units, tokens, content, self.input_tokens)

    def batches(self, part: ScoredPart, batch_tokens: int) -> Iterator[PredictedBatch]:
        """Yield windows of about the same length, the longest ones first."""
        lengths = np.diff(self._starts)
        windows = [
            window
            for document in part.units
            for window in cut_windows(document, int(lengths[document]), self._max_length, self._overlap)
        ]
        windows.sort(key=lambda window: window.begin - window.stop)
        while windows:
            num_windows = max(1, batch_tokens // (windows[0].stop - windows[0].begin))
            yield self._batch(windows[:num_windows])
            del windows[:num_windows]

    def _batch(self, windows: Sequence[TextWindow]) -> PredictedBatch:
        """Return the forward pass over windows, padded at the end, which causal attention does not see."""
        longest = windows[0].stop - windows[0].begin
        input_ids = np.zeros((len(windows), longest), dtype=np.int64)
        positions = []
        places = []
        for row, window in enumerate(windows):
            start = int(self._starts[window.document])
            own = self.target_ids[start : start + window.stop]
            read = np.concatenate([self._prefix, own])[window.begin : window.stop]
            input_ids[row, : len(read)] = read
            positions.append(row * longest + np.arange(window.first, window.stop) - window.begin)
            places.append(start + np.arange(window.first, window.stop))
        place = np.concatenate(places)
        targets = Targets(*map(torch.from_numpy, (np.concatenate(positions), self.target_ids[place].astype(np.int64))))
        return PredictedBatch(torch.from_numpy(input_ids), None, targets, place)


class PackedText(EncodedText):
    """The validation split of a token dataset, read in its rows as in training.

    So a document that is cut at the end of a row goes on without context, the labels decide which tokens are predicted,
    EOS too, and the loss is the run's ``val_loss``. Without a document index, each row is a document of unknown bytes.
    """

    def __init__(self, text: HeldOutRows) -> None:
        assert text.dataset.validation is not None
        self.name = text.dataset.name
        self.identity = identity_of(text)
        self._dataset = text.dataset
        self._rows = text.dataset.validation
        ids = []
        of_rows = [0]
        documents = []
        sources = []
        num_targets = []
        num_bytes = []
        of_sequences = [np.zeros(0, dtype=np.int64)]
        self.highest_id = 0
        for rows in _chunks(range(len(self._rows)), _ROWS_AT_ONCE):
            batch = self._rows.__getitems__(rows)
            assert batch.pieces is not None
            targets = find_targets(batch.labels)
            ids.append(targets.ids.numpy().astype(np.int32))
            of_rows += np.bincount(targets.positions // batch.labels.shape[1], minlength=len(rows)).tolist()
            numbers = np.array(rows, dtype=np.int64)
            if batch.documents is not None:
                # a target belongs to the sequence of its own token, which follows the position that predicts it
                places = np.searchsorted(targets.positions.numpy() + 1, batch.documents.borders.numpy())
                of_sequences.append(np.diff(places))
            documents.append(numbers if self._rows.index is None else self._rows.index.pieces(numbers).documents)
            sources.append(batch.pieces.sources.numpy())
            num_targets.append(batch.pieces.num_targets.numpy())
            num_bytes.append(batch.pieces.num_bytes.numpy())
            self.highest_id = max(self.highest_id, int(batch.input_ids.max()))
        counts = np.concatenate(num_targets)
        has_targets = counts > 0
        self._numbers, of_pieces = np.unique(np.concatenate(documents)[has_targets], return_inverse=True)
        self._row_starts = np.cumsum(of_rows)
        self.target_ids = np.concatenate(ids)
        self.owners = np.repeat(of_pieces, counts[has_targets])
        self.num_bytes = np.bincount(of_pieces, np.concatenate(num_bytes)[has_targets], len(self._numbers))
        self.source_names = (text.name,) if text.name else self._rows.source_names
        self.sources = np.zeros(len(self._numbers), dtype=np.int64)
        if not text.name:
            self.sources[of_pieces] = np.concatenate(sources)[has_targets]
        self.input_tokens = self._rows.longest()
        # int64, the predicted tokens of each sequence that attention keeps apart, such as the answers of a pair
        self.num_targets_of_sequences = np.concatenate(of_sequences)
        if not len(self.target_ids):
            raise InputError(
                f"{text.dataset.folder}: no token of its {len(self._rows)} validation rows is supervised, so there is "
                "no loss to compare; tokenize with a larger --validation_split or --max_length, so that answers fit"
            )

    def place(self, document: int) -> str:
        number = int(self._numbers[document])
        if self._rows.index is None:
            return f"row {number}"
        origin = self._rows.index.origin(number)
        return f"{origin.file}:{origin.row}"

    def note(self) -> str:
        """Return why fewer tokens are predicted than the manifest counts; "" if there is nothing to say."""
        reason = unpredicted_tokens([self._dataset], len(self.target_ids))
        return f"{self.name}: {reason}" if reason else ""

    def parts(self) -> Iterator[ScoredPart]:
        for units in _split(self._row_starts):
            tokens = range(int(self._row_starts[units.start]), int(self._row_starts[units.stop]))
            settings = f"{self._dataset.fingerprint} {self._rows.isolates} {units}"
            content = _digest(settings.encode(), self.target_ids[tokens.start : tokens.stop])
            yield ScoredPart(units, tokens, content, self.input_tokens)

    def batches(self, part: ScoredPart, batch_tokens: int) -> Iterator[PredictedBatch]:
        for rows in _chunks(part.units, max(1, batch_tokens // self.input_tokens)):
            batch = self._rows.__getitems__(rows)
            places = np.arange(self._row_starts[rows.start], self._row_starts[rows.stop])
            yield PredictedBatch(batch.input_ids, batch.documents, find_targets(batch.labels), places)


def identity_of(text: EvaluatedText, max_length: int = 0, overlap: int = 0) -> str:
    """Return what tells a text, the windows of documents and the kind of device from others, whatever the tokenizer."""
    if isinstance(text, HeldOutRows):
        own = _digest(f"{text.dataset.fingerprint} {text.dataset.isolates}".encode())
    else:
        digests = (hashlib.sha256(one.encode("utf-8", "surrogatepass")).digest() for one in text.texts)
        own = _digest(f"{max_length} {overlap}".encode(), *digests)
    return full_digest(f"{own} {device_kind()}")[:NUM_DIGITS]


def device_kind() -> str:
    """Return the kind of device that models are evaluated on, which decides the precision."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def full_digest(text: str) -> str:
    """Return the hash of a text in all its hexadecimal digits."""
    return _digest(text.encode())


def _encode(texts: Sequence[str], tokenizer: Any, prefix: int) -> Iterator[np.ndarray]:
    """Yield the ids of each text, int32, without special tokens around it; a BOS that it begins with is left out."""
    for some in _chunks(range(len(texts)), _TEXTS_AT_ONCE):
        encoded = tokenizer(list(texts[some.start : some.stop]), add_special_tokens=False, return_attention_mask=False)
        for ids in encoded["input_ids"]:
            yield np.array(ids[1:] if ids[:1] == [prefix] else ids, dtype=np.int32)


def _split(starts: np.ndarray) -> Iterator[range]:
    """Yield ranges of consecutive units that have about ``_PART_TOKENS`` tokens; unit u begins at ``starts[u]``."""
    first = 0
    while first < len(starts) - 1:
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + _PART_TOKENS, side="right")) - 1)
        yield range(first, stop)
        first = stop


def _chunks(numbers: range, size: int) -> Iterator[range]:
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


def _digest(*contents: "np.ndarray | bytes") -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).tobytes())
    return digest.hexdigest()
