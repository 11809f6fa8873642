"""Turn the texts of an evaluation, documents or a token dataset's validation split, into forward passes of a model.

Open :class:`EncodedText` first: a text in the tokens of one tokenizer, in chunks and forward passes.
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
"""The number of hexadecimal digits that identify weights and texts in ``documents.jsonl``."""
_CHUNK_TOKENS = 1 << 18
_ROWS_AT_ONCE = 64
_TEXTS_AT_ONCE = 256
# a piece of a document in a row: the document's number in the split, its source, its targets, and their bytes or NaN
_PIECE = np.dtype([("document", np.int64), ("source", np.int64), ("num_targets", np.int64), ("num_bytes", np.float64)])


@dataclass(frozen=True)
class DocumentTexts:
    """The documents of a source as text."""

    name: str
    texts: tuple[str, ...]
    locations: tuple[str, ...]
    """The file and line of each document."""


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """The validation split of a token dataset. ``name`` is the source of all documents; None keeps their sources."""

    name: str | None
    dataset: TokenDataset


EvaluatedText = DocumentTexts | HeldOutRows


def open_texts(entries: Sequence[str], text_column: str, downloads: Path) -> list[EvaluatedText]:
    """Read the documents that ``--texts`` names as NAME=PLACE or PLACE; URLs are downloaded to ``downloads``."""
    texts: list[EvaluatedText] = []
    faults: list[str] = []
    for entry, (name, location) in zip(entries, split_names(entries, "--texts"), strict=True):
        try:
            if (Path(location) / FILE_NAME).is_file():
                # without a name, the documents keep the names of their sources
                has_name = entry != location
                texts.append(_open_rows(location, name if has_name else None, isolates=True))
            else:
                texts.append(_read_documents(name, location, text_column, downloads))
        except InputError as error:
            faults += (fault.replace("--train_data_dir", "--texts") for fault in error.faults)
    if faults:
        raise InputError(*faults)
    return texts


def open_validation_of(checkpoint: Path) -> list[EvaluatedText]:
    """Open the validation split of a checkpoint's run, to be read as the run itself reads it."""
    saved = read_trainer_json(checkpoint)
    if saved.stream is not None:
        raise InputError(f"{checkpoint}: its run trained on a stream, which has no validation split; give --texts")
    if saved.samples_rows:
        raise InputError(f"{checkpoint}: its run trained on --prompts, which have no validation split; give --texts")
    folders = saved.arguments.get("train_data_dir") or []
    if isinstance(folders, str):
        folders = [folders]
    isolates = bool(saved.arguments.get("isolate_documents", True))
    try:
        return [_open_rows(folder, None, isolates) for folder in folders]
    except InputError as error:
        raise InputError(*(f"the validation split of {checkpoint}: {fault}" for fault in error.faults)) from None


def _open_rows(folder: str, name: str | None, isolates: bool) -> HeldOutRows:
    dataset = open_dataset(folder, isolates)
    if dataset.validation is None:
        raise InputError(f"{folder}: the token dataset has no validation split; tokenize with --validation_split")
    return HeldOutRows(name, dataset)


def _read_documents(name: str, location: str, text_column: str, downloads: Path) -> DocumentTexts:
    """Read all documents of a source; files at a URL are downloaded to ``downloads``."""
    (source,) = open_sources([location], "--texts", stream=False, downloads=downloads)
    # bad rows are skipped only here: reading them below is an error
    kind = find_kind(source, text_column, skips_bad_rows=True, prefers_text=True)
    if kind != "text":
        raise InputError(
            f"--texts {location}: its rows are chats or instructions, which need a chat template; tokenize them with "
            "fabric-train tokenize and give the token dataset"
        )
    texts = []
    locations = []
    for _, document in StreamedSource(name, source, kind, (text_column,)).read(0):
        texts.append(str(document.content))
        locations.append(document.locate())
    if not texts:
        raise InputError(f"--texts {location}: no document has text; give another source")
    return DocumentTexts(name, tuple(texts), tuple(locations))


@dataclass(frozen=True)
class PredictedBatch:
    """A forward pass and the tokens that it predicts."""

    input_ids: torch.Tensor
    """int64 [B, T]."""
    documents: Documents | None
    """The borders of the documents; None if each row is one document."""
    targets: Targets
    token_indices: np.ndarray
    """The indices of the targets among all predicted tokens of the text, int64 [N]."""


@dataclass(frozen=True)
class TextChunk:
    """Consecutive documents or rows of a text."""

    units: range
    """The documents of a ``WindowedText``, or the rows of a ``PackedText``."""
    tokens: range
    """The range of the chunk's tokens among all predicted tokens of the text."""
    content: str
    """A hash that identifies the chunk's content and how it is read."""
    longest_input: int
    """The text's ``input_tokens``, which decides how some models compute."""


