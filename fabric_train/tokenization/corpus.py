"""Open the corpus of a tokenization (sources, tokenizer, formats, cleaner) and the folder for unfinished work."""

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
from fabric_train.cli.errors import InputError, note, raise_if_limit_reached
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
from fabric_train.tokenization.chats.columns import DESIRABLE
from fabric_train.tokenization.chats.formats import (
    PREFERENCE,
    UNPAIRED,
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
from fabric_train.tokenization.unpaired_answers import UnpairedEncoder

if TYPE_CHECKING:
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

DOWNLOADS = "downloads"  # the subfolder of an unfinished folder with downloaded files
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

    After an exception, a folder with enough finished work is kept, and a line on standard error says so.
    """
    target = Path(os.path.abspath(target))
    folder = target.parent / f".{target.name}.unfinished"
    check_no_links_in(folder)
    with ExitStack() as stack:
        try:
            fault = f"{target}: another process is writing to it"
            stack.enter_context(hold_lock(folder / "lock", fault, "wait for it or stop it"))
        except OSError as error:
            raise_if_limit_reached(error)
            raise InputError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from None
        try:
            yield folder
        except BaseException:
            if not _keep_unfinished(folder, sizes):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _keep_unfinished(folder: Path, sizes: ShardSizes) -> bool:
    """Return whether the finished work in the folder is worth keeping, and if so, tell the user."""
    num_shards = sum(file.suffix in (".npz", ".lines") for file in folder.glob("*"))
    downloads = [file for file in (folder / DOWNLOADS).glob("*") if file.suffix != UNFINISHED_SUFFIX]
    # without a finished shard, only downloads are finished
    finished_files = folder.rglob("*") if num_shards else downloads
    if sum(file.stat().st_size for file in finished_files) <= sizes.worth_keeping:
        return False
    work = f"{num_shards:,} finished shards"
    if downloads:
        work += f" and {len(downloads):,} downloads"
    print(f"{work} are kept in {folder}; run the same command again to continue", file=sys.stderr)
    return True


@dataclass(frozen=True)
class SourceFormat:
    """How to encode rows of a ``kind``: ``chat`` encodes chats; if it is None, ``columns[0]`` holds text.

    ``pairs`` encodes preference pairs or unpaired answers, by ``chat``.
    """

    kind: str
    columns: tuple[str, ...]
    chat: "ChatEncoder | None"
    pairs: PairEncoder | UnpairedEncoder | None = None

    def read(self, row: Row | BadRowError) -> Chat | Pair:
        """Read a row with a chat or a pair; BadRowError if it has a different format."""
        assert self.chat is not None, "a text is no chat"
        if self.kind == PREFERENCE:
            return read_pair(row, calls_as_text=self.chat.calls_as_text)
        return read_chat(row, self.kind, calls_as_text=self.chat.calls_as_text)


@dataclass(frozen=True)
class OpenedCorpus:
    """The sources, the tokenizer, and how documents are cleaned and encoded."""

    arguments: TokenizeArguments  # with the packing that the sources decide
    names_and_places: list[tuple[str, str]]  # the name and place of each source as given
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
        """Everything that decides a shard's tokens, except its source and the encoder, as JSON."""
        arguments = self.arguments
        max_length = None if arguments.packing == "concat" else arguments.max_length  # concat shortens no chat
        choices = (arguments.text_column, arguments.data_format, arguments.train_on, arguments.too_long, max_length)
        cleaning = {} if self.cleaner is None else self.cleaner.settings()
        registered = [str(asdict(chat_format)) for chat_format in self.registered_formats]
        # the order of the list is part of the keys of finished shards
        settings = [choices, self.tokenizer_hashes, arguments.deduplicate, cleaning, registered]
        return json.dumps(settings, sort_keys=True)

    @property
    def registered_formats(self) -> tuple[Component, ...]:
        """The formats of the sources that were registered by --extensions."""
        kinds = sorted({source_format.kind for source_format in self.formats})
        return tuple(CHAT_FORMATS.describe(kind) for kind in kinds if kind in CHAT_FORMATS.registered)

    @property
    def has_unpaired(self) -> bool:
        """Whether the documents are unpaired answers."""
        return any(source_format.kind == UNPAIRED for source_format in self.formats)

    @property
    def num_proc(self) -> int:
        """The number of processes that may work at the same time."""
        return self.arguments.num_proc or available_cores()

    @property
    def caps(self) -> tuple[int | None, int | None]:
        """The caps on documents and tokens, after which --dataset is not read any further; None means no cap."""
        arguments = self.arguments
        if arguments.deduplicate or arguments.near_duplicates is not None or arguments.weights is not None:
            return None, None
        return arguments.max_documents, arguments.max_tokens

    def shards(self, encoder: str) -> list[Shard]:
        """Return all shards of the sources, as the encoder of this name encodes them."""
        return split_into_shards(self.sources, f"{self.settings} {encoder}", self.sizes)

    def files_read_at_once(self, shards: Sequence[Shard]) -> list[np.ndarray]:
        """Return which files of each source are hashed when their shard is read, bool [files]; none with a cap.

        With a cap, some shards are not read, but the manifest has the hashes of all files.
        """
        are_read = [np.zeros(len(source.files), dtype=bool) for source in self.sources]
        if self.caps == (None, None):
            for shard in shards:
                files = shard.origins[shard.read_at_once]
                are_read[shard.source][files] = True
        return are_read

    def source_records(self, digests: Sequence[np.ndarray]) -> list[SourceRecord]:
        """Return the sources' records for the manifest; ``digests`` are the SHA-256 of the files of each source."""
        records = []
        for source, file_digests, (name, place) in zip(self.sources, digests, self.names_and_places, strict=True):
            records.append(replace(source.record(file_digests), name=name, place=redact(place)))
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
    """Open the sources and the tokenizer, print the sources' notes, and save the tokenizer to ``folder/tokenizer``."""
    # what is wrong with names or the tokenizer is found before anything is downloaded
    train_names = split_names(arguments.dataset or [], "--dataset")
    validation_names = split_names(arguments.validation_dataset or [], "--validation_dataset")
    tokenizer = load_tokenizer(arguments.tokenizer_name)
    chat_template: str | None = None
    if arguments.chat_template is not None:
        chat_template = read_chosen_template(arguments.chat_template, tokenizer)

    # the sources
    downloads = unfinished / DOWNLOADS
    train_places = [place for _, place in train_names]
    train = open_sources(train_places, "--dataset", arguments.stream, downloads)
    validation_places = [place for _, place in validation_names]
    held_out = open_sources(validation_places, "--validation_dataset", arguments.stream, downloads)
    sources = [*train, *held_out]
    for source in sources:
        print(f"reading {source.name}", *source.notes, sep="\n  ", file=sys.stderr)
    _check_room(arguments, sources)

    # the tokenizer, with the chat template that is used
    tokenizer_folder = folder / "tokenizer"
    tokenizer.save(tokenizer_folder)
    if chat_template is not None:
        set_chat_template(tokenizer_folder, chat_template)

    # what the rows of each source hold, and how it is encoded
    def source_kind(source: Source) -> str:
        if arguments.data_format != "auto":
            return arguments.data_format
        return find_kind(source, arguments.text_column, arguments.skips_bad_rows, with_pairs=True)

    kinds = open_each(source_kind, sources)
    _check_pairs(kinds, arguments)
    packing: Packing | None = arguments.packing
    if packing is None:
        packing = "best_fit" if set(kinds) - {"text"} else "concat"  # concat would cut chats
    arguments = replace(arguments, packing=packing)
    formats = open_formats(kinds, tokenizer_folder, arguments)
    cleaner = open_cleaner(arguments, kinds, arguments.text_column) if arguments.cleans else None
    return OpenedCorpus(
        arguments=arguments,
        names_and_places=[*train_names, *validation_names],
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        tokenizer_hashes={file.name: sha256(file) for file in sorted(tokenizer_folder.iterdir())},
        formats=formats,
        cleaner=cleaner,
        sizes=sizes,
    )


def _check_room(arguments: TokenizeArguments, sources: Sequence[Source]) -> None:
    """Raise an InputError if the disk of --output_dir is full; print a note if it may have no room for the tokens."""
    target = Path(arguments.output_dir).expanduser()
    requirements.check_room(target, _SMALLEST_DATASET, "the smallest token dataset")
    has_cap = arguments.max_documents is not None or arguments.max_tokens is not None
    if has_cap or arguments.shard is not None:
        return  # only a part of the input is encoded
    num_bytes = sum(source.num_bytes for source in sources)  # compressed files become larger
    parent = nearest_existing(target.absolute())
    free_bytes = requirements.free_bytes(parent)
    if free_bytes < _BYTES_PER_BYTE_OF_INPUT * num_bytes:
        note(
            f"the input has {show_size(num_bytes)}, and the tokens of plain text take about twice as much, but "
            f"{parent} has {show_size(free_bytes)} left"
        )


def _check_pairs(kinds: Sequence[str], arguments: TokenizeArguments) -> None:
    """Raise an InputError with a line for each fault.

    Faults are pairs or unpaired answers together with other kinds of data, and options that they do not support.
    """
    places = [*arguments.dataset, *(arguments.validation_dataset or ())]
    place_by_kind = {kind: redact(place) for kind, place in zip(kinds, places, strict=True)}
    if PREFERENCE in kinds:
        compared_kind = PREFERENCE
        noun = "preference pair"
    elif UNPAIRED in kinds:
        compared_kind = UNPAIRED
        noun = "unpaired answer"
    else:
        return
    faults: list[str] = []
    for kind, place in place_by_kind.items():
        if kind != compared_kind:
            compared_place = place_by_kind[compared_kind]
            faults.append(f"{compared_place} has {noun}s, but {place} has {kind}; write a token dataset for each")
    if arguments.packing == "concat":
        faults.append(f"--packing concat cuts {noun}s at row ends; leave out --packing to use best_fit")
    if arguments.overlap:
        faults.append(
            f"--overlap has no effect, since {_with_article(noun)} is never split over two rows; leave out --overlap"
        )
    if arguments.train_on == "all":
        faults.append(
            f"--train_on all does not apply to {_with_article(noun)}, of which only the answers are compared; give "
            "assistant or last"
        )
    if faults:
        raise InputError(*faults)


def _with_article(noun: str) -> str:
    return f"{'an' if noun.startswith('u') else 'a'} {noun}"


def find_kind(
    source: Source,
    text_column: str,
    skips_bad_rows: bool,
    with_pairs: bool = False,
    *,
    prefers_text: bool = False,
) -> str:
    """Return the data format of a source's first row: a format of chats if it has its columns, and otherwise text.

    Text in a column that the user has chosen takes precedence over a chat, as does any text with ``prefers_text``.
    Columns of preference pairs and labels of answers only count ``with_pairs``; InputError if a row has only these.
    """
    chooses_text = prefers_text or text_column != TEXT_COLUMN
    for part in source.parts(1 << 20):
        reader = source.reader(part, (text_column, *columns("auto")))
        for row_number, row in reader:
            if isinstance(row, BadRowError):
                if not skips_bad_rows:
                    raise row.fault()
                continue  # the next row decides
            has_text = name_in(text_column, row) in row
            if has_text and chooses_text:
                return "text"

            # a format of chats
            kind = detect_format(row)
            is_pair = kind == PREFERENCE
            if not with_pairs:
                kind = _find_single_chat(row)
            if kind is not None:
                return kind

            # text
            if not has_text and is_pair:
                raise InputError(
                    f"{reader.place(row_number)}: this is a preference pair; write a token dataset with "
                    "fabric-train tokenize first"
                )
            if not has_text:
                no_text = str(missing_column(reader.place(row_number), text_column, row))
                raise InputError(unexpected_format(row, "auto", f"{no_text}, and no chat or instruction either"))
            if not prefers_text and is_speaker(row.get("role")):
                raise InputError(
                    f"{reader.place(row_number)}: this is one turn of a conversation with its other turns in other "
                    "rows; write each conversation into one row with messages, or use --data_format text to train on "
                    "each turn as a document"
                )
            return "text"
    return "text"  # an empty source


def _find_single_chat(row: Row) -> str | None:
    """Return the format of the chat that a row holds apart from its preference pair or label; None if it has none."""
    kind = detect_format(row)
    if kind == UNPAIRED:
        return detect_format({name: value for name, value in row.items() if name not in DESIRABLE})
    if kind == PREFERENCE:
        return detect_format({name: value for name, value in row.items() if name != "chosen"})
    return kind


def open_formats(
    kinds: Sequence[str], tokenizer_folder: Path, arguments: TokenizeArguments, *, split_at_control_tokens: bool = True
) -> list[SourceFormat]:
    """Return how to encode these kinds, and save the chat template in the folder.

    ``split_at_control_tokens``: see ``ChatEncoder``.
    """
    formats = {"text": SourceFormat("text", columns=(arguments.text_column,), chat=None)}
    for kind in sorted(set(kinds) - {"text"}):
        # slow to import, and texts do not need it
        from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

        # concat cuts chats at row ends, and a pair is shortened as a whole by its encoder
        has_two_sequences = kind in (PREFERENCE, UNPAIRED)
        has_no_limit = has_two_sequences or arguments.packing == "concat"
        encoder = ChatEncoder(
            tokenizer_folder,
            kind,
            arguments.train_on,
            arguments.too_long,
            max_length=None if has_no_limit else arguments.max_length,
            split_at_control_tokens=split_at_control_tokens,
            is_template_from_user=arguments.chat_template is not None,
        )
        pairs: PairEncoder | UnpairedEncoder | None = None
        if has_two_sequences:
            pairs = PairEncoder(encoder, arguments.too_long, arguments.max_length)
            if kind == UNPAIRED:
                pairs = UnpairedEncoder(pairs)
        formats[kind] = SourceFormat(kind, columns(kind), encoder, pairs)
        set_chat_template(tokenizer_folder, encoder.chat_template)
    return [formats[kind] for kind in kinds]


def sample_texts(corpus: OpenedCorpus) -> Iterator[str]:
    """Yield texts from evenly spaced parts of the sources, for comparing ids."""
    num_bytes = sum(source.num_bytes for source in corpus.sources)
    num_characters = int(num_bytes * _SAMPLED_SHARE)
    num_characters = min(max(num_characters, _MIN_SAMPLED), _MAX_SAMPLED)
    characters_per_part = num_characters // _SAMPLED_PARTS

    part_bytes = max(1, num_bytes // _SAMPLED_PARTS)
    parts_by_source = [source.pack(source.parts(part_bytes)) for source in corpus.sources]
    num_parts = sum(len(parts) for parts in parts_by_source)
    step = max(1, num_parts // _SAMPLED_PARTS)
    num_parts_before = 0  # parts of earlier sources
    for source, source_format, parts in zip(corpus.sources, corpus.formats, parts_by_source, strict=True):
        for index in range(len(parts)):
            # a part is built when it is taken from the packed parts, so only every `step`-th is taken
            if (num_parts_before + index) % step == 0:
                yield from _first_texts(source, source_format, parts[index], characters_per_part)
        num_parts_before += len(parts)


def _first_texts(source: Source, source_format: SourceFormat, part: Any, max_characters: int) -> Iterator[str]:
    """Yield the part's first documents, at most ``max_characters`` in all; the last one may be cut."""
    remaining_characters = max_characters
    reader = source.reader(part, source_format.columns)
    for row_number, row in reader:
        if remaining_characters <= 0:
            return
        try:
            if source_format.chat is None:
                text, _ = text_of(row, source_format.columns[0], partial(reader.place, row_number))
            else:
                text = "\n".join(message["content"] for message in source_format.read(row).joined.messages)
                check_surrogates(text)
        except BadRowError:
            continue  # reported or skipped when the shard is encoded
        if text:
            yield text[:remaining_characters]
            remaining_characters -= len(text)


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux: fewer than the machine has, in a container or a job
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
