"""Check a token dataset before training: compare its manifest with its rows, its tokenizer and the model.

Faults stop the run. Notes are differences that the user should know.
"""

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.argument_types import REWARD
from fabric_train.cli.errors import InputError, first_line, raise_if_limit_reached
from fabric_train.cli.launcher import global_rank
from fabric_train.cli.tables import OBJECTIVES, PROJECT
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.step_sampler import select_validation_rows
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import Rows, TokenDataset
from fabric_train.export.tokenizer_comparison import tokenizer_changed_by_config
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.rope import how_to_extend
from fabric_train.rollouts.prompts import Prompts
from fabric_train.rollouts.rewards import name_rewards
from fabric_train.token_dataset.manifest import FILE_NAME, Manifest, TokenizerRecord, changed_tokenizer
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.tokenizer_comparison import compare_tokenizers
from fabric_train.tokenization.tokenizers.tokenizer_folder import read_chat_template
from fabric_train.tokenization.tokenizers.vocabulary import ADDED, AddedVocabulary
from fabric_train.training.early_stopping import EarlyStopping, parse_early_stopping
from fabric_train.training.objective import Objective
from fabric_train.training.prompt_validation import name_figures

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.training.prepared_run import TrainingData

_MOST_TOKENS = 1 << 28
"""The most tokens to read when looking for added tokens: 1 GB, which takes some seconds."""
_ROWS_AT_ONCE = 1024
_LISTED = 5


