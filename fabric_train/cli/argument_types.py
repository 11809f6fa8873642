"""Types of arguments, and the conversion of values from the command line or YAML to them; what programs share."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_NULL = ("null", "None")
POSITIONAL = {"positional": True}
"""Metadata of the one field of a dataclass that may be given on the command line without its name."""
GivenShares = Sequence[float] | Sequence[str] | Sequence[dict[str, Any]]
"""Numbers, one for each folder; or names with numbers, as NAME=NUMBER or as mappings."""
_BRANCH = r"refs/pr/[1-9][0-9]{0,8}|(?!refs/)(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*"
REPOSITORY = r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+"
"""Pattern of a name on the Hugging Face hub, OWNER/NAME."""

_ISO_639_1 = """
aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki
kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no
nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te
tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class NumberRange:
    """The range of a number argument; ``words`` say what a number in it looks like."""

    words: str
    lowest: float
    highest: float
    excludes_lowest: bool = False
    thousand: int | None = None  # what k after the number stands for, in lengths 1024; m and b are its square and cube

    def check(self, number: float) -> None:
        """Raise a WrongValueError if a number is not in the range."""
        is_too_low = number <= self.lowest if self.excludes_lowest else number < self.lowest
        if is_too_low or not math.isfinite(number) or number > self.highest == 1:  # a limit of 1 is in the words
            raise WrongValueError(self.words)
        if number > self.highest:
            raise WrongValueError(f"at most {int(self.highest):,}")


@dataclass(frozen=True, eq=False)
class NameIn:
    """A text that is one of the ``names``, such as those of a table of ``cli.tables``, which may get more.

    ``fixed_names`` are those that stand before the table's, such as auto.
    """

    table: Collection[str]
    fixed_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that there are now."""
        return (*self.fixed_names, *self.table)

    @property
    def words(self) -> str:
        """What a value looks like."""
        if not self.names:
            return "a name that --extensions adds"
        return f"one of {', '.join(self.names)} (--extensions adds names)"


PositiveInt = Annotated[int, NumberRange("a whole number above 0", 1, _INT32)]
NonNegativeInt = Annotated[int, NumberRange("a whole number, 0 or more", 0, _INT32)]
PositiveInt64 = Annotated[int, NumberRange("a whole number above 0", 1, _INT64)]
NonNegativeInt64 = Annotated[int, NumberRange("a whole number, 0 or more", 0, _INT64)]
NumProcesses = Annotated[int, NumberRange("a whole number above 0", 1, 1024)]
NumLayers = Annotated[int, NumberRange("a whole number above 0", 1, 1000)]
LayerSize = Annotated[int, NumberRange("a whole number above 0", 1, 2**24)]
"""A model's width, heads or vocabulary; the bytes of a matrix with two such sides fit into int64."""
NumWorkers = Annotated[int, NumberRange("a whole number, 0 or more", 0, 1024)]
RowLength = Annotated[int, NumberRange("a whole number above 0, such as 8192 or 8k", 1, 2**24, thousand=1024)]
"""Tokens of a row or a text; 2**24 is ten times the longest context of any model."""
Overlap = Annotated[int, NumberRange("a whole number, 0 or more", 0, 2**24, thousand=1024)]
TokenCount = Annotated[int, NumberRange("a whole number above 0, such as 200k, 5m or 1.5b", 1, _INT64, thousand=1000)]
"""Tokens of a corpus, which are counted in thousands, millions and billions."""
PositiveFloat = Annotated[float, NumberRange("a number above 0", 0, 1e9, excludes_lowest=True)]
NonNegativeFloat = Annotated[float, NumberRange("a number, 0 or more", 0, 1e9)]
UnitInterval = Annotated[float, NumberRange("a number from 0 to 1", 0, 1)]
PositiveShare = Annotated[float, NumberRange("a number above 0 and at most 1", 0, 1, excludes_lowest=True)]
Seconds = Annotated[float, NumberRange("a number, 0 or more", 0, 1e8)]
"""A timeout of at most three years; torch and the system can count the nanoseconds of ten times as much."""


