"""Decode token ids one by one for a reader."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json
from fabric_train.tokenization.tokenizers.text_encoder import load_fast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PARTIAL = "\ufffd"  # decoders write it for bytes that are not a whole character
_LONGEST_CHARACTER = 4  # in bytes of UTF-8, and so in tokens
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


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

    def spans(self, ids: list[int]) -> Iterator[tuple[int, str]]:
        """Yield (number of ids, text) in order; the number is above 1 only for tokens that share a character."""
        texts = self._texts(ids)
        position = 0
        while position < len(ids):
            count, text = 1, texts[ids[position]]
            if _PARTIAL in text:
                count, text = self._join(ids[position : position + _LONGEST_CHARACTER], text)
            yield count, text
            position += count

    def _join(self, ids: list[int], text: str) -> tuple[int, str]:
        """Join the fewest ids that make whole characters; only the first if none do."""
        for count in range(2, len(ids) + 1):
            if ids[count - 1] in self.special:
                break
            joined = self._decode([ids[:count]])[0]
            if _PARTIAL not in joined:
                return count, joined
        return 1, text

    def _texts(self, ids: Iterable[int]) -> dict[int, str]:
        unique = sorted(set(ids))
        known = [token for token in unique if 0 <= token < self.size]
        texts = dict(zip(known, self._decode([[token] for token in known]), strict=True))
        texts |= {token: self.special[token] for token in known if token in self.special}
        return {token: texts.get(token) or f"⟨{token}⟩" for token in unique}

    def _decode(self, sequences: list[list[int]]) -> list[str]:
        """Decode each sequence after a letter, because some decoders strip the space of a text's first token."""
        letter, text = self._letter
        decoded = self.tokenizer.decode_batch([[*letter, *ids] for ids in sequences], skip_special_tokens=False)
        return [part.removeprefix(text) for part in decoded]

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        ids = self.tokenizer.encode("a", add_special_tokens=False).ids
        return ids, self.tokenizer.decode(ids, skip_special_tokens=False)


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of a Hugging Face tokenizer folder, or None if it has no ``tokenizer.json``."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = load_fast(file, special_text_is_plain=False)
    names = _names(folder / "special_tokens_map.json") | _names(folder / "tokenizer_config.json")
    added = tokenizer.get_added_tokens_decoder()
    special = {token: entry.content for token, entry in added.items() if entry.special}
    by_role = {role: tokenizer.token_to_id(names[role]) if role in names else None for role in _ROLES}
    special |= {token: names[role] for role, token in by_role.items() if token is not None}
    return Vocabulary(
        tokenizer=tokenizer,
        size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        special=special,
        **{f"{role}_id": token for role, token in by_role.items()},
    )


def _names(file: Path) -> dict[str, str]:
    """Return the special tokens of a configuration by role. It has them as text, or as objects with ``content``."""
    if not file.exists():
        return {}
    content = read_json(file, dict, "tokenize again")
    try:
        tokens = {role: content[role] for role in _ROLES if content.get(role)}
        return {role: token if isinstance(token, str) else str(token["content"]) for role, token in tokens.items()}
    except (KeyError, TypeError):
        raise InputError(f"{file} is not a tokenizer configuration; tokenize again") from None
