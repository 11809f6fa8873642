"""Open --prompts: the prompts of reinforcement learning, encoded, with the columns that rewards receive."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.cli.argument_types import counted
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.cli.shares import Shares
from fabric_train.data.mixture import rows_of_shares
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.inference.prompt_file import Prompt as PromptText
from fabric_train.inference.prompts import PromptEncoder
from fabric_train.model.hf_model import load_hf_tokenizer
from fabric_train.reading.documents import BadRowError, Chat, Row
from fabric_train.reading.sources import Source, open_sources, split_names
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer

PROMPT = "prompt"
"""The column with the prompt: a text, or the messages of a chat."""
_OPTION = "--prompts"
_VALIDATION_OPTION = "--validation_prompts"
_RANGE_BYTES = 1 << 30  # of a file, or of a dataset's rows, that is read at once
_MOST_FAULTS = 20  # that are listed


@dataclass(frozen=True)
class Prompt:
    """A prompt of a run."""

    prompt_id: str
    """Its source and row, such as ``math:17``; rows count from 1."""
    source: int
    """The index of its source among ``Prompts.source_names``."""
    content: Any
    """The text, or the list of messages, as in the file."""
    token_ids: tuple[int, ...]
    columns: dict[str, Any]
    """The values of the other columns of its row, by name."""


@dataclass(frozen=True)
class PromptRows:
    """The prompts of a run, in the form in which a run counts the rows of its training data."""

    prompts: tuple[Prompt, ...]
    row_length: int
    """The most tokens of a row of packed completions."""
    longest_beside: int = 0
    """The tokens of the longest row of a token dataset that trains beside them; 0 if there is none."""

    def __len__(self) -> int:
        return len(self.prompts)

    def longest(self) -> int:
        return max(self.row_length, self.longest_beside)

    def lengths(self) -> set[int]:
        return {self.longest()}


@dataclass(frozen=True)
class PromptSource:
    """A source of prompts: all entries of --prompts with the same name."""

    name: str
    num_rows: int


@dataclass(frozen=True)
class ValidationPrompts:
    """The held-out prompts of ``--validation_prompts``, which an evaluation completes."""

    prompts: tuple[Prompt, ...]
    source_names: tuple[str, ...]
    name: str

    @cached_property
    def column_names(self) -> frozenset[str]:
        """The columns that every prompt has, beside the prompt itself."""
        return frozenset.intersection(*self.columns_by_source.values())

    @cached_property
    def columns_by_source(self) -> dict[str, frozenset[str]]:
        """The columns that every prompt of a source has, beside the prompt itself, by the name of the source."""
        return _columns_by_source(self.source_names, self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of all prompts, see ``Prompts.fingerprint``."""
        return _fingerprint(self.prompts)


