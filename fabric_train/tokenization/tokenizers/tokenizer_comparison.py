"""Compare two ``tokenizer.json`` files to see whether every text gets the same ids.

Training and evaluating a model on a token dataset need this comparison if the dataset's tokenizer and the model's were
written by different versions of the libraries: merges were strings once and are pairs now, and different settings can
have the same effect. Such files differ in bytes and give the same ids. So tokens are compared one by one. If merges,
normalizer or pre-tokenizer differ, both tokenizers encode the same texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast

_COMPARED_SETTINGS = ("merges", "normalizer", "pre_tokenizer")
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
    """The parts of a ``tokenizer.json`` that determine the ids of a text."""

    ids: dict[str, int]  # by token, added tokens included
    added_ids: dict[str, int]  # of the added tokens
    settings: dict[str, Any]  # by the names of _COMPARED_SETTINGS


def compare_tokenizers(ours: Path, theirs: Path, in_rows: str) -> tuple[str | None, str | None]:
    """Compare the tokenizer of a token dataset with the one of a model.

    Args:
        ours: the ``tokenizer.json`` whose ids are in the rows; called "here" in the result.
        theirs: the ``tokenizer.json`` of the model; called "there".
        in_rows: a text with the added tokens that are in the rows, such as EOS and a chat template's; they must have
            the same ids.

    Returns:
        A fault, which says why an id means another token or a text gets other ids, and a note on an added token that
        differs, which changes no ids. None without one.

    Raises:
        InputError: a file is damaged.
    """
    our_content = _read_content(ours)
    their_content = _read_content(theirs)
    fault = None
    note = None
    for difference in _find_differences(our_content, their_content):
        description = _describe(difference, our_content, their_content)
        if difference.is_added and difference.token not in in_rows:
            note = note or description
        else:
            fault = fault or description
    if fault is None:
        fault = _find_other_ids(ours, theirs, our_content, their_content)
    return fault, note


def _read_content(file: Path) -> _Content:
    content = read_json(file, dict, "download the file again")
    try:
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # of a Unigram model: pieces and scores in the order of ids
            vocabulary = {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
        added_ids = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        ids = {**vocabulary, **added_ids}
        for token, token_id in ids.items():
            if not isinstance(token, str) or not isinstance(token_id, int):
                raise TypeError("a token or its id is of another type")
        merges = []
        for pair in model.get("merges", ()):
            merges.append(tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair))
        settings = {
            "merges": merges,
            "normalizer": content.get("normalizer"),
            "pre_tokenizer": content.get("pre_tokenizer"),
        }
        return _Content(ids, added_ids, settings)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} is not a tokenizer ({type(error).__name__}: {error}); download the file again"
        ) from None


@dataclass(frozen=True)
class _Difference:
    """A token that has a different id, or none, in the other tokenizer."""

    token: str
    token_id: int
    is_added: bool  # whether the tokenizers that have the token or its id have it as an added token


def _find_differences(our_content: _Content, their_content: _Content) -> Iterator[_Difference]:
    """Yield the tokens of ``our_content`` that differ in ``their_content``, and then the reverse."""
    for content, compared in ((our_content, their_content), (their_content, our_content)):
        compared_token_ids = set(compared.ids.values())
        compared_added_ids = set(compared.added_ids.values())
        for token, token_id in content.ids.items():
            if compared.ids.get(token) == token_id:
                continue
            is_plain_token = token in compared.ids and token not in compared.added_ids
            is_plain_id = token_id in compared_token_ids and token_id not in compared_added_ids
            is_added = token in content.added_ids and not is_plain_token and not is_plain_id
            yield _Difference(token, token_id, is_added)


def _describe(difference: _Difference, our_content: _Content, their_content: _Content) -> str:
    token = difference.token
    our_id = our_content.ids.get(token)
    their_id = their_content.ids.get(token)
    if their_id is None:
        return f"token {token!r} is id {difference.token_id} here and missing there"
    if our_id is None:
        return f"token {token!r} is id {difference.token_id} there and missing here"
    return f"token {token!r} is id {our_id} here and {their_id} there"


def _find_other_ids(ours: Path, theirs: Path, our_content: _Content, their_content: _Content) -> str | None:
    """Return a description of a text that gets other ids, or None; encode texts only if settings differ."""
    different_settings = [
        name for name in _COMPARED_SETTINGS if our_content.settings[name] != their_content.settings[name]
    ]
    if not different_settings:
        return None
    our_tokenizer = load_fast(ours, special_text_is_plain=False)
    their_tokenizer = load_fast(theirs, special_text_is_plain=False)

    # with other merges, a token's own text may be encoded differently
    candidates = list(_TEXTS)
    if "merges" in different_settings:
        candidates += our_tokenizer.decode_batch([[token_id] for token_id in our_content.ids.values()])
    # added tokens were compared before, and a part of a character is no text
    added_tokens = {*our_content.added_ids, *their_content.added_ids}
    texts = [text for text in candidates if "\ufffd" not in text and text not in added_tokens]

    our_encodings = our_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    their_encodings = their_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, our_encoding, their_encoding in zip(texts, our_encodings, their_encodings, strict=True):
        if our_encoding.ids != their_encoding.ids:
            settings = " and ".join(different_settings)
            our_ids = _shorten(our_encoding.ids)
            their_ids = _shorten(their_encoding.ids)
            return f"{settings} differ: {text!r} is {our_ids} here and {their_ids} there"
    return None


def _shorten(token_ids: list[int]) -> str:
    shown_ids = ", ".join(map(str, token_ids[:6]))
    return f"[{shown_ids}, …]" if len(token_ids) > 6 else f"[{shown_ids}]"
