"""Open the corpus of a run: sources, tokenizer, formats and cleaner; and the folder that keeps unfinished work."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cleaning.cleaner import Cleaner, open_cleaner
from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, note, raise_reached_limit
from fabric_train.cli.output import redact
from fabric_train.cli.tables import CHAT_FORMATS, Component
from fabric_train.files import requirements
from fabric_train.files.atomic_folder import check_not_taken, complete_folder, hold_lock, nearest_existing
from fabric_train.files.regular_file import check_no_links_in
from fabric_train.reading.documents import (
    BadRowError,
    Chat,
    Pair,
    Row,
    check_surrogates,
    missing_column,
    name_in,
    text_of,
)
from fabric_train.reading.listing import sha256
from fabric_train.reading.sources import UNFINISHED_SUFFIX, Source, open_each, open_sources, split_names
from fabric_train.token_dataset.manifest import SourceRecord
from fabric_train.token_dataset.rows import Packing
from fabric_train.tokenization.arguments import TEXT_COLUMN, TokenizeArguments
from fabric_train.tokenization.chats.chat_template import read_chosen_template
from fabric_train.tokenization.chats.formats import (
    PREFERENCE,
    columns,
    detect_format,
    read_chat,
    read_pair,
    unexpected_format,
)
from fabric_train.tokenization.chats.turns import is_speaker
from fabric_train.tokenization.pairs import PairEncoder
from fabric_train.tokenization.shards import SIZES, Shard, ShardSizes, split_into_shards
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer, set_chat_template

if TYPE_CHECKING:
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

DOWNLOADS = "downloads"  # the subfolder of an unfinished folder with downloaded files
_SOURCE_OPTIONS = ("--dataset", "--validation_dataset")
# the sample on which ids are compared: parts of the sources, characters per byte, limits of characters
_SAMPLED_PARTS = 8
_SAMPLED_SHARE = 0.01
_MIN_SAMPLED = 20_000
_MAX_SAMPLED = 160_000
_SMALLEST_DATASET = 1_000_000  # bytes: a tokenizer of a small vocabulary, and tables
_BYTES_PER_BYTE_OF_INPUT = 2  # a token takes 4 bytes, as text does: once until it is packed, once in its row


@contextmanager
def unfinished_folder(target: Path, sizes: ShardSizes = SIZES) -> Iterator[Path]:
    """Yield the locked folder ``.NAME.unfinished`` next to ``target``, and remove it when the block succeeds.

    After an exception, a folder with finished work that is worth keeping stays, and a line on standard error says so.
    """
    target = Path(os.path.abspath(target))
    folder = target.parent / f".{target.name}.unfinished"
    check_no_links_in(folder)
    with ExitStack() as stack:
        try:
            taken = f"{target}: another process is tokenizing into it"
            stack.enter_context(hold_lock(folder / "lock", taken, "wait for it or stop it"))
        except OSError as error:
            raise_reached_limit(error)
            raise InputError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from None
        try:
            yield folder
        except BaseException:
            num_finished = sum(file.suffix in (".npz", ".lines") for file in folder.glob("*"))
            downloads = [file for file in (folder / DOWNLOADS).glob("*") if file.suffix != UNFINISHED_SUFFIX]
            parts = folder.rglob("*") if num_finished else downloads
            if sum(file.stat().st_size for file in parts) > sizes.worth_keeping:
                kept = f"{num_finished:,} finished shards" + (f" and {len(downloads):,} downloads" if downloads else "")
                print(f"{kept} are kept in {folder}: the same command continues with them", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class SourceFormat:
    """How to encode rows of a ``kind``: ``chat`` encodes chats; if it is None, ``columns[0]`` holds text.

    ``pairs`` encodes preference pairs, by ``chat``.
    """

    kind: str
    columns: tuple[str, ...]
    chat: "ChatEncoder | None"
    pairs: PairEncoder | None = None

    def read(self, row: Row | BadRowError) -> Chat | Pair:
        """Read a row with a chat or a pair; BadRowError if it has another format."""
        assert self.chat is not None, "a text is no chat"
        if self.pairs is not None:
            return read_pair(row, calls_as_text=self.chat.calls_as_text)
        return read_chat(row, self.kind, calls_as_text=self.chat.calls_as_text)


@dataclass(frozen=True)
class OpenedCorpus:
    """The sources, the tokenizer, and how documents are cleaned and encoded."""

    arguments: TokenizeArguments  # with the packing that the sources decide
    named: list[tuple[str, str]]  # the name and place of each source as given
    train: list[Source]  # the sources of --dataset
    held_out: list[Source]  # the sources of --validation_dataset
    tokenizer: CorpusTokenizer
    tokenizer_folder: Path  # where it was saved, with the chat template that is used
    tokenizer_hashes: dict[str, str]  # SHA-256 of each file in that folder
    formats: list[SourceFormat]  # one per source
    cleaner: Cleaner | None  # cleans texts before they are encoded; None leaves them as they are
    sizes: ShardSizes

    @property
    def sources(self) -> list[Source]:
        """All sources, by which shards and files are numbered."""
        return [*self.train, *self.held_out]

    @property
    def settings(self) -> str:
        """What decides the tokens of a shard besides its source and the encoder, as JSON."""
        given = self.arguments
        longest = None if given.packing == "concat" else given.max_length
        chosen = (given.text_column, given.data_format, given.train_on, given.too_long, longest)
        cleaning = {} if self.cleaner is None else self.cleaner.settings()
        registered = [str(asdict(chat_format)) for chat_format in self.registered_formats]
        return json.dumps([chosen, self.tokenizer_hashes, given.deduplicate, cleaning, registered], sort_keys=True)

    @property
    def registered_formats(self) -> tuple[Component, ...]:
        """The formats of the sources that --extensions has registered."""
        kinds = sorted({source_format.kind for source_format in self.formats})
        return tuple(CHAT_FORMATS.describe(kind) for kind in kinds if kind in CHAT_FORMATS.registered)

    @property
    def num_proc(self) -> int:
        """The number of processes that may work at a time."""
        return self.arguments.num_proc or available_cores()

    @property
    def caps(self) -> tuple[int | None, int | None]:
        """Documents and tokens after which --dataset is not read on; None is no cap: all documents are needed."""
        given = self.arguments
        reads_all = given.deduplicate or given.near_duplicates is not None or given.weights is not None
        return (None, None) if reads_all else (given.max_documents, given.max_tokens)

    def shards(self, encoder: str) -> list[Shard]:
        """Return all shards of the sources, as the encoder of this name encodes them."""
        return split_into_shards(self.sources, f"{self.settings} {encoder}", self.sizes)

    def files_read_at_once(self, shards: Sequence[Shard]) -> list[np.ndarray]:
        """Return which files of each source are hashed when their shard is read, bool [files]; none with a cap."""
        are_read = [np.zeros(len(source.files), dtype=bool) for source in self.sources]
        for shard in shards if self.caps == (None, None) else ():
            are_read[shard.source][shard.origins[shard.read_at_once]] = True
        return are_read

    def source_records(self, digests: Sequence[np.ndarray]) -> list[SourceRecord]:
        """Return the sources' records for the manifest; ``digests`` are the SHA-256 of the files of each source."""
        records = []
        for source, of_files, (name, place) in zip(self.sources, digests, self.named, strict=True):
            records.append(replace(source.record(of_files), name=name, place=redact(place)))
        return records


