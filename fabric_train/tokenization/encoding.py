"""All shards of all sources to tokens on the disk, in several processes; the encoder's ids are checked meanwhile."""

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.chats.chat_format import columns, detect_format, unexpected_format
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.encoded_shards import (
    REASONS,
    Shard,
    ShardRecord,
    SourceFormat,
    Work,
    cut_into_shards,
    encode_shard,
    read_record,
)
from fabric_train.tokenization.manifest import BAD_ROW, SourceRecord
from fabric_train.tokenization.progress import Show, progress
from fabric_train.tokenization.reading.files import missing_column, text_of
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.tokenizers.byte_bpe import ByteBPE
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.tokenizers.text_encoder import open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import CorpusTokenizer
from fabric_train.tokenization.workers import Workers

if TYPE_CHECKING:
    from arguments import TokenizeArguments

_TICK_SECONDS = 0.2
_LONG_RUN_BYTES = 64 << 20
# of the corpus, to compare ids: so many places, a character of a hundred bytes, but not fewer nor more than this
_SAMPLED_PARTS, _SAMPLED_SHARE, _LEAST_SAMPLED, _MOST_SAMPLED = 8, 0.01, 20_000, 160_000


@dataclass(frozen=True)
class Encoded:
    """Finished shards in the order of the sources, as many records, and what the manifest says of the sources.

    ``encoder`` is its name, and why where it is not tiktoken.
    """

    shards: list[Shard]
    records: list[ShardRecord]
    sources: list[SourceRecord]
    encoder: str


@dataclass(frozen=True)
class Caps:
    """Documents or tokens of the first ``num_sources`` sources after which reading these may end."""

    num_sources: int
    max_documents: int | None
    max_tokens: int | None


class _DifferentIdsError(Exception):
    """The encoder does not give the tokenizer's ids; the message shows where."""


_held: list[Work] = []  # to the process's end: to free an encoder before takes longer than to write the rows

_Task = Shard | int  # to encode; or the number of a source whose files are to be hashed


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_formats(
    sources: Sequence[Source], tokenizer_folder: Path, arguments: "TokenizeArguments", with_tiktoken: bool = True
) -> list[SourceFormat]:
    """Find out from each source's first row what it holds; the template of chats is written into the folder.

    ``with_tiktoken`` lets chats be encoded by it where it gives the tokenizer's ids.

    Raises:
        InputError: one line for each source whose rows are something else, or whose first row is bad.
    """
    kinds: list[str] = []
    faults: list[str] = []
    for source in sources:
        try:
            kinds.append(_data_format(source, arguments))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    formats = {"text": SourceFormat((arguments.text_column,), None)}
    longest = None if arguments.packing == "concat" else arguments.max_length
    for kind in sorted(set(kinds) - {"text"}):
        from fabric_train.tokenization.chats.chat_encoder import (
            ChatEncoder,  # where there are only texts, time is saved
        )

        encoder = ChatEncoder(
            tokenizer_folder, kind, arguments.train_on, arguments.too_long, longest, with_tiktoken=with_tiktoken
        )
        formats[kind] = SourceFormat(columns(kind), encoder)
        (tokenizer_folder / "chat_template.jinja").write_text(encoder.chat_template, encoding="utf-8")
    return [formats[kind] for kind in kinds]


def _data_format(source: Source, arguments: "TokenizeArguments") -> str:
    if arguments.data_format != "auto":
        return arguments.data_format
    looked_for = (arguments.text_column, *columns("auto"))
    for part in source.parts(1 << 20):
        reader = source.reader(part, looked_for)
        for number, row in reader:
            if isinstance(row, BadRowError):
                if arguments.on_bad_rows == "fail":
                    raise row.fault()
                continue
            if arguments.text_column in row:
                return "text"
            kind = detect_format(row)
            if kind is None:
                no_text = str(missing_column(reader.place(number), arguments.text_column, row))
                raise InputError(unexpected_format(row, "auto", f"{no_text}; and no chat or instruction"))
            return kind
    return "text"


def encode_sources(
    sources: Sequence[Source],
    formats: Sequence[SourceFormat],
    tokenizer: CorpusTokenizer,
    tokenizer_folder: Path,
    tokenizer_hashes: dict[str, str],
    folder: Path,
    arguments: "TokenizeArguments",
    num_proc: int,
    caps: Caps,
    check: ParityCheck,
) -> Encoded:
    """Encode what is not finished in ``folder`` yet.

    ``tokenizer_hashes`` are the SHA-256 of the files in ``tokenizer_folder``; a shard of other ones is not used. Where
    tiktoken gives another id than the Hugging Face tokenizer, all is done again with the latter.

    Raises:
        InputError: what the sources raise.
        ChildProcessError: a process was killed.
    """
    file = tokenizer_folder / "tokenizer.json"
    check.start(file, tokenizer.special_text_is_plain)
    check.prepare(list(_sample(sources, formats)))
    encoder, name = open_encoder(file, tokenizer.special_text_is_plain)
    work = Work(
        folder=folder,
        sources=list(sources),
        formats=list(formats),
        encoder=encoder,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        hashed=arguments.deduplicate,
        skips_bad_rows=arguments.on_bad_rows == "skip",
        progress=None,
    )
    _held.append(work)
    settings = _settings(tokenizer_hashes, arguments)
    try:
        return _encode_all(work, name, settings, check, num_proc, caps)
    except _DifferentIdsError as error:
        encoder, name = open_encoder(file, tokenizer.special_text_is_plain, why_not_tiktoken=str(error))
        formats = find_formats(sources, tokenizer_folder, arguments, with_tiktoken=False)
        work = replace(work, encoder=encoder, formats=formats)
        return _encode_all(work, name, settings, check, num_proc, caps)