@dataclass(frozen=True)
class DatasetCheck:
    """Faults, which stop the run, and notes, which the user should read before it."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def check_dataset(dataset: TokenDataset, shape: ModelShape, isolate_documents: bool) -> DatasetCheck:
    """Compare a token dataset with its manifest and the model; without a manifest (an older folder) check all ids."""
    splits = {"train": dataset.train}
    if dataset.validation:
        splits["validation"] = dataset.validation
    manifest = dataset.manifest
    faults: list[str] = []
    notes: list[str] = []
    for name, rows in splits.items():
        faults += _faults_of_length(dataset, name, rows, shape)

    # the manifest: the rows and the tokenizer that it describes
    if manifest is None:
        unknown = "which tokenizer was used"
        if isolate_documents and not dataset.train.has_borders:
            unknown += " and where documents begin, so documents in the same row attend to each other"
        notes.append(
            f"{dataset.folder} has no {FILE_NAME} because an older version wrote it, so it is unknown {unknown}"
        )
    else:
        faults += _faults_of_changed_rows(dataset, splits, manifest)
        faults += changed_tokenizer(dataset.folder, manifest.tokenizer)
        if not faults and not shape.is_new:
            tokenizer_check = _compare_tokenizer(dataset.folder, manifest.tokenizer, shape)
            faults += tokenizer_check.faults
            notes += tokenizer_check.notes
        if not faults and not global_rank():
            faults += _faults_of_export(dataset, manifest.tokenizer, shape)

    # the rows themselves, as far as a manifest does not vouch for them
    if manifest is None or manifest.tokenizer.vocab_size > shape.vocab_size:
        fix = "tokenize with the model's own tokenizer"
        if manifest and not faults:  # the model's own tokenizer may have made the rows
            has_own_tokenizer = shape.is_new or manifest.tokenizer.name == shape.source
            if has_own_tokenizer or _find_tokenizer_file(shape.source, "tokenizer.json"):
                fix = resize_advice(shape, manifest.tokenizer.vocab_size)
        for name, rows in splits.items():
            faults += _faults_of_ids(dataset, name, rows, shape, fix)
    if manifest is None:
        for name, rows in splits.items():
            faults += _faults_of_columns(dataset, name, rows, shape)
    if not faults:
        for rows in splits.values():
            rows.pieces([0])  # opens the document index, so that a damaged one is found before the run begins
    return DatasetCheck(tuple(faults), tuple(notes))


def note_on_added_tokens(shape: ModelShape, datasets: Sequence[TokenDataset]) -> str | None:
    """Return a note if the training rows lack tokens that were added to the model, which would stay untrained.

    Rows from all over the token datasets are read until each added token has been seen, at most ``_MOST_TOKENS``
    tokens.
    """
    if shape.is_new:
        return None
    added_path = _find_tokenizer_file(shape.source, ADDED)
    tokenizer_path = _find_tokenizer_file(shape.source, "tokenizer.json") if added_path else None
    if added_path is None or tokenizer_path is None:
        return None
    added = read_json(added_path, AddedVocabulary, "extend the model again, or remove this file")

    # chunks of rows in random order, so that the first ones come from all over the datasets
    chunks: list[tuple[Rows, range]] = []
    for dataset in datasets:
        num_rows = len(dataset.train)
        for begin in range(0, num_rows, _ROWS_AT_ONCE):
            chunks.append((dataset.train, range(begin, min(begin + _ROWS_AT_ONCE, num_rows))))
    random.Random(0).shuffle(chunks)

    is_missing = np.ones(len(added.tokens), dtype=bool)  # by added token
    num_read = 0
    for train, row_range in chunks:
        for column in train.chunks("input_ids", row_range):
            added_indices = column.flatten().to_numpy() - added.first_id  # below 0 for the other tokens
            is_added = (added_indices >= 0) & (added_indices < len(is_missing))
            is_missing[added_indices[is_added]] = False
            num_read += len(added_indices)
        if not is_missing.any() or num_read >= _MOST_TOKENS:
            break
    missing_ids = np.flatnonzero(is_missing) + added.first_id
    if not len(missing_ids):
        return None

    tokenizer = load_fast(tokenizer_path, special_text_is_plain=False)
    texts = [tokenizer.decode([index], skip_special_tokens=False) for index in missing_ids[:_LISTED].tolist()]
    token_list = ", ".join(map(repr, texts))
    if len(missing_ids) > _LISTED:
        token_list += f" and {len(missing_ids) - _LISTED:,} more"
    return (
        f"{len(missing_ids):,} of {len(is_missing):,} tokens that were added to {shape.source} do not occur in the "
        f"{num_read:,} tokens read from the training data: {token_list}; their embeddings stay untrained; add text "
        "that contains them, or add fewer tokens"
    )


def faults_of_objective(arguments: "TrainArguments", data: "TrainingData", accelerator: str) -> list[str]:
    """Return why the objective cannot be used with the data and devices of a run."""
    preference = arguments.preference
    option = f"--objective {preference.objective}"
    changes_positions = bool(arguments.model.scaling or arguments.model.rope_theta)
    if preference.needs_reference and changes_positions:
        return [
            f"{option} compares with a reference model that has the same positions; change --rope_scaling or "
            "--rope_theta in an earlier run"
        ]
    if preference.objective == "distill":
        faults = _faults_of_distillation(arguments, data, accelerator)
        if faults:
            return faults
    if OBJECTIVES.module_of(preference.objective) != PROJECT:
        return []  # it knows which data it takes
    if not preference.compares_answers:
        if isinstance(data, Stream):
            return []
        if data.has_pairs:
            return [f"{data.name} has preference pairs, which {option} cannot train on; give --objective dpo"]
        if data.has_unpaired:
            return [
                f"{data.name} has unpaired answers, which {option} cannot train on; give --objective kto, or "
                "tokenize the desirable answers as chats with --data_format prompt_completion or messages"
            ]
        return []

    # an objective that trains on preference pairs, or on unpaired answers
    noun = "preference pairs"
    rows = "rows with chosen and rejected answers"
    if preference.needs_unpaired:
        noun = "unpaired answers"
        rows = "rows with an answer and a label"
    fix = f"tokenize {rows} with fabric-train tokenize, and give --train_data_dir"
    if isinstance(data, Stream):
        return [f"{option} trains on {noun}, which --streaming_dataset cannot provide; {fix}"]
    faults = []
    for dataset in data.parts:
        if dataset.has_pairs and preference.needs_unpaired:
            faults.append(f"{option}: {dataset.name} has preference pairs; give --objective dpo, or {fix}")
        elif dataset.has_unpaired and not preference.needs_unpaired:
            faults.append(f"{option}: {dataset.name} has unpaired answers; give --objective kto, or {fix}")
        elif not (dataset.has_pairs or dataset.has_unpaired):
            faults.append(f"{option}: {dataset.name} has no {noun}; {fix}")
    if not data.isolates:
        faults.append(
            f"{option} needs isolated documents to keep the answers to a prompt apart; leave out --isolate_documents "
            "false"
        )
    if accelerator == "tpu":
        faults.append(f"{option} does not work with --accelerator tpu; use a GPU or the CPU")
    return faults


def _faults_of_distillation(arguments: "TrainArguments", data: "TrainingData", accelerator: str) -> list[str]:
    """Return the settings with which a run cannot learn from a teacher."""
    option = "--objective distill"
    faults = []
    if accelerator == "tpu":
        faults.append(f"{option} does not work with --accelerator tpu; use a GPU or the CPU")
    if arguments.model.precision == "16-mixed":
        faults.append(f"{option} does not work with --precision 16-mixed; give bf16-mixed or bf16-true")
    if arguments.preference.distill_on == "all" and isinstance(data, Stream):
        faults.append(
            "--distill_on all does not work with --streaming_dataset; tokenize the texts and give --train_data_dir"
        )
    if arguments.fsdp.context_parallel_size > 1:
        faults.append(f"{option} does not work with --context_parallel_size; leave out --context_parallel_size")
    return faults


def check_deciding_sources(
    arguments: "TrainArguments", data: "TrainingData", objective: Objective
) -> EarlyStopping | None:
    """Check the sources in ``--best_by`` and ``--early_stopping``, and return the parsed early stopping, or None."""
    evaluation = arguments.evaluation
    sources = _validated_sources(data)
    names = ["all", *sources]
    metrics = {*evaluation.computed_metrics, *objective.metric_names}
    validation = _ValidationName("the validation split", "tokenize with --validation_split above 0")
    if isinstance(data, Prompts):
        reward_names = name_rewards(arguments.rollouts.rewards or ())
        metrics = set(name_figures(reward_names)) if sources else set()
        reward_figures = tuple(f"{REWARD}_{name}" for name in reward_names)
        validation = _ValidationName("--validation_prompts", "give held-out prompts", reward_figures)
    faults = []
    if not _can_decide(evaluation.best_by, names, metrics):
        faults.append(_fault_of_source("best_by", evaluation.best_by, sources, validation))
    stopping = None
    if evaluation.early_stopping is not None:
        stopping = parse_early_stopping(evaluation.early_stopping, sources)
        if not sources or not _can_decide(stopping.source, names, metrics):
            faults.append(_fault_of_source("early_stopping", stopping.source, sources, validation))
    if faults:
        raise InputError(*faults)
    return stopping


def faults_of_validation(
    arguments: "TrainArguments", data: "TrainingData", objective: Objective, stopping: EarlyStopping | None
) -> list[str]:
    """Return a fault if the validation rows that a run evaluates have nothing to predict.

    These rows would give neither a loss nor a best checkpoint. The same holds for the rows of a source in
    ``--best_by`` or ``--early_stopping``. Rows are read until a row with targets is found for each.
    """
    rows = data.validation
    evaluation = arguments.evaluation
    if rows is None or evaluation.self_check:
        return []

    # the sources whose loss decides, and the options that name them
    deciding_names = {
        "--best_by": evaluation.best_by,
        "--early_stopping": stopping.source if stopping else "all",
    }
    options_by_source: dict[str, str] = {}  # those in which no row with targets is found yet
    for option, name in deciding_names.items():
        source = _source_of(name, rows.source_names)
        if source:
            options_by_source[source] = option

    chosen = select_validation_rows(rows, evaluation.eval_batch_size, evaluation.eval_iters, arguments.data.seed)
    has_targets = False
    for row in chosen:
        batch = rows.__getitems__([row])
        if int(objective.count(batch)) == 0:
            continue
        has_targets = True
        if options_by_source and batch.pieces is not None:
            sources_with_targets = batch.pieces.sources[batch.pieces.num_targets > 0]
            for source_index in sources_with_targets.unique().tolist():
                options_by_source.pop(rows.source_names[source_index], None)
        if not options_by_source:
            return []

    # no row has targets, or no row of a source that decides
    subject = f"none of the {len(chosen)} validation rows"
    lacking = "a supervised token"
    if has_targets:
        options = " and ".join(options_by_source.values())
        lacking += f" from {', '.join(options_by_source)}, whose loss {options} needs"
    if evaluation.eval_iters is not None and len(chosen) < len(rows):
        return [
            f"{subject} selected by --eval_iters {evaluation.eval_iters} has {lacking}, so there would be no "
            f"validation loss; give a larger --eval_iters, or leave it out to evaluate all {len(rows)} rows"
        ]
    return [
        f"{subject} has {lacking}, so there would be no validation loss; tokenize with a larger --validation_split "
        "or --max_length so that it contains answers, or with --validation_split 0"
    ]


def _source_of(name: str, source_names: Sequence[str]) -> str | None:
    """Return the source in SOURCE or METRIC/SOURCE; None for the full split."""
    if name in source_names:
        return name
    _, _, source = name.partition("/")
    return source if source in source_names else None


def _can_decide(name: str, source_names: list[str], metrics: Collection[str]) -> bool:
    """Return whether a name is a source, a metric, or the metric of a source as METRIC/SOURCE."""
    if name in source_names:
        return True
    metric, _, source = name.partition("/")
    return metric in metrics and (not source or source in source_names)


@dataclass(frozen=True)
class _ValidationName:
    """How messages call what a run evaluates."""

    name: str
    advice: str
    """What to do if there is none."""
    reward_figures: tuple[str, ...] = ()
    """The names of the single rewards, which can decide as well as a source can; none without rewards."""


def _fault_of_source(option: str, name: str, source_names: list[str], validation: _ValidationName) -> str:
    """Return the fault of an option with a source that the validation does not have."""
    if not source_names:
        return f"--{option} {name}: there is no {validation.name.removeprefix('the ')}; {validation.advice}"
    if option == "early_stopping" and name.isdecimal():
        return (
            f"--early_stopping {name}: the number needs a source before it; give all:{name} or {source_names[0]}:{name}"
        )
    noun = "source or reward" if validation.reward_figures else "source"
    choices = ", ".join(("all", *source_names, *validation.reward_figures))
    return f"--{option} {name}: {validation.name} has no such {noun}; give {choices}"


def _validated_sources(data: "TrainingData") -> list[str]:
    """Return the sources of the validation split, or of the held-out prompts, in order."""
    if isinstance(data, Prompts):
        # all prompts of a source may be too long; the source then has no rewards
        return [] if data.validation_prompts is None else list(data.validation_prompts.columns_by_source)
    data_with_validation = data.held_out if isinstance(data, Stream) else data
    if data_with_validation is None:
        return []
    source_names: dict[str, None] = {}  # an ordered set
    for dataset in data_with_validation.parts:
        if dataset.validation is None:
            continue
        ledger = dataset.manifest.ledger.splits.get("validation") if dataset.manifest else None
        if ledger and ledger.sources:
            source_names |= dict.fromkeys(ledger.sources)
        else:
            source_names |= dict.fromkeys(dataset.source_names)
    return list(source_names)


def longest_row(data: "TrainingData") -> int:
    """Return the number of tokens in the longest row that a run trains on or evaluates."""
    longest = data.max_length if isinstance(data, Stream) else data.train.longest()
    if data.validation:
        longest = max(longest, data.validation.longest())
    return longest


def _faults_of_length(dataset: TokenDataset, split: str, rows: Rows, shape: ModelShape) -> list[str]:
    """Return a fault if the rows of a split are too short to predict a token, or too long for the model."""
    longest = rows.longest()
    if longest < 2:
        return [
            f"{dataset.folder}: rows of {split} have {longest} tokens, which leaves none to predict; tokenize again"
        ]
    if shape.max_positions is None or longest <= shape.max_positions:
        return []
    return [
        f"{dataset.folder}: rows of {split} have {longest} tokens, but {shape.source} has {shape.max_positions} "
        f"positions; tokenize with --max_length {shape.max_positions} or less{how_to_extend(shape, longest)}"
    ]


def resize_advice(shape: ModelShape, num_tokens: int) -> str:
    """Return the advice for a model whose tokenizer has more tokens, ``num_tokens``, than its embedding."""
    if shape.is_new:
        return f"its tokenizer has {num_tokens}; give --vocab_size {num_tokens} or more"
    return (
        f"its own tokenizer has {num_tokens}; resize the model in transformers with "
        f"model.resize_token_embeddings({num_tokens}), save it and its tokenizer with save_pretrained(FOLDER), and "
        "give that folder"
    )


def _faults_of_ids(dataset: TokenDataset, split: str, rows: Rows, shape: ModelShape, fix: str) -> list[str]:
    """Report ids without an embedding in the model; extra ids of a larger tokenizer are fine if no row has them."""
    lowest, highest = rows.id_range()
    subject = f"{dataset.folder}: {split} holds token id"
    faults = []
    if lowest < 0:
        faults.append(f"{subject} {lowest}, which is invalid; pad with a token of the model and mask it in labels")
    if highest >= shape.vocab_size:
        faults.append(
            f"{subject} {highest}, but {shape.source} has {shape.vocab_size} tokens; {fix} "
            "(docs/reference/errors.md#vocabulary)"
        )
    return faults


def _faults_of_columns(dataset: TokenDataset, split: str, rows: Rows, shape: ModelShape) -> list[str]:
    """Report labels that are not tokens, and document borders that are not in order."""
    faults = []
    if rows.has_labels:
        lowest, highest = rows.id_range("labels")
        label = lowest if lowest < 0 else highest  # whichever may be no token
        if not 0 <= label < shape.vocab_size:
            faults.append(
                f"{dataset.folder}: {split} has label {label}, but {shape.source} has {shape.vocab_size} tokens; use "
                f"token ids as labels, and {IGNORED_LABEL} for tokens that are not supervised"
            )
    row = rows.find_row_with_wrong_borders()
    if row is not None:
        faults.append(
            f"{dataset.folder}: {split} has document_starts that are not in ascending order, first in row {row}; "
            "tokenize again"
        )
    return faults


def _faults_of_changed_rows(dataset: TokenDataset, splits: dict[str, Rows], manifest: Manifest) -> list[str]:
    """Compare the number and the lengths of the rows with the manifest's."""
    subject = f"{dataset.folder}: {FILE_NAME} says"
    fix = "the folder was changed after it was written; tokenize again"
    faults = []
    for split in sorted(splits.keys() | manifest.ledger.splits.keys(), reverse=True):
        recorded = manifest.ledger.splits[split].rows if split in manifest.ledger.splits else 0
        num_rows = len(splits[split]) if split in splits else 0
        if recorded != num_rows:
            faults.append(f"{subject} ledger.{split}.rows {recorded:,}, but there are {num_rows:,}; {fix}")
    max_length = manifest.settings.max_length
    for split, rows in splits.items():
        lengths = {rows.shortest(), rows.longest()}
        if lengths != {max_length}:
            length_range = " to ".join(map(str, sorted(lengths)))
            faults.append(
                f"{subject} settings.max_length {max_length}, but rows of {split} have {length_range} tokens; {fix}"
            )
    return faults


