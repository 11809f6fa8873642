"""Decode the ids of a ``tokenizer.json`` one by one, for people."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PARTIAL = "\ufffd"  # decoders write it for bytes that are not a whole character
_LONGEST_CHARACTER = 4  # in bytes of UTF-8, and so in tokens
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
ADDED = "vocabulary.json"
"""The file of a model folder with the tokens that ``python -m fabric_train.vocabulary extend`` added."""


@dataclass(frozen=True)
class AddedVocabulary:
    """The content of ``vocabulary.json``: the tokens that were added to a model."""

    base: str  # the tokenizer without these tokens
    first_id: int
    num_rows: int
    init: str
    seed: int
    tokens: list[str]  # in the order of their ids


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a token dataset; an id is None if there is no such token."""

    tokenizer: "Tokenizer"
    size: int  # the largest id plus one
    special: dict[int, str]  # the special tokens' texts by id
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    def spans(self, token_ids: list[int]) -> Iterator[tuple[int, str]]:
        """Yield (number of ids, text) in order; the number only exceeds 1 for tokens that share a character."""
        texts = self._texts(token_ids)
        position = 0
        while position < len(token_ids):
            num_ids = 1
            text = texts[token_ids[position]]
            if _PARTIAL in text:
                candidates = token_ids[position : position + _LONGEST_CHARACTER]
                num_ids, text = self._join(candidates, text)
            yield num_ids, text
            position += num_ids

    def _join(self, token_ids: list[int], text: str) -> tuple[int, str]:
        """Join the fewest ids that make whole characters.

        Args:
            token_ids: up to four ids, of which the first is no whole character.
            text: the text of the first id.

        Returns:
            The number of joined ids and their text; 1 and ``text`` if no ids make whole characters.
        """
        for num_ids in range(2, len(token_ids) + 1):
            if token_ids[num_ids - 1] in self.special:
                break
            (joined_text,) = self._decode([token_ids[:num_ids]])
            if _PARTIAL not in joined_text:
                return num_ids, joined_text
        return 1, text

    def _texts(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each single id, or ``⟨ID⟩`` if it has none."""
        unique_ids = sorted(set(token_ids))
        valid_ids = [token_id for token_id in unique_ids if 0 <= token_id < self.size]
        texts = dict(zip(valid_ids, self._decode([[token_id] for token_id in valid_ids]), strict=True))
        texts |= {token_id: self.special[token_id] for token_id in valid_ids if token_id in self.special}
        return {token_id: texts.get(token_id) or f"⟨{token_id}⟩" for token_id in unique_ids}

    def _decode(self, sequences: list[list[int]]) -> list[str]:
        """Decode each sequence after a letter, because some decoders strip the space of a text's first token."""
        letter_ids, letter = self._letter
        with_letter = [[*letter_ids, *token_ids] for token_ids in sequences]
        texts = self.tokenizer.decode_batch(with_letter, skip_special_tokens=False)
        return [text.removeprefix(letter) for text in texts]

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """The ids of a letter, and the text to which they are decoded."""
        token_ids = self.tokenizer.encode("a", add_special_tokens=False).ids
        return token_ids, self.tokenizer.decode(token_ids, skip_special_tokens=False)


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of a Hugging Face tokenizer folder, or None if it has no ``tokenizer.json``."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = load_fast(file, special_text_is_plain=False)
    special_tokens = {}
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            special_tokens[token_id] = token.content

    # the tokens that the configuration names are special, too
    named_tokens = _read_named_tokens(folder / "special_tokens_map.json")
    named_tokens |= _read_named_tokens(folder / "tokenizer_config.json")
    named_ids: dict[str, int | None] = dict.fromkeys(_ROLES)
    for role, token_text in named_tokens.items():
        named_id = tokenizer.token_to_id(token_text)
        named_ids[role] = named_id
        if named_id is not None:
            special_tokens[named_id] = token_text
    return Vocabulary(
        tokenizer=tokenizer,
        size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        special=special_tokens,
        bos_token_id=named_ids["bos_token"],
        eos_token_id=named_ids["eos_token"],
        pad_token_id=named_ids["pad_token"],
        unk_token_id=named_ids["unk_token"],
    )


def _read_named_tokens(file: Path) -> dict[str, str]:
    """Return the special tokens of a configuration by role; they are texts, or objects with ``content``."""
    if not file.exists():
        return {}
    content = read_json(file, dict, "tokenize again")
    named_tokens = {}
    try:
        for role in _ROLES:
            token = content.get(role)
            if token:
                named_tokens[role] = token if isinstance(token, str) else str(token["content"])
    except (KeyError, TypeError):
        raise InputError(f"{file} is not a tokenizer configuration; tokenize again") from None
    return named_tokens
