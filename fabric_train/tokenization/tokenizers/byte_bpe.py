"""Byte-level BPE tokenizers (Llama-3, GPT-2, SmolLM2, Qwen style ``tokenizer.json``) encoded by tiktoken.

Whatever decides about ids is taken from the file, and a tokenizer that tiktoken cannot follow is refused. Only numpy,
orjson and tiktoken are imported, so that a process is ready in a moment.
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

from fabric_train.tokenization.tokenizers.added_tokens import AddedTokenSplitter, refuse_unlike
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.long_texts import line_cutter
from fabric_train.tokenization.tokenizers.merge_ranks import NOT_IN_VOCABULARY, merge_ranks, refuse_other_kinds
from fabric_train.tokenization.tokenizers.piece_encoder import PieceEncoder, UnlikelyTextError
from fabric_train.tokenization.tokenizers.split_pattern import split_pattern
from fabric_train.tokenization.tokenizers.tokenizer_json import TokenizerJson, read_tokenizer_json
from fabric_train.tokenization.tokenizers.unsupported import NotExpressibleError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["ByteBPE", "NotExpressibleError", "load_byte_bpe"]


@dataclass(frozen=True)
class ByteBPE:
    """A byte-level BPE tokenizer in tiktoken's hands.

    ``ids`` [number of tiktoken's ranks] holds the id of each rank; None where rank and id are the same. Added tokens
    are looked for before and after the normalizer, which is Unicode's NFC or none. The few texts that tiktoken cannot
    encode are left to the ``tokenizers`` library and ``tokenizer_file``.
    """

    pieces: PieceEncoder
    ids: np.ndarray | None
    composes: bool
    tokens_before: AddedTokenSplitter
    tokens_after: AddedTokenSplitter
    tokenizer_file: Path
    special_text_is_plain: bool

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return each text's ids, int32, without BOS and EOS. Texts hold no lone surrogates."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        try:
            parts = [self._encode_part(part) for part in self._split(text)]
        except UnlikelyTextError:
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
        if len(ids) and ids.min() == NOT_IN_VOCABULARY:  # the tokenizer drops such a byte and joins its neighbours
            raise UnlikelyTextError
        return ids


def load_byte_bpe(tokenizer_file: Path, special_text_is_plain: bool) -> ByteBPE:
    """Load the ``tokenizer.json`` at ``tokenizer_file``, one that the ``tokenizers`` library can read.

    ``special_text_is_plain``: the text of a special token inside a document is text, and not that token.

    Raises:
        NotExpressibleError: tiktoken cannot be made to give its ids.
    """
    return express(read_tokenizer_json(tokenizer_file), tokenizer_file, special_text_is_plain)


def express(content: TokenizerJson, tokenizer_file: Path, special_text_is_plain: bool) -> ByteBPE:
    """Return the tokenizer of ``tokenizer_file``, whose ``content`` was read before; see ``load_byte_bpe``."""
    refuse_other_kinds(content.model)
    refuse_unlike(content.added_tokens, content.model["vocab"])
    pattern = split_pattern(content.pre_tokenizer)
    composes = _composes(content.normalizer)
    plain = {token.content for token in content.added_tokens if special_text_is_plain and token.special}
    made = merge_ranks(content.model, frozenset(token.content for token in content.added_tokens) - plain)
    return ByteBPE(
        pieces=PieceEncoder(pattern, made.ranks, line_cutter(content.pre_tokenizer)),
        ids=None if np.array_equal(made.ids, np.arange(len(made.ids))) else made.ids,
        composes=composes,
        tokens_before=_splitter(content, plain, normalized=False),
        tokens_after=_splitter(content, plain, normalized=True),
        tokenizer_file=tokenizer_file,
        special_text_is_plain=special_text_is_plain,
    )


def _composes(normalizer: dict[str, Any] | None) -> bool:
    """Return whether the normalizer is NFC; False for none.

    Raises:
        NotExpressibleError: it is another one.
    """
    if normalizer is None:
        return False
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    others = [step["type"] for step in steps if step["type"] != "NFC"]
    if others:
        raise NotExpressibleError(f"its normalizer is {', '.join(others)}")
    return bool(steps)


def _splitter(content: TokenizerJson, plain: set[str], *, normalized: bool) -> AddedTokenSplitter:
    """Return the splitter for the added tokens that are looked for after the normalizer, or for those before it."""
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
    """Return the text in NFC, the same by every version of Unicode that knows its letters."""
    if text.isascii():
        return text
    if _unassigned().search(text):  # tokenizers' Unicode may be newer than Python's
        raise UnlikelyTextError
    return unicodedata.normalize("NFC", text)


@cache
def _unassigned() -> "re.Pattern[str]":
    """Return an expression for the code points that this Python's Unicode does not know."""
    codes = (code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cn")
    ranges = []
    for _, run in groupby(enumerate(codes), key=lambda numbered: numbered[1] - numbered[0]):
        members = [code for _, code in run]
        ranges.append(f"{re.escape(chr(members[0]))}-{re.escape(chr(members[-1]))}")
    return re.compile(f"[{''.join(ranges)}]")