@contextmanager
def opened_corpus(arguments: TokenizeArguments, sizes: ShardSizes) -> Iterator[tuple["OpenedCorpus", Path, Path]]:
    """Yield the corpus, the folder for --output_dir, which is complete or absent, and that for unfinished work."""
    target = Path(arguments.output_dir).expanduser()
    check_not_taken(target)
    with unfinished_folder(target, sizes) as unfinished, complete_folder(target) as folder:
        yield open_corpus(arguments, folder, unfinished, sizes), folder, unfinished


def open_corpus(
    arguments: TokenizeArguments, folder: Path, unfinished: Path, sizes: ShardSizes = SIZES
) -> OpenedCorpus:
    """Open the sources and the tokenizer, print the sources' notes, save the tokenizer into ``folder/tokenizer``."""
    named = {option: split_names(getattr(arguments, option[2:]) or [], option) for option in _SOURCE_OPTIONS}
    tokenizer = load_tokenizer(arguments.tokenizer_name)
    chosen = None if arguments.chat_template is None else read_chosen_template(arguments.chat_template, tokenizer)
    train, held_out = (
        open_sources([place for _, place in given], option, arguments.stream, unfinished / DOWNLOADS)
        for option, given in named.items()
    )
    for source in (*train, *held_out):
        print(f"reading {source.name}", *source.notes, sep="\n  ", file=sys.stderr)
    _check_room(arguments, [*train, *held_out])
    tokenizer_folder = folder / "tokenizer"
    tokenizer.save(tokenizer_folder)
    if chosen is not None:
        set_chat_template(tokenizer_folder, chosen)
    asked = None if arguments.data_format == "auto" else arguments.data_format
    skips = arguments.skips_bad_rows
    kinds = open_each(
        lambda one: asked or find_kind(one, arguments.text_column, skips, with_pairs=True), [*train, *held_out]
    )
    _check_pairs(kinds, arguments)
    default: Packing = "best_fit" if set(kinds) - {"text"} else "concat"  # which would cut chats
    arguments = replace(arguments, packing=arguments.packing or default)
    formats = open_formats(kinds, tokenizer_folder, arguments)
    return OpenedCorpus(
        arguments=arguments,
        named=[one for given in named.values() for one in given],
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        tokenizer_hashes={file.name: sha256(file) for file in sorted(tokenizer_folder.iterdir())},
        formats=formats,
        cleaner=open_cleaner(arguments, kinds, arguments.text_column) if arguments.cleans else None,
        sizes=sizes,
    )


