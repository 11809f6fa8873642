"""Say what the ids of a ``tokenizer.json`` mean: decode them one by one for a reader, and compare two files.

Whoever trains or evaluates a model on a token dataset needs the comparison if its tokenizer and the model's were
written by different versions of the libraries: merges were strings once and are pairs now, and different settings can
have the same effect. Such files have other bytes and give the same ids. So tokens are compared one by one. If merges,
normalizer or pre-tokenizer differ, both tokenizers encode the same texts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json
from fabric_train.tokenization.tokenizers.text_encoder import load_fast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PARTIAL = "\ufffd"  # decoders write it for bytes that are not a whole character
_LONGEST_CHARACTER = 4  # in bytes of UTF-8, and so in tokens
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_PARTS = ("merges", "normalizer", "pre_tokenizer")
# texts that split patterns and normalizers treat differently; the vocabulary is compared too
_TEXTS = (
    "We'll see: DON'T you think it's 3.14, or 1234567 of 1,000.00?\n\n\n  indented\r\n\ttabs\t\tand   blanks   ",
    "é e\u0301 ﬁ ﬀ Å Ω ½ Straße İstanbul 한글 ｆｕｌｌ \u00a0\u3000x",
    "日本語のテキスト、中文文本。العربية עברית ไทย हिन्दी 😀👩‍👩‍👧🇫🇷",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # note ------- ======",
    "word",
    " word",
    "  word ",
)


ADDED = "vocabulary.json"
"""The file of a model folder with the tokens that ``python -m fabric_train.vocabulary extend`` added."""


@dataclass(frozen=True)
class AddedVocabulary:
    """The tokens that were added to ``base``, in the order of their ids from ``first_id`` on, and how rows began."""

    base: str
    first_id: int
    num_rows: int
    init: str
    seed: int
    tokens: list[str]


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
            count = 1
            text = texts[ids[position]]
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
    special = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special}
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


@dataclass(frozen=True)
class _Content:
    """A file's ids by token, added tokens included; the added tokens' alone; the parts that determine a text's ids."""

    ids: dict[str, int]
    added: dict[str, int]
    parts: dict[str, Any]


def compare_tokenizers(ours: Path, theirs: Path, in_rows: str) -> tuple[str | None, str | None]:
    """Compare ``ours``, whose ids are in the rows ("here" in the result), with the model's ("there").

    ``in_rows`` is text with the added tokens that are in the rows, such as EOS and a chat template's; they must have
    the same ids. InputError if one of the files is damaged.

    Return a fault, why an id means another token or a text gets other ids; and a note, an added token that differs,
    which changes no ids; None without one.
    """
    here = _read_content(ours)
    there = _read_content(theirs)
    fault = None
    note = None
    for token, index, is_added in _differing_tokens(here, there):
        words = _describe(token, index, here, there)
        if is_added and token not in in_rows:
            note = note or words
        else:
            fault = fault or words
    return fault or _other_ids(ours, theirs, here, there), note


def _read_content(file: Path) -> _Content:
    content = read_json(file, dict, "fetch the file again")
    try:
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # of a Unigram model: pieces and scores in the order of ids
            vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", ())]
        ids = {**vocabulary, **added}
        if not all(isinstance(token, str) and isinstance(index, int) for token, index in ids.items()):
            raise TypeError("a token or its id is of another type")
        return _Content(ids, added, {"merges": merges, **{part: content.get(part) for part in _PARTS[1:]}})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not a tokenizer ({type(error).__name__}: {error}); fetch the file again") from None


def _differing_tokens(here: _Content, there: _Content) -> Iterator[tuple[str, int, bool]]:
    """Yield tokens that differ, with id and whether sides that have the token or its id have it as an added token."""
    for one, other in ((here, there), (there, here)):
        tokens = {index: token for token, index in other.ids.items()}
        added = set(other.added.values())
        for token, index in one.ids.items():
            if other.ids.get(token) != index:
                elsewhere = token in other.ids and token not in other.added
                yield token, index, token in one.added and not elsewhere and (index not in tokens or index in added)


def _describe(token: str, index: int, here: _Content, there: _Content) -> str:
    ours = here.ids.get(token)
    theirs = there.ids.get(token)
    if ours is None or theirs is None:
        has, lacks = ("here", "there") if theirs is None else ("there", "here")
        return f"token {token!r} is id {index} {has} and missing {lacks}"
    return f"token {token!r} is id {ours} here and {theirs} there"


def _other_ids(ours: Path, theirs: Path, here: _Content, there: _Content) -> str | None:
    """Return a description of a text that gets other ids, or None; encode texts only if parts of the files differ."""
    different = [part for part in _PARTS if here.parts[part] != there.parts[part]]
    if not different:
        return None
    first, second = (load_fast(file, special_text_is_plain=False) for file in (ours, theirs))
    own = first.decode_batch([[index] for index in here.ids.values()]) if "merges" in different else []
    added = {*here.added, *there.added}
    texts = [text for text in (*_TEXTS, *own) if "\ufffd" not in text and text not in added]
    encoded = (tokenizer.encode_batch_fast(texts, add_special_tokens=False) for tokenizer in (first, second))
    for text, one, other in zip(texts, *encoded, strict=True):
        if one.ids != other.ids:
            return f"{' and '.join(different)} differ: {text!r} is {_short(one.ids)} here and {_short(other.ids)} there"
    return None


def _short(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:6]))}{', …' if len(ids) > 6 else ''}]"
