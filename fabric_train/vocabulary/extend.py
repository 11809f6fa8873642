"""Extend a model with tokens: learn them, write tokenizer and weights as a new model folder, and verify it.

``plan`` stops before the weights are written, when the tokens, their savings and their costs are known.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig
from transformers.utils import cached_file

from fabric_train.checkpoint import means_checkpoint
from fabric_train.cli.argument_types import counted, show_size
from fabric_train.cli.errors import InputError
from fabric_train.export.hub_format import add_former_names, write_weights
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder
from fabric_train.files.requirements import check_room
from fabric_train.files.typed_json import read_json
from fabric_train.model import hf_model
from fabric_train.model.computed_settings import leave_code_out
from fabric_train.model.generation_settings import read_generation_config, write_generation_config
from fabric_train.model.load_weights import build_on_meta, open_stored
from fabric_train.model.origin import find_origin
from fabric_train.model.weight_files import StoredTensors
from fabric_train.tokenization.tokenizers.llama3_ranks import is_rank_file
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.vocabulary import ADDED, AddedVocabulary
from fabric_train.vocabulary.extendable_tokenizer import ExtendableTokenizer, NewTokens
from fabric_train.vocabulary.extended_tensors import ExtendedMatrix, ExtendedTensors, Norms
from fabric_train.vocabulary.verify import load_verified_tokenizer, verify_weights
from fabric_train.vocabulary.words import LanguageTexts, hold_out, read_texts, words_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fabric_train.vocabulary.__main__ import VocabularyExtendArguments

PADDED_TO = 64
"""The number of rows is a multiple of this, for fast matrix products and for even parts in tensor parallelism."""
_EMBEDDING = 0
_HEAD = 1


@dataclass(frozen=True)
class Savings:
    """The savings by the new tokens on the held-out tenth of a language's texts; all zero if nothing was held out."""

    language: str
    num_bytes: int
    num_words: int
    old_tokens: int
    new_tokens: int

    def describe(self) -> str:
        """Return, in words, the tokens per word before and after, and the share that is saved."""
        if not self.num_words:
            return "too little text to hold out a tenth, so the savings are unknown"
        old_rate = self.old_tokens / self.num_words
        new_rate = self.new_tokens / self.num_words
        share = 1 - self.new_tokens / self.old_tokens
        held_out = f"held-out {show_size(self.num_bytes)}"
        return f"{old_rate:.2f} → {new_rate:.2f} tokens per word on the {held_out}, saves {share:.1%}"