def _check_room(arguments: TokenizeArguments, sources: Sequence[Source]) -> None:
    """Raise an InputError if the disk of --output_dir is full; note that the tokens may not find room there."""
    target = Path(arguments.output_dir).expanduser()
    requirements.check_room(target, _SMALLEST_DATASET, "the smallest token dataset")
    reads_all = arguments.max_documents is None and arguments.max_tokens is None and arguments.shard is None
    num_bytes = sum(source.num_bytes for source in sources)  # of compressed files, more follow
    parent = nearest_existing(target.absolute())
    free = requirements.free_bytes(parent)
    if reads_all and free < _BYTES_PER_BYTE_OF_INPUT * num_bytes:
        note(
            f"the input has {show_size(num_bytes)}, and tokens of plain text take about twice as much; {parent} has "
            f"{show_size(free)} left"
        )


def _check_pairs(kinds: Sequence[str], arguments: TokenizeArguments) -> None:
    """Raise InputError, with a line for each fault, if preference pairs are among other documents, or would be cut."""
    if "preference" not in kinds:
        return
    places = [*arguments.dataset, *(arguments.validation_dataset or ())]
    names = {kind: redact(place) for kind, place in zip(kinds, places, strict=True)}
    faults = [
        f"{names['preference']} has preference pairs, {name} has {kind}: make a token dataset of each"
        for kind, name in names.items()
        if kind != "preference"
    ]
    if arguments.packing == "concat":
        faults.append("--packing concat cuts preference pairs at row ends: leave it out, which gives best_fit")
    if arguments.overlap:
        faults.append("--overlap: a preference pair is never in two rows, so nothing is repeated; leave it out")
    if arguments.train_on == "all":
        faults.append("--train_on all: of a preference pair, only the answers are compared; give assistant or last")
    if faults:
        raise InputError(*faults)