class EncodedText(Protocol):
    """The documents of a text as the tokens of one tokenizer: D documents, N predicted tokens."""

    name: str
    """The name in messages."""
    identity: str
    """See ``identity_of``."""
    target_ids: np.ndarray
    """The predicted tokens, int32 [N]."""
    owners: np.ndarray
    """The document of each predicted token, int64 [N]."""
    source_names: tuple[str, ...]
    sources: np.ndarray
    """The source of each document, int64 [D], as an index of ``source_names``."""
    num_bytes: np.ndarray
    """The UTF-8 bytes that the predicted tokens of each document stand for, fp64 [D]; NaN if they are not known."""
    input_tokens: int
    """The number of tokens in the longest sequence that a model reads."""
    highest_id: int
    """The highest of all ids."""

    def location(self, document: int) -> str:
        """Return a document's file and line."""

    def chunks(self) -> Iterator[TextChunk]:
        """Yield consecutive chunks of about ``_CHUNK_TOKENS`` predicted tokens."""

    def batches(self, chunk: TextChunk, batch_tokens: int) -> Iterator[PredictedBatch]:
        """Yield forward passes of at most ``batch_tokens`` tokens, or of one sequence, that predict its tokens."""


@dataclass(frozen=True)
class TextWindow:
    """A forward pass over tokens ``begin`` to ``stop`` of a document, which predict from ``first_predicting`` on."""

    document: int
    begin: int
    first_predicting: int
    stop: int


def cut_windows(document: int, num_tokens: int, max_length: int, overlap: int) -> Iterator[TextWindow]:
    """Yield windows of at most ``max_length`` tokens in which each of a document's tokens is predicted exactly once.

    Token 0 is the BOS before the document, and tokens 1 to ``num_tokens`` are the document. Each token of a window
    predicts the next one. The first window predicts as many tokens as it can. Every other window has at least
    ``overlap`` tokens before its first predicted token, and the last one is as long as the others. With an overlap of
    1, these are lm_eval's windows (``get_rolling_token_windows`` with ``context_len=1``). A document of 10 tokens, with
    a max_length of 4 and an overlap of 2::

        reads 0-3, predicts 1-4;  reads 3-6, predicts 5-7;  reads 6-9, predicts 8-10
    """
    num_predicted = min(max_length, num_tokens)
    if num_predicted:
        yield TextWindow(document, begin=0, first_predicting=0, stop=num_predicted)
    while num_predicted < num_tokens:
        stop = min(num_predicted + max_length - overlap + 1, num_tokens)
        yield TextWindow(document, begin=stop - max_length, first_predicting=num_predicted, stop=stop)
        num_predicted = stop


