"""Replace personal data with placeholders: e-mail addresses, IBANs, telephone numbers, DNI and NIE, IP addresses.

Each kind has a pattern for candidates and a check that ordinary numbers fail: check digits (IBAN, DNI, NIE), numbering
plans (telephone), public addresses (IP). It does not find addresses in words (``ana at example dot com``) or in escapes
(``ana%40example.com``), accounts without an IBAN, telephone numbers in the national form of countries other than Spain
and those of +1, names, and postal addresses.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any

from fabric_train.files.requirements import load_package

_Span = tuple[int, int]  # the index of the first character, and of the character after the last

PLACEHOLDERS = {"email": "<EMAIL>", "iban": "<IBAN>", "phone": "<PHONE>", "dni": "<DNI>", "ip": "<IP>"}
"""The placeholder of each kind, in the order of replacement.

They are ordinary text for common tokenizers, in the form of StarCoder's data (arXiv:2305.06161). FineWeb inserts valid
addresses, which cannot be distinguished from addresses of the text; Dolma's ``|||EMAIL_ADDRESS|||`` is a special token
of the first OLMo tokenizer.
"""
_PACKAGES = {"iban": "python-stdnum", "phone": "phonenumbers", "dni": "python-stdnum"}
_MODULES = {"python-stdnum": "stdnum", "phonenumbers": "phonenumbers"}
_RULES = 2  # the version of the rules below; shards that were finished with another are not reused

_SPACE = " \u00a0\u2009\u202f"
_SPACES = re.compile(f"[{_SPACE}]")
_MOST_DIGITS = 4000  # of a match, which takes some 100 bytes of memory for each
# where telephone and identity numbers can be: this is several times as fast as a pattern that begins by looking behind
_DIGITS = re.compile(rf"[0-9](?:[^0-9\n]{{0,3}}[0-9]){{6,{_MOST_DIGITS}}}")
_LONGEST_NUMBER = 64
_AROUND = 5  # characters before and after the digits that belong to a number, or decide that there is none

# RFC 5321: at most 64 characters before the @, 63 in a label; RFC 6531: letters of any script. Left out are the ones of
# scripts without spaces (CJK), where words would run into the address, and | ' / and others that RFC 5322 allows, but
# that stand beside addresses in tables, quotes and links.
_LETTER = r"[^\W\u2e80-\ud7ff]"
_OTHERS = r"[%+\u0300-\u036f-]"  # with accents that are code points of their own
_LOCAL_PART = re.compile(rf"(?:{_LETTER}|{_OTHERS})+(?:\.(?:{_LETTER}|{_OTHERS})+)*\Z")
_DOMAIN = re.compile(r"@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,24})(?!_*[^\W_])")
_NO_ADDRESS = re.compile(r"@[0-9]x\.", re.IGNORECASE)  # logo@2x.png
_NO_PERSON = "git"  # git@github.com:owner/name

# ISO 13616: a country, two check digits and 11 to 30 letters or digits, often in groups of four; Spanish accounts also
# in those that they had before IBANs
_IBAN = re.compile(
    rf"""(?<![\w-]) [A-Z]{{2}}[0-9]{{2}}
         (?: (?:[{_SPACE}-]?[0-9]{{4}}){{2}} [{_SPACE}-]?[0-9]{{2}} [{_SPACE}-]?[0-9]{{10}}
           | (?:[{_SPACE}-]?[A-Z0-9]{{4}}){{2,7}} (?:[{_SPACE}-]?[A-Z0-9]{{1,3}})? ) (?!\w)""",
    re.VERBOSE | re.IGNORECASE,
)
_LAST_GROUP = re.compile(rf"[{_SPACE}./-]+\(?[^{_SPACE}./-]*\Z")

# The groups of Spanish numbers. Nine digits may be anything, 612.345.678 an amount, 91.234.56.78 an IP address: these
# need a word for telephone before them. Numbers of +1 in the national form have groups that no other numbers have.
_PHONE = re.compile(
    rf"""(?<![\w+$€£¥#=-]) (?<![$€£¥#][ ]) (?<!EUR[ ]) (?<!USD[ ]) (?<![0-9][{_SPACE}.,:-]) (?:
      (?P<international> \(?(?: \+[1-9][0-9]{{0,2}} | (?<!/)00(?P<country>[1-9][0-9]{{0,2}})(?=[{_SPACE})-]) )
                         (?: [{_SPACE}.()/-]{{0,2}}[0-9] ){{6,14}} ) (?![0-9])
    | (?: (?P<spanish> [6-9][0-9]{{2}} (?P<a>[{_SPACE}-])[0-9]{{3}} (?P=a)(?!000)[0-9]{{3}}
                     | [6-9][0-9]{{2}} (?P<b>[{_SPACE}-])[0-9]{{2}} (?P=b)[0-9]{{2}} (?P=b)[0-9]{{2}}
                     | [89][0-9] (?P<c>[{_SPACE}-])[0-9]{{3}} (?P=c)[0-9]{{2}} (?P=c)?[0-9]{{2}}
                     | \([89][0-9]{{1,2}}\) (?:[{_SPACE}.-]?[0-9]{{2,3}}){{3}} )
        | (?P<unclear> [6-9][0-9]{{8}} | [6-9][0-9]{{2}}[{_SPACE}][0-9]{{6}}
                     | [6-9][0-9]{{2}}\.[0-9]{{3}}\.[0-9]{{3}} | [6-9][0-9]{{2}}(?:\.[0-9]{{2}}){{3}}
                     | [89][0-9]\.[0-9]{{3}}\.[0-9]{{2}}\.[0-9]{{2}} )
        | (?P<of_plus_1> (?:1[ .-])? (?: \([2-9][0-9]{{2}}\)[ ]?[2-9][0-9]{{2}}[.-]
                                       | [2-9][0-9]{{2}}(?P<d>[.-])[2-9][0-9]{{2}}(?P=d) ) [0-9]{{4}} )
      ) (?!\w) (?![{_SPACE}.,-][0-9]) (?![{_SPACE}]?[%€$£¥])
    )""",
    re.VERBOSE,
)
_COUNTED = re.compile(
    rf"[{_SPACE}](?:eur|euros?|usd|d[oóò]lar\w*|gbp|libras|pesetas|ptas|pesos|habitant\w*)\b", re.IGNORECASE
)
_DECIMAL = re.compile(r"\(?\+[0-9]+\.[0-9]+")
_TELEPHONE = re.compile(
    r"\b(?:tel|tlf|tfno|tfn|m[oó]v|m[oò]bil|phone|mobile|cell|fax|wh?ats?app|wasap|llam|truca|truqu|call\b|contact)|[☎☏📞📱]",
    re.IGNORECASE,
)
_CONTEXT = 40  # characters before a number in which such a word is looked for

# Real Decreto 1553/2005 (DNI), 557/2011 (NIE): eight digits, or X, Y or Z and seven, and a letter that is a check digit
_DNI = re.compile(
    rf"""(?<![\w.,+-]) (?: [0-9]{{8}} | [0-9]{{2}}\.[0-9]{{3}}\.[0-9]{{3}}
                         | [XYZxyz][ -]?(?:[0-9]{{7}} | [0-9]\.[0-9]{{3}}\.[0-9]{{3}}) )
         (?: (?:[{_SPACE}]?[–-][{_SPACE}]?)?[A-Za-z] | [{_SPACE}][A-Z] ) (?![\w-])""",
    re.VERBOSE,
)

_IPV4 = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?!\w|\.[0-9])")
# RFC 4291: public is 2000::/3; its last part may be an IPv4 address
_IPV6 = re.compile(r"[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{1,33}(?:[0-9A-Fa-f]|::)(?!\w|:[\w:]|\.[0-9])")
_WITHIN_IPV4 = re.compile(r"[\w.]\Z")
_WITHIN_IPV6 = re.compile(r"(?:[\w.]|::|[0-9A-Fa-f]{4}:)\Z")
_VERSION = re.compile(r"(?:\b(?:v|ver|versi[oóò]n?|release|build|firmware)[.:]?\s?|[^\W\d_]/)\Z", re.IGNORECASE)
# the numbers of a version or a section: 0.25 % of the addresses are like that
_SMALL = ((32, 32, 32, 32), (10, 100, 100, 100))


@dataclass(frozen=True)
class Redaction:
    """The step that replaces personal data with placeholders."""

    kinds: tuple[str, ...]  # keys of PLACEHOLDERS, in their order there

    def clean(self, text: str, edits: Counter[str]) -> str:
        """Return the text with placeholders, and count them in ``edits`` as ``redacted KIND``."""
        for kind in self.kinds:
            spans = list(_FINDERS[kind](text))
            if not spans:
                continue
            edits[f"redacted {kind}"] += len(spans)
            # the text between the spans, joined by placeholders
            remaining_texts = []
            previous_end = 0
            for start, end in spans:
                remaining_texts.append(text[previous_end:start])
                previous_end = end
            remaining_texts.append(text[previous_end:])
            text = PLACEHOLDERS[kind].join(remaining_texts)
        return text

    def settings(self) -> dict[str, Any]:
        """Return the kinds, and the versions of the rules and of the packages that check numbers."""
        packages = sorted({_PACKAGES[kind] for kind in self.kinds if kind in _PACKAGES})
        versions = {package: version(package) for package in packages}
        return {"kinds": list(self.kinds), "rules": _RULES, "versions": versions}


def open_redaction(kinds: Sequence[str]) -> Redaction:
    """Return the step for ``kinds``, keys of PLACEHOLDERS; InputError if a package that it needs is not installed."""
    kind_by_package = {_PACKAGES[kind]: kind for kind in kinds if kind in _PACKAGES}
    for package, kind in kind_by_package.items():
        load_package(_MODULES[package], f"--redact {kind}")
    return Redaction(tuple(kind for kind in PLACEHOLDERS if kind in kinds))


def _find_emails(text: str) -> Iterator[_Span]:
    """Yield the positions of e-mail addresses: each @ with its domain, and the local part before it."""
    previous_end = 0
    for domain in _DOMAIN.finditer(text):
        at_sign = domain.start()
        # the pattern ends at the @ and is searched in the 64 characters before it, the most that RFC 5321 allows
        local_part = _LOCAL_PART.search(text, max(previous_end, at_sign - 64), at_sign)
        if local_part is None or local_part[0] == _NO_PERSON or _NO_ADDRESS.match(text, at_sign):
            continue
        previous_end = domain.end()
        yield local_part.start(), domain.end()


def _find_ibans(text: str) -> Iterator[_Span]:
    """Yield the positions of account numbers with valid check digits; words in capitals may follow a number."""
    from stdnum import iban

    for match in _IBAN.finditer(text):
        length = _longest_valid_length(match[0], iban.is_valid)
        if length:
            yield match.start(), match.start() + length


def _longest_valid_length(candidate: str, is_valid: Callable[[str], bool]) -> int:
    """Return the length of the longest valid number that ends at a separator, since words may follow the number.

    Returns 0 if no beginning is valid.
    """
    while candidate and not is_valid(candidate):
        last_group = _LAST_GROUP.search(candidate)
        if last_group is None:
            return 0
        candidate = candidate[: last_group.start()]
    return len(candidate)


def _match_near_digits(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of ``pattern``, of up to 64 characters, around seven digits or more.

    Searching only these parts of a text is several times as fast as searching all of it.
    """
    position = 0
    while True:
        digits = _DIGITS.search(text, position)
        if digits is None:
            return
        # a longer sequence of digits is cut, and the next search repeats the end of this one
        is_cut = len(digits[0]) > _MOST_DIGITS
        position = digits.end()
        if is_cut:
            position -= _LONGEST_NUMBER
        for match in pattern.finditer(text, max(0, digits.start() - _AROUND), digits.end() + _AROUND):
            if is_cut and match.end() > position:  # the match may go on after the cut: the next search begins with it
                position = match.start()
                break
            yield match


def _find_phones(text: str) -> Iterator[_Span]:
    """Yield the positions of telephone numbers that libphonenumber recognizes.

    A number that may be anything counts only after a word for telephone. An amount of something never counts.
    """
    for match in _match_near_digits(_PHONE, text):
        start = match.start()
        kind = match.lastgroup  # the alternative of the pattern
        if kind == "unclear" and not _TELEPHONE.search(text, max(0, start - _CONTEXT), start):
            continue
        if kind == "international":
            # the country code of 0034… is known; that of +34… is found by the library
            length = _longest_valid_length(match[0], partial(_is_phone, country=match["country"]))
            if length and not _DECIMAL.fullmatch(match[0]):
                yield start, start + length
            continue
        is_amount = _COUNTED.match(text, match.end()) is not None  # 612 345 678 euros
        region = "US" if kind == "of_plus_1" else "ES"
        if not is_amount and _is_phone(match[0], region):
            yield match.span()


def _is_phone(phone_number: str, region: str = "ES", country: str | None = None) -> bool:
    """Return whether this is a valid number for libphonenumber.

    Args:
        phone_number: the number as written in the text.
        region: the country for numbers in national form.
        country: the country code that the number must have; None allows any.
    """
    import phonenumbers

    phone_number = _SPACES.sub(" ", phone_number)  # the library does not know all of them
    try:
        parsed_number = phonenumbers.parse(phone_number, region)
    except phonenumbers.NumberParseException:
        return False
    if country is not None and country != str(parsed_number.country_code):
        return False
    return bool(phonenumbers.is_valid_number(parsed_number))


def _find_identity_numbers(text: str) -> Iterator[_Span]:
    """Yield the positions of Spanish identity numbers (DNI, NIE) with a valid check letter."""
    from stdnum.es import dni, nie

    for match in _match_near_digits(_DNI, text):
        identity_number = re.sub(r"\W", "", match[0])
        if dni.is_valid(identity_number) or nie.is_valid(identity_number):
            yield match.span()


def _find_ips(text: str) -> Iterator[_Span]:
    """Yield the positions of public IP addresses, except numbers that look like a version or a section."""
    # candidates with the pattern of what precedes them if they are the end of something longer
    candidates = []
    for match in _IPV4.finditer(text):
        if not _is_version(match):
            candidates.append((match, _WITHIN_IPV4))
    for match in _IPV6.finditer(text):
        candidates.append((match, _WITHIN_IPV6))
    candidates.sort(key=lambda candidate: candidate[0].start())
    for match, within in candidates:
        start = match.start()
        continues_longer = within.search(text, max(0, start - 5), start) is not None
        if _is_public(match[0]) and not continues_longer:
            yield match.span()


def _is_version(address: re.Match[str]) -> bool:
    """Return whether four numbers look like a version or a section: 1.2.3.4, v91.0.9.11 or Edge/91.0.1.2."""
    numbers = [int(digits) for digits in address[0].split(".")]
    for limits in _SMALL:
        if all(map(operator.lt, numbers, limits)):
            return True
    start = address.start()
    return _VERSION.search(address.string, max(0, start - _CONTEXT), start) is not None


def _is_public(address: str) -> bool:
    """Return whether an address identifies somebody's connection: it is not private, local, multicast or an example."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return parsed.is_global and not parsed.is_multicast


_FINDERS: dict[str, Callable[[str], Iterator[_Span]]] = {
    "email": _find_emails,
    "iban": _find_ibans,
    "phone": _find_phones,
    "dni": _find_identity_numbers,
    "ip": _find_ips,
}
