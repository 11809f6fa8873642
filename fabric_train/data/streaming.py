"""Open --streaming_dataset: its documents, the tokenizer, and the encoder of texts and chats."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Set
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
    fault_of,
)
from fabric_train.data.token_dataset import IndexedRows, TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.files.regular_file import read_json
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
    """An encoder that gives the ids and labels of tokenization, BOS and EOS included; ``chats`` are by format."""

    encoder: text_encoder.TextEncoder
    borders: text_encoder.Borders
    chats: Mapping[str, "ChatEncoder"]

    def __call__(self, document: Document) -> EncodedDocument:
        """Return the document's tokens, at least 1."""
        if isinstance(document.content, str):
            (ids,) = self.encoder.encode_batch([document.content])
            ids = text_encoder.add_borders(ids, self.borders)
            return EncodedDocument(ids, None, len(document.content), document.num_bytes)
        try:
            encoded = self.chats[document.kind].encode(document.content)
        except BadRowError as error:
            raise fault_of(f"{document.place()}: {error}") from None
        assert isinstance(encoded, EncodedDocument)  # those that would be left out are not read
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
    """The training data of --streaming_dataset.

    The run stores the model's ``tokenizer`` in ``tokenizer_folder``, and the encoder is opened from there.
    ``chat_template`` is None without chats. A row has ``max_length`` tokens, and ``isolates`` says whether attention
    stays within a document. ``held_out`` has the validation split, None without --train_data_dir. ``notes`` name the
    columns of texts that are not used.
    """

    documents: StreamedDocuments
    tokenizer: CorpusTokenizer
    tokenizer_folder: Path
    chat_template: ChatTemplateInUse | None
    max_length: int
    isolates: bool
    held_out: TokenDataset | TokenMixture | None
    notes: tuple[str, ...] = ()

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.documents.source_names

    @property
    def validation(self) -> IndexedRows | None:
        return self.held_out.validation if self.held_out else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        end_of_turn = self.chat_template.end_of_turn_token_id if self.chat_template else None
        return (self.tokenizer.eos_token_id, *([end_of_turn] if end_of_turn is not None else []))

    @property
    def attachments(self) -> tuple[Path, ...]:
        """Folders that each checkpoint copies, so that it can be exported and used on its own."""
        return (self.tokenizer_folder,)

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of everything that decides the ids, BOS and EOS included."""
        source = self.tokenizer.source
        if isinstance(source, Path):
            given = read_json(source / "tokenizer.json", dict, "fetch the file again")
        else:
            given = json.loads(source.backend_tokenizer.to_str())
        content = json.dumps(given, sort_keys=True)  # independent of the formatting
        borders = f"{self.tokenizer.bos_token_id} {self.tokenizer.eos_token_id} {self.tokenizer.special_text_is_plain}"
        return hashlib.sha256(f"{content} {borders}".encode()).hexdigest()

    def save_tokenizer(self) -> None:
        """Write the tokenizer, with the chat template in use, into ``tokenizer_folder``."""
        self.tokenizer.save(self.tokenizer_folder)
        if self.chat_template is not None:
            set_chat_template(self.tokenizer_folder, self.chat_template.source)

    def open_encoder(self) -> DocumentEncoder:
        """Open the encoder of the tokenizer in ``tokenizer_folder``; its ids are those that tokenization writes.

        Forked processes may use it as long as this process has encoded nothing with it.
        """
        file = self.tokenizer_folder / "tokenizer.json"
        is_plain = self.tokenizer.special_text_is_plain
        encoder, _ = text_encoder.open_encoder(file, is_plain)
        difference = None
        if not isinstance(encoder, text_encoder.FastEncoder):
            difference = self._find_difference(encoder, Reference(file, is_plain))
        if difference:
            encoder, _ = text_encoder.open_encoder(file, is_plain, why_not_gigatoken=difference)
        kinds = sorted({place.kind for place in self.documents.places} - {"text"})
        chats = {kind: _chat_encoder(self.tokenizer_folder, kind, by_parts=difference is None) for kind in kinds}
        borders = text_encoder.Borders(self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return DocumentEncoder(encoder, borders, chats)

    def _find_difference(self, encoder: text_encoder.TextEncoder, reference: Reference) -> str | None:
        """Return how the encoder's ids of hard strings and of the first documents differ from the tokenizer's, if they
        do.
        """
        first = islice(replace(self.documents, shuffle_buffer=0).read(0), _COMPARED_DOCUMENTS)
        texts = [text[:_COMPARED_CHARACTERS] for document in first for text in _texts_in(document)]
        texts = [*reference.hard_strings(), *texts]
        return find_difference(texts, reference.encode(texts), encoder.encode_batch(texts))


def _texts_in(document: Document) -> list[str]:
    if isinstance(document.content, str):
        return [document.content]
    return [message["content"] for message in read_chat(document.content, document.kind).messages]


def _chat_encoder(tokenizer_folder: Path, kind: str, by_parts: bool = True) -> "ChatEncoder":
    """Return an encoder of chats of any length: they are cut where rows end."""
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder  # slow to import, and texts do not need it

    return ChatEncoder(tokenizer_folder, kind, TRAIN_ON, "drop", max_length=None, by_parts=by_parts)


def open_stream(
    given: "DataArguments",
    tokenizer_name: str,
    special_text_is_plain: bool | None,
    tokenizer_folder: Path,
    held_out: TokenDataset | TokenMixture | None,
) -> Stream:
    """Open the sources of --streaming_dataset and the tokenizer, a folder or a hub name; None takes its own default."""
    assert given.streaming_dataset is not None
    documents = _open_documents(given, given.streaming_dataset, tokenizer_folder)
    with naming_option("--model_name", instead_of="--tokenizer_name"):
        tokenizer = load_tokenizer(tokenizer_name)
    if special_text_is_plain is not None:
        tokenizer = replace(tokenizer, special_text_is_plain=special_text_is_plain)
    template = _open_template(documents, tokenizer)
    texts = [place for place in documents.places if place.kind == "text"]
    return Stream(
        documents,
        tokenizer,
        tokenizer_folder,
        template,
        given.max_length,
        given.isolate_documents,
        held_out,
        notes=tuple(_notes_of_unused_columns(texts, None)),
    )


def _open_template(documents: StreamedDocuments, tokenizer: CorpusTokenizer) -> ChatTemplateInUse | None:
    chats = [place for place in documents.places if place.kind != "text"]
    if not chats:
        return None
    with TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        with naming_option("--chat_template of fabric-train tokenize", instead_of="--chat_template"):
            encoder = _chat_encoder(Path(folder), chats[0].kind)
        notes = [*encoder.notes, *_notes_of_unused_columns(chats, encoder)]
    return ChatTemplateInUse(encoder.chat_template, encoder.end_of_turn_token_id, tuple(notes))


def _notes_of_unused_columns(places: Iterable[StreamedSource], encoder: "ChatEncoder | None") -> Iterator[str]:
    """Yield which columns of the first rows of each place nothing is made of; ``encoder`` is that of chats."""
    for place in places:
        _look_at_first_rows(place, encoder)
        if place.unused:
            yield f"{place.name}: columns not used (in its first rows): {', '.join(sorted(place.unused))}"


def _look_at_first_rows(place: StreamedSource, encoder: "ChatEncoder | None" = None) -> None:
    """Find the columns of a place's first rows of which nothing is made; with ``encoder``, also keys not shown."""
    for part in islice(place.source.parts(WHOLE_FILES), 1):
        reader = place.source.reader(part, place.columns)
        rows = [row for _, row in islice(reader, _ROWS_LOOKED_AT) if not isinstance(row, BadRowError)]
        place.unused.update(reader.unread_columns)
        for row in rows:
            place.unused.update(_unused_columns(row, place, encoder))


