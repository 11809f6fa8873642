"""Texts on which two different encoders are likely to give different ids."""

import random
from collections.abc import Iterable, Iterator

_WHITESPACE = (
    " ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\v",
    "\f",
    "\x1c",
    "\x85",
    "\xa0",
    "\u2003",
    "\u2028",
    "\u200b",
    "\u3000",
    "\ufeff",
)
_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def special_token_strings(tokens: Iterable[str]) -> Iterator[str]:
    """Yield texts with the special or added ``tokens`` of a tokenizer, and with text that only looks like them."""
    tokens = list(tokens)
    for join in ("", " ", "a", "\n "):
        yield join.join(tokens)
    for token in tokens[:20]:
        similar = f"{token[:-1]} {token[1:]} {token.upper()}"
        yield f"a{token}b {token} c\n{token}\n{token}{token}, {similar} {token}'s  {token}"


def _every_plane() -> Iterator[str]:
    """Yield samples of code points from all Unicode planes: joined, with spaces, and between letters and digits.

    The strings are short, because an encoder may leave a text with certain characters to another one.
    """
    strides = ((0, 0xD800, 61), (0xE000, 0x10000, 61), (0x10000, 0x40000, 257), (0x40000, 0x110000, 0x7FF))
    letters = [chr(code) for start, end, stride in strides for code in range(start, end, stride)]
    # letters, digits and marks of recent Unicode versions, which libraries adopt at different times
    letters += [chr(code) for code in (0x1C89, 0x0897, 0x105C0, 0x10D40, 0x11DE0, 0x11DE9, 0x16D63, 0x16D68, 0x16FF4)]
    letters += ["\ud7ff", "\ue000", "\ufffd", "\uffff", "\U00010000", "\U0010ffff"]
    for start in range(0, len(letters), 32):
        some = letters[start : start + 32]
        yield "".join(some)
        yield " ".join(some)
        yield "".join(f"a{letter}1{letter}" for letter in some)


def _whitespace_runs() -> Iterator[str]:
    for space in _WHITESPACE:
        yield space
        yield (
            "".join(f"{space * length}x{space * length}7{space * length}." for length in (1, 2, 3, 4, 7, 8, 40)) + space
        )
        yield "".join(f"a{space}{other}{space}b " for other in _WHITESPACE)
    yield " " * 5000
    yield "\n" * 3000 + "x" + " \n" * 2000 + "\t" * 3000


def _joined_at_random() -> Iterator[str]:
    """Yield random sequences of parts that overlap, repeat or end pieces, from a fixed seed."""
    parts = [
        "er",
        "e",
        "re",
        "an",
        "a",
        "na",
        "t",
        "ing",
        "ab",
        "ь",
        "р",
        "=",
        "😀",
        "é",
        "▁",
        "\x00",
        "1",
        "22",
        "333",
    ]
    parts += [*_WHITESPACE, *_CONTRACTIONS, "'S", "'LL", "_", ".", "<|", "|>", "日本", "한국", "e\u0301", "\u0338"]
    draw = random.Random(0)
    for _ in range(300):
        yield "".join(draw.choices(parts, k=draw.randint(1, 30)))


HARD_STRINGS: tuple[str, ...] = (
    "",
    "a",
    *_every_plane(),
    *_whitespace_runs(),
    *_joined_at_random(),
    "".join(f" it{c} I{c.upper()} {c}{c.title()}x ’{c[1:]} 1{c}" for c in _CONTRACTIONS) + "'ſ 'K ' ''s 's't",
    "0 1 12 123 1234 12345 1234567 0.5 1,000.00 ½ ² Ⅷ ٣٤٥ ४५६ 一二三 ①② 1a2b3c -1 1e-5 0x1F 2026-11-21 12:30",
    "<s></s> <unk><pad><mask> <0x0A><0x41> <|endoftext|><|begin_of_text|> <|im_start|>user<|im_end|> [INST] <bos>",
    "▁ ▁▁a▁ b Ġ ĠĠthe Ċ ĉ Ã© â€™",
    "é e\u0301 \u0301 a\u0323\u0307 a\u0307\u0323 Å \u212b Ω \u2126 ﬁ ﬀ ① ½ ｆｕｌｌ 한글",
    "\u1112\u1161\u11ab >\u0338 \u0344 \u0958",
    "日本語のテキスト、中文文本。العربية עברית ไทย हिन्दी ქართული ᏣᎳᎩ ǅ ß ẞ İ ı ſ K",
    "😀😃 👩\u200d👩\u200d👧 🇫🇷🇩🇪 👍🏽 ❤\ufe0f 1\ufe0f\u20e3 \U0001f9ff\U000e0041 🏴\U000e0067\U000e007f",
    "\x00\x01\x02\x04\x06\x13\x1d \x7f\x1b[0m \u200b\u200d\ufeff\u202e\u2066x\u2069",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # note\n\n\n\tif a<b&&c>=d{e=~f;}//g\r\n",
    "aaaaaaaaaaaaaaaa ----------- ====== ...... !!!???!! ,,;: ((([[[{{{ \\\\\\ //// http://a.b/c?d=e&f=%20#g",
    "a" * 20_000,
    "abcdefghijklmnopqrstuvwxyz" * 400,
    "LoremIpsumDolorSitAmet" * 300,
    "中文文本没有空格" * 600,
    "1234567890" * 800,
    "-=" * 3000,
    "👩\u200d👧" * 500,
)