@dataclass(frozen=True)
class Prompts:
    """The training data of a run that samples its rows: prompts, whose completions become the rows of each step.

    It has the members of a token dataset that a run reads before its first step. A prompt counts as a row.
    """

    train: PromptRows
    source_names: tuple[str, ...]
    name: str
    tokenizer: CorpusTokenizer
    tokenizer_folder: Path
    """The folder in which the run stores the tokenizer."""
    stop_token_ids: tuple[int, ...]
    """The tokens that end a completion."""
    notes: tuple[str, ...]
    """Notes for the user on prompts and columns that are left out."""
    sources: tuple[PromptSource, ...]
    """The sources in the order of their prompts."""
    dataset: TokenDataset | None
    """The token dataset whose rows train beside the completions; None if there is none."""
    rows_per_epoch: tuple[int, ...] | None
    """How many prompts of each source an epoch takes; None if it takes every prompt once, in an order of all."""
    validation_prompts: ValidationPrompts | None = None
    """The prompts that the run does not train on; None if it evaluates nothing."""
    parts = ()
    """The token datasets whose rows a run trains on; completions are in none."""
    validation = None
    """The rows that a run evaluates; there are only prompts."""
    manifest = None
    isolates = True
    has_pairs = False
    has_unpaired = False

    @property
    def attachments(self) -> tuple[Path, ...]:
        """The folders that are copied to each checkpoint, so that it can be exported and used on its own."""
        return (self.tokenizer_folder,)

    @cached_property
    def column_names(self) -> frozenset[str]:
        """The columns that every prompt has, beside the prompt itself."""
        return frozenset.intersection(*self.columns_by_source.values())

    @cached_property
    def columns_by_source(self) -> dict[str, frozenset[str]]:
        """The columns that every prompt of a source has, beside the prompt itself, by the name of the source."""
        return _columns_by_source(self.source_names, self.train.prompts)

    @property
    def longest_prompt(self) -> Prompt:
        """The prompt with the most tokens, among those that train and those that are held out."""
        prompts = self.train.prompts
        if self.validation_prompts is not None:
            prompts += self.validation_prompts.prompts
        return max(prompts, key=lambda prompt: len(prompt.token_ids))

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the prompts that train: their sources, tokens and columns, in order, not their paths."""
        return _fingerprint(self.train.prompts, "" if self.dataset is None else self.dataset.fingerprint)

    def save_tokenizer(self) -> None:
        """Write the tokenizer's folder if it is not there."""
        if self.tokenizer_folder.is_dir():
            return
        self.tokenizer_folder.parent.mkdir(parents=True, exist_ok=True)
        with complete_folder(self.tokenizer_folder) as folder:
            self.tokenizer.save(folder)


@dataclass(frozen=True)
class PromptLengths:
    """The room for a prompt and its completion."""

    row_length: int
    """The most tokens of both, and of a row of packed completions."""
    max_new_tokens: int
    """The most tokens of the completion."""

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.row_length - self.max_new_tokens


def open_prompts(
    entries: Sequence[str],
    tokenizer_name: str,
    lengths: PromptLengths,
    tokenizer_folder: Path,
    shares: Shares,
    dataset: TokenDataset | None = None,
    validation_entries: Sequence[str] | None = None,
) -> Prompts:
    """Read and encode all prompts.

    Args:
        entries: The values of ``--prompts``: files, folders or datasets, also as NAME=LOCATION.
        tokenizer_name: A folder or a hub name.
        lengths: The room for a prompt. Longer ones are left out, which a note says.
        tokenizer_folder: Where the run will store the tokenizer.
        shares: How much of each entry an epoch reads.
        dataset: The token dataset whose rows train beside the completions.
        validation_entries: The values of ``--validation_prompts``; None if it is not given.

    Raises:
        InputError: A source or the tokenizer cannot be read, a row has no prompt, or no prompt is short enough.
    """
    if lengths.longest_prompt < 1:
        raise InputError(
            f"--max_new_tokens {lengths.max_new_tokens} leaves no room for a prompt in rows of --max_length "
            f"{lengths.row_length}; give a larger --max_length or a smaller --max_new_tokens"
        )
    training_rows = _read_all_rows(entries, _OPTION, tokenizer_folder)
    with naming_option("--model_name", instead_of="--tokenizer_name"):
        tokenizer = load_tokenizer(tokenizer_name)
    encoder = _open_encoder(tokenizer_name, training_rows)
    encoded = _encode_rows(training_rows, _OPTION, entries, encoder, lengths)
    notes = encoded.notes
    validation_prompts = None
    if validation_entries is not None:
        validation_rows = _read_all_rows(validation_entries, _VALIDATION_OPTION, tokenizer_folder)
        _check_kinds(validation_rows, training_rows)
        held_out = _encode_rows(validation_rows, _VALIDATION_OPTION, validation_entries, encoder, lengths)
        notes += [*held_out.notes, *_notes_on_trained_prompts(held_out.prompts, encoded.prompts)]
        validation_prompts = ValidationPrompts(held_out.prompts, held_out.source_names, ", ".join(validation_entries))

    sources = []
    for source_index, name in enumerate(encoded.source_names):
        num_rows = sum(prompt.source == source_index for prompt in encoded.prompts)
        sources.append(PromptSource(name, num_rows))
    stop_token_ids = tuple(sorted({tokenizer.eos_token_id, *encoder.end_ids}))
    return Prompts(
        train=PromptRows(encoded.prompts, lengths.row_length, dataset.train.longest() if dataset else 0),
        source_names=encoded.source_names,
        name=", ".join(entries),
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        stop_token_ids=stop_token_ids,
        notes=tuple(notes),
        sources=tuple(sources),
        dataset=dataset,
        rows_per_epoch=_rows_per_epoch(shares, sources),
        validation_prompts=validation_prompts,
    )


