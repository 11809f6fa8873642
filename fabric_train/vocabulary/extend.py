"""Extend a model by tokens: learn them, write tokenizer and weights as a new model folder, and verify it.

``plan`` has all that is known before the weights are written: the tokens, what they save and what they cost.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.utils import cached_file

from fabric_train.checkpoint import means_checkpoint
from fabric_train.cli.argument_types import counted, show_size
from fabric_train.cli.errors import InputError, RunError
from fabric_train.export.hub_format import add_former_names, blocks, write_weights
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder
from fabric_train.files.regular_file import read_json
from fabric_train.files.requirements import check_room
from fabric_train.model import hf_model
from fabric_train.model.load_weights import build_on_meta, open_stored
from fabric_train.model.origin import find_origin
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, safetensors_files
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.llama3_ranks import is_rank_file
from fabric_train.tokenization.tokenizers.parity_check import HARD_STRINGS
from fabric_train.tokenization.tokenizers.text_encoder import open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.vocabulary import ADDED, AddedVocabulary
from fabric_train.vocabulary.model_files import ExtendableTokenizer, ExtendedMatrix, ExtendedTensors, NewTokens, Norms
from fabric_train.vocabulary.words import LanguageTexts, cut, hold_out, read_texts, words_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fabric_train.vocabulary.__main__ import VocabularyExtendArguments

PADDED_TO = 64
"""Rows are a multiple of this: matrix products of other sizes are slower, and tensor parallelism needs even parts."""

_ROWS_COMPARED = 4096
_MOST_CHARACTERS = 4_000_000
_SHOWN = 60


@dataclass(frozen=True)
class Saved:
    """What the new tokens save on the held-out tenth of a language's texts; all zero if nothing could be held out."""

    language: str
    num_bytes: int
    num_words: int
    tokens_before: int
    tokens_after: int

    def describe(self) -> str:
        if not self.num_words:
            return "too little text to hold out a tenth: what the tokens save is not known"
        before = self.tokens_before / self.num_words
        after = self.tokens_after / self.num_words
        share = 1 - self.tokens_after / self.tokens_before
        held_out = f"held-out {show_size(self.num_bytes)}"
        return f"{before:.2f} → {after:.2f} tokens a word on the {held_out}, saves {share:.1%}"


