"""Open --streaming_dataset: its documents, the tokenizer, and the encoder of texts and chats."""

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError, naming_option
from fabric_train.data.stream_documents import (
    TRAIN_ON,
    WHOLE_FILES,
    Document,
    StreamedDocuments,
    StreamedSource,
    bad_row_error,
)
from fabric_train.data.token_dataset import IndexedRows, TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.files.typed_json import read_json
from fabric_train.reading.documents import BadRowError, EncodedDocument, Row, columns_beside_text, why_left_out
from fabric_train.reading.sources import open_sources, split_names
from fabric_train.tokenization.chats.formats import columns, read_chat
from fabric_train.tokenization.corpus import find_kind
from fabric_train.tokenization.tokenizers import text_encoder
from fabric_train.tokenization.tokenizers.parity_check import Reference, find_difference
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer, set_chat_template

if TYPE_CHECKING:
    from fabric_train.arguments import DataArguments
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

_COMPARED_DOCUMENTS = 8
_COMPARED_CHARACTERS = 50_000
_ROWS_LOOKED_AT = 20  # to see which of their columns are used
_COUNTED_DOCUMENTS = 100  # at the start of a source, to estimate how many it has


@dataclass(frozen=True)
class DocumentEncoder:
    """An encoder of documents that gives the same ids and labels as tokenization, including BOS and EOS."""

    encoder: text_encoder.TextEncoder
    """The encoder of texts."""
    borders: text_encoder.Borders
    chats: Mapping[str, "ChatEncoder"]
    """The encoders of chats, by format."""

    def __call__(self, document: Document) -> EncodedDocument:
        """Return the document's tokens, at least 1."""
        if isinstance(document.content, str):
            (ids,) = self.encoder.encode_batch([document.content])
            ids = text_encoder.add_borders(ids, self.borders)
            return EncodedDocument(ids, None, len(document.content), document.num_bytes)
        try:
            encoded = self.chats[document.kind].encode(document.content)
        except BadRowError as error:
            raise bad_row_error(f"{document.locate()}: {error}") from None
        # documents that would be left out were not read
        assert isinstance(encoded, EncodedDocument)
        return encoded


@dataclass(frozen=True)
class ChatTemplateInUse:
    """The chat template of a stream, the token with which it ends turns, and notes for the user."""

    source: str
    end_of_turn_token_id: int | None
    notes: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True)
