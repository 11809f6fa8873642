"""Build a token dataset: open the corpus, encode, select, pack, and write ledger and manifest."""

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from fabric_train.cleaning.dropped import count_by_task, write_hits, write_sample
from fabric_train.cleaning.near_duplicates import NearDuplicates, find_near_duplicates
from fabric_train.cli.errors import InputError
from fabric_train.cli.fabric_command import command_from_here
from fabric_train.cli.output import redact
from fabric_train.cli.tables import CHAT_FORMATS
from fabric_train.reading.sources import Source, split_names
from fabric_train.token_dataset.arrow_folder import (
    check_disk_space,
    count_severed_chats,
    count_sources,
    write_dataset_dict,
    write_index,
    write_split,
)
from fabric_train.token_dataset.document_index import SourceTable
from fabric_train.token_dataset.manifest import (
    BAD_ROWS,
    EMPTY,
    Ledger,
    Manifest,
    PairLedger,
    Settings,
    SourceRecord,
    SplitLedger,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from fabric_train.token_dataset.rows import RowPlan, plan_rows
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.corpus import OpenedCorpus, opened_corpus
from fabric_train.tokenization.duplicate_samples import sample_duplicates
from fabric_train.tokenization.encoding import EncodedSources, encode_sources
from fabric_train.tokenization.line_counts import find_boilerplate
from fabric_train.tokenization.selection import Collection, Split, collect, select, tokens_by_source
from fabric_train.tokenization.shards import HASH_BYTES, SIZES, InputSlice, ShardSizes
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

_VERSIONS_OF = ("fabric-train", "gigatoken", "tokenizers", "transformers", "datasets", "numpy")


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that decide the rows; to look them up reads a file of each."""
    return {name: version(name) for name in _VERSIONS_OF}


@dataclass(frozen=True)
class Outcome:
    """The result of a build: the manifest, notes for the user, and the seconds and processes that encoding took."""

    manifest: Manifest
    notes: tuple[str, ...]
    encode_seconds: float
    num_proc: int


def build_token_dataset(arguments: TokenizeArguments, check: ParityCheck, sizes: ShardSizes = SIZES) -> Outcome:
    """Write the token dataset that ``arguments`` describe. The output folder is complete or absent.

    ``check`` compares gigatoken's ids with the tokenizer's; it may already be loading the tokenizer.
    """
    with opened_corpus(arguments, sizes) as (corpus, folder, unfinished):
        if corpus.cleaner is not None and isinstance(arguments.boilerplate, int):
            # the lines that --boilerplate removes are known once all documents have been read
            corpus = replace(corpus, cleaner=corpus.cleaner.with_boilerplate(find_boilerplate(corpus, unfinished)))
        started = time.monotonic()
        encoded = encode_sources(corpus, unfinished, check, InputSlice())
        seconds = time.monotonic() - started
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return Outcome(manifest, tuple(notes), seconds, encoded.num_proc)


def write_token_dataset(
    folder: Path, corpus: OpenedCorpus, encoded: EncodedSources, *, of_slice: bool = False
) -> Manifest:
    """Select the documents of each split, pack them into rows, and write all but the tokenizer into ``folder``.

    ``encoded`` has no records afterwards. If it is ``of_slice``, the manifest names only the files that it has read.
    """
    arguments = corpus.arguments
    tokenizer = _tokenizer_record(corpus, encoded)
    near = None
    if arguments.near_duplicates is not None:
        files = [record.tokens.with_suffix(".signatures") for record in encoded.records]
        near = find_near_duplicates(files, arguments.near_duplicates, folder / "bands")
    if not of_slice:
        _check_not_empty(corpus.sources, encoded, len(corpus.train))
    collections = _collect(corpus, encoded, near)
    unused = _unused_columns(encoded)
    sources = [
        replace(source, unused_columns=tuple(sorted(unused[number])))
        for number, source in enumerate(corpus.source_records(encoded.digests))
    ]
    if of_slice:
        sources, collections = _with_own_files(sources, collections, encoded)
    encoded.records.clear()  # gigabytes of a large corpus; the collections have the needed parts
    splits = select(collections, corpus.train, arguments)
    table = SourceTable(sources)
    ledgers = _write_splits(splits, folder, corpus, table)
    dropped = [one for collection in collections for one in collection.dropped]
    if any(len(one.duplicates) or len(one.near_duplicates) for one in collections):
        dropped += sample_duplicates(near, collections, table, corpus.tokenizer_folder)
    hits = [one for collection in collections for one in collection.hits]
    if dropped:
        write_sample(folder, dropped, table)
    if hits:
        write_hits(folder, hits, table)
    settings = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    if arguments.validation_dataset:  # a URL may hold a password
        settings["validation_dataset"] = [redact(name) for name in arguments.validation_dataset]
    manifest = Manifest(
        ledger=_ledger(collections, splits, ledgers),
        sources=tuple(_with_shares(sources, collections, splits, arguments)),
        tokenizer=tokenizer,
        settings=Settings(**settings),
        versions=_versions(),
        has_index=True,
        cleaning={} if corpus.cleaner is None else corpus.cleaner.settings(),
        has_pairs=any(format_.pairs is not None for format_ in corpus.formats),
        chat_formats=corpus.registered_formats,
    )
    write_manifest(folder, manifest)
    return manifest


def _collect(corpus: OpenedCorpus, encoded: EncodedSources, near: NearDuplicates | None) -> list[Collection]:
    """Collect the documents of --dataset and, if given, of --validation_dataset."""
    arguments = corpus.arguments
    sources = corpus.sources
    num_train = len(corpus.train)
    caps = (arguments.max_documents, None if arguments.weights else arguments.max_tokens)
    seen = np.empty((0, HASH_BYTES), dtype=np.uint8) if arguments.deduplicate else None
    collections: list[Collection] = []
    for is_train in (True, False) if arguments.validation_dataset else (True,):
        records = [one for one in encoded.records if (one.shard.source < num_train) == is_train]
        first = sum(len(collection.characters) for collection in collections)
        repeats = None if near is None else near.is_repeat(first, sum(len(one.documents) for one in records))
        limits = caps if is_train else (None, None)
        collections.append(collect(records, sources, *limits, seen, repeats))
        seen = None if seen is None else collections[-1].hashes
    return collections


def _with_own_files(
    sources: Sequence[SourceRecord], collections: Sequence[Collection], encoded: EncodedSources
) -> tuple[list[SourceRecord], list[Collection]]:
    """Keep only the files that the shards have read in the records of the sources, and number them from 0.

    The SHA-256 of a file that another slice has hashed is empty; a merge fills it in.
    """
    read: list[set[int]] = [set() for _ in sources]
    for record in encoded.records:
        read[record.shard.source].update(record.shard.origins.tolist())
    own = [sorted(origins) for origins in read]
    first_files = np.cumsum([0, *(source.num_files for source in sources)])
    numbers = np.zeros(int(first_files[-1]), dtype=np.int64)
    kept = [first + origin for first, origins in zip(first_files.tolist(), own, strict=False) for origin in origins]
    numbers[kept] = np.arange(len(kept))
    reduced = []
    for source, origins, digests in zip(sources, own, encoded.digests, strict=True):
        if source.kind == "files":
            files = [source.files[one] for one in origins]
            hashed = [digests[one].any() for one in origins]
            pairs = zip(files, hashed, strict=True)
            files = [file if is_known else replace(file, sha256="") for file, is_known in pairs]
            reduced.append(replace(source, files=tuple(files)))
        else:
            reduced.append(replace(source, splits=tuple(source.splits[one] for one in origins)))
    renumbered = []
    for collection in collections:
        collection.places["file"] = numbers[collection.places["file"]]
        dropped = [(text, (int(numbers[file]), row)) for text, (file, row) in collection.dropped]
        hits = [(hit, (int(numbers[file]), row)) for hit, (file, row) in collection.hits]
        renumbered.append(replace(collection, dropped=dropped, hits=hits))
    return reduced, renumbered


def _check_not_empty(sources: Sequence[Source], encoded: EncodedSources, num_train: int) -> None:
    """Check that each source has a document, except the last ones that a cap has left unread."""
    num_documents: Counter[int] = Counter()
    bad_rows: dict[int, str] = {}
    left_out: dict[int, Counter[str]] = defaultdict(Counter)
    for record in encoded.records:
        source = record.shard.source
        num_documents[source] += len(record.documents)
        for index, reason in enumerate(record.reasons):
            left_out[source][reason] += int((record.skipped["reason"] == index).sum())
        if record.first_bad_row:
            bad_rows.setdefault(source, record.first_bad_row)
    last_read = max((one.shard.source for one in encoded.records if one.shard.source < num_train), default=num_train)
    faults = [
        f"{one.name}: {_nothing_left(left_out[number])}"
        + (f"; the first bad row: {bad_rows[number]}" if number in bad_rows else "")
        for number, one in enumerate(sources)
        if not num_documents[number] and (number <= last_read or number >= num_train)
    ]
    if faults:
        raise InputError(*faults)


def _nothing_left(left_out: Counter[str]) -> str:
    if not left_out.keys() - {EMPTY, *BAD_ROWS}:
        return "no document with any text in it"
    counts = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in left_out.most_common())
    return f"every document is left out ({counts}); leave out the source, or what drops them"


def _write_splits(
    splits: dict[str, Split], folder: Path, corpus: OpenedCorpus, sources: SourceTable
) -> dict[str, SplitLedger]:
    """Pack and write each split with its document index, and return its ledger."""
    arguments = corpus.arguments
    tokenizer = corpus.tokenizer
    assert arguments.packing is not None, "the default depends on the sources, which are open"
    plans = {}
    for name, split in splits.items():
        is_mixed = name == "train" and arguments.weights is not None
        of_documents = None if is_mixed else sources.sources_of(split.collection.places["file"])
        lengths = split.collection.documents.lengths
        how = (arguments.packing, arguments.max_length, arguments.overlap)
        plans[name] = plan_rows(lengths, split.order, *how, of_documents)
    faults = [_too_short(name, splits[name], plan, arguments) for name, plan in plans.items() if not plan.num_rows]
    if faults:
        raise InputError(*faults)
    check_disk_space(folder.parent, [(splits[name].collection.documents, plan) for name, plan in plans.items()])
    is_chat = np.array([format_.chat is not None for format_ in corpus.formats])
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ledgers = {}
    for name, plan in plans.items():
        collection = splits[name].collection
        num_supervised, checksums = write_split(folder / name, collection.documents, plan, padding, corpus.num_proc)
        num_severed = count_severed_chats(collection.documents, plan, is_chat[collection.sources])
        documents = collection.places[plan.order]
        write_index(folder / name, plan, documents, checksums)
        ledgers[name] = SplitLedger(
            documents=len(splits[name].order),
            characters=int(collection.characters[splits[name].order].sum()),
            tokens_in=plan.tokens_in,
            tokens_repeated=plan.tokens_repeated,
            tokens_in_rows=plan.tokens_in_rows,
            tokens_padding=plan.tokens_padding,
            tokens_supervised=num_supervised,
            tokens_dropped=plan.tokens_dropped,
            rows=plan.num_rows,
            chats_severed=num_severed,
            sources=count_sources(plan, documents, sources),
            pairs=None if collection.pairs is None else _count_pairs(collection.pairs[splits[name].order]),
        )
    write_dataset_dict(folder, splits)
    return ledgers


def _count_pairs(pairs: np.ndarray) -> PairLedger:
    chosen, rejected = (pairs[name].astype(np.int64) for name in ("chosen", "rejected"))
    margins = pairs["rating_margin"][~np.isnan(pairs["rating_margin"])]
    return PairLedger(
        chosen_tokens=int(chosen.sum()),
        rejected_tokens=int(rejected.sum()),
        chosen_longer=int((chosen > rejected).sum()),
        equal_lengths=int((chosen == rejected).sum()),
        prefixes=int(pairs["is_prefix"].sum()),
        rated=len(margins),
        rating_margin=float(margins.sum()),
    )


def _too_short(name: str, split: Split, plan: RowPlan, arguments: TokenizeArguments) -> str:
    if not len(split.collection.kept):
        return f"{name}: {_nothing_left(Counter(_sum_counts(split.collection.skipped.values())))}"
    without = " or --validation_split 0" if name == "validation" else ""
    return (
        f"{name} has {plan.tokens_in:,} tokens in {len(split.order):,} documents, less than one row of "
        f"{arguments.max_length:,}; give more documents, a smaller --max_length{without}"
    )


def _ledger(collections: Sequence[Collection], splits: dict[str, Split], ledgers: dict[str, SplitLedger]) -> Ledger:
    num_kept = sum(len(collection.kept) for collection in collections)
    num_distinct = sum(len(np.unique(split.order)) for split in splits.values())
    return Ledger(
        splits=ledgers,
        documents_read=sum(collection.num_read for collection in collections),
        documents_kept=num_kept,
        documents_skipped=_sum_counts(counts for one in collections for counts in one.skipped.values()),
        documents_repeated=sum(len(split.order) for split in splits.values()) - num_distinct,
        documents_unsampled=num_kept - num_distinct,
        tokens_cut=_sum_counts(collection.tokens_cut for collection in collections),
        edits=_sum_counts(collection.edits for collection in collections),
        contaminated=count_by_task([one for collection in collections for one in collection.hits]),
    )


def _sum_counts(all_counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in all_counts:
        total.update(counts)
    return dict(total)


def _with_shares(
    sources: Sequence[SourceRecord],
    collections: Sequence[Collection],
    splits: dict[str, Split],
    arguments: TokenizeArguments,
) -> list[SourceRecord]:
    """Return the sources' records with their documents and tokens, and with their shares of the train split."""
    train = splits["train"]
    tokens_in_train = tokens_by_source(train.collection, train.order, len(arguments.dataset))
    left_for_train = tokens_by_source(collections[0], collections[0].kept, len(arguments.dataset))
    for name, split in splits.items():
        if name != "train" and split.collection is collections[0]:
            left_for_train -= tokens_by_source(split.collection, split.order, len(arguments.dataset))
    records = []
    for number, record in enumerate(sources):
        is_train = number < len(arguments.dataset)
        collection = collections[0] if is_train else collections[-1]
        own = collection.kept[collection.sources[collection.kept] == number]
        sampled = int(tokens_in_train[number]) if is_train else 0
        record = replace(
            record,
            documents=len(own),
            documents_skipped=dict(collection.skipped.get(number, {})),
            tokens=int(collection.documents.lengths[own].sum()),
            train_tokens=sampled,
            share_reached=round(sampled / int(tokens_in_train.sum()), 6),
        )
        if is_train and arguments.weights:
            weight = arguments.weights[number]
            share = round(weight / sum(arguments.weights), 6)
            epochs = round(sampled / int(left_for_train[number]), 4)
            record = replace(record, weight=weight, share_asked=share, epochs=epochs)
        records.append(record)
    return records


def _tokenizer_record(corpus: OpenedCorpus, encoded: EncodedSources) -> TokenizerRecord:
    tokenizer = corpus.tokenizer
    chat = next((format_.chat for format_ in corpus.formats if format_.chat is not None), None)
    return TokenizerRecord(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        sha256=corpus.tokenizer_hashes,
        encoder=encoded.encoder,
        chat_template_sha256=None if chat is None else chat.chat_template_sha256,
        end_of_turn_token_id=None if chat is None else chat.end_of_turn_token_id,
        turn_end_token_ids=tuple(sorted({end for record in encoded.records for end in record.turn_ends.tolist()})),
    )


def notes_of(corpus: OpenedCorpus, encoded: EncodedSources) -> list[str]:
    """Return lines for the user: why gigatoken was not used, what chats were changed, and the first bad row."""
    notes = [encoded.encoder] if encoded.encoder != "gigatoken" else []
    for format_ in dict.fromkeys(corpus.formats):
        notes += format_.chat.notes if format_.chat is not None else ()
    for number, names in sorted(_unused_columns(encoded).items()):
        if names:
            notes.append(f"{corpus.named[number][0]}: columns not used: {', '.join(sorted(names))}")
    bad = next((record.first_bad_row for record in encoded.records if record.first_bad_row), "")
    return [*dict.fromkeys(notes), *([f"the first bad row left out: {bad}"] if bad else [])]


def _unused_columns(encoded: EncodedSources) -> dict[int, set[str]]:
    """Return the columns of chats, and the keys of their messages, of which nothing was made, by number of source."""
    unused: dict[int, set[str]] = defaultdict(set)
    for record in encoded.records:
        unused[record.shard.source].update(record.unused)
    return unused


def find_finished(arguments: TokenizeArguments) -> Manifest | None:
    """Return the manifest of the token dataset in --output_dir, or None if nothing is there.

    Only arguments are compared, not the content of the sources, which takes as long as reading them. InputError if the
    folder has something else, or a token dataset that was made with other arguments.
    """
    folder = Path(arguments.output_dir).expanduser()
    if not any(folder.glob("*")):
        return None
    manifest = read_manifest(folder)
    if manifest is not None and manifest.parts:
        command = f"{command_from_here('publish')} {shlex.quote(str(folder))} --push_to_hub {arguments.push_to_hub}"
        raise InputError(f"{folder} is a merge, which this command has not made; push it with {command}")
    if manifest is None:
        raise InputError(f"{folder} already exists and is not a token dataset of this program; choose another folder")
    differences = [f"--{name} {made}, not {asked}" for name, made, asked in _differences(manifest, arguments)]
    if differences:
        raise InputError(f"{folder} was made with other arguments: {', '.join(differences)}; choose another folder")
    return manifest


def _differences(manifest: Manifest, arguments: TokenizeArguments) -> Iterator[tuple[str, object, object]]:
    if manifest.tokenizer.name != arguments.tokenizer_name:
        yield "tokenizer_name", manifest.tokenizer.name, arguments.tokenizer_name
    made = [(source.name, source.place) for source in manifest.sources]
    given = [
        (name, redact(place))
        for option in ("--dataset", "--validation_dataset")
        for name, place in split_names(getattr(arguments, option[2:]) or [], option)
    ]
    if made != given:
        yield "dataset", [place for _, place in made], [place for _, place in given]
    for name, value in asdict(manifest.settings).items():
        asked = getattr(arguments, name)
        # without --packing, it was chosen by the rows; the sources of validation are compared above
        if asked != value and (name, asked) != ("packing", None) and name != "validation_dataset":
            yield name, value, asked
    for made_by in manifest.chat_formats:
        chat_format = CHAT_FORMATS.describe(made_by.name) if made_by.name in CHAT_FORMATS else None
        if chat_format is not None and chat_format.source != made_by.source:
            yield "extensions", f"with another file of the {made_by}", "as it is now"