def _compare_tokenizer(folder: Path, record: TokenizerRecord, shape: ModelShape) -> DatasetCheck:
    """Compare a token dataset's tokenizer with the model's."""
    notes = _notes_on_bos_and_eos(folder, record, shape)

    # the chat templates
    template = _read_template(shape.source)
    template_hash = None
    if template:
        template_hash = hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest()
    if record.chat_template_sha256 and template_hash and template_hash != record.chat_template_sha256:
        notes.append(
            f"{folder}: its chats were rendered with a different chat template than {shape.source}'s; checkpoints "
            "and exports will contain the token dataset's template"
        )

    # the vocabularies: those of two equal files are the same
    dataset_path = folder / "tokenizer" / "tokenizer.json"
    model_path = _find_tokenizer_file(shape.source, "tokenizer.json")
    if model_path is None:
        if record.name != shape.source:
            notes.append(
                f"{shape.source} has no tokenizer.json, so it is unknown whether it fits {record.name}, the "
                f"tokenizer of {folder}"
            )
        return DatasetCheck((), tuple(notes))
    if hashlib.sha256(model_path.read_bytes()).hexdigest() == record.sha256.get(dataset_path.name):
        return DatasetCheck((), tuple(notes))
    special_texts = [record.bos_token, record.eos_token, _read_template(str(folder / "tokenizer"))]
    text_in_rows = " ".join(text for text in special_texts if text)
    fault, added = compare_tokenizers(dataset_path, model_path, text_in_rows)
    paths = f"here: {dataset_path}, there: {model_path}"
    if added:
        notes.append(f"the tokenizers only differ in added tokens: {added} ({paths}); text gets the same ids")
    if not fault:
        return DatasetCheck((), tuple(notes))
    line = (
        f"{folder}: not tokenized with the tokenizer of {shape.source}: {fault} ({paths}); tokenize with "
        f"--tokenizer_name {shape.source}, or train a model that uses {record.name} "
        "(docs/reference/errors.md#another-tokenizer)"
    )
    return DatasetCheck((line,), tuple(notes))


