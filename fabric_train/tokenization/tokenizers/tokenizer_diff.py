"""Compare two ``tokenizer.json`` files by the ids they give, not by their bytes.

Whoever trains or evaluates a model on a token dataset needs this if its tokenizer and the model's were written by
different versions of the libraries: merges were strings once and are pairs now, and different settings can have the
same effect. Such files have other bytes and give the same ids. So tokens are compared one by one. If merges, normalizer
or pre-tokenizer differ, both tokenizers encode the same texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json
from fabric_train.tokenization.tokenizers.text_encoder import load_fast

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


@dataclass(frozen=True)
class _Content:
    """A file's ids by token, added tokens included; the added tokens' alone; the parts that determine a text's ids."""

    ids: dict[str, int]
    added: dict[str, int]
    parts: dict[str, Any]


@dataclass(frozen=True)
class TokenizerDifference:
    """Why an id means another token or a text gets other ids; or an added token that differs, which changes no ids."""

    fault: str | None
    note: str | None


def compare_tokenizers(ours: Path, theirs: Path, in_rows: str) -> TokenizerDifference:
    """Compare ``ours``, whose ids are in the rows ("here" in the result), with the model's ("there").

    ``in_rows`` is text with the added tokens that are in the rows, such as EOS and a chat template's; they must have
    the same ids. InputError if one of the files is damaged.
    """
    here, there = _read(ours), _read(theirs)
    fault, note = None, None
    for token, index, is_added in _differing_tokens(here, there):
        words = _describe(token, index, here, there)
        if is_added and token not in in_rows:
            note = note or words
        else:
            fault = fault or words
    return TokenizerDifference(fault or _other_ids(ours, theirs, here, there), note)


def _read(file: Path) -> _Content:
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
        parts = {"merges": merges, **{part: content.get(part) for part in _PARTS[1:]}}
        return _Content(ids, added, parts)
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
    ours, theirs = here.ids.get(token), there.ids.get(token)
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