class WrongValueError(ValueError):
    """A value that is not of an argument's type; the message names the expected type."""


def convert(kind: Any, value: Any) -> Any:
    """Convert what YAML gave, or text of the command line, which is read like a plain scalar of YAML.

    ``kind`` is str, bool, int, a type of this module, a Literal, a list or dict of these, or a union with None. A
    WrongValueError if the value is not of that type, or beyond its limits.
    """
    if get_origin(kind) in (Union, UnionType):
        return _convert_to_union(get_args(kind), value)
    if get_origin(kind) is Annotated:
        base, limits = get_args(kind)
        if isinstance(limits, NameIn):
            if not isinstance(value, str) or value not in limits.names:
                raise WrongValueError(limits.words)
            return value
        return _convert_to_number(base, limits, value)
    if get_origin(kind) is list:
        return _convert_to_list(kind, value)
    if get_origin(kind) is dict:
        value = _read(yaml_core.load, value, describe(kind)) if isinstance(value, str) else value
        is_right = isinstance(value, dict) and _is_plain(value)
    elif get_origin(kind) is Literal:
        is_right = isinstance(value, str) and value in get_args(kind)
    elif kind is str:
        is_right = isinstance(value, str) and _is_text(value)
    else:
        value = _read(yaml_core.plain_scalar, value, describe(kind)) if isinstance(value, str) else value
        is_right = type(value) is kind  # True is an int, but not a number that somebody wrote
    if not is_right:
        raise WrongValueError(describe(kind))
    return value