class Extension:
    """A model to extend: its configuration, its stored tensors and its tokenizer, which is saved in ``folder``.

    Raises an InputError if this kind of model cannot be extended, or if its files do not fit together.
    """

    def __init__(self, model: str, folder: Path) -> None:
        """Open a hub name or a folder, and save its tokenizer in ``folder``."""
        if means_checkpoint(Path(model)):
            raise InputError(
                f"--model {model}: this is a run or checkpoint; convert it with fabric-train convert first"
            )
        self.name = model
        try:
            self.shape = hf_model.read_shape(model)
            stored = open_stored(model)
            tokenizer = load_tokenizer(model)
        except InputError as error:  # here, one argument gives both
            faults = [fault.replace("--model_name", "--model") for fault in error.faults]
            raise InputError(*(fault.replace("--tokenizer_name", "--model") for fault in faults)) from None
        if stored is None:
            raise InputError(f"--model {model}: it has no weights (model.safetensors); download the model again")
        self.tensors: StoredTensors = stored
        self.tokenizer = ExtendableTokenizer(tokenizer, folder, _find_sentencepiece(model))
        self.first_id = self.tokenizer.first_id
        if self.first_id > self.shape.vocab_size:
            raise InputError(
                f"--model {model}: its tokenizer has {self.first_id:,} ids, but its embedding has "
                f"{self.shape.vocab_size:,} rows; use a model whose files match"
            )
        self._matrices = self._find_matrices()

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return _HEAD not in self._matrices.values()

    def num_rows(self, new: NewTokens) -> int:
        """Return the number of rows of embedding and head with the new tokens, which is never smaller than before."""
        needed = max(self.first_id + len(new.texts), self.shape.vocab_size)
        num_units = -(-needed // PADDED_TO)  # rounded up
        return num_units * PADDED_TO

    @property
    def num_bytes(self) -> int:
        """The bytes of the stored tensors, without new rows."""
        num_bytes = 0
        for name in self.tensors:
            num_bytes += self.tensors.shape(name).numel() * self.tensors.dtype(name).itemsize
        return num_bytes

    def num_taken(self, new: NewTokens) -> int:
        """Return how many of the model's rows without a token get a new token."""
        num_without_token = self.shape.vocab_size - self.first_id
        return min(len(new.texts), num_without_token)

    def bytes_of_rows(self, num_rows: int) -> int:
        """Return the bytes of ``num_rows`` rows of the embedding and, if it is not tied, of the head."""
        name_by_matrix = {matrix: name for name, matrix in self._matrices.items()}  # a tied one may have two names
        row_bytes = 0
        for name in name_by_matrix.values():
            width = self.tensors.shape(name)[1]
            row_bytes += width * self.tensors.dtype(name).itemsize
        return num_rows * row_bytes

    def extended(self, new: NewTokens, seed: int | None) -> ExtendedTensors:
        """Return the tensors with rows for the new tokens, which are drawn at random if there is a ``seed``."""
        listed_pieces = [self.tokenizer.pieces_of(token) for token in (*new.listed, *new.special)]
        pieces = [*new.learned.pieces, *listed_pieces]
        num_rows = self.num_rows(new)
        matrices: dict[str, ExtendedMatrix] = {}
        for name, matrix in self._matrices.items():
            matrix_seed = None if seed is None else (seed, matrix)  # embedding and head are drawn differently
            matrices[name] = ExtendedMatrix(
                self.tensors, name, self.first_id, pieces=pieces, num_rows=num_rows, seed=matrix_seed
            )
        return ExtendedTensors(self.tensors, matrices)

    def _find_matrices(self) -> dict[str, int]:
        """Return which matrix, ``_EMBEDDING`` or ``_HEAD``, is stored under each of its names.

        A tied matrix is the embedding, under one stored name or two.
        """
        model: Any = build_on_meta(self.shape, torch.float32)
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise InputError(f"--model {self.name}: its head has a bias, which cannot be extended yet")
        # Files of older models have names without the prefix of the base model (GPT-2's wte.weight).
        matrices: dict[str, int] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            is_embedding = parameter is embedding.weight
            is_head = head is not None and parameter is head.weight
            if not is_embedding and not is_head:
                continue
            for stored_name in (name, name.removeprefix(f"{model.base_model_prefix}.")):
                if stored_name in self.tensors:
                    matrices[stored_name] = _EMBEDDING if is_embedding else _HEAD
                    break
        # Both must be there, with the rows that the configuration says.
        is_tied = head is None or head.weight is embedding.weight
        expected = {_EMBEDDING} if is_tied else {_EMBEDDING, _HEAD}
        row_counts = {tuple(self.tensors.shape(name)[:1]) for name in matrices}
        if set(matrices.values()) != expected or row_counts != {(self.shape.vocab_size,)}:
            model_type = self.shape.config.model_type
            fault = f"the embedding and head of a {model_type} were not found in its weights"
            raise InputError(f"--model {self.name}: {fault}")
        return matrices


def _find_sentencepiece(model: str) -> Path | None:
    """Return the tokenizer.model of a folder or a cached hub name, if it is SentencePiece's."""
    folder = Path(model)
    if folder.is_dir():
        path = folder / "tokenizer.model"
    else:
        cached = cached_file(model, "tokenizer.model", _raise_exceptions_for_missing_entries=False)
        if not cached:
            return None
        path = Path(cached)
    if not path.is_file() or is_rank_file(path):
        return None
    return path


def extend(arguments: "VocabularyExtendArguments") -> None:
    """Learn the tokens, and write the model folder, or with ``plan`` only print their savings and costs."""
    # Check all that is given before anything is read.
    target = Path(arguments.output_dir).expanduser()
    listed = _read_tokens(arguments.tokens, "--tokens")
    special = _read_tokens(arguments.special_tokens, "--special_tokens")
    if not arguments.plan:
        check_not_taken(target)
    if Path(arguments.model).is_dir():
        check_not_inside(target, Path(arguments.model))
    with tempfile.TemporaryDirectory() as tokenizer_dir:
        extension = Extension(arguments.model, Path(tokenizer_dir))
        if not arguments.plan:
            check_room(target, extension.num_bytes, "the extended model")
        extension.tokenizer.check_listed([*listed, *special], "--tokens, --special_tokens")

        # Learn tokens from nine tenths of the texts.
        texts = read_texts(arguments.texts or [], arguments.text_column, arguments.max_bytes, arguments.seed)
        documents: list[str] = []
        held_out: list[list[str]] = []  # of each language
        for text in texts:
            text_documents, text_held_out = hold_out(text)
            documents += text_documents
            held_out.append(text_held_out)
        new = NewTokens(extension.first_id, listed=listed, special=special)
        if arguments.num_tokens is not None:
            learned = extension.tokenizer.learn(documents, arguments.num_tokens, (*listed, *special))
            new = NewTokens(extension.first_id, learned, listed, special)

        # Write and verify the tokenizer, and count what it saves on the last tenth.
        old_tokenizer = extension.tokenizer.fast
        extension.tokenizer.write(new)
        all_documents: list[str] = []
        for text in texts:
            all_documents += text.documents
        new_tokenizer = load_verified_tokenizer(old_tokenizer, Path(tokenizer_dir), new, all_documents)
        savings: list[Savings] = []
        for text, text_held_out in zip(texts, held_out, strict=True):
            savings.append(_measure_savings(text, text_held_out, old_tokenizer, new_tokenizer))
            if text.note:
                print(f"note       {text.note}")
        _print_plan(extension, new, savings)
        if not arguments.plan:
            _write(extension, new, arguments, Path(tokenizer_dir), target)


def _read_tokens(file: str | None, option: str) -> tuple[str, ...]:
    """Return the tokens in a file, one a line; none without a file."""
    if file is None:
        return ()
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{option} {file}: cannot be read ({error}); give a text file in UTF-8") from None
    tokens = tuple(line for line in lines if line.strip())
    if not tokens:
        raise InputError(f"{option} {file}: it has no tokens; write one per line")
    return tokens


def _measure_savings(text: LanguageTexts, held_out: Sequence[str], old: "Tokenizer", new: "Tokenizer") -> Savings:
    """Count the tokens of held-out documents with both tokenizers."""
    return Savings(
        language=text.name,
        num_bytes=sum(len(document.encode()) for document in held_out),
        num_words=sum(len(words_of(document)) for document in held_out),
        old_tokens=_count_tokens(old, held_out),
        new_tokens=_count_tokens(new, held_out),
    )


def _count_tokens(tokenizer: "Tokenizer", documents: Sequence[str]) -> int:
    encodings = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings)


