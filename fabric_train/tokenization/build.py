"""Build a token dataset: open the corpus, encode, select, pack, and write the ledger and the manifest."""

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from fabric_train.cleaning.dropped import DroppedText, Location, count_by_task, write_hits, write_sample
from fabric_train.cleaning.near_duplicates import NearDuplicates, find_near_duplicates
from fabric_train.cleaning.results import TaskHit
from fabric_train.cli.commands import command_from_here
from fabric_train.cli.errors import InputError
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
    SourceFile,
    SourceRecord,
    SplitLedger,
    TokenizerRecord,
    UnpairedLedger,
    read_manifest,
    write_manifest,
)
from fabric_train.token_dataset.rows import RowPlan, plan_rows
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.chats.formats import PREFERENCE
from fabric_train.tokenization.corpus import OpenedCorpus, opened_corpus
from fabric_train.tokenization.duplicate_samples import sample_duplicates
from fabric_train.tokenization.encoding import EncodedSources, encode_sources
from fabric_train.tokenization.line_counts import find_boilerplate
from fabric_train.tokenization.selection import Collection, Split, collect, select, tokens_by_source
from fabric_train.tokenization.shard_files import HASH_BYTES
from fabric_train.tokenization.shards import SIZES, InputSlice, ShardSizes
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck

_VERSIONS_OF = ("fabric-train", "gigatoken", "tokenizers", "transformers", "datasets", "numpy")


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that decide the rows; each lookup reads a file."""
    return {name: version(name) for name in _VERSIONS_OF}


@dataclass(frozen=True)
class Outcome:
    """The result of a build: the manifest, notes for the user, and the seconds and processes that encoding took."""

    manifest: Manifest
    notes: tuple[str, ...]
    encode_seconds: float
    num_proc: int


def build_token_dataset(arguments: TokenizeArguments, check: ParityCheck, sizes: ShardSizes = SIZES) -> Outcome:
    """Write the token dataset that ``arguments`` describe; the output folder is complete or absent.

    ``check`` compares gigatoken's ids with the tokenizer's; it may already be loading the tokenizer.
    """
    with opened_corpus(arguments, sizes) as (corpus, folder, unfinished):
        if corpus.cleaner is not None and isinstance(arguments.boilerplate, int):
            # the lines that --boilerplate removes are known once all documents have been read
            boilerplate = find_boilerplate(corpus, unfinished)
            corpus = replace(corpus, cleaner=corpus.cleaner.with_boilerplate(boilerplate))
        started = time.monotonic()
        encoded = encode_sources(corpus, unfinished, check, InputSlice())
        seconds = time.monotonic() - started
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return Outcome(manifest, tuple(notes), seconds, encoded.num_proc)


def write_token_dataset(
    folder: Path, corpus: OpenedCorpus, encoded: EncodedSources, *, of_slice: bool = False
) -> Manifest:
    """Select the documents of each split, pack them into rows, and write everything but the tokenizer to ``folder``.

    ``encoded`` has no records afterwards. With ``of_slice``, it holds one slice of the input, and the manifest names
    only the files that the slice has read.
    """
    # collect the documents
    arguments = corpus.arguments
    tokenizer = _tokenizer_record(corpus, encoded)
    near_duplicates: NearDuplicates | None = None
    if arguments.near_duplicates is not None:
        signature_files = [record.tokens.with_suffix(".signatures") for record in encoded.records]
        near_duplicates = find_near_duplicates(signature_files, arguments.near_duplicates, folder / "bands")
    if not of_slice:
        _check_not_empty(corpus.sources, encoded, len(corpus.train))
    collections = _collect_documents(corpus, encoded, near_duplicates)
    unused_columns = _unused_columns(encoded)
    sources: list[SourceRecord] = []
    for source_number, source in enumerate(corpus.source_records(encoded.digests)):
        sources.append(replace(source, unused_columns=tuple(sorted(unused_columns[source_number]))))
    if of_slice:
        sources, collections = _keep_files_of_slice(sources, collections, encoded)
    encoded.records.clear()  # gigabytes of a large corpus; the collections have what is needed

    # write the rows and the index of each split
    splits = select(collections, corpus.train, arguments)
    source_table = SourceTable(sources)
    ledgers = _write_splits(splits, folder, corpus, source_table)

    # write what cleaning dropped and marked
    dropped_samples: list[tuple[DroppedText, Location]] = []
    hits: list[tuple[TaskHit, Location]] = []
    has_duplicates = False
    for collection in collections:
        dropped_samples += collection.dropped_samples
        hits += collection.hits
        has_duplicates |= bool(len(collection.duplicates) or len(collection.near_duplicates))
    if has_duplicates:
        dropped_samples += sample_duplicates(near_duplicates, collections, source_table, corpus.tokenizer_folder)
    if dropped_samples:
        write_sample(folder, dropped_samples, source_table)
    if hits:
        write_hits(folder, hits, source_table)

    # the manifest comes last: it makes the folder a token dataset
    settings = {setting.name: getattr(arguments, setting.name) for setting in fields(Settings)}
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
        has_pairs=any(source_format.kind == PREFERENCE for source_format in corpus.formats),
        has_unpaired=corpus.has_unpaired,
        chat_formats=corpus.registered_formats,
    )
    write_manifest(folder, manifest)
    return manifest


def _collect_documents(
    corpus: OpenedCorpus, encoded: EncodedSources, near_duplicates: NearDuplicates | None
) -> list[Collection]:
    """Collect the documents of --dataset and, if given, of --validation_dataset."""
    arguments = corpus.arguments
    num_train_sources = len(corpus.train)
    train_records = [record for record in encoded.records if record.shard.source < num_train_sources]
    validation_records = [record for record in encoded.records if record.shard.source >= num_train_sources]
    no_hashes = np.empty((0, HASH_BYTES), dtype=np.uint8)
    num_train_documents = sum(len(record.documents) for record in train_records)
    train = collect(
        train_records,
        corpus.sources,
        max_documents=arguments.max_documents,
        max_tokens=None if arguments.weights else arguments.max_tokens,  # with weights, the mixture has this many
        earlier_hashes=no_hashes if arguments.deduplicate else None,
        is_near_duplicate=None if near_duplicates is None else near_duplicates.is_repeat(0, num_train_documents),
    )
    if not arguments.validation_dataset:
        return [train]
    # a validation document that is also trained on is left out
    num_validation_documents = sum(len(record.documents) for record in validation_records)
    validation = collect(
        validation_records,
        corpus.sources,
        max_documents=None,
        max_tokens=None,
        earlier_hashes=train.hashes if arguments.deduplicate else None,
        is_near_duplicate=None
        if near_duplicates is None
        else near_duplicates.is_repeat(num_train_documents, num_validation_documents),
    )
    return [train, validation]


def _keep_files_of_slice(
    sources: Sequence[SourceRecord], collections: Sequence[Collection], encoded: EncodedSources
) -> tuple[list[SourceRecord], list[Collection]]:
    """Keep only the files that the shards have read in the sources' records, and number them from 0.

    The SHA-256 of a file that another slice has hashed is empty; a merge fills it in.
    """
    # the files, or splits of Hugging Face datasets, that the shards have read, as their numbers in the source
    origins_read: list[set[int]] = [set() for _ in sources]
    for record in encoded.records:
        origins_read[record.shard.source].update(record.shard.origins.tolist())
    origins_by_source = [sorted(origins) for origins in origins_read]

    # new_numbers[file]: the number in the slice of a file of the whole input
    first_files = np.cumsum([0, *(source.num_files for source in sources)]).tolist()
    new_numbers = np.zeros(first_files[-1], dtype=np.int64)
    num_files = 0
    for first_file, origins in zip(first_files, origins_by_source, strict=False):
        for origin in origins:
            new_numbers[first_file + origin] = num_files
            num_files += 1

    # the sources with these files only
    reduced_sources: list[SourceRecord] = []
    for source, origins, digests in zip(sources, origins_by_source, encoded.digests, strict=True):
        if source.kind == "files":
            files: list[SourceFile] = []
            for origin in origins:
                file = source.files[origin]
                files.append(file if digests[origin].any() else replace(file, sha256=""))
            reduced_sources.append(replace(source, files=tuple(files)))
        else:
            splits = tuple(source.splits[origin] for origin in origins)
            reduced_sources.append(replace(source, splits=splits))

    # the documents with the new numbers
    renumbered_collections: list[Collection] = []
    for collection in collections:
        collection.places["file"] = new_numbers[collection.places["file"]]
        samples = [(text, (int(new_numbers[file]), row)) for text, (file, row) in collection.dropped_samples]
        hits = [(hit, (int(new_numbers[file]), row)) for hit, (file, row) in collection.hits]
        renumbered_collections.append(replace(collection, dropped_samples=samples, hits=hits))
    return reduced_sources, renumbered_collections


def _check_not_empty(sources: Sequence[Source], encoded: EncodedSources, num_train: int) -> None:
    """Check that each source has a document, except the last sources, which a cap may have left unread."""
    num_documents: Counter[int] = Counter()  # these three by number of the source
    first_bad_rows: dict[int, str] = {}
    skipped: dict[int, Counter[str]] = defaultdict(Counter)
    last_read = -1  # the last source of --dataset that was read
    for record in encoded.records:
        source_number = record.shard.source
        num_documents[source_number] += len(record.documents)
        for reason_number, reason in enumerate(record.reasons):
            skipped[source_number][reason] += int((record.skipped["reason"] == reason_number).sum())
        if record.first_bad_row:
            first_bad_rows.setdefault(source_number, record.first_bad_row)
        if source_number < num_train:
            last_read = max(last_read, source_number)
    if last_read < 0:  # no source has anything to read: each of them is a fault
        last_read = num_train

    faults: list[str] = []
    for source_number, source in enumerate(sources):
        is_expected = source_number <= last_read or source_number >= num_train
        if is_expected and not num_documents[source_number]:
            fault = f"{source.name}: {_nothing_left(skipped[source_number])}"
            if source_number in first_bad_rows:
                fault += f"; first bad row: {first_bad_rows[source_number]}"
            faults.append(fault)
    if faults:
        raise InputError(*faults)


def _nothing_left(skipped: Counter[str]) -> str:
    """Return the error that no document is left, and why; ``skipped`` are the numbers of rows by reason."""
    if not skipped.keys() - {EMPTY, *BAD_ROWS}:
        return "no document with text"
    counts = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped.most_common())
    return f"every document is left out ({counts}); leave out the source, or the options that drop its documents"


def _plan_splits(splits: dict[str, Split], arguments: TokenizeArguments, sources: SourceTable) -> dict[str, RowPlan]:
    """Plan the rows of each split; raise an InputError that names every split without rows."""
    assert arguments.packing is not None, "the default depends on the sources, which are open"
    plans: dict[str, RowPlan] = {}
    for name, split in splits.items():
        # rows keep the sources apart, unless --weights has mixed their documents
        is_mixed = name == "train" and arguments.weights is not None
        document_sources = None if is_mixed else sources.sources_of(split.collection.places["file"])
        plans[name] = plan_rows(
            split.collection.documents.lengths,
            split.order,
            arguments.packing,
            max_length=arguments.max_length,
            overlap=arguments.overlap,
            sources=document_sources,
        )
    faults = [_too_short(name, splits[name], plan, arguments) for name, plan in plans.items() if not plan.num_rows]
    if faults:
        raise InputError(*faults)
    return plans


def _write_splits(
    splits: dict[str, Split], folder: Path, corpus: OpenedCorpus, sources: SourceTable
) -> dict[str, SplitLedger]:
    """Pack and write each split with its document index, and return its ledger."""
    # plan the rows of all splits before any is written, so that a fault leaves nothing to remove
    plans = _plan_splits(splits, corpus.arguments, sources)
    check_disk_space(folder.parent, [(splits[name].collection.documents, plan) for name, plan in plans.items()])

    # write them
    tokenizer = corpus.tokenizer
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    is_chat_source = np.array([source_format.chat is not None for source_format in corpus.formats])
    ledgers: dict[str, SplitLedger] = {}
    for name, plan in plans.items():
        collection = splits[name].collection
        order = splits[name].order
        num_supervised, checksums = write_split(
            folder / name, collection.documents, plan, pad_token_id, corpus.num_proc
        )
        num_severed = count_severed_chats(collection.documents, plan, is_chat_source[collection.sources])
        places = collection.places[plan.order]
        is_desirable: np.ndarray | None = None
        pair_ledger: PairLedger | None = None
        unpaired_ledger: UnpairedLedger | None = None
        if corpus.has_unpaired:
            assert collection.pairs is not None
            is_desirable = collection.pairs["is_desirable"][plan.order]
            unpaired_ledger = _count_unpaired(collection.pairs[order])
        elif collection.pairs is not None:
            pair_ledger = _count_pairs(collection.pairs[order])
        write_index(folder / name, plan, places, checksums, is_desirable)
        ledgers[name] = SplitLedger(
            documents=len(order),
            characters=int(collection.characters[order].sum()),
            tokens_in=plan.tokens_in,
            tokens_repeated=plan.tokens_repeated,
            tokens_in_rows=plan.tokens_in_rows,
            tokens_padding=plan.tokens_padding,
            tokens_supervised=num_supervised,
            tokens_dropped=plan.tokens_dropped,
            rows=plan.num_rows,
            chats_severed=num_severed,
            sources=count_sources(plan, places, sources),
            pairs=pair_ledger,
            unpaired=unpaired_ledger,
        )
    write_dataset_dict(folder, splits)
    return ledgers


def _count_pairs(pairs: np.ndarray) -> PairLedger:
    chosen = pairs["chosen"].astype(np.int64)
    rejected = pairs["rejected"].astype(np.int64)
    margins = pairs["rating_margin"]
    margins = margins[~np.isnan(margins)]  # NaN: the pair has no ratings
    return PairLedger(
        chosen_tokens=int(chosen.sum()),
        rejected_tokens=int(rejected.sum()),
        chosen_longer=int((chosen > rejected).sum()),
        equal_lengths=int((chosen == rejected).sum()),
        prefixes=int(pairs["is_prefix"].sum()),
        rated=len(margins),
        rating_margin=float(margins.sum()),
    )


def _count_unpaired(answers: np.ndarray) -> UnpairedLedger:
    num_desirable = int(answers["is_desirable"].sum())
    return UnpairedLedger(
        desirable=num_desirable,
        undesirable=len(answers) - num_desirable,
        answer_tokens=int(answers["chosen"].sum(dtype=np.int64)),
        mismatched_tokens=int(answers["rejected"].sum(dtype=np.int64)),
    )


def _too_short(name: str, split: Split, plan: RowPlan, arguments: TokenizeArguments) -> str:
    """Return the error that a split has no row, and why."""
    if not len(split.collection.kept_documents):
        return f"{name}: {_nothing_left(Counter(_sum_counts(split.collection.skipped.values())))}"
    alternative = " or --validation_split 0" if name == "validation" else ""
    return (
        f"{name} has {plan.tokens_in:,} tokens in {len(split.order):,} documents, less than one row of "
        f"{arguments.max_length:,}; give more documents, a smaller --max_length{alternative}"
    )


def _ledger(collections: Sequence[Collection], splits: dict[str, Split], ledgers: dict[str, SplitLedger]) -> Ledger:
    """Return the ledger of the token dataset from the ``ledgers`` of its splits."""
    skipped: Counter[str] = Counter()
    hits: list[tuple[TaskHit, Location]] = []
    for collection in collections:
        skipped.update(_sum_counts(collection.skipped.values()))
        hits += collection.hits
    # a mixture repeats documents, or leaves some out
    num_kept = sum(len(collection.kept_documents) for collection in collections)
    num_in_splits = sum(len(split.order) for split in splits.values())
    num_distinct = sum(len(np.unique(split.order)) for split in splits.values())
    return Ledger(
        splits=ledgers,
        documents_read=sum(collection.num_read for collection in collections),
        documents_kept=num_kept,
        documents_skipped=dict(skipped),
        documents_repeated=num_in_splits - num_distinct,
        documents_unsampled=num_kept - num_distinct,
        tokens_cut=_sum_counts(collection.tokens_cut for collection in collections),
        edits=_sum_counts(collection.edits for collection in collections),
        contaminated=count_by_task(hits),
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
    """Return the sources' records with their documents and tokens, and their shares of the train split."""
    # tokens of each source of --dataset, int64 [sources]: in the rows of train, and of the documents train may use
    num_train_sources = len(arguments.dataset)
    train = splits["train"]
    train_tokens = tokens_by_source(train.collection, train.order, num_train_sources)
    available_tokens = tokens_by_source(collections[0], collections[0].kept_documents, num_train_sources)
    for name, split in splits.items():
        if name != "train" and split.collection is collections[0]:
            available_tokens -= tokens_by_source(split.collection, split.order, num_train_sources)

    records: list[SourceRecord] = []
    for source_number, source in enumerate(sources):
        is_train = source_number < num_train_sources
        collection = collections[0] if is_train else collections[-1]
        kept_documents = collection.kept_documents
        documents = kept_documents[collection.sources[kept_documents] == source_number]
        num_train_tokens = int(train_tokens[source_number]) if is_train else 0
        record = replace(
            source,
            documents=len(documents),
            documents_skipped=dict(collection.skipped.get(source_number, {})),
            tokens=int(collection.documents.lengths[documents].sum()),
            train_tokens=num_train_tokens,
            share_reached=round(num_train_tokens / int(train_tokens.sum()), 6),
        )
        if is_train and arguments.weights:
            weight = arguments.weights[source_number]
            share = round(weight / sum(arguments.weights), 6)
            epochs = round(num_train_tokens / int(available_tokens[source_number]), 4)
            record = replace(record, weight=weight, share_asked=share, epochs=epochs)
        records.append(record)
    return records