def _settings(tokenizer_hashes: dict[str, str], arguments: "TokenizeArguments") -> str:
    """Return what decides a shard's content beside the source and the encoder."""
    longest = None if arguments.packing == "concat" else arguments.max_length
    chosen = (arguments.text_column, arguments.data_format, arguments.train_on, arguments.too_long, longest)
    return json.dumps([chosen, tokenizer_hashes, arguments.deduplicate])


def _encode_all(work: Work, name: str, settings: str, check: ParityCheck, num_proc: int, caps: Caps) -> Encoded:
    shards = cut_into_shards(work.sources, f"{settings} {name}")
    work = replace(work, progress=multiprocessing.RawArray("q", 3 * len(shards)))
    records = {shard.index: record for shard in shards if (record := _usable_record(work, shard)) is not None}
    for index, record in records.items():
        done = (shards[index].num_bytes, len(record.documents), record.num_tokens)
        work.progress[3 * index : 3 * index + 3] = done
    described: dict[int, SourceRecord] = {}
    total = sum(shard.num_bytes for shard in shards)
    tasks = chain(range(len(work.sources)), _to_do(shards, records, caps))
    with Workers(partial(_perform, work), num_proc) as workers, progress(total) as show:
        finished_tasks = workers.run(tasks, _TICK_SECONDS)
        next(finished_tasks, None)  # they have something to do now
        if isinstance(work.encoder, ByteBPE):
            check.begin(work.encoder, is_long=total > _LONG_RUN_BYTES)
        import pyarrow  # noqa: F401 - the rows need it, and there is time for it now

        for finished in finished_tasks:
            if finished is not None:
                task, result = finished
                if isinstance(task, Shard):
                    record = read_record(work.folder, task)
                    assert record is not None, task
                    records[task.index] = record
                elif result is not None:
                    described[task] = result
            _show(work, show)
        difference = check.result() if isinstance(work.encoder, ByteBPE) else None
    if difference:
        raise _DifferentIdsError(difference)
    used = [shard for shard in shards if shard.index in records]
    described_in_order = [described[number] for number in sorted(described)]
    return Encoded(used, [records[shard.index] for shard in used], described_in_order, name)


def _perform(work: Work, task: _Task) -> SourceRecord | None:
    """Return a source's record; a shard's lies on the disk."""
    if isinstance(task, Shard):
        encode_shard(work, task)
        return None
    return work.sources[task].record()


def _sample(sources: Sequence[Source], formats: Sequence[SourceFormat]) -> Iterator[str]:
    """Yield texts from places spaced evenly over the sources of text."""
    of_text = [
        (source, format_.columns[0]) for source, format_ in zip(sources, formats, strict=True) if not format_.chat
    ]
    num_bytes = sum(source.num_bytes for source, _ in of_text)
    part_bytes = max(1, num_bytes // _SAMPLED_PARTS)
    parts = [(source, column, part) for source, column in of_text for part in source.parts(part_bytes)]
    characters = min(max(int(num_bytes * _SAMPLED_SHARE), _LEAST_SAMPLED), _MOST_SAMPLED) // _SAMPLED_PARTS
    for source, column, part in parts[:: max(1, len(parts) // _SAMPLED_PARTS)]:
        yield from _first_texts(source, column, part, characters)


def _first_texts(source: Source, column: str, part: Any, left: int) -> Iterator[str]:
    """Yield the part's first documents, together about ``left`` characters."""
    reader = source.reader(part, (column,))
    for number, row in reader:
        if left <= 0:
            return
        try:
            text = None if isinstance(row, BadRowError) else text_of(row, column, partial(reader.place, number))
        except BadRowError:
            continue  # told, or left out, where the shard is encoded
        if text:
            yield text[:left]
            left -= len(text)


def _usable_record(work: Work, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard that this run may use: none with bad rows where these are to be told."""
    record = read_record(work.folder, shard)
    if record is not None and not work.skips_bad_rows and (record.skipped["reason"] == REASONS.index(BAD_ROW)).any():
        return None
    return record


def _to_do(shards: Sequence[Shard], records: dict[int, ShardRecord], caps: Caps) -> Iterator[Shard]:
    """Yield the shards that are not finished, as long as those before have not reached a cap."""
    num_documents = num_tokens = following = 0
    for shard in shards:
        while (before := records.get(following)) is not None:
            if shards[following].source < caps.num_sources:
                num_documents += len(before.documents)
                num_tokens += before.num_tokens
            following += 1
        reached = num_documents >= (caps.max_documents or float("inf"))
        reached = reached or num_tokens >= (caps.max_tokens or float("inf"))
        if shard.index not in records and not (reached and shard.source < caps.num_sources):
            yield shard


def _show(work: Work, show: Show) -> None:
    done = work.progress[:]
    num_bytes, num_documents, num_tokens = (sum(done[start::3]) for start in range(3))
    show(num_bytes, num_documents, num_tokens)
