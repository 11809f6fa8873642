"""The arguments of ``tokenize_dataset.py``."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from fabric_train.cleaning.arguments import CleaningArguments
from fabric_train.cli.argument_types import (
    NameIn,
    NonNegativeInt64,
    NumProcesses,
    Overlap,
    PositiveFloat,
    PositiveInt64,
    RowLength,
    TokenCount,
    UnitInterval,
    counted,
)
from fabric_train.cli.output import redact
from fabric_train.cli.push_arguments import PushArguments, not_language_codes
from fabric_train.cli.tables import CHAT_FORMATS

DataFormat = Annotated[str, NameIn(CHAT_FORMATS, ("auto", "text"))]
TEXT_COLUMN = "text"
"""The column that is read as text unless another is chosen."""


@dataclass(frozen=True, kw_only=True)
class CardArguments(PushArguments):
    """Card and publication of a token dataset on the Hugging Face hub"""

    card_language: list[str] | None = None
    """For the card: ISO 639 codes, such as es ca."""

    def faults(self) -> list[str]:
        """Return what :class:`PushArguments` finds, and codes of no language."""
        return [*PushArguments.faults(self), *not_language_codes("--card_language", self.card_language)]


@dataclass(frozen=True)
class TokenizeArguments(CleaningArguments, CardArguments):
    """Turn documents, chats, preference pairs or unpaired answers into a token dataset

    PROGRAM --dataset corpus/ --tokenizer_name meta-llama/Meta-Llama-3-8B --max_length 8k --output_dir data/tokens
    PROGRAM --dataset chats.jsonl --tokenizer_name TOKENIZER --packing best_fit --output_dir data/chats
    PROGRAM --dataset ca=ca.jsonl es=es/ --weights 0.7 0.3 --tokenizer_name TOKENIZER --output_dir data/mixed
    """

    dataset: list[str]
    """Sources: files (txt, md, csv, json, jsonl, parquet, also with .gz and .zst), globs, folders, URLs, save_to_disk
    folders or hub names. Part of a hub dataset, or of a copy of it: NAME:SUBSET:SPLIT@REVISION; each may be left out,
    as in NAME:SUBSET, NAME::SPLIT or NAME@REVISION. es=corpus/es/ names a source es; by default, its name is the path
    that you give. If a path begins like NAME=, put ./ before it.
    """
    tokenizer_name: str
    """Tokenizer: a hub name, a folder, or a tokenizer.model file."""
    output_dir: str
    """Token dataset to write; must not exist yet."""
    max_length: RowLength = 2048
    """Tokens per row; 8k is 8192."""
    packing: Literal["concat", "best_fit", "none"] | None = None
    """concat joins documents and cuts them at row ends; best_fit fills rows with whole documents; none puts one
    document into each row and pads it. Default: best_fit if a source has chats, instructions, preference pairs or
    unpaired answers, otherwise concat.
    """
    overlap: Overlap = 0
    """Tokens to repeat from the previous row when a document continues in the next one. They are not supervised again.
    """
    data_format: DataFormat = "auto"
    """Content of a source's rows: text in --text_column, a chat, an instruction, a preference pair, or an unpaired
    answer with a label. auto detects it from the first row. --extensions can register more formats.
    """
    extensions: list[str] | None = None
    """Python modules that register chat formats, such as my_formats for my_formats.py in the current folder
    (docs/how-to/extend.md). Their code runs in every process.
    """
    text_column: str = TEXT_COLUMN
    """Column that holds the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts; for
    example, 'moves: ' joins them with a space.
    """
    chat_template: str | None = None
    """Jinja file with the chat template to use instead of the tokenizer's. It is also stored in checkpoints and
    exports.
    """
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Supervised tokens of a chat: the assistant's turns, all tokens, or the assistant's last turn. For a preference
    pair or an unpaired answer: the turns, or the last turn, of each answer.
    """
    too_long: Literal["cut_end", "cut_start", "drop"] = "cut_end"
    """What to do with chats longer than --max_length: cut turns at the end, cut turns at the start after the system
    turn, or drop the chat. The two sequences of a preference pair or an unpaired answer share --max_length tokens. For
    these, cut_start removes prompt turns from both, and cut_end drops the document, because answers are never cut.
    """
    validation_split: UnitInterval = 0.05
    """Share of the documents that go to validation/; 0 for none."""
    validation_dataset: list[str] | None = None
    """Sources for validation/ instead of a split, in the same form as --dataset."""
    weights: list[PositiveFloat] | None = None
    """Relative weight of each --dataset in the tokens of train/. Default: use every document once."""
    deduplicate: bool = False
    """Leave out documents whose content equals an earlier one's."""
    on_bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with rows that cannot be read: report the first one and stop, or count them and leave them out."""
    stream: bool = False
    """Read hub datasets as a stream instead of downloading them first."""
    num_proc: NumProcesses | None = None
    """Processes that encode; default: one per core."""
    shard: str | None = None
    """I/N: only encode slice I of N of the input, into --output_dir. Run N such tasks on any number of machines, then
    merge their folders with fabric-train merge: the result is the same as from a single run. With --boilerplate, tasks
    first count lines.
    """
    parts: bool = False
    """With --shard: also pack the slice into rows, to be merged with fabric-train merge --parts true. Each slice then
    has its own validation split and its own last incomplete row.
    """
    seed: NonNegativeInt64 = 0
    """Seed of the validation split and of sampling by --weights."""
    max_documents: PositiveInt64 | None = None
    """Stop after this many documents."""
    max_tokens: TokenCount | None = None
    """Stop after the document that reaches this many tokens, such as 200k, 5m or 1.5b; with --weights, tokens of
    train/.
    """

    def faults(self) -> list[str]:
        """Return values that leave nothing to train on, and contradictions."""
        faults = [*CardArguments.faults(self), *CleaningArguments.faults(self)]
        if self.dataset == []:
            faults.append("--dataset is empty; give a source")
        if self.validation_dataset == []:
            faults.append("--validation_dataset is empty; give a source")
        if self.validation_split == 1:
            faults.append("--validation_split 1 leaves nothing to train on; give a share below 1")
        if self.max_length < 2:
            faults.append("--max_length 1 leaves no token to predict; give 2 or more")
        if isinstance(self.boilerplate, int) and self.stream:
            faults.append(
                f"--boilerplate {self.boilerplate} reads sources twice, so --stream would download them twice; leave "
                "out --stream, or give a folder of repeated lines (docs/cleaning.md)"
            )
        if self.overlap >= self.max_length > 1:
            faults.append(
                f"--overlap {self.overlap} leaves no room for new tokens in rows of --max_length {self.max_length}; "
                "give a smaller --overlap"
            )
        if self.push_to_hub is None:  # the card is written for the hub
            if self.license is not None:
                faults.append("--license needs --push_to_hub OWNER/NAME")
            if self.card_language is not None:
                faults.append("--card_language needs --push_to_hub OWNER/NAME")
        if self.weights and len(self.weights) != len(self.dataset):
            weight_count = counted(len(self.weights), "number")
            source_count = counted(len(self.dataset), "source")
            faults.append(f"--weights has {weight_count} for {source_count} in --dataset; give one for each")
        return [*faults, *self._faults_of_shard()]

    @property
    def part(self) -> tuple[int, int] | None:
        """The two numbers of --shard; None without it."""
        match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", self.shard or "")
        if match is None:
            return None
        number = int(match[1])
        count = int(match[2])
        if number > count:
            return None
        return number, count

    @property
    def skips_bad_rows(self) -> bool:
        return self.on_bad_rows == "skip"

    @property
    def counts_lines(self) -> bool:
        """Whether this is a task that counts the lines of its slice for --boilerplate, and does not encode it."""
        return self.shard is not None and isinstance(self.boilerplate, int)

    def _faults_of_shard(self) -> list[str]:
        if self.shard is None:
            return ["--parts true packs a slice; add --shard I/N"] if self.parts else []
        faults: list[str] = []
        if self.part is None:
            faults.append(f"--shard: expected I/N such as 3/64, from 1/64 to 64/64, got {self.shard!r}")
        if self.push_to_hub is not None:
            faults.append(
                "--push_to_hub cannot publish a slice made by --shard; merge the slices, and publish the result "
                "(docs/publish.md)"
            )
        for source in (*self.dataset, *(self.validation_dataset or ())):
            if "://" in source:
                url = redact(source)
                faults.append(f"--shard: every task would download {url}; download it once, and give its path")
        if self.stream:
            faults.append(
                "--shard needs files that all tasks can read; leave out --stream true, or download the files once"
            )
        names = ("weights", "deduplicate", "near_duplicates", "max_documents", "max_tokens", "validation_dataset")
        options = [f"--{name}" for name in names if getattr(self, name)]
        if self.parts and options:
            faults.append(
                f"--parts true: {', '.join(options)} needs the entire corpus; leave out --parts true, and merge the "
                "slices fully"
            )
        return faults