def describe(kind: Any) -> str:
    """Return in words what a value of this type looks like."""
    if get_origin(kind) is Literal:
        return ("one of " if len(get_args(kind)) > 1 else "") + ", ".join(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        words = [describe(part) for part in get_args(kind) if part is not type(None)]
        return " or ".join(words) + (" or null" if type(None) in get_args(kind) else "")
    if get_origin(kind) is Annotated:
        limits: NumberRange | NameIn = get_args(kind)[1]
        return limits.words
    if get_origin(kind) is list:
        return f"a list, each {describe(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "names with values, such as {name: 1}"
    return {str: "text", bool: "true or false", int: "a whole number"}[kind]


def takes_dict(kind: Any) -> bool:
    """Whether values of this type may be mappings, also in lists of them."""
    return get_origin(kind) is dict or any(takes_dict(choice) for choice in get_args(kind))


def takes_list(kind: Any) -> bool:
    """Whether values of this type are lists, or lists or None."""
    return get_origin(kind) is list or any(get_origin(choice) is list for choice in get_args(kind))


def _convert_to_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if type(None) in kinds and (value is None or (isinstance(value, str) and value in _NULL)):
        return None
    faults = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return convert(kind, value)
            except WrongValueError as error:
                faults.append(str(error))
    raise WrongValueError(" or ".join(faults) + (" or null" if type(None) in kinds else ""))


def _convert_to_number(base: Any, range_: NumberRange, value: Any) -> Any:
    if isinstance(value, str):
        in_units = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?([kmb])", value, re.I) if range_.thousand else None
        if in_units and range_.thousand:
            whole = in_units[1]
            decimals = in_units[2] or ""
            unit = in_units[3].lower()
            factor = range_.thousand ** ("kmb".index(unit) + 1)
            value, rest = divmod(int(whole + decimals) * factor, 10 ** len(decimals))
            if rest:
                raise WrongValueError(range_.words)
        else:
            value = _read(yaml_core.plain_scalar, value, range_.words)
    if type(value) is not base and not (base is float and type(value) is int):
        raise WrongValueError(range_.words)
    range_.check(value)
    return base(value)


def _convert_to_list(kind: Any, value: Any) -> list[Any]:
    if isinstance(value, str):  # without brackets it is the only element
        is_bracketed = value.startswith("[") and value.endswith("]")
        value = _read(yaml_core.load, value, describe(kind)) if is_bracketed else [value]
    if not isinstance(value, list):
        raise WrongValueError(describe(kind))
    try:
        return [convert(get_args(kind)[0], item) for item in value]
    except WrongValueError as error:
        raise WrongValueError(f"a list, each {error}") from None


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value that YAML gave."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_text(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return not value or _is_text(value)
    if value is None or type(value) is bool:
        return True
    if type(value) not in (int, float):
        return False
    return bool(math.isfinite(value) and abs(value) <= (_INT64 if type(value) is int else math.inf))


def _is_text(value: str) -> bool:
    """Whether a text can be printed, written to a file and used as a name: not empty, UTF-8 and without zero bytes."""
    return bool(value) and "\0" not in value and not re.search("[\ud800-\udfff]", value)


def _read(reader: Callable[[str], Any], text: str, expected: str) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        raise WrongValueError(expected) from error


def groups_of(arguments: type) -> dict[str, type]:
    """Return the groups of a program's arguments by field name; a single group has an empty name."""
    hints = get_type_hints(arguments)
    return hints if all(dataclasses.is_dataclass(kind) for kind in hints.values()) else {"": arguments}


def types_of(arguments: type) -> dict[str, Any]:
    """Return the types of all arguments by name, number ranges included."""
    return {
        name: kind
        for group in groups_of(arguments).values()
        for name, kind in get_type_hints(group, include_extras=True).items()
    }


def shown_name(name: str) -> str:
    """Return an argument's name as users write it: one that is a keyword of Python ends in _ in its dataclass."""
    return name.rstrip("_")


def positional_of(arguments: type) -> str | None:
    """Return the argument that may be given without its name."""
    fields = [field for group in groups_of(arguments).values() for field in dataclasses.fields(group)]
    return next((field.name for field in fields if field.metadata.get("positional")), None)


def is_required(field: dataclasses.Field) -> bool:
    """Whether an argument has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of an argument that has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def title_of(group: type) -> str:
    """Return the first line of a group's docstring."""
    return (group.__doc__ or group.__name__).strip().splitlines()[0]


@dataclass(frozen=True)
class Shares:
    """How much an epoch takes of token datasets and sources; ``option`` is where it is given, for messages."""

    option: str
    given: GivenShares | None
    """None takes all rows once."""
    of_tokens: bool = False
    """Whether they are shares of the tokens, see ``rows_of_token_shares``, and not of rows."""

    def by_name(self) -> dict[str, float] | None:
        """Return the shares by name; None if they are numbers alone."""
        if self.given is None or not any(isinstance(one, str | dict) for one in self.given):
            return None
        named: dict[str, float] = {}
        for name, share in named_numbers(self.given):
            if share is None or not name:
                raise InputError(
                    f"{self.option}: expected numbers above 0, one for each folder, or NAME=NUMBER such as "
                    f"data/va=0.5; got {list(self.given)}"
                )
            if name in named:
                raise InputError(f"{self.option}: {name} is given twice")
            named[name] = share
        return named


def named_numbers(given: Sequence[Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the names and numbers of texts NAME=NUMBER and of dicts; None if it is no number from 0 to 1e9."""
    for one in given:
        for name, number in one.items() if isinstance(one, dict) else [str(one).rpartition("=")[::2]]:
            yield name, _number(number)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number <= 1e9 and math.isfinite(number) and not isinstance(value, bool) else None


def split_name(name: str, folders: Sequence[str], option: str) -> tuple[int, str | None]:
    """Return the number of the folder that FOLDER or FOLDER:SOURCE of ``--shares`` means, and the source."""
    paths = [os.path.normpath(folder) for folder in folders]
    if os.path.normpath(name) in paths:
        return paths.index(os.path.normpath(name)), None
    heads = [name[:place] for place, sign in enumerate(name) if sign == ":"]
    for head in reversed(heads):
        if os.path.normpath(head) in paths:
            return paths.index(os.path.normpath(head)), name[len(head) + 1 :]
    raise InputError(f"{option}: {name} is neither a folder of --train_data_dir nor FOLDER:SOURCE of one")


def parse_size(text: str) -> int | None:
    """Return the number of bytes of 80GB (1e9 each), 80GiB (2**30 each) or 25GB/s; None if ``text`` is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B(?:/s)?", text.strip())
    num_bytes = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    return round(num_bytes) if 1 <= num_bytes < 2**63 else None


def show_size(num_bytes: float) -> str:
    """Return bytes as GB, or as MB below one GB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def nearest_name(name: str, known: Collection[str]) -> str:
    """Return a hint at the known name that is most like ``name``, empty if none is."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 step or 2,000 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class PushArguments:
    """Card and publication on the Hugging Face hub"""

    push_to_hub: str | None = None
    """Push the finished folder to the repository OWNER/NAME. A folder that is finished already is only pushed."""
    private: bool = True
    """Make a repository that the push creates private."""
    revision: str | None = None
    """Branch to push to, created if it is missing; refs/pr/N is an open pull request. Default: main."""
    create_pr: bool = False
    """Open a pull request instead of changing main."""
    commit_message: str | None = None
    """Message of the commit, and title of the pull request."""
    license: str | None = None
    """For the card: the licence's identifier on the hub, such as apache-2.0; default of a model: its base model's."""

    def faults(self) -> list[str]:
        """Return names that the hub refuses, and options of a push without one."""
        faults = []
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            faults.append(f"--license: expected an identifier of the hub such as apache-2.0, got {self.license!r}")
        if self.license == "other":
            faults.append("--license other needs a name and a text: leave it out, to take the base model's")
        if self.push_to_hub is not None and not re.fullmatch(REPOSITORY, self.push_to_hub):
            faults.append(f"--push_to_hub: expected OWNER/NAME, got {self.push_to_hub!r}")
        if self.revision is not None and not re.fullmatch(_BRANCH, self.revision):
            faults.append(f"--revision: expected a branch such as step-500, or refs/pr/N, got {self.revision!r}")
        if self.create_pr and self.revision is not None:
            faults.append("--create_pr true opens a pull request for main: leave out --revision")
        if self.push_to_hub is None:
            given = {"revision": self.revision, "create_pr": self.create_pr, "commit_message": self.commit_message}
            faults += [f"--{name} needs --push_to_hub OWNER/NAME" for name, value in given.items() if value]
        return faults


def not_language_codes(option: str, codes: Sequence[str] | None) -> list[str]:
    """Return a fault for each code that is not of ISO 639-1, of three letters, or a special value of the hub."""
    known = {*_ISO_639_1.split(), "code", "multilingual"}
    return [
        f"{option}: expected ISO 639 codes such as en, es or ca, got {code!r}"
        for code in codes or ()
        if code not in known and not re.fullmatch(r"[a-z]{3}", code)
    ]


def given_twice(folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each folder that is given again, also by another path, with the fault; a folder given thrice, twice."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in folders]
    for number, name in enumerate(folders):
        first = folders[paths.index(paths[number])]
        if paths.index(paths[number]) < number:
            yield first, f"{first} is given twice{'' if name == first else f', also as {name}'}; give it once"


def range_of_steps(text: str) -> tuple[int, int] | None:
    """Return first and last step of a text such as 10:12, None if it is no such text."""
    found = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", text)
    steps = (int(found[1]), int(found[2])) if found else None
    return steps if steps and steps[0] <= steps[1] else None


HIGHER_IS_BETTER = ("accuracy", "margin", "reward_chosen")
"""Figures of ``--best_by`` that are better if they are higher. Who reads a checkpoint has no objective to ask."""


def planned_steps(
    max_step: int | None, number_epochs: int | None, rows: tuple[int, int] | None, after_step: int = 0
) -> float:
    """Return the steps that ``--max_step`` and ``--number_epochs`` plan; infinite if neither limits them.

    ``rows`` are the rows of an epoch and of a step; None if epochs do not count, as for a stream and with phases. The
    first epoch begins after ``after_step``.
    """
    steps = [math.inf if max_step is None else max_step]
    if number_epochs is not None and rows is not None:
        steps.append(after_step + math.ceil(rows[0] / rows[1]) * number_epochs)
    return min(steps)