class Stream:
    """The training data of --streaming_dataset."""

    documents: StreamedDocuments
    tokenizer: CorpusTokenizer
    """The model's tokenizer."""
    tokenizer_folder: Path
    """The folder in which the run stores the tokenizer, and from which the encoder is opened."""
    chat_template: ChatTemplateInUse | None
    """None without chats."""
    max_length: int
    """The tokens of a row."""
    isolates: bool
    """Whether attention stays within a document."""
    held_out: TokenDataset | TokenMixture | None
    """The token dataset with the validation split; None without --train_data_dir."""
    notes: tuple[str, ...] = ()
    """Notes for the user on columns of texts that are not used."""

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.documents.source_names

    @property
    def validation(self) -> IndexedRows | None:
        return self.held_out.validation if self.held_out else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end documents, and turns of chats."""
        if self.chat_template is None or self.chat_template.end_of_turn_token_id is None:
            return (self.tokenizer.eos_token_id,)
        return (self.tokenizer.eos_token_id, self.chat_template.end_of_turn_token_id)

    @property
    def attachments(self) -> tuple[Path, ...]:
        """The folders that are copied to each checkpoint, so that it can be exported and used on its own."""
        return (self.tokenizer_folder,)

    @property
    def tokenizer_hash(self) -> str:
        """The SHA-256 of everything that decides the ids, including BOS and EOS."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer.source, Path):
            vocabulary = read_json(tokenizer.source / "tokenizer.json", dict, "download the file again")
        else:
            vocabulary = json.loads(tokenizer.source.backend_tokenizer.to_str())
        content = json.dumps(vocabulary, sort_keys=True)  # independent of the formatting
        settings = f"{tokenizer.bos_token_id} {tokenizer.eos_token_id} {tokenizer.special_text_is_plain}"
        return hashlib.sha256(f"{content} {settings}".encode()).hexdigest()

    def save_tokenizer(self) -> None:
        """Write the tokenizer, with the chat template in use, to ``tokenizer_folder``."""
        self.tokenizer.save(self.tokenizer_folder)
        if self.chat_template is not None:
            set_chat_template(self.tokenizer_folder, self.chat_template.source)

    def open_encoder(self) -> DocumentEncoder:
        """Open the encoder of the tokenizer in ``tokenizer_folder``, which gives the same ids as tokenization.

        Forked processes may use it as long as this process has encoded nothing with it.
        """
        file = self.tokenizer_folder / "tokenizer.json"
        is_plain = self.tokenizer.special_text_is_plain
        encoder, _ = text_encoder.open_encoder(file, is_plain)

        # the fast encoder is used only if it agrees with the tokenizer
        difference = None
        if not isinstance(encoder, text_encoder.FastEncoder):
            difference = self._find_difference(encoder, Reference(file, is_plain))
        if difference:
            encoder, _ = text_encoder.open_encoder(file, is_plain, why_not_gigatoken=difference)

        chat_formats = sorted({source.kind for source in self.documents.sources} - {"text"})
        chats = {}
        for chat_format in chat_formats:
            chats[chat_format] = _chat_encoder(
                self.tokenizer_folder, chat_format, split_at_control_tokens=difference is None
            )
        borders = text_encoder.Borders(self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return DocumentEncoder(encoder, borders, chats)

    def _find_difference(self, encoder: text_encoder.TextEncoder, reference: Reference) -> str | None:
        """Return how the encoder's ids differ from the tokenizer's; None if they agree.

        Difficult strings and the first documents are compared.
        """
        texts = list(reference.hard_strings())
        unshuffled = replace(self.documents, shuffle_buffer=0)
        for document in islice(unshuffled.read(epoch=0), _COMPARED_DOCUMENTS):
            for text in _texts_in(document):
                texts.append(text[:_COMPARED_CHARACTERS])
        return find_difference(texts, reference.encode(texts), encoder.encode_batch(texts))


def _texts_in(document: Document) -> list[str]:
    """Return the text of a document, or the messages of a chat."""
    if isinstance(document.content, str):
        return [document.content]
    chat = read_chat(document.content, document.kind)
    return [message["content"] for message in chat.messages]


def _chat_encoder(tokenizer_folder: Path, chat_format: str, *, split_at_control_tokens: bool = True) -> "ChatEncoder":
    """Return an encoder of chats without a limit of length: chats are cut where rows end."""
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder  # slow to import, and texts do not need it

    return ChatEncoder(
        tokenizer_folder,
        chat_format,
        TRAIN_ON,
        too_long="drop",
        max_length=None,
        split_at_control_tokens=split_at_control_tokens,
    )


def open_stream(
    data_arguments: "DataArguments",
    tokenizer_name: str,
    special_text_is_plain: bool | None,
    tokenizer_folder: Path,
    held_out: TokenDataset | TokenMixture | None,
) -> Stream:
    """Open the sources of --streaming_dataset and the tokenizer.

    Args:
        data_arguments: Arguments with a ``streaming_dataset``.
        tokenizer_name: A folder or a hub name.
        special_text_is_plain: Whether the text of a special token is encoded as plain text; None: as the tokenizer
            does by default.
        tokenizer_folder: Where the run will store the tokenizer.
        held_out: The token dataset with the validation split, if there is one.

    Raises:
        InputError: a source, its share or the tokenizer cannot be used.
    """
    assert data_arguments.streaming_dataset is not None
    documents = _open_documents(data_arguments, data_arguments.streaming_dataset, tokenizer_folder)
    with naming_option("--model_name", instead_of="--tokenizer_name"):
        tokenizer = load_tokenizer(tokenizer_name)
    if special_text_is_plain is not None:
        tokenizer = replace(tokenizer, special_text_is_plain=special_text_is_plain)
    text_sources = [source for source in documents.sources if source.kind == "text"]  # their rows were looked at
    return Stream(
        documents=documents,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        chat_template=_open_template(documents, tokenizer),
        max_length=data_arguments.max_length,
        isolates=data_arguments.isolate_documents,
        held_out=held_out,
        notes=tuple(_notes_on_unused_columns(text_sources)),
    )


def _open_template(documents: StreamedDocuments, tokenizer: CorpusTokenizer) -> ChatTemplateInUse | None:
    """Return the chat template of the tokenizer, with notes on columns that it does not use; None without chats."""
    chat_sources = [source for source in documents.sources if source.kind != "text"]
    if not chat_sources:
        return None
    with TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        with naming_option("--chat_template of fabric-train tokenize", instead_of="--chat_template"):
            encoder = _chat_encoder(Path(folder), chat_sources[0].kind)
        for source in chat_sources:
            _look_at_first_rows(source, encoder)  # again, for what the template does not show
        notes = [*encoder.notes, *_notes_on_unused_columns(chat_sources)]
    return ChatTemplateInUse(encoder.chat_template, encoder.end_of_turn_token_id, tuple(notes))


def _notes_on_unused_columns(sources: Sequence[StreamedSource]) -> list[str]:
    """Return a note for each source whose first rows have unused columns."""
    notes = []
    for source in sources:
        if source.unused_columns:
            names = ", ".join(sorted(source.unused_columns))
            notes.append(f"{source.name}: columns not used (in its first rows): {names}")
    return notes


def _look_at_first_rows(source: StreamedSource, encoder: "ChatEncoder | None" = None) -> None:
    """Add the columns of a source's first rows that are in no document to its ``unused_columns``.

    With an ``encoder`` of chats, the keys of turns that its template does not show are added too.
    """
    for file_part in islice(source.source.parts(WHOLE_FILES), 1):  # a source without files has none
        reader = source.source.reader(file_part, source.columns)
        rows = [row for _, row in islice(reader, _ROWS_LOOKED_AT) if not isinstance(row, BadRowError)]
        source.unused_columns.update(reader.unread_columns)
        for row in rows:
            source.unused_columns.update(_find_unused_columns(row, source, encoder))


def _find_unused_columns(row: Row, source: StreamedSource, encoder: "ChatEncoder | None") -> Set[str]:
    """Return the columns of a row, and the keys of its turns, that no document uses."""
    if source.kind == "text":
        return columns_beside_text(row, source.columns[0])
    calls_as_text = encoder is not None and encoder.calls_as_text
    try:
        chat = read_chat(row, source.kind, calls_as_text=calls_as_text)
    except BadRowError:  # reported when the row is read
        return set()
    if encoder is None:
        is_left_out = why_left_out(chat, TRAIN_ON) is not None
        return set() if is_left_out else chat.unused
    (encoded,) = encoder.encode_all([chat])
    if not isinstance(encoded, EncodedDocument):  # left out, or bad
        return set()
    return encoded.unused


def _open_documents(data_arguments: "DataArguments", entries: list[str], downloads: Path) -> StreamedDocuments:
    """Open the entries of --streaming_dataset; the files of URLs are downloaded to ``downloads``."""
    # open all sources, and see what kind of documents they have
    names_and_locations = split_names(entries, "--streaming_dataset")
    opened_sources = open_sources(
        [location for _, location in names_and_locations], "--streaming_dataset", stream=True, downloads=downloads
    )
    sources = []
    for (name, _), opened_source in zip(names_and_locations, opened_sources, strict=True):
        kind = find_kind(opened_source, data_arguments.text_column, skips_bad_rows=True)
        used_columns = (data_arguments.text_column,) if kind == "text" else columns(kind)
        source = StreamedSource(name, opened_source, kind, used_columns)
        _look_at_first_rows(source)  # so that later notes name only columns that come later
        sources.append(source)

    # refuse sources without a document, and shares that cannot be read
    shares = _shares_of_sources(data_arguments, [source.name for source in sources])
    documents = StreamedDocuments(sources, shares, data_arguments.shuffle_buffer, data_arguments.seed)
    if shares is None:
        if not any(_has_documents(source) for source in sources):
            raise InputError("--streaming_dataset has no documents with text; give other sources")
    else:
        faults = []
        for source, share in zip(sources, shares, strict=True):
            fault = _fault_in_share(source, share, is_only_source=len(sources) == 1)
            if fault is not None:
                faults.append(fault)
        if faults:
            raise InputError(*faults)
    return documents


def _has_documents(source: StreamedSource) -> bool:
    return any(True for _ in source.read(0))


def _shares_of_sources(data_arguments: "DataArguments", names: list[str]) -> list[float] | None:
    """Return the share of each source; sources that --shares does not name have 1. None without --shares."""
    shares = data_arguments.shares_of_epochs
    if shares.values is None:
        return None
    shares_by_name = shares.by_name()
    if shares_by_name is None:
        return [float(share) for share in shares.values if not isinstance(share, dict)]
    unknown_names = [name for name in shares_by_name if name not in names]
    if unknown_names:
        raise InputError(
            f"--shares: {unknown_names[0]} is not a source of --streaming_dataset; its sources are: {', '.join(names)}"
        )
    return [shares_by_name.get(name, 1.0) for name in names]


def _fault_in_share(source: StreamedSource, share: float, *, is_only_source: bool) -> str | None:
    """Return why a source cannot be read with a share, or None if it can."""
    if not is_only_source and not source.size:
        return (
            f"--shares cannot mix {source.name} evenly, because the hub does not provide its number of rows; "
            "download it and give its folder, or tokenize it with fabric-train tokenize"
        )

    # count the documents of a small source; of a larger one, estimate them from the progress after the first ones
    progress_of_documents = [progress for progress, _ in islice(source.read(0), _COUNTED_DOCUMENTS)]
    if not progress_of_documents:
        return f"--streaming_dataset {source.name} has no documents with text; give other sources"
    num_documents: float = len(progress_of_documents)
    if len(progress_of_documents) == _COUNTED_DOCUMENTS and progress_of_documents[-1]:
        num_documents = len(progress_of_documents) / progress_of_documents[-1]

    if source.size and 0 < share * num_documents < 1:
        return (
            f"--shares: a pass with the share {share:g} reads less than one of the {round(num_documents):,} documents "
            f"of {source.name}; give at least {1 / num_documents:.2g}, or leave out {source.name}"
        )
    return None