@dataclass(frozen=True)
class _SourceRows:
    """The rows of an entry of ``--prompts`` or ``--validation_prompts``."""

    name: str
    """The name of its source, which other entries may have, too."""
    rows: list[tuple[str, int, Row]]
    """See :func:`_read_rows`."""

    @property
    def has_chats(self) -> bool:
        return any(isinstance(row.get(PROMPT), list) for _, _, row in self.rows)

    @property
    def has_texts(self) -> bool:
        return any(isinstance(row.get(PROMPT), str) for _, _, row in self.rows)


@dataclass(frozen=True)
class _EncodedPrompts:
    """The prompts of ``--prompts`` or ``--validation_prompts``."""

    prompts: tuple[Prompt, ...]
    """In the order of their sources."""
    source_names: tuple[str, ...]
    notes: list[str]


def _read_all_rows(entries: Sequence[str], option: str, downloads: Path) -> list[_SourceRows]:
    """Return the rows of the entries of an option.

    Raises:
        InputError: A source cannot be opened, or a row is damaged.
    """
    names_and_locations = split_names(list(entries), option)
    locations = [location for _, location in names_and_locations]
    opened_sources = open_sources(locations, option, stream=False, downloads=downloads)
    sources = []
    for (name, _), source in zip(names_and_locations, opened_sources, strict=True):
        sources.append(_SourceRows(name, list(_read_rows(source))))
    return sources


def _encode_rows(
    sources: Sequence[_SourceRows], option: str, entries: Sequence[str], encoder: PromptEncoder, lengths: PromptLengths
) -> _EncodedPrompts:
    """Encode the prompts of all sources; a row without one is refused, one that is too long is left out.

    Raises:
        InputError: A row has no prompt, or no prompt is short enough.
    """
    source_names = tuple(dict.fromkeys(source.name for source in sources))
    prompts: list[Prompt] = []
    num_too_long = 0
    num_rows_of_source: Counter[str] = Counter()
    faults: list[str] = []
    for source in sources:
        for location, row_number, row in source.rows:
            num_rows_of_source[source.name] += 1
            try:
                content = _read_content(row)
                token_ids = tuple(encoder.encode(PromptText(content, location, row_number, is_from_file=True)))
            except BadRowError as error:
                faults.append(f"{location}: {error}")
                continue
            except InputError as error:
                faults += error.faults
                continue
            if len(token_ids) > lengths.longest_prompt:
                num_too_long += 1
                continue
            columns = {column: value for column, value in row.items() if column != PROMPT}
            source_index = source_names.index(source.name)
            prompt_id = f"{source.name}:{num_rows_of_source[source.name]}"
            prompts.append(Prompt(prompt_id, source_index, row[PROMPT], token_ids, columns))
    if faults:
        num_hidden = len(faults) - _MOST_FAULTS
        hidden = [f"and {num_hidden:,} more rows"] if num_hidden > 0 else []
        raise InputError(*faults[:_MOST_FAULTS], *hidden)
    if not prompts and not num_too_long:
        raise InputError(f"{option} {' '.join(entries)}: there is no row; give files with prompts")
    if not prompts:
        raise InputError(
            f"{option} {' '.join(entries)}: no prompt has at most {lengths.longest_prompt} tokens, the room that "
            f"--max_length {lengths.row_length} leaves beside --max_new_tokens {lengths.max_new_tokens}"
        )
    notes = _notes_on_columns(source_names, prompts, option)
    if num_too_long:
        notes.append(
            f"{option}: {counted(num_too_long, 'prompt')} of {num_too_long + len(prompts):,} with more than "
            f"{lengths.longest_prompt} tokens (--max_length less --max_new_tokens) will not be used"
        )
    used_source_names = {source_names[prompt.source] for prompt in prompts}
    for name in source_names:
        if num_rows_of_source[name] and name not in used_source_names:
            notes.append(f"{option}: all prompts of {name} are too long, so this source will not be used")
    prompts.sort(key=lambda prompt: prompt.source)  # stable; sources with the same name are one
    return _EncodedPrompts(tuple(prompts), source_names, notes)