def _tokenizer_record(corpus: OpenedCorpus, encoded: EncodedSources) -> TokenizerRecord:
    tokenizer = corpus.tokenizer
    chat_template_sha256: str | None = None
    end_of_turn_token_id: int | None = None
    for source_format in corpus.formats:
        if source_format.chat is not None:  # all chats are rendered with one template
            chat_template_sha256 = source_format.chat.chat_template_sha256
            end_of_turn_token_id = source_format.chat.end_of_turn_token_id
            break
    turn_end_ids: set[int] = set()
    for record in encoded.records:
        turn_end_ids.update(record.turn_ends.tolist())
    return TokenizerRecord(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        sha256=corpus.tokenizer_hashes,
        encoder=encoded.encoder,
        chat_template_sha256=chat_template_sha256,
        end_of_turn_token_id=end_of_turn_token_id,
        turn_end_token_ids=tuple(sorted(turn_end_ids)),
    )


def notes_of(corpus: OpenedCorpus, encoded: EncodedSources) -> list[str]:
    """Return lines for the user: why gigatoken was not used, what chats were changed, and the first bad row."""
    notes: list[str] = []
    if encoded.encoder != "gigatoken":
        notes.append(encoded.encoder)
    for source_format in corpus.formats:
        if source_format.chat is not None:
            notes += source_format.chat.notes
    for source_number, columns in sorted(_unused_columns(encoded).items()):
        if columns:
            name, _ = corpus.names_and_places[source_number]
            notes.append(f"{name}: columns not used: {', '.join(sorted(columns))}")
    notes = list(dict.fromkeys(notes))  # several sources may have the same format
    bad_rows = [record.first_bad_row for record in encoded.records if record.first_bad_row]
    if bad_rows:
        notes.append(f"first bad row that was skipped: {bad_rows[0]}")
    return notes