def _print_plan(extension: Extension, new: NewTokens, savings: Sequence[Savings]) -> None:
    """Print the savings by the new tokens in each language, and the costs of their rows."""
    old_rows = extension.shape.vocab_size
    new_rows = extension.num_rows(new)
    for language in savings:
        print(f"{language.language:<10} {language.describe()}")
    kinds = f"{len(new.learned.tokens):,} learned, {len(new.listed):,} given, {len(new.special):,} special"
    print(f"tokens     {extension.first_id:,} → {extension.first_id + len(new.texts):,}: {kinds}")
    print(f"rows       {old_rows:,} → {new_rows:,} (vocab_size in config.json), padded to a multiple of {PADDED_TO}")
    num_taken = extension.num_taken(new)
    if num_taken:
        without_token = f"{old_rows - extension.first_id:,} stored rows without a token"
        print(f"           the new tokens use {num_taken:,} of {without_token}; the others are unchanged")
    matrices = "the embedding, tied with the head" if extension.is_tied else "embedding and head"
    old_bytes = extension.bytes_of_rows(old_rows)
    new_bytes = extension.bytes_of_rows(new_rows)
    sizes = f"{show_size(old_bytes)} → {show_size(new_bytes)}"
    print(f"costs      {show_size(new_bytes - old_bytes)} more in {matrices}: {sizes}")


