"""Merge all slices of ``--shard`` into the token dataset that one run would write."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.tokenization.all_slices import check_settings, check_unchanged, folders_of_shards, open_input
from fabric_train.tokenization.build import notes_of, write_token_dataset
from fabric_train.tokenization.encoding import EncodedSources, unfinished_shards
from fabric_train.tokenization.manifest import Manifest
from fabric_train.tokenization.opened_corpus import OpenedCorpus
from fabric_train.tokenization.progress import ThrottledLog
from fabric_train.tokenization.reading.listing import SHA256_BYTES
from fabric_train.tokenization.shard_files import ShardRecord, read_record
from fabric_train.tokenization.slice_folder import Slice, states_of


def merge_slices(slices: Sequence[Slice], target: Path) -> tuple[Manifest, list[str]]:
    """Write the token dataset ``target`` that one run without --shard would write. It is complete or absent.

    Args:
        slices: all slices of a run, in their order.
        target: the folder to write.

    Returns:
        The manifest, and notes for the user.

    Raises:
        InputError: the input has changed since the slices were made, or the token dataset cannot be written.
    """
    with complete_folder(target) as folder:
        corpus = open_input(slices, folder)
        encoded = _join(corpus, slices)
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return manifest, notes


def _join(corpus: OpenedCorpus, slices: Sequence[Slice]) -> EncodedSources:
    """Return the shards and the hashed files of all slices.

    Raises:
        InputError: the input has changed since, or a slice is damaged.
    """
    encoder = slices[0].record.encoder
    check_settings(slices, corpus.settings)
    by_encoder = {one.record.encoder: one.folder for one in slices}
    if len(by_encoder) > 1:
        pairs = " and ".join(f"{folder} by {name}" for name, folder in list(by_encoder.items())[:2])
        raise InputError(f"encoded differently: {pairs}; run the tasks on machines with the same packages")
    shards = corpus.shards(encoder)
    folders = folders_of_shards(slices)
    records, log = dict[int, ShardRecord](), ThrottledLog()
    for shard in shards:
        log(f"reading slices: {shard.index:,} of {len(shards):,} shards")
        record = read_record(folders[shard.key], shard) if shard.key in folders else None
        if record is not None:
            records[shard.index] = record
    lost = [shard.index for shard in unfinished_shards(shards, records, corpus.caps)]
    check_unchanged(slices, corpus, shards, lost)
    hashed = {file.state: file.hashed for one in slices for file in one.record.files if file.hashed is not None}
    return EncodedSources(
        shards=[shard for shard in shards if shard.index in records],
        records=[records[index] for index in sorted(records)],
        digests=[
            np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, SHA256_BYTES)
            for digests in ([hashed[state].sha256 for state in states] for states in states_of(corpus.sources))
        ],
        encoder=encoder,
        num_proc=1,
    )