def _faults_of_export(dataset: TokenDataset, record: TokenizerRecord, shape: ModelShape) -> list[str]:
    """Return a fault if the token dataset's tokenizer would change in an export, because that has a config.json."""
    tokenizer = dataset.folder / "tokenizer"
    if not (tokenizer / "tokenizer_config.json").is_file():
        return []
    try:
        differences = tokenizer_changed_by_config(tokenizer, shape.config)
    except (ArithmeticError, AttributeError, ImportError, LookupError, OSError, TypeError, ValueError) as error:
        raise_if_limit_reached(error)
        differences = [first_line(error).rstrip(".")]
    if not differences:
        return []
    return [
        f"{dataset.folder}: next to the config.json of a {shape.config.model_type}, transformers loads the tokenizer "
        f"{record.name} differently ({', '.join(differences)}), so the model could not be exported; tokenize with "
        "the model's own tokenizer, or give another model"
    ]


def _notes_on_bos_and_eos(folder: Path, record: TokenizerRecord, shape: ModelShape) -> list[str]:
    """Note a BOS or EOS that differs from the model's configuration, since many models have another one, or several."""
    notes = []
    config: Any = shape.config.get_text_config()
    for role, verb in (("bos", "begin"), ("eos", "end")):
        token = getattr(record, f"{role}_token")
        token_id = getattr(record, f"{role}_token_id")
        model_ids = getattr(config, f"{role}_token_id", None)
        if model_ids is None:
            continue
        if not isinstance(model_ids, list):
            model_ids = [model_ids]
        if token_id is not None and model_ids and token_id not in model_ids:
            notes.append(
                f"{folder}: documents {verb} with {token!r} (id {token_id}), but config.json of {shape.source} has "
                f"{role}_token_id {' or '.join(map(str, model_ids))}"
            )
    return notes


def _find_tokenizer_file(source: str, name: str) -> Path | None:
    """Return a file of a tokenizer: in a checkpoint, in a model folder, or cached from the hub."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if folder.is_dir():
        for path in (folder / "tokenizer" / name, folder / name):
            if path.is_file():
                return path
        return None
    cached = try_to_load_from_cache(source, name)
    return Path(cached) if isinstance(cached, str) else None


def _read_template(source: str) -> str | None:
    """Return the chat template of a model or tokenizer; None if it has none, or several named ones."""
    template_path = _find_tokenizer_file(source, "chat_template.jinja")
    if template_path:
        return read_chat_template(template_path)
    config_path = _find_tokenizer_file(source, "tokenizer_config.json")
    if config_path is None:
        return None
    template = read_json(config_path, dict, "download the file again").get("chat_template")
    return template if isinstance(template, str) else None