def find_kind(
    source: Source,
    text_column: str,
    skips_bad_rows: bool,
    with_pairs: bool = False,
    *,
    prefers_text: bool = False,
) -> str:
    """Return the data format of a source's first row: a format of chats if it has such columns, else text.

    Text in a column that the user has chosen comes before a chat, and so does any text with ``prefers_text``. Columns
    of preference pairs only count ``with_pairs``; InputError if a row has no others.
    """
    looked_for = (text_column, *columns("auto"))
    chooses_text = prefers_text or text_column != TEXT_COLUMN
    for part in source.parts(1 << 20):
        reader = source.reader(part, looked_for)
        for number, row in reader:
            if isinstance(row, BadRowError):
                if not skips_bad_rows:
                    raise row.fault()
                continue
            has_text = name_in(text_column, row) in row
            if has_text and chooses_text:
                return "text"
            kind = detect_format(row)
            if kind == PREFERENCE and not with_pairs:
                kind = detect_format({name: value for name, value in row.items() if name != "chosen"})
                if kind is None and not has_text:
                    place = reader.place(number)
                    raise InputError(
                        f"{place}: a preference pair; make a token dataset with fabric-train tokenize first"
                    )
            if kind is None and has_text:
                if not prefers_text and is_speaker(row.get("role")):
                    raise InputError(
                        f"{reader.place(number)}: one turn of a conversation, whose other turns are other rows; "
                        "write each conversation into one row with messages, or tokenize with --data_format text, "
                        "which trains on each turn as a document"
                    )
                return "text"
            if kind is None:
                no_text = str(missing_column(reader.place(number), text_column, row))
                raise InputError(unexpected_format(row, "auto", f"{no_text}; and no chat or instruction"))
            return kind
    return "text"


def open_formats(
    kinds: Sequence[str], tokenizer_folder: Path, arguments: TokenizeArguments, by_parts: bool = True
) -> list[SourceFormat]:
    """Return how to encode these kinds; ``by_parts`` as in ``ChatEncoder``. The folder gets the template of chats."""
    formats = {"text": SourceFormat("text", (arguments.text_column,), None)}
    longest = None if arguments.packing == "concat" else arguments.max_length
    for kind in sorted(set(kinds) - {"text"}):
        # slow to import, and texts do not need it
        from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

        has_pairs = kind == PREFERENCE
        encoder = ChatEncoder(
            tokenizer_folder,
            kind,
            arguments.train_on,
            arguments.too_long,
            None if has_pairs else longest,
            by_parts=by_parts,
            is_chosen=arguments.chat_template is not None,
        )
        pairs = PairEncoder(encoder, arguments.too_long, arguments.max_length) if has_pairs else None
        formats[kind] = SourceFormat(kind, columns(kind), encoder, pairs)
        set_chat_template(tokenizer_folder, encoder.chat_template)
    return [formats[kind] for kind in kinds]


def sample_texts(corpus: OpenedCorpus) -> Iterator[str]:
    """Yield texts from parts spaced evenly over the sources, to compare ids on."""
    sources = corpus.sources
    num_bytes = sum(source.num_bytes for source in sources)
    part_bytes = max(1, num_bytes // _SAMPLED_PARTS)
    characters = min(max(int(num_bytes * _SAMPLED_SHARE), _MIN_SAMPLED), _MAX_SAMPLED) // _SAMPLED_PARTS
    parts = [source.pack(source.parts(part_bytes)) for source in sources]
    every = max(1, sum(map(len, parts)) // _SAMPLED_PARTS)
    before = 0
    for source, format_, own in zip(sources, corpus.formats, parts, strict=True):
        for index in range(-before % every, len(own), every):
            yield from _first_texts(source, format_, own[index], characters)
        before += len(own)


def _first_texts(source: Source, format_: SourceFormat, part: Any, left: int) -> Iterator[str]:
    """Yield the part's first documents, at most ``left`` characters in all."""
    reader = source.reader(part, format_.columns)
    for number, row in reader:
        if left <= 0:
            return
        try:
            if format_.chat is None:
                text = text_of(row, format_.columns[0], partial(reader.place, number))[0]
            else:
                text = "\n".join(message["content"] for message in format_.read(row).joined.messages)
                check_surrogates(text)
        except BadRowError:
            continue  # reported or skipped when the shard is encoded
        if text:
            yield text[:left]
            left -= len(text)


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
