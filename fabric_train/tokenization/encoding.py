"""Encode all shards of all sources in several processes, while another process checks the encoder's ids."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.tokenization.chats.chat_format import read_chat
from fabric_train.tokenization.chats.control_tokens import check_surrogates
from fabric_train.tokenization.corpus import Caps, FilesToHash, InputSlice, OpenedCorpus, files_to_hash
from fabric_train.tokenization.documents import BadRowError, Row, text_of
from fabric_train.tokenization.manifest import BAD_ROW
from fabric_train.tokenization.reading.listing import SHA256_BYTES, check_unchanged, hash_files
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shard_files import Shard, ShardRecord, read_record, remove_outdated_shards
from fabric_train.tokenization.shards import (
    EncodingJob,
    SourceFormat,
    encode_shard,
    open_formats,
    part_name,
)
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.tokenizers.text_encoder import Borders, FastEncoder, open_encoder
from fabric_train.tokenization.workers import ShowProgress, WorkerPool, progress

_TICK_SECONDS = 0.2
# the sample on which ids are compared: parts of the sources, characters per byte, limits of characters
_SAMPLED_PARTS, _SAMPLED_SHARE, _MIN_SAMPLED, _MAX_SAMPLED = 8, 0.01, 20_000, 160_000


@dataclass(frozen=True)
class EncodedSources:
    """The finished shards in the order of the sources, with one record each, and the hashes of files.

    ``digests`` has the SHA-256 of the files of each source, uint8 [files, 32], zeros for those in other slices.
    ``encoder`` is ``gigatoken``, or ``tokenizers: WHY``.
    ``num_proc`` processes have encoded.
    """

    shards: list[Shard]
    records: list[ShardRecord]
    digests: list[np.ndarray]
    encoder: str
    num_proc: int


class _DifferentIdsError(Exception):
    """The encoder and the tokenizer give different ids; the message shows where."""


_kept_alive: list[EncodingJob] = []  # freeing an encoder takes longer than writing the rows

_Task = int | FilesToHash  # an int is the index of a shard


def encode_sources(corpus: OpenedCorpus, folder: Path, check: ParityCheck, input_slice: InputSlice) -> EncodedSources:
    """Encode the shards of a slice that are not finished yet.

    If gigatoken gives another id than the Hugging Face tokenizer, everything is encoded again with the latter.

    Args:
        corpus: the opened corpus.
        folder: where the shards are written.
        check: compares the encoder's ids with the tokenizer's.
        input_slice: what to encode and hash of the sources.

    Raises:
        InputError: a source cannot be read, has a bad row and bad rows are not skipped, or has changed meanwhile.
        ChildProcessError: a process was killed.
        RunError: memory ran out.
    """
    file, tokenizer = corpus.tokenizer_folder / "tokenizer.json", corpus.tokenizer
    check.start(file, tokenizer.special_text_is_plain)
    check.prepare(list(_sample(corpus.sources, corpus.formats)))
    encoder, name = open_encoder(file, tokenizer.special_text_is_plain)
    job = EncodingJob(
        folder=folder,
        sources=corpus.sources,
        formats=corpus.formats,
        cleaner=corpus.cleaner,
        encoder=encoder,
        borders=Borders(tokenizer.bos_token_id, tokenizer.eos_token_id),
        hashed=corpus.arguments.deduplicate,
        skips_bad_rows=corpus.arguments.on_bad_rows == "skip",
        progress=None,
    )
    _kept_alive.append(job)
    try:
        return _encode_all(corpus, job, name, check, input_slice)
    except _DifferentIdsError as error:
        encoder, name = open_encoder(file, tokenizer.special_text_is_plain, why_not_gigatoken=str(error))
        kinds = [format_.kind for format_ in corpus.formats]
        formats = open_formats(kinds, corpus.tokenizer_folder, corpus.arguments, by_parts=False)
        return _encode_all(corpus, replace(job, encoder=encoder, formats=formats), name, check, input_slice)


def _encode_all(
    corpus: OpenedCorpus, job: EncodingJob, encoder: str, check: ParityCheck, input_slice: InputSlice
) -> EncodedSources:
    """Encode with the encoder of this name.

    Raises:
        _DifferentIdsError: its ids differ from the tokenizer's.
    """
    outdated = remove_outdated_shards(job.folder)
    if outdated:
        print(f"{outdated:,} shards that an older version finished are encoded again", file=sys.stderr)
    all_shards = corpus.shards(encoder)
    shards = list(compress(all_shards, input_slice.of([shard.num_bytes for shard in all_shards])))
    to_hash = list(files_to_hash(job.sources, input_slice, corpus.files_read_at_once(all_shards)))
    job = replace(job, progress=multiprocessing.RawArray("q", 3 * len(all_shards)), shards=all_shards)
    records = {shard.index: record for shard in shards if (record := _usable_record(job, shard)) is not None}
    for index, record in records.items():
        done = (all_shards[index].num_bytes, len(record.documents), record.num_tokens)
        job.progress[3 * index : 3 * index + 3] = done
    digests = [np.zeros((len(source.files), SHA256_BYTES), dtype=np.uint8) for source in job.sources]
    total = sum(shard.num_bytes for shard in shards)
    tasks: Iterator[_Task] = chain(to_hash, (shard.index for shard in unfinished_shards(shards, records, corpus.caps)))
    num_proc = max(1, min(corpus.num_proc, len(to_hash) + len(shards) - len(records)))
    with WorkerPool(partial(_run_task, job), num_proc, partial(_what_is_read, job)) as workers, progress(total) as show:
        finished_tasks = workers.run(tasks, _TICK_SECONDS)
        next(finished_tasks, None)  # starts the first tasks
        is_compared = not isinstance(job.encoder, FastEncoder)
        if is_compared:
            check.begin(job.encoder, job.borders)
        import pyarrow  # noqa: F401 - needed to write the rows; the import takes no extra time while others encode

        for finished in finished_tasks:
            if finished is not None:
                task, result = finished
                if isinstance(task, int):
                    record = read_record(job.folder, all_shards[task])
                    assert record is not None, task
                    records[task] = record
                else:
                    hashed = np.frombuffer(result, np.uint8).reshape(-1, SHA256_BYTES)
                    digests[task.source][task.start : task.stop] = hashed
            _show(job, show)
        difference = check.result() if is_compared else None
    if difference:
        raise _DifferentIdsError(difference)
    used = [shard for shard in shards if shard.index in records]
    for shard in used:
        hashed = np.ascontiguousarray(records[shard.index].parts["sha256"]).view(np.uint8).reshape(-1, SHA256_BYTES)
        are_hashed = hashed.any(axis=1)
        digests[shard.source][shard.origins[are_hashed]] = hashed[are_hashed]
    for source, of_files in zip(job.sources, digests, strict=True):
        for number in np.flatnonzero(of_files.any(axis=1)).tolist():
            check_unchanged(source.files[number], of_files[number].tobytes())
    return EncodedSources(used, [records[shard.index] for shard in used], digests, encoder, num_proc)


def _run_task(job: EncodingJob, task: _Task) -> bytes:
    """Encode a shard, or return the SHA-256 of files, joined."""
    if isinstance(task, int):
        encode_shard(job, job.shards[task])
        return b""
    files = job.sources[task.source].files
    return b"".join(hash_files(map(files.__getitem__, range(task.start, task.stop))))


def _what_is_read(job: EncodingJob, task: _Task) -> str:
    """Return the file or dataset that a task has come to."""
    if not isinstance(task, int):
        return job.sources[task.source].name
    done, shard = job.progress[3 * task], job.shards[task]
    for part in shard.parts:
        if done < part.num_bytes:
            break
        done -= part.num_bytes
    return part_name(job.sources[shard.source], part)


def _sample(sources: Sequence[Source], formats: Sequence[SourceFormat]) -> Iterator[str]:
    """Yield texts from parts spaced evenly over the sources."""
    num_bytes = sum(source.num_bytes for source in sources)
    part_bytes = max(1, num_bytes // _SAMPLED_PARTS)
    characters = min(max(int(num_bytes * _SAMPLED_SHARE), _MIN_SAMPLED), _MAX_SAMPLED) // _SAMPLED_PARTS
    parts = [source.pack(source.parts(part_bytes)) for source in sources]
    every = max(1, sum(map(len, parts)) // _SAMPLED_PARTS)
    before = 0
    for source, format_, own in zip(sources, formats, parts, strict=True):
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
            text = "" if isinstance(row, BadRowError) else _text_in(row, format_, partial(reader.place, number))
        except BadRowError:
            continue  # reported or skipped when the shard is encoded
        if text:
            yield text[:left]
            left -= len(text)


def _text_in(row: Row, format_: SourceFormat, place: Callable[[], str]) -> str:
    if format_.chat is None:
        return text_of(row, format_.columns[0], place)[0]
    text = "\n".join(message["content"] for message in read_chat(row, format_.kind).messages)
    check_surrogates(text)
    return text


def _usable_record(job: EncodingJob, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard; None if it skipped bad rows and this run must report them."""
    record = read_record(job.folder, shard)
    if record is not None and not job.skips_bad_rows and BAD_ROW in record.reasons:
        return None
    return record


def unfinished_shards(shards: Sequence[Shard], records: dict[int, ShardRecord], caps: Caps) -> Iterator[Shard]:
    """Yield the shards without a record, until the finished shards before them reach a cap.

    ``records``, by the shards' indexes, grows while this iterates.
    """
    num_documents = num_tokens = following = 0
    for shard in shards:
        while following < len(shards) and (before := records.get(shards[following].index)) is not None:
            if shards[following].source < caps.num_sources:
                num_documents += len(before.documents)
                num_tokens += before.num_tokens
            following += 1
        reached = num_documents >= (caps.max_documents or float("inf"))
        reached = reached or num_tokens >= (caps.max_tokens or float("inf"))
        if shard.index not in records and not (reached and shard.source < caps.num_sources):
            yield shard


def _show(job: EncodingJob, show: ShowProgress) -> None:
    done = job.progress[:]
    num_bytes, num_documents, num_tokens = (sum(done[start::3]) for start in range(3))
    show(num_bytes, num_documents, num_tokens)
