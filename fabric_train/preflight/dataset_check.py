"""Check a token dataset before training: compare its manifest with its rows, its tokenizer and the model.

Faults stop the run. Notes are differences that the user should know.
"""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.cli.launcher import global_rank
from fabric_train.cli.tables import OBJECTIVES, PROJECT
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.step_sampler import select_validation_rows
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import Rows, TokenDataset
from fabric_train.export.tokenizer_comparison import tokenizer_changed_by_config
from fabric_train.files.regular_file import read_json
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.rope import how_to_extend
from fabric_train.token_dataset.manifest import FILE_NAME, Manifest, TokenizerRecord, changed_tokenizer
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.tokenizer_comparison import compare_tokenizers
from fabric_train.tokenization.tokenizers.tokenizer_folder import read_chat_template
from fabric_train.tokenization.tokenizers.vocabulary import ADDED, AddedVocabulary
from fabric_train.training.early_stopping import EarlyStopping, parse_early_stopping
from fabric_train.training.objective import Objective

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.training.prepared_run import TrainingData

_MOST_TOKENS = 1 << 28
"""Tokens read to look for added ones: 1 GB, some seconds."""
_ROWS_AT_ONCE = 1024
_LISTED = 5


@dataclass(frozen=True)
class DatasetCheck:
    """Lines that stop the run, and lines that the user should read before it."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def check_dataset(dataset: TokenDataset, shape: ModelShape, isolate_documents: bool) -> DatasetCheck:
    """Compare a token dataset with its manifest and the model; without a manifest (an older folder) check all ids."""
    splits = {"train": dataset.train} | ({"validation": dataset.validation} if dataset.validation else {})
    manifest = dataset.manifest
    faults = [fault for name, rows in splits.items() for fault in _beyond_the_positions(dataset, name, rows, shape)]
    notes: list[str] = []
    if manifest is None:
        unknown = "which tokenizer made it"
        if isolate_documents and not dataset.train.has_borders:
            unknown += ", and where documents begin: documents in one row see each other"
        notes.append(f"{dataset.folder} has no {FILE_NAME} (an older folder), so it is not known {unknown}")
    else:
        faults += _changed_rows(dataset, splits, manifest)
        faults += changed_tokenizer(dataset.folder, manifest.tokenizer)
        if not faults and not shape.is_new:
            another = _other_tokenizer(dataset.folder, manifest.tokenizer, shape)
            faults = list(another.faults)
            notes = list(another.notes)
        if not faults and not global_rank():
            faults += _changed_by_export(dataset, manifest.tokenizer, shape)
    if manifest is None or manifest.tokenizer.vocab_size > shape.vocab_size:
        fix = "tokenize with the model's own tokenizer"
        if manifest and not faults:  # the model's own tokenizer may have made the rows
            has_own = shape.is_new or manifest.tokenizer.name == shape.source
            if has_own or _model_file(shape.source, "tokenizer.json"):
                fix = resize_advice(shape, manifest.tokenizer.vocab_size)
        faults += [fault for name, rows in splits.items() for fault in _foreign_ids(dataset, name, rows, shape, fix)]
    if manifest is None:
        faults += [fault for name, rows in splits.items() for fault in _wrong_columns(dataset, name, rows, shape)]
    if not faults:
        for rows in splits.values():
            rows.pieces([0])  # opens the document index
    return DatasetCheck(tuple(faults), tuple(notes))


def note_on_added_tokens(shape: ModelShape, parts: Sequence[TokenDataset]) -> str | None:
    """Return a note for the user if the rows to train on lack tokens that were added to the model: they stay untrained.

    Rows from all over the token datasets are read until each added token was seen, at most ``_MOST_TOKENS`` tokens.
    """
    file = None if shape.is_new else _model_file(shape.source, ADDED)
    tokenizer_file = None if file is None else _model_file(shape.source, "tokenizer.json")
    if file is None or tokenizer_file is None:
        return None
    added = read_json(file, AddedVocabulary, "extend the model again, or remove this file")
    is_missing = np.ones(len(added.tokens), dtype=bool)
    num_read = 0
    pieces = [
        (part.train, range(begin, min(begin + _ROWS_AT_ONCE, len(part.train))))
        for part in parts
        for begin in range(0, len(part.train), _ROWS_AT_ONCE)
    ]
    random.Random(0).shuffle(pieces)
    for train, rows in pieces:
        for chunk in train.chunks("input_ids", rows):
            ids = chunk.flatten().to_numpy() - added.first_id
            is_missing[ids[(ids >= 0) & (ids < len(is_missing))]] = False
            num_read += len(ids)
        if not is_missing.any() or num_read >= _MOST_TOKENS:
            break
    missing = np.flatnonzero(is_missing) + added.first_id
    if not len(missing):
        return None
    tokenizer = load_fast(tokenizer_file, special_text_is_plain=False)
    texts = (tokenizer.decode([index], skip_special_tokens=False) for index in missing[:_LISTED].tolist())
    shown = ", ".join(map(repr, texts))
    more = f" and {len(missing) - _LISTED:,} more" if len(missing) > _LISTED else ""
    return (
        f"{len(missing):,} of {len(is_missing):,} tokens that were added to {shape.source} are not in the {num_read:,} "
        f"tokens that were read of the training data: {shown}{more}; their rows stay untrained: add text that has "
        "them, or extend by fewer tokens"
    )


def faults_of_objective(given: "TrainArguments", data: "TrainingData", accelerator: str) -> list[str]:
    """Return what forbids the objective with the data and the devices of a run."""
    option = f"--objective {given.preference.objective}"
    if given.preference.needs_reference and (given.model.scaling or given.model.rope_theta):
        return [f"{option} compares with a model of the same positions: give --rope_scaling in a run before"]
    if OBJECTIVES.module_of(given.preference.objective) != PROJECT:
        return []  # it knows which data it takes
    if not given.preference.needs_pairs:
        if isinstance(data, Stream) or not data.has_pairs:
            return []
        return [f"{data.name} has preference pairs, which {option} does not train on; give --objective dpo"]
    fix = "tokenize rows with chosen and rejected answers with fabric-train tokenize, and give --train_data_dir"
    if isinstance(data, Stream):
        return [f"{option} trains on preference pairs, and --streaming_dataset has none; {fix}"]
    faults = [f"{option}: {part.name} has no preference pairs; {fix}" for part in data.parts if not part.has_pairs]
    if not data.isolates:
        faults.append(f"{option} keeps both answers of a pair apart: leave --isolate_documents false out")
    if accelerator == "tpu":
        faults.append(f"{option} does not work with --accelerator tpu; use a GPU or the CPU")
    return faults


def check_deciding_sources(
    arguments: "TrainArguments", data: "TrainingData", objective: Objective
) -> EarlyStopping | None:
    """Check the sources of ``--best_by`` and ``--early_stopping``, and return the latter, None if it is not given."""
    given = arguments.evaluation
    names = _validated_sources(data)
    figures = {*given.computed_metrics, *objective.metric_names}
    can_decide = _can_decide(given.best_by, ["all", *names], figures)
    faults = [] if can_decide else [_no_such_source("best_by", given.best_by, names)]
    stopping = None
    if given.early_stopping is not None:
        stopping = parse_early_stopping(given.early_stopping, names)
        if not names or not _can_decide(stopping.source, ["all", *names], figures):
            faults.append(_no_such_source("early_stopping", stopping.source, names))
    if faults:
        raise InputError(*faults)
    return stopping


def faults_of_validation(
    arguments: "TrainArguments", data: "TrainingData", objective: Objective, stopping: EarlyStopping | None
) -> list[str]:
    """Return a fault if the validation rows that a run evaluates have nothing to predict.

    Neither a loss nor a best checkpoint would come of such rows. The same holds for the rows of a source that
    ``--best_by`` or ``--early_stopping`` decides by. Rows are read until one of each is found that has targets.
    """
    rows = data.validation
    evaluation = arguments.evaluation
    if rows is None or evaluation.self_check:
        return []
    chosen = select_validation_rows(rows, evaluation.eval_batch_size, evaluation.eval_iters, arguments.data.seed)
    deciding = {"--best_by": evaluation.best_by, "--early_stopping": stopping.source if stopping else "all"}
    wanted = {source: option for option, name in deciding.items() if (source := _source_of(name, rows.source_names))}
    has_targets = False
    for row in chosen:
        batch = rows.__getitems__([row])
        if int(objective.count(batch)) == 0:
            continue
        has_targets = True
        if wanted and batch.pieces is not None:
            with_targets = batch.pieces.sources[batch.pieces.num_targets > 0]
            for source in with_targets.unique().tolist():
                wanted.pop(rows.source_names[source], None)
        if not wanted:
            return []
    return [_nothing_to_predict(evaluation.eval_iters, len(chosen), len(rows), None if not has_targets else wanted)]


def _source_of(name: str, source_names: Sequence[str]) -> str | None:
    """Return the source that SOURCE or METRIC/SOURCE names, None for the whole split."""
    if name in source_names:
        return name
    source = name.partition("/")[2]
    return source if source in source_names else None


def _nothing_to_predict(limit: int | None, num_chosen: int, num_rows: int, wanted: Mapping[str, str] | None) -> str:
    """Return the fault of validation rows without targets; ``wanted`` are the options by source, None for all."""
    rows = f"none of the {num_chosen} validation rows"
    whose = "a supervised token"
    if wanted is not None:
        whose += f" of {', '.join(wanted)}, by whose loss {' and '.join(wanted.values())} decide"
    if limit is not None and num_chosen < num_rows:
        return (
            f"{rows} that --eval_iters {limit} selects has {whose}, so there would be no validation loss; give a "
            f"larger --eval_iters, or leave it out to evaluate all {num_rows} rows"
        )
    return (
        f"{rows} has {whose}, so there would be no validation loss; tokenize with a larger --validation_split or "
        "--max_length, so that answers are in it, or with --validation_split 0"
    )


def _can_decide(source: str, names: list[str], figures: Collection[str]) -> bool:
    """Return whether this is a source, a metric of ``figures``, or the metric of a source as METRIC/SOURCE."""
    metric, _, of_source = source.partition("/")
    return source in names or (metric in figures and (of_source or "all") in names)


def _no_such_source(option: str, source: str, names: list[str]) -> str:
    if not names:
        return f"--{option} {source}: there is no validation split; tokenize with --validation_split above 0"
    if option == "early_stopping" and source.isdecimal():
        return f"--early_stopping {source}: a source comes before the number; give all:{source}, or {names[0]}:{source}"
    return f"--{option} {source}: the validation split has no such source; give all, {', '.join(names)}"


def _validated_sources(data: "TrainingData") -> list[str]:
    dataset = data.held_out if isinstance(data, Stream) else data
    names: dict[str, None] = {}
    for part in dataset.parts if dataset else ():
        if part.validation is None:
            continue
        ledger = part.manifest.ledger.splits.get("validation") if part.manifest else None
        names |= dict.fromkeys(ledger.sources if ledger and ledger.sources else part.source_names)
    return list(names)


def longest_row(data: "TrainingData") -> int:
    """Return the tokens of the longest row that a run trains on or evaluates."""
    held_out = [data.validation.longest()] if data.validation else []
    return max([data.max_length if isinstance(data, Stream) else data.train.longest(), *held_out])


def _beyond_the_positions(dataset: TokenDataset, name: str, rows: Rows, shape: ModelShape) -> list[str]:
    if rows.longest() < 2:
        return [f"{dataset.folder}: rows of {name} have {rows.longest()} tokens, none to predict; tokenize again"]
    if shape.max_positions is None or rows.longest() <= shape.max_positions:
        return []
    return [
        f"{dataset.folder}: rows of {name} have {rows.longest()} tokens, {shape.source} takes {shape.max_positions}; "
        f"tokenize with --max_length {shape.max_positions} or less{how_to_extend(shape, rows.longest())}"
    ]


def resize_advice(shape: ModelShape, num_tokens: int) -> str:
    """Return what to do about a model whose own tokenizer has more tokens, ``num_tokens``, than its embedding."""
    if shape.is_new:
        return f"its tokenizer has {num_tokens}: give --vocab_size {num_tokens} or more"
    return (
        f"its own tokenizer has {num_tokens}: resize the model with transformers, model.resize_token_embeddings("
        f"{num_tokens}), save it and its tokenizer with save_pretrained(FOLDER), and give that folder"
    )


def _foreign_ids(dataset: TokenDataset, name: str, rows: Rows, shape: ModelShape, fix: str) -> list[str]:
    """Name ids without an embedding in the model. A larger tokenizer is fine if the rows have none of its extra ids."""
    (lowest, highest), holds = rows.id_range(), f"{dataset.folder}: {name} holds token id"
    faults = [f"{holds} {lowest}; pad with a token of the model and mask it in labels"] if lowest < 0 else []
    if highest >= shape.vocab_size:
        faults.append(
            f"{holds} {highest}, {shape.source} has {shape.vocab_size} tokens; {fix} "
            "(docs/reference/errors.md#vocabulary)"
        )
    return faults


def _wrong_columns(dataset: TokenDataset, name: str, rows: Rows, shape: ModelShape) -> list[str]:
    faults = []
    if rows.has_labels:
        lowest, highest = rows.id_range("labels")
        wrong = lowest if lowest < 0 else highest
        if not 0 <= wrong < shape.vocab_size:
            faults.append(
                f"{dataset.folder}: {name} has label {wrong}, {shape.source} has {shape.vocab_size} tokens; labels are "
                f"tokens, or {IGNORED_LABEL} where nothing is to be learnt"
            )
    outside = rows.find_row_with_wrong_borders()
    if outside is not None:
        faults.append(
            f"{dataset.folder}: {name} has document_starts that are not in order within their row, row {outside} "
            "first; tokenize again"
        )
    return faults


def _changed_rows(dataset: TokenDataset, splits: dict[str, Rows], manifest: Manifest) -> list[str]:
    there = f"{dataset.folder}: {FILE_NAME} says"
    fix = "the folder was changed since: tokenize again"
    faults = []
    for name in sorted(splits.keys() | manifest.ledger.splits.keys(), reverse=True):
        said = manifest.ledger.splits[name].rows if name in manifest.ledger.splits else 0
        found = len(splits[name]) if name in splits else 0
        if said != found:
            faults.append(f"{there} ledger.{name}.rows {said:,}, there are {found:,}; {fix}")
    for name, rows in splits.items():
        lengths = {rows.shortest(), rows.longest()}
        if lengths != {manifest.settings.max_length}:
            found_length = " to ".join(map(str, sorted(lengths)))
            faults.append(
                f"{there} settings.max_length {manifest.settings.max_length}, "
                f"rows of {name} have {found_length} tokens; {fix}"
            )
    return faults


def _other_tokenizer(folder: Path, record: TokenizerRecord, shape: ModelShape) -> DatasetCheck:
    notes = _other_bos_eos(folder, record, shape)
    template = _template(shape.source)
    digest = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest() if template else None
    if record.chat_template_sha256 and digest and digest != record.chat_template_sha256:
        notes.append(
            f"{folder}: its chats are rendered with another chat template than {shape.source}'s own; "
            "checkpoints and exports will carry the former"
        )
    ours = folder / "tokenizer" / "tokenizer.json"
    theirs = _model_file(shape.source, "tokenizer.json")
    if theirs is None and record.name != shape.source:
        notes.append(
            f"{shape.source} brings no tokenizer.json: whether it is a model of {record.name}, whose tokenizer "
            f"made {folder}, is not known"
        )
    if theirs is None or hashlib.sha256(theirs.read_bytes()).hexdigest() == record.sha256.get(ours.name):
        return DatasetCheck((), tuple(notes))
    in_rows = " ".join(filter(None, (record.bos_token, record.eos_token, _template(str(folder / "tokenizer")))))
    fault, added = compare_tokenizers(ours, theirs, in_rows)
    sides = f"here is {ours}, there {theirs}"
    if added:
        notes.append(f"the tokenizers differ in added tokens: {added} ({sides}); text has the same ids")
    line = (
        f"{folder}: not made with the tokenizer of {shape.source}: {fault} ({sides}); "
        f"tokenize with --tokenizer_name {shape.source}, or train a model of {record.name} "
        "(docs/reference/errors.md#another-tokenizer)"
    )
    return DatasetCheck((line,) if fault else (), tuple(notes))


def _changed_by_export(dataset: TokenDataset, record: TokenizerRecord, shape: ModelShape) -> list[str]:
    """Return a fault if an export, which has a config.json, would read the token dataset's tokenizer as another one."""
    tokenizer = dataset.folder / "tokenizer"
    if not (tokenizer / "tokenizer_config.json").is_file():
        return []
    try:
        differences = tokenizer_changed_by_config(tokenizer, shape.config)
    except (ArithmeticError, AttributeError, ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise_reached_limit(error)
        differences = [first_line(error).rstrip(".")]
    if not differences:
        return []
    return [
        f"{dataset.folder}: beside the config.json of a {shape.config.model_type}, transformers reads the tokenizer "
        f"{record.name} as another one ({', '.join(differences)}), so the model could not be exported; tokenize with "
        "the model's own tokenizer, or give another model"
    ]


def _other_bos_eos(folder: Path, record: TokenizerRecord, shape: ModelShape) -> list[str]:
    """Note a BOS or EOS that differs from the model's configuration. Many models name another one, or several."""
    notes = []
    config: Any = shape.config.get_text_config()
    for role, verb in (("bos", "begin"), ("eos", "end")):
        token = getattr(record, f"{role}_token")
        index = getattr(record, f"{role}_token_id")
        named = getattr(config, f"{role}_token_id", None)
        named = named if isinstance(named, list) else [] if named is None else [named]
        if index is not None and named and index not in named:
            notes.append(
                f"{folder}: documents {verb} with {token!r} (id {index}), config.json of {shape.source} has "
                f"{role}_token_id {' or '.join(map(str, named))}"
            )
    return notes


def _model_file(source: str, name: str) -> Path | None:
    """Return a file of a tokenizer: in a checkpoint, in a model folder, or cached from the hub."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if folder.is_dir():
        places = [folder / "tokenizer" / name, folder / name]
        return next((place for place in places if place.is_file()), None)
    cached = try_to_load_from_cache(source, name)
    return Path(cached) if isinstance(cached, str) else None


def _template(source: str) -> str | None:
    """Return the chat template of a model or tokenizer; None if it has none, or several named ones."""
    file = _model_file(source, "chat_template.jinja")
    if file:
        return read_chat_template(file)
    config = _model_file(source, "tokenizer_config.json")
    template = read_json(config, dict, "fetch the file again").get("chat_template") if config else None
    return template if isinstance(template, str) else None
