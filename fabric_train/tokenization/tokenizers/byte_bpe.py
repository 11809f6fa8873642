"""Encode with byte-level BPE tokenizers (``tokenizer.json`` of Llama-3, GPT-2, SmolLM2 or Qwen) by tiktoken.

Everything that determines ids is read from the file. A tokenizer whose ids tiktoken cannot reproduce raises an error.
The module imports only numpy, orjson and tiktoken, so that a process starts quickly.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.tokenization.tokenizers.added_tokens import AddedTokenSplitter, check_added_tokens
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.long_texts import line_splitter
from fabric_train.tokenization.tokenizers.merge_ranks import NOT_IN_VOCABULARY, check_model, merge_ranks
from fabric_train.tokenization.tokenizers.piece_encoder import PieceEncoder, UnencodableTextError
from fabric_train.tokenization.tokenizers.split_pattern import split_pattern
from fabric_train.tokenization.tokenizers.tokenizer_json import TokenizerJson, read_tokenizer_json
from fabric_train.tokenization.tokenizers.unsupported import UnsupportedTokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ByteBPE:
    """A byte-level BPE tokenizer that encodes with tiktoken.

    The few texts that tiktoken cannot encode are encoded by the ``tokenizers`` library from ``tokenizer_file``.

    Attributes:
        ids: the id of each tiktoken rank, int32 [number of ranks]; None if rank and id are the same.
        composes: whether the normalizer is Unicode's NFC; otherwise there is none.
        tokens_before: the added tokens that are matched before normalization.
        tokens_after: the added tokens that are matched after normalization.
    """

    pieces: PieceEncoder
    ids: np.ndarray | None
    composes: bool
    tokens_before: AddedTokenSplitter
    tokens_after: AddedTokenSplitter
    tokenizer_file: Path
    special_text_is_plain: bool

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32 [T], without BOS and EOS. Texts must not contain lone surrogates."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        try:
            parts = [self._encode_part(part) for part in self._split(text)]
        except UnencodableTextError:
            return np.array(self._reference.encode(text, add_special_tokens=False).ids, np.int32)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])

    @cached_property
    def _reference(self) -> "Tokenizer":
        return load_fast(self.tokenizer_file, self.special_text_is_plain)

    def _split(self, text: str) -> Iterator[str | int]:
        for part in self.tokens_before.split(text):
            if isinstance(part, int):
                yield part
            else:
                yield from self.tokens_after.split(_compose(part) if self.composes else part)

    def _encode_part(self, part: str | int) -> np.ndarray:
        if isinstance(part, int):
            return np.array([part], np.int32)
        ranks = self.pieces.encode(part)
        if self.ids is None:
            return ranks
        ids = self.ids[ranks]
        if len(ids) and ids.min() == NOT_IN_VOCABULARY:  # the tokenizer drops such a byte and merges its neighbours
            raise UnencodableTextError
        return ids


def load_byte_bpe(tokenizer_file: Path, special_text_is_plain: bool) -> ByteBPE:
    """Load a ``tokenizer.json`` that the ``tokenizers`` library can read.

    Args:
        tokenizer_file: the ``tokenizer.json``.
        special_text_is_plain: whether the text of a special token in a document is encoded as text, not as the token.

    Raises:
        UnsupportedTokenizerError: tiktoken cannot reproduce its ids.
    """
    return build_byte_bpe(read_tokenizer_json(tokenizer_file), tokenizer_file, special_text_is_plain)


def build_byte_bpe(content: TokenizerJson, tokenizer_file: Path, special_text_is_plain: bool) -> ByteBPE:
    """Build the tokenizer from the ``content`` of ``tokenizer_file``; arguments and errors as in ``load_byte_bpe``."""
    check_model(content.model)
    check_added_tokens(content.added_tokens, content.model["vocab"])
    pattern = split_pattern(content.pre_tokenizer)
    composes = _composes(content.normalizer)
    plain = {token.content for token in content.added_tokens if special_text_is_plain and token.special}
    made = merge_ranks(content.model, frozenset(token.content for token in content.added_tokens) - plain)
    return ByteBPE(
        pieces=PieceEncoder(pattern, made.ranks, line_splitter(content.pre_tokenizer)),
        ids=None if np.array_equal(made.ids, np.arange(len(made.ids))) else made.ids,
        composes=composes,
        tokens_before=_splitter(content, plain, normalized=False),
        tokens_after=_splitter(content, plain, normalized=True),
        tokenizer_file=tokenizer_file,
        special_text_is_plain=special_text_is_plain,
    )


def _composes(normalizer: dict[str, Any] | None) -> bool:
    """Return whether the normalizer is NFC; False if there is none.

    Raises:
        UnsupportedTokenizerError: the normalizer is another one.
    """
    if normalizer is None:
        return False
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    others = [step["type"] for step in steps if step["type"] != "NFC"]
    if others:
        raise UnsupportedTokenizerError(f"its normalizer is {', '.join(others)}")
    return bool(steps)


def _splitter(content: TokenizerJson, plain: set[str], *, normalized: bool) -> AddedTokenSplitter:
    """Return the splitter for the added tokens that are matched after normalization, or before it."""
    composes = normalized and _composes(content.normalizer)
    return AddedTokenSplitter(
        {
            unicodedata.normalize("NFC", token.content) if composes else token.content: token.id
            for token in content.added_tokens
            if token.normalized == normalized
        },
        left_as_text=frozenset(plain),
    )


def _compose(text: str) -> str:
    """Return the text in NFC, if this Python's Unicode version knows all of its characters."""
    if text.isascii():
        return text
    if _unassigned().search(text):  # the tokenizers library may use a newer Unicode version
        raise UnencodableTextError
    return unicodedata.normalize("NFC", text)


@cache
def _unassigned() -> "re.Pattern[str]":
    """Return a regular expression for the code points that this Python's Unicode version does not know."""
    codes = (code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cn")
    ranges = []
    for _, run in groupby(enumerate(codes), key=lambda numbered: numbered[1] - numbered[0]):
        members = [code for _, code in run]
        ranges.append(f"{re.escape(chr(members[0]))}-{re.escape(chr(members[-1]))}")
    return re.compile(f"[{''.join(ranges)}]")