def _write(
    extension: Extension, new: NewTokens, arguments: "VocabularyExtendArguments", tokenizer_dir: Path, target: Path
) -> None:
    """Write the model folder, and verify its weights before it gets its name."""
    config = AutoConfig.from_pretrained(arguments.model, trust_remote_code=False)
    leave_code_out(config)
    tensors = extension.extended(new, arguments.seed if arguments.init == "normal" else None)
    with complete_folder(target) as folder:
        write_weights(tensors, folder, None, arguments.max_shard_size, f"writing {target.name}")
        norms = {name: matrix.norms() for name, matrix in tensors.matrices.items()}  # of rows that were read now
        generation_config = read_generation_config(arguments.model, config)
        config.get_text_config().vocab_size = extension.num_rows(new)
        first_name = next(iter(extension.tensors))
        config.dtype = config.dtype or extension.tensors.dtype(first_name)
        config.save_pretrained(folder)
        write_generation_config(folder, generation_config)
        for file in sorted(tokenizer_dir.iterdir()):
            shutil.copyfile(file, folder / file.name)
        add_former_names(folder)
        added = _added_vocabulary(extension, new, arguments)
        (folder / ADDED).write_text(json.dumps(vars(added), ensure_ascii=False) + "\n", encoding="utf-8")
        _write_card(extension, new, arguments, norms, folder)
        verify_weights(extension.tensors, tensors, folder)
    for name, norm in norms.items():
        print(f"norms      {name}: old rows {norm.old:.3g}, new rows {norm.new:.3g} (mean)")
    print(f"written    {target}, verified: only rows of new tokens changed, texts without a new token keep their ids")
    print(f"next       fabric-train tokenize --tokenizer_name {target} --dataset … --output_dir …")


def _added_vocabulary(extension: Extension, new: NewTokens, arguments: "VocabularyExtendArguments") -> AddedVocabulary:
    """Return the record of the new tokens, after the earlier ones if the model was extended before."""
    file = Path(arguments.model) / ADDED
    first_id = extension.first_id
    tokens = new.texts
    if file.is_file():
        previous = read_json(file, AddedVocabulary, "remove this file, or extend the model that it names")
        if previous.first_id + len(previous.tokens) == first_id:
            first_id = previous.first_id
            tokens = [*previous.tokens, *tokens]
    return AddedVocabulary(
        base=extension.name,
        first_id=first_id,
        num_rows=extension.num_rows(new),
        init=arguments.init,
        seed=arguments.seed,
        tokens=tokens,
    )


def _write_card(
    extension: Extension, new: NewTokens, arguments: "VocabularyExtendArguments", norms: dict[str, Norms], folder: Path
) -> None:
    """Write the model card, and copy the files of the base model's licence."""
    origin, legal_files = find_origin(arguments.model)
    for file in legal_files:
        shutil.copyfile(file, folder / file.name)
    row_origin = {
        "mean": "the mean of the rows of the tokens that it replaces",
        "normal": "a draw from the normal distribution with the mean and the covariance of all old rows",
    }[arguments.init]
    learned = counted(len(new.learned.tokens), "token")
    num_listed = len(new.listed) + len(new.special)
    paragraphs = [
        f"# {origin.name} with more tokens",
        f"{origin.name} with {learned} learned from text and {num_listed:,} given ones. They are not trained yet: "
        "continue training before you use the model. Text without a new token has the same ids as before.",
        f"- Tokens: {extension.first_id:,} of the base model, {extension.first_id + len(new.texts):,} now.",
        f"- Rows of embedding and head: {extension.num_rows(new):,}, padded to a multiple of {PADDED_TO}.",
        f"- A new row is {row_origin}.{_describe_taken_rows(extension, new)}",
    ]
    for name, norm in norms.items():
        paragraphs.append(f"- Mean row norm of `{name}`: {norm.old:.3g} for old rows, {norm.new:.3g} for new rows.")
    paragraphs.append(f"`{ADDED}` lists the new tokens in the order of their ids.")
    data = ModelCardData(
        library_name="transformers",
        base_model=origin.repository,
        license=origin.license,
        license_name=origin.license_name,
        license_link=origin.license_link,
    )
    # the items of a list follow one another without an empty line
    text = "\n\n".join(paragraphs).replace("\n\n- ", "\n- ")
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def _describe_taken_rows(extension: Extension, new: NewTokens) -> str:
    """Return a sentence about stored rows without a token that get new tokens, or ""."""
    num_taken = extension.num_taken(new)
    if not num_taken:
        return ""
    sentence = f"{num_taken:,} of them use rows of the base model that had no token"
    return f" {sentence}; its other rows are unchanged."