def _unused_columns(encoded: EncodedSources) -> dict[int, set[str]]:
    """Return, by source number, the columns of chats and the keys of messages that no document has used."""
    unused: dict[int, set[str]] = defaultdict(set)
    for record in encoded.records:
        unused[record.shard.source].update(record.unused)
    return unused


def find_finished(arguments: TokenizeArguments) -> Manifest | None:
    """Return the manifest of the token dataset in --output_dir, or None if it does not exist.

    Only arguments are compared, not the content of the sources, which takes as long as reading them. InputError if the
    folder has something else, or a token dataset that was made with different arguments.
    """
    folder = Path(arguments.output_dir).expanduser()
    if not any(folder.glob("*")):
        return None
    manifest = read_manifest(folder)
    if manifest is not None and manifest.parts:
        command = f"{command_from_here('publish')} {shlex.quote(str(folder))} --push_to_hub {arguments.push_to_hub}"
        raise InputError(f"{folder} is a merged token dataset, not one that this command wrote; push it with {command}")
    if manifest is None:
        raise InputError(f"{folder} already exists and is not a token dataset; choose another folder")
    differences = list(_find_differences(manifest, arguments))
    if differences:
        raise InputError(
            f"{folder} was written with different arguments: {', '.join(differences)}; choose another folder"
        )
    return manifest