def _check_kinds(validation_sources: Sequence[_SourceRows], training_sources: Sequence[_SourceRows]) -> None:
    """Raise an InputError if held-out prompts are chats and those that train are texts, or the other way round."""
    advice = "give held-out prompts of the same form"
    has_chats = any(source.has_chats for source in training_sources)
    if not has_chats and any(source.has_chats for source in validation_sources):
        raise InputError(f"{_VALIDATION_OPTION} has chats, but {_OPTION} has only texts; {advice}")
    has_texts = any(source.has_texts for source in training_sources)
    if not has_texts and any(source.has_texts for source in validation_sources):
        raise InputError(f"{_VALIDATION_OPTION} has texts, but {_OPTION} has only chats; {advice}")


def _notes_on_trained_prompts(held_out: Sequence[Prompt], trained: Sequence[Prompt]) -> list[str]:
    """Return a note if held-out prompts are also among those that train."""
    trained_ids = {prompt.token_ids for prompt in trained}
    num_trained = sum(prompt.token_ids in trained_ids for prompt in held_out)
    if num_trained == 0:
        return []
    verb = "is" if num_trained == 1 else "are"
    return [
        f"{_VALIDATION_OPTION}: {num_trained:,} of {counted(len(held_out), 'prompt')} {verb} also in {_OPTION}, so the "
        "validation reward does not only show what the model does with new prompts"
    ]


def _fingerprint(prompts: Iterable[Prompt], dataset_fingerprint: str = "") -> str:
    """Return the SHA-256 of the sources, tokens and columns of prompts, in order, after that of a token dataset."""
    digest = hashlib.sha256(dataset_fingerprint.encode())
    for prompt in prompts:
        fields = [prompt.source, prompt.token_ids, prompt.columns]
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _columns_by_source(source_names: Sequence[str], prompts: Sequence[Prompt]) -> dict[str, frozenset[str]]:
    """Return the columns that every prompt of a source has, for each source that has prompts."""
    columns_by_source: dict[str, frozenset[str]] = {}
    for prompt in prompts:
        name = source_names[prompt.source]
        columns = frozenset(prompt.columns)
        columns_by_source[name] = columns_by_source.get(name, columns) & columns
    return columns_by_source


def _notes_on_columns(source_names: Sequence[str], prompts: Sequence[Prompt], option: str) -> list[str]:
    """Return notes on columns that only some prompts, or only some sources, have: rewards do not receive them."""
    notes = []
    counts: Counter[str] = Counter()
    for prompt in prompts:
        counts.update(prompt.columns.keys())
    columns_by_source = _columns_by_source(source_names, prompts)
    columns_of_any_source: frozenset[str] = frozenset().union(*columns_by_source.values())
    # a column that all prompts of some source have is in the note on sources below
    for column, num_prompts in sorted(counts.items()):
        if num_prompts < len(prompts) and column not in columns_of_any_source:
            num_missing = len(prompts) - num_prompts
            notes.append(
                f"{option}: {num_missing:,} of {len(prompts):,} prompts have no {column}, so rewards do not receive "
                "this column; give each prompt a value, null if there is none"
            )
    common_columns = frozenset.intersection(*columns_by_source.values())
    if columns_of_any_source != common_columns:
        notes.append(
            f"{option}: the sources have different columns: {_describe_columns(columns_by_source)}; rewards receive "
            f"only columns of all prompts: {', '.join(sorted(common_columns)) or 'none'}"
        )
    return notes