def _unused_columns(row: Row, place: StreamedSource, encoder: "ChatEncoder | None") -> Set[str]:
    """Return the columns of a row, and the keys of its turns, of which nothing is made."""
    if place.kind == "text":
        return columns_beside_text(row, place.columns[0])
    try:
        chat = read_chat(row, place.kind, calls_as_text=encoder is not None and encoder.calls_as_text)
    except BadRowError:  # which is reported when it is read
        return set()
    if encoder is None:
        return set() if why_left_out(chat, TRAIN_ON) else chat.unused
    (encoded,) = encoder.encode_all([chat])
    return encoded.unused if isinstance(encoded, EncodedDocument) else set()


def _open_documents(given: "DataArguments", places: list[str], downloads: Path) -> StreamedDocuments:
    named = split_names(places, "--streaming_dataset")
    sources = open_sources([place for _, place in named], "--streaming_dataset", stream=True, downloads=downloads)
    kinds = [find_kind(source, given.text_column, skips_bad_rows=True) for source in sources]
    streamed = [
        StreamedSource(name, source, kind, (given.text_column,) if kind == "text" else columns(kind))
        for (name, _), source, kind in zip(named, sources, kinds, strict=True)
    ]
    for place in streamed:  # so that reading names only columns that come later
        _look_at_first_rows(place)
    shares = _shares_of(given, [place.name for place in streamed])
    documents = StreamedDocuments(streamed, shares, given.shuffle_buffer, given.seed)
    if shares is not None:
        alone = len(streamed) == 1
        faults = (_fault_in_share(place, share, alone) for place, share in zip(streamed, shares, strict=True))
        if found := [*filter(None, faults)]:
            raise InputError(*found)
    elif all(next(place.read(0), None) is None for place in streamed):
        raise InputError("--streaming_dataset: no document with any text in it; give others")
    return documents


def _shares_of(given: "DataArguments", names: list[str]) -> list[float] | None:
    """Return the share of each place; those that --shares does not name have 1. None without --shares."""
    shares = given.shares_of_epochs
    if shares.given is None:
        return None
    by_name = shares.by_name()
    if by_name is None:
        return [float(share) for share in shares.given if not isinstance(share, dict)]
    unknown = [name for name in by_name if name not in names]
    if unknown:
        raise InputError(
            f"--shares: {unknown[0]} is not a source of --streaming_dataset; there are: {', '.join(names)}"
        )
    return [by_name.get(name, 1.0) for name in names]


def _fault_in_share(place: StreamedSource, share: float, alone: bool) -> str | None:
    if not alone and not place.size:
        return (
            f"--shares: the hub does not say how many rows {place.name} has, so it cannot be mixed evenly; download it "
            "and give its folder, or tokenize it with fabric-train tokenize"
        )
    first = list(islice(place.read(0), _COUNTED_DOCUMENTS))
    if not first:
        return f"--streaming_dataset {place.name}: no document with any text in it; give others"
    # all of them if they are few; of a larger source, as many as its size has of the first ones
    num_documents = len(first) / first[-1][0] if len(first) == _COUNTED_DOCUMENTS and first[-1][0] else len(first)
    if place.size and 0 < share * num_documents < 1:
        return (
            f"--shares: a pass takes {share:g} of {place.name}, less than one of its {round(num_documents):,} "
            f"documents; give at least {1 / num_documents:.2g}, or leave it out"
        )
    return None