class WindowedText(EncodedText):
    """Texts whose documents are read one by one: BOS (EOS for a tokenizer without BOS), then the document's tokens."""

    def __init__(self, documents: DocumentTexts, tokenizer: Any, max_length: int, overlap: int) -> None:
        """Encode the documents with a tokenizer of transformers; for the lengths see :func:`cut_windows`."""
        prefix = tokenizer.bos_token_id
        if prefix is None:
            prefix = tokenizer.eos_token_id
        ids = list(_encode(documents.texts, tokenizer, prefix))
        lengths = [len(document_ids) for document_ids in ids]

        self._documents = documents
        self._max_length = max_length
        self._overlap = overlap
        self._prefix = np.array([prefix], dtype=np.int32)
        self._starts = np.cumsum([0, *lengths])  # of each document among all tokens, and the end
        self.name = documents.name
        self.identity = identity_of(documents, max_length, overlap)
        self.target_ids = np.concatenate(ids)
        self.owners = np.repeat(np.arange(len(ids)), lengths)
        self.source_names = (documents.name,)
        self.sources = np.zeros(len(ids), dtype=np.int64)
        self.num_bytes = np.array(list(map(utf8_length, documents.texts)), dtype=np.float64)
        self.input_tokens = min(max_length, max(lengths))
        self.highest_id = int(self.target_ids.max(initial=prefix))

    def location(self, document: int) -> str:
        return self._documents.locations[document]

    def chunks(self) -> Iterator[TextChunk]:
        settings = np.array([self._max_length, self._overlap, self._prefix[0]])
        for documents in _split_evenly(self._starts):
            tokens = range(int(self._starts[documents.start]), int(self._starts[documents.stop]))
            lengths = np.diff(self._starts[documents.start : documents.stop + 1])
            content = _digest(settings, lengths, self.target_ids[tokens.start : tokens.stop])
            yield TextChunk(documents, tokens, content, self.input_tokens)

    def batches(self, chunk: TextChunk, batch_tokens: int) -> Iterator[PredictedBatch]:
        """Yield windows of about the same length, the longest ones first."""
        windows: list[TextWindow] = []
        for document in chunk.units:
            num_tokens = int(self._starts[document + 1] - self._starts[document])
            windows += cut_windows(document, num_tokens, self._max_length, self._overlap)
        windows.sort(key=lambda window: window.stop - window.begin, reverse=True)
        while windows:
            longest = windows[0].stop - windows[0].begin
            num_windows = max(1, batch_tokens // longest)
            yield self._batch_of(windows[:num_windows])
            del windows[:num_windows]

    def _batch_of(self, windows: Sequence[TextWindow]) -> PredictedBatch:
        """Return the forward pass over windows, the longest first; padding is at the end, where nothing attends to it.

        ``target_ids`` has no BOS, so token t + 1 of a document, which token t predicts, is the document's target t.
        """
        longest = windows[0].stop - windows[0].begin
        input_ids = np.zeros((len(windows), longest), dtype=np.int64)
        positions = []  # of the predicting tokens, in the flattened batch
        token_indices = []
        for row, window in enumerate(windows):
            # the tokens that the window reads
            document_start = int(self._starts[window.document])
            document_ids = self.target_ids[document_start : document_start + window.stop]
            window_ids = np.concatenate([self._prefix, document_ids])[window.begin : window.stop]
            input_ids[row, : len(window_ids)] = window_ids
            # the positions that predict, and what they predict
            predicting = np.arange(window.first_predicting, window.stop)  # tokens of the document
            positions.append(row * longest + predicting - window.begin)
            token_indices.append(document_start + predicting)
        all_indices = np.concatenate(token_indices)
        targets = Targets(
            positions=torch.from_numpy(np.concatenate(positions)),
            ids=torch.from_numpy(self.target_ids[all_indices].astype(np.int64)),
        )
        return PredictedBatch(torch.from_numpy(input_ids), None, targets, all_indices)


class PackedText(EncodedText):
    """The validation split of a token dataset, read row by row as in training.

    A document that is cut at the end of a row therefore continues without context, the labels decide which tokens are
    predicted, including EOS, and the loss is the run's ``val_loss``. Without a document index, each row is a document
    of unknown bytes.
    """

    def __init__(self, text: HeldOutRows) -> None:
        """Read all rows of the split.

        Raises:
            InputError: no token is supervised.
        """
        assert text.dataset.validation is not None
        self.name = text.dataset.name
        self.identity = identity_of(text)
        self._dataset = text.dataset
        self._rows = text.dataset.validation
        self.input_tokens = self._rows.longest()
        self.highest_id = 0

        # Read all rows: their targets, and the pieces of documents that the targets belong to. The lists have an array
        # for each batch of rows.
        target_ids = []
        num_targets_of_rows = [0]
        pieces_of_batches = []
        num_targets_of_sequences = [np.zeros(0, dtype=np.int64)]
        for rows in _slices(range(len(self._rows)), _ROWS_AT_ONCE):
            batch = self._rows.__getitems__(rows)
            assert batch.pieces is not None
            targets = find_targets(batch.labels)
            target_ids.append(targets.ids.numpy().astype(np.int32))
            target_rows = targets.positions // batch.labels.shape[1]
            num_targets_of_rows += np.bincount(target_rows, minlength=len(rows)).tolist()
            if batch.documents is not None:
                # a target belongs to the sequence of its own token, which follows the position that predicts it
                token_positions = targets.positions.numpy() + 1
                num_targets_before = np.searchsorted(token_positions, batch.documents.borders.numpy())
                num_targets_of_sequences.append(np.diff(num_targets_before))
            documents = np.array(rows, dtype=np.int64)  # without an index, each row is a document
            if self._rows.index is not None:
                documents = self._rows.index.pieces(documents).documents
            pieces_of_batch = np.empty(len(documents), dtype=_PIECE)
            pieces_of_batch["document"] = documents
            pieces_of_batch["source"] = batch.pieces.sources.numpy()
            pieces_of_batch["num_targets"] = batch.pieces.num_targets.numpy()
            pieces_of_batch["num_bytes"] = batch.pieces.num_bytes.numpy()
            pieces_of_batches.append(pieces_of_batch)
            self.highest_id = max(self.highest_id, int(batch.input_ids.max()))

        self.target_ids = np.concatenate(target_ids)
        self._row_starts = np.cumsum(num_targets_of_rows)
        self.num_targets_of_sequences = np.concatenate(num_targets_of_sequences)
        """The predicted tokens of each sequence that attention keeps apart, such as an answer of a pair, int64."""
        if not len(self.target_ids):
            raise InputError(
                f"{text.dataset.folder}: no token of its {len(self._rows)} validation rows is supervised, so there is "
                "no loss to compare; tokenize with a larger --validation_split or --max_length, so that answers fit"
            )

        # join the pieces of each document; documents without a target are left out, and the others numbered from 0
        pieces = np.concatenate(pieces_of_batches)
        pieces = pieces[pieces["num_targets"] > 0]
        self._documents, document_of_piece = np.unique(pieces["document"], return_inverse=True)
        num_documents = len(self._documents)
        self.owners = np.repeat(document_of_piece, pieces["num_targets"])
        self.num_bytes = np.bincount(document_of_piece, weights=pieces["num_bytes"], minlength=num_documents)
        self.sources = np.zeros(num_documents, dtype=np.int64)
        self.source_names: tuple[str, ...] = self._rows.source_names
        if text.name:
            self.source_names = (text.name,)  # the one source of all documents
        else:
            self.sources[document_of_piece] = pieces["source"]

    def location(self, document: int) -> str:
        split_document = int(self._documents[document])
        if self._rows.index is None:
            return f"row {split_document}"
        origin = self._rows.index.origin(split_document)
        return f"{origin.file}:{origin.row}"

    def note(self) -> str:
        """Return why fewer tokens are predicted than the manifest counts; "" if there is nothing to say."""
        reason = unpredicted_tokens([self._dataset], len(self.target_ids))
        return f"{self.name}: {reason}" if reason else ""

    def chunks(self) -> Iterator[TextChunk]:
        for rows in _split_evenly(self._row_starts):
            tokens = range(int(self._row_starts[rows.start]), int(self._row_starts[rows.stop]))
            settings = f"{self._dataset.fingerprint} {self._rows.isolates} {rows}"
            content = _digest(settings.encode(), self.target_ids[tokens.start : tokens.stop])
            yield TextChunk(rows, tokens, content, self.input_tokens)

    def batches(self, chunk: TextChunk, batch_tokens: int) -> Iterator[PredictedBatch]:
        num_rows = max(1, batch_tokens // self.input_tokens)
        for rows in _slices(chunk.units, num_rows):
            batch = self._rows.__getitems__(rows)
            token_indices = np.arange(self._row_starts[rows.start], self._row_starts[rows.stop])
            yield PredictedBatch(batch.input_ids, batch.documents, find_targets(batch.labels), token_indices)


def identity_of(text: EvaluatedText, max_length: int = 0, overlap: int = 0) -> str:
    """Return a hash of a text, the windows of documents and the kind of device, which no tokenizer changes."""
    if isinstance(text, HeldOutRows):
        content = _digest(f"{text.dataset.fingerprint} {text.dataset.isolates}".encode())
    else:
        digests = [hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest() for document in text.texts]
        content = _digest(f"{max_length} {overlap}".encode(), *digests)
    return full_digest(f"{content} {device_kind()}")[:NUM_DIGITS]


def device_kind() -> str:
    """Return the kind of device that models are evaluated on, which decides the precision."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def full_digest(text: str) -> str:
    """Return the hash of a text in all its hexadecimal digits."""
    return _digest(text.encode())


def _encode(texts: Sequence[str], tokenizer: Any, prefix: int) -> Iterator[np.ndarray]:
    """Yield the ids of each text, int32, without special tokens around it and without a leading ``prefix``."""
    for indices in _slices(range(len(texts)), _TEXTS_AT_ONCE):
        batch = list(texts[indices.start : indices.stop])
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)
        for ids in encoded["input_ids"]:
            if ids[:1] == [prefix]:
                ids = ids[1:]
            yield np.array(ids, dtype=np.int32)


def _split_evenly(starts: np.ndarray) -> Iterator[range]:
    """Yield ranges of consecutive units that have about ``_CHUNK_TOKENS`` tokens; unit u begins at ``starts[u]``."""
    num_units = len(starts) - 1
    begin = 0
    while begin < num_units:
        # the last unit that ends within so many tokens, but at least one unit
        stop = int(np.searchsorted(starts, starts[begin] + _CHUNK_TOKENS, side="right")) - 1
        stop = max(begin + 1, stop)
        yield range(begin, stop)
        begin = stop


def _slices(indices: range, size: int) -> Iterator[range]:
    """Yield a range of indices in slices of ``size``; the last one may be smaller."""
    for begin in range(0, len(indices), size):
        yield indices[begin : begin + size]


def _digest(*contents: "np.ndarray | bytes") -> str:
    """Return the SHA-256 of the joined contents."""
    digest = hashlib.sha256()
    for content in contents:
        if not isinstance(content, bytes):
            content = np.ascontiguousarray(content).tobytes()
        digest.update(content)
    return digest.hexdigest()