def _describe_columns(columns_by_source: Mapping[str, frozenset[str]]) -> str:
    """Return which source has which columns, for messages."""
    descriptions = []
    for name, columns in columns_by_source.items():
        descriptions.append(f"{name} has {', '.join(sorted(columns)) or 'no column but the prompt'}")
    return "; ".join(descriptions)


def _rows_per_epoch(shares: Shares, sources: Sequence[PromptSource]) -> tuple[int, ...] | None:
    """Return how many prompts of each source an epoch takes; None without shares.

    Raises:
        InputError: A name is not that of a source, a source has no share, or an epoch would take no prompt of one.
    """
    if shares.values is None:
        return None
    names = [source.name for source in sources]
    share_by_name = shares.by_name()
    if share_by_name is None:
        if len(shares.values) != len(sources):
            raise InputError(
                f"{shares.option} has {len(shares.values)} numbers for {len(sources)} sources of {_OPTION}; give one "
                "for each"
            )
        share_by_name = {name: float(str(value)) for name, value in zip(names, shares.values, strict=True)}
    faults = [f"{shares.option}: {name} is no source of {_OPTION}" for name in share_by_name if name not in names]
    faults += [f"{shares.option} has no number for {name}" for name in names if name not in share_by_name]
    if faults:
        raise InputError(*faults)
    rows_per_epoch = rows_of_shares([source.num_rows for source in sources], [share_by_name[name] for name in names])
    for source, num_rows in zip(sources, rows_per_epoch, strict=True):
        if share_by_name[source.name] and not num_rows:
            faults.append(
                f"{shares.option} reads none of the {source.num_rows:,} prompts of {source.name} in an epoch; give it "
                "a larger share, or leave it out"
            )
    if faults:
        raise InputError(*faults)
    return tuple(rows_per_epoch)


def _read_rows(source: Source) -> Iterator[tuple[str, int, Row]]:
    """Yield each row of a source with its file and line, for messages, and its number, which counts from 1.

    Raises:
        InputError: A row is damaged.
    """
    row_number = 0
    for file_range in source.parts(_RANGE_BYTES):
        reader = source.reader(file_range, (PROMPT, *_other_columns(source, file_range)))
        for number_in_range, row in reader:
            row_number += 1
            if isinstance(row, BadRowError):
                raise InputError(str(row))
            yield reader.place(number_in_range), row_number, row


def _other_columns(source: Source, file_range: Any) -> list[str]:
    """Return the columns of a table beside the prompts; none of JSON, whose rows have all their keys anyway."""
    reader = source.reader(file_range, (PROMPT,))
    next(iter(reader), None)  # opens the table
    return sorted(reader.unread_columns)


def _open_encoder(tokenizer_name: str, sources: Sequence[_SourceRows]) -> PromptEncoder:
    """Return the encoder of the prompts, with the chat template if a prompt is a chat."""
    has_chats = any(source.has_chats for source in sources)
    tokenizer = load_hf_tokenizer(tokenizer_name)
    if has_chats and not tokenizer.chat_template:
        raise InputError(
            f"--model_name {tokenizer_name} has no chat template, but prompts are lists of messages; give a chat "
            "model, or texts as prompts"
        )
    return PromptEncoder(tokenizer, tokenizer_name, prompts_chats=has_chats)


def _read_content(row: Row) -> str | Chat:
    """Return the prompt of a row, a text or a chat that ends before the assistant's turn.

    Raises:
        BadRowError: The row has no prompt.
    """
    prompt = row.get(PROMPT)
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, list) or not prompt:
        raise BadRowError(f'expected a column "{PROMPT}" with a text or a list of messages')
    messages = []
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRowError(f'a message of "{PROMPT}" has no role; give {{"role": ..., "content": ...}}')
        if not isinstance(message.get("content"), str):
            raise BadRowError(f'a message of "{PROMPT}" has no text as its content')
        messages.append(dict(message))
    if messages[-1]["role"] in ("assistant", "system"):
        raise BadRowError(f'the last message of "{PROMPT}" must be a turn of the user or a tool')
    return Chat(messages)