class Extension:
    """A model to extend: its configuration, its stored tensors and its tokenizer, saved into ``folder``.

    InputError if the model is of a kind that cannot be extended, or its files do not fit together.
    """

    def __init__(self, model: str, folder: Path) -> None:
        if means_checkpoint(Path(model)):
            raise InputError(f"--model {model}: a run or checkpoint; convert it with fabric-train convert first")
        self.name = model
        try:
            self.shape = hf_model.read_shape(model)
            stored = open_stored(model)
            tokenizer = load_tokenizer(model)
        except InputError as error:
            names = ("--model_name", "--tokenizer_name")
            raise InputError(*(_renamed(fault, names) for fault in error.faults)) from None
        if stored is None:
            raise InputError(f"--model {model}: no weights in it (model.safetensors); fetch the model again")
        self.tensors: StoredTensors = stored
        self.tokenizer = ExtendableTokenizer(tokenizer, folder, _sentencepiece_of(model))
        self.first_id = self.tokenizer.first_id
        if self.first_id > self.shape.vocab_size:
            raise InputError(
                f"--model {model}: its tokenizer has {self.first_id:,} ids, its embedding {self.shape.vocab_size:,} "
                "rows; use a model whose files fit together"
            )
        self._matrices = self._find_matrices()

    @property
    def is_tied(self) -> bool:
        return len(set(self._matrices.values())) == 1

    def num_rows(self, new: NewTokens) -> int:
        """Return the rows of embedding and head with the new tokens, never fewer than before."""
        needed = max(self.first_id + len(new.texts), self.shape.vocab_size)
        return -(-needed // PADDED_TO) * PADDED_TO

    @property
    def num_bytes(self) -> int:
        """The bytes of the stored tensors, without new rows."""
        return sum(self.tensors.shape(name).numel() * self.tensors.dtype(name).itemsize for name in self.tensors)

    def num_taken(self, new: NewTokens) -> int:
        """Return how many rows that the model has without a token the new tokens take."""
        return min(len(new.texts), self.shape.vocab_size - self.first_id)

    def bytes_of_rows(self, num_rows: int) -> int:
        """Return the bytes of so many rows of the embedding and, if it is not tied, of the head."""
        streams = {stream: name for name, stream in self._matrices.items()}
        row = sum(self.tensors.shape(name)[1] * self.tensors.dtype(name).itemsize for name in streams.values())
        return num_rows * row

    def extended(self, new: NewTokens, seed: int | None) -> ExtendedTensors:
        """Return the tensors with rows for the new tokens, drawn if there is a ``seed``."""
        given = [self.tokenizer.pieces_of(token) for token in (*new.given, *new.special)]
        pieces = [*new.learned.pieces, *given]
        return ExtendedTensors(
            self.tensors,
            {
                name: ExtendedMatrix(
                    self.tensors,
                    name,
                    self.first_id,
                    pieces,
                    self.num_rows(new),
                    None if seed is None else (seed, stream),
                )
                for name, stream in self._matrices.items()
            },
        )

    def _find_matrices(self) -> dict[str, int]:
        """Return the stored names of the embedding (0) and the head (1, or 0 if it is tied)."""
        model: Any = build_on_meta(self.shape, torch.float32)
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise InputError(f"--model {self.name}: its head has a bias, which cannot be extended yet")
        found: dict[str, int] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter is embedding.weight or (head is not None and parameter is head.weight):
                stored = [
                    one for one in (name, name.removeprefix(f"{model.base_model_prefix}.")) if one in self.tensors
                ]
                found |= dict.fromkeys(stored[:1], int(parameter is not embedding.weight))
        wanted = {0} if head is None or head.weight is embedding.weight else {0, 1}
        sizes = {tuple(self.tensors.shape(name)[:1]) for name in found}
        if set(found.values()) != wanted or sizes != {(self.shape.vocab_size,)}:
            kind = self.shape.config.model_type
            raise InputError(f"--model {self.name}: the embedding and head of a {kind} were not found in its weights")
        return found


def _renamed(fault: str, names: Sequence[str]) -> str:
    for name in names:
        fault = fault.replace(name, "--model")
    return fault


def _sentencepiece_of(model: str) -> Path | None:
    """Return the tokenizer.model of a folder or a cached hub name, if it is one of SentencePiece."""
    folder = Path(model)
    found = str(folder / "tokenizer.model")
    if not folder.is_dir():
        found = cached_file(model, "tokenizer.model", _raise_exceptions_for_missing_entries=False) or ""
    return Path(found) if Path(found).is_file() and not is_rank_file(Path(found)) else None


def extend(arguments: "VocabularyExtendArguments") -> None:
    """Learn the tokens, and write the model folder, or with ``plan`` only say what they save and cost."""
    target = Path(arguments.output_dir).expanduser()
    given = _read_given(arguments.tokens, "--tokens")
    special = _read_given(arguments.special_tokens, "--special_tokens")
    if not arguments.plan:
        check_not_taken(target)
    if Path(arguments.model).is_dir():
        check_not_inside(target, Path(arguments.model))
    with tempfile.TemporaryDirectory() as folder:
        extension = Extension(arguments.model, Path(folder))
        if not arguments.plan:
            check_room(target, extension.num_bytes, "the extended model")
        extension.tokenizer.check_given([*given, *special], "--tokens, --special_tokens")
        texts = read_texts(arguments.texts or [], arguments.text_column, arguments.max_bytes, arguments.seed)
        parts = [hold_out(text) for text in texts]
        new = NewTokens(extension.first_id, given=given, special=special)
        if arguments.num_tokens is not None:
            kept = [one for part, _ in parts for one in part]
            learned = extension.tokenizer.learn(kept, arguments.num_tokens, (*given, *special))
            new = NewTokens(extension.first_id, learned, given, special)
        before = extension.tokenizer.fast
        extension.tokenizer.write(new)
        after = verify_tokenizer(before, Path(folder), new, [one for text in texts for one in text.documents])
        saved = [_measure(text, held_out, before, after) for text, (_, held_out) in zip(texts, parts, strict=True)]
        for text in texts:
            if text.note:
                print(f"note       {text.note}")
        _print_plan(extension, new, saved)
        if not arguments.plan:
            _write(extension, new, arguments, Path(folder), target)


def _read_given(file: str | None, option: str) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{option} {file}: cannot be read ({error}); give a text file in UTF-8") from None
    tokens = tuple(line for line in lines if line.strip())
    if not tokens:
        raise InputError(f"{option} {file}: no token in it; write one a line")
    return tokens


def _measure(text: LanguageTexts, held_out: Sequence[str], before: "Tokenizer", after: "Tokenizer") -> Saved:
    counts = [
        sum(len(one.ids) for one in tokenizer.encode_batch_fast(list(held_out), add_special_tokens=False))
        for tokenizer in (before, after)
    ]
    num_bytes = sum(len(document.encode()) for document in held_out)
    return Saved(text.name, num_bytes, sum(len(words_of(document)) for document in held_out), *counts)


def _print_plan(extension: Extension, new: NewTokens, saved: Sequence[Saved]) -> None:
    rows = extension.shape.vocab_size
    num_rows = extension.num_rows(new)
    kinds = f"{len(new.learned.tokens):,} learned, {len(new.given):,} given, {len(new.special):,} special"
    matrices = "the embedding, tied with the head" if extension.is_tied else "embedding and head"
    before = extension.bytes_of_rows(rows)
    after = extension.bytes_of_rows(num_rows)
    for one in saved:
        print(f"{one.language:<10} {one.describe()}")
    print(f"tokens     {extension.first_id:,} → {extension.first_id + len(new.texts):,}: {kinds}")
    print(f"rows       {rows:,} → {num_rows:,} (vocab_size in config.json), padded to a multiple of {PADDED_TO}")
    if taken := extension.num_taken(new):
        without_token = f"{rows - extension.first_id:,} stored rows without a token"
        print(f"           the new tokens take {taken:,} of {without_token}; the others stay as they are")
    print(f"costs      {show_size(after - before)} more in {matrices}: {show_size(before)} → {show_size(after)}")


def _write(
    extension: Extension, new: NewTokens, arguments: "VocabularyExtendArguments", tokenizer: Path, target: Path
) -> None:
    """Write the folder, and verify its weights, before it gets its name."""
    num_rows = extension.num_rows(new)
    config = AutoConfig.from_pretrained(arguments.model, trust_remote_code=False)
    tensors = extension.extended(new, arguments.seed if arguments.init == "normal" else None)
    with complete_folder(target) as folder:
        write_weights(tensors, folder, None, arguments.max_shard_size, f"writing {target.name}")
        norms = {name: matrix.norms() for name, matrix in tensors.matrices.items()}
        generation_config = hf_model.read_generation_config(arguments.model, config)
        config.get_text_config().vocab_size = num_rows
        config.dtype = config.dtype or extension.tensors.dtype(next(iter(extension.tensors)))
        config.save_pretrained(folder)
        hf_model.write_generation_config(folder, generation_config)
        for file in sorted(tokenizer.iterdir()):
            shutil.copyfile(file, folder / file.name)
        add_former_names(folder)
        added = _added(extension, new, arguments)
        (folder / ADDED).write_text(json.dumps(vars(added), ensure_ascii=False) + "\n", encoding="utf-8")
        _write_card(extension, new, arguments, norms, folder)
        verify_weights(extension.tensors, tensors, folder)
    for name, norm in norms.items():
        print(f"norms      {name}: {norm.old:.3g} of old rows, {norm.new:.3g} of new rows, on average")
    print(f"written    {target}, verified: only rows of new tokens changed, texts without a new token keep their ids")
    print(f"next       fabric-train tokenize --tokenizer_name {target} --dataset … --output_dir …")


def _added(extension: Extension, new: NewTokens, arguments: "VocabularyExtendArguments") -> AddedVocabulary:
    """Return the record of the new tokens, and of the tokens before them if the model was extended before."""
    file = Path(arguments.model) / ADDED
    first_id = extension.first_id
    tokens = new.texts
    if file.is_file():
        before = read_json(file, AddedVocabulary, "remove this file, or extend the model that it names")
        if before.first_id + len(before.tokens) == first_id:
            first_id = before.first_id
            tokens = [*before.tokens, *tokens]
    return AddedVocabulary(extension.name, first_id, extension.num_rows(new), arguments.init, arguments.seed, tokens)


def _write_card(
    extension: Extension, new: NewTokens, arguments: "VocabularyExtendArguments", norms: dict[str, Norms], folder: Path
) -> None:
    origin, legal = find_origin(arguments.model)
    for file in legal:
        shutil.copyfile(file, folder / file.name)
    how = {
        "mean": "the mean of the rows of the tokens that it replaces",
        "normal": "a draw from the normal distribution with the mean and the covariance of all old rows",
    }[arguments.init]
    learned = counted(len(new.learned.tokens), "token")
    num_given = len(new.given) + len(new.special)
    lines = [
        f"# {origin.name} with more tokens",
        f"{origin.name} with {learned} learned from text and {num_given:,} given ones. They are not trained yet: "
        "continue the training before use. Text without a new token has the same ids as before.",
        f"- Tokens: {extension.first_id:,} of the base model, {extension.first_id + len(new.texts):,} now.",
        f"- Rows of embedding and head: {extension.num_rows(new):,}, padded to a multiple of {PADDED_TO}.",
        f"- A new row is {how}.{_described_rows(extension, new)}",
        *(
            f"- Mean norm of `{name}`: {one.old:.3g} of old rows, {one.new:.3g} of new rows."
            for name, one in norms.items()
        ),
        f"`{ADDED}` lists the new tokens in the order of their ids.",
    ]
    data = ModelCardData(
        library_name="transformers",
        base_model=origin.repository,
        license=origin.license,
        license_name=origin.license_name,
        license_link=origin.license_link,
    )
    text = "\n\n".join(lines).replace("\n\n- ", "\n- ")
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")


def _described_rows(extension: Extension, new: NewTokens) -> str:
    if not (taken := extension.num_taken(new)):
        return ""
    return f" {taken:,} of them take the place of rows that the base model has without a token; its other rows stay."


def verify_tokenizer(before: "Tokenizer", folder: Path, new: NewTokens, documents: Sequence[str]) -> "Tokenizer":
    """Load the tokenizer in ``folder``, and compare it with the old one and with the learned segments.

    Lines of the documents, up to 4 million characters, and texts on which encoders are likely to fail must have their
    old ids unless they have a new one. RunError if the tokenizer is not as it was made.
    """
    after = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
    ids = after.get_vocab(with_added_tokens=True)
    for place, token in enumerate(new.texts):
        if ids.get(token) != new.first_id + place:
            raise RunError(f"the new token {token!r} has id {ids.get(token)}, not {new.first_id + place}")
    segments = new.learned.segments
    if cut(after, segments) != segments:
        raise RunError("the extended tokenizer cuts words in another way than its tokens were learned")
    texts = [*HARD_STRINGS, *_lines(documents)]
    old, found = (tokenizer.encode_batch(texts, add_special_tokens=False) for tokenizer in (before, after))
    for text, one, other in zip(texts, old, found, strict=True):
        if one.ids != other.ids and max(other.ids) < new.first_id:
            raise RunError(f"a text without a new token has other ids than before: {text[:_SHOWN]!r}")
    encoder, _ = open_encoder(folder / "tokenizer.json", special_text_is_plain=False)
    with_transformers = PreTrainedTokenizerFast.from_pretrained(folder)(texts, add_special_tokens=False)["input_ids"]
    for text, one, ours, theirs in zip(texts, found, encoder.encode_batch(texts), with_transformers, strict=True):
        if not one.ids == ours.tolist() == theirs:
            raise RunError(f"libraries give different ids to {text[:_SHOWN]!r}")
    return after


def _lines(documents: Sequence[str]) -> list[str]:
    """Return lines from all documents, of long ones the first, up to a limit of characters for each."""
    each = _MOST_CHARACTERS // max(1, len(documents)) + 1
    return [line for document in documents for line in document[:each].splitlines()]


def verify_weights(old: StoredTensors, written: ExtendedTensors, folder: Path) -> None:
    """Read the files in ``folder`` and compare the bits of all old weights; RunError at the first difference."""
    found = CheckpointTensors(safetensors_files(folder), "write the folder again")
    names = set(found)
    for name in written:
        if name not in names or found.shape(name) != written.shape(name) or found.dtype(name) != old.dtype(name):
            raise RunError(f"{folder}: {name} is missing, or has another shape or type than it was written with")
        for wanted, block in zip(_kept_blocks(old, name, written), _kept_blocks(found, name, written), strict=True):
            if not torch.equal(_bits(wanted), _bits(block)):
                raise RunError(f"{folder}: {name} differs from the model's")


def _kept_blocks(tensors: StoredTensors, name: str, written: ExtendedTensors) -> Iterator[torch.Tensor]:
    """Yield blocks of what an extension does not change of a tensor."""
    matrix = written.matrices.get(name)
    if matrix is None:
        yield from blocks(tensors, name, tensors.shape(name))
        return
    old_tokens, without_token = matrix.kept_rows()
    yield from blocks(tensors, name, torch.Size((len(old_tokens), matrix.width)))
    for first in range(without_token.start, without_token.stop, _ROWS_COMPARED):
        count = min(_ROWS_COMPARED, without_token.stop - first)
        yield tensors.read_block(name, (first, 0), (count, matrix.width))


def _bits(block: torch.Tensor) -> torch.Tensor:
    return block.contiguous().reshape(-1).view(torch.uint8)