def _find_differences(manifest: Manifest, arguments: TokenizeArguments) -> Iterator[str]:
    """Describe the arguments of the token dataset that differ from this command's."""
    if manifest.tokenizer.name != arguments.tokenizer_name:
        yield f"--tokenizer_name {manifest.tokenizer.name}, not {arguments.tokenizer_name}"

    # the sources, without passwords, as the manifest has them
    manifest_sources = [(source.name, source.place) for source in manifest.sources]
    sources = split_names(arguments.dataset, "--dataset")
    sources += split_names(arguments.validation_dataset or [], "--validation_dataset")
    sources = [(name, redact(place)) for name, place in sources]
    if manifest_sources != sources:
        yield f"--dataset {[place for _, place in manifest_sources]}, not {[place for _, place in sources]}"

    # the settings
    for name, manifest_value in asdict(manifest.settings).items():
        value = getattr(arguments, name)
        if name == "validation_dataset":  # compared above, with the sources
            continue
        if name == "packing" and value is None:  # the sources decide it
            continue
        if value != manifest_value:
            yield f"--{name} {manifest_value}, not {value}"

    # the files of --extensions
    for chat_format in manifest.chat_formats:
        if chat_format.name in CHAT_FORMATS:
            registered_format = CHAT_FORMATS.describe(chat_format.name)
            if registered_format.source != chat_format.source:
                yield f"--extensions with another version of the {chat_format}"
