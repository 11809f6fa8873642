"""A document as it is read, encoded or left out: the text of a row, checks of columns, and the error for a bad row."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_train.cli.errors import InputError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class EncodedDocument:
    """A document or a chat as tokens, BOS and EOS included."""

    input_ids: np.ndarray  # int32 [number of tokens]
    supervised: np.ndarray | None  # bool [number of tokens], whether the token is a target; None if all are
    num_characters: int  # code points of the encoded text; of a chat, of the content of its messages
    num_bytes: int  # UTF-8 bytes of the same
    num_tokens_cut: int = 0  # tokens of the turns that were removed because they did not fit into a row
    turn_ends: frozenset[int] = frozenset()  # the ids of the control tokens with which supervised turns of a chat end


@dataclass(frozen=True)
class LeftOut:
    """A document that is left out: the ledger's reason, and its tokens if it did not fit into a row."""

    reason: str
    num_tokens_cut: int = 0


def utf8_length(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8; half of a surrogate pair has three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class BadRowError(ValueError):
    """A row that cannot be used. The message names the fault and, once a reader has added it, the place."""

    def fault(self) -> InputError:
        """Return the error that ends the run with ``--on_bad_rows fail``."""
        return InputError(f"{self}; --on_bad_rows skip leaves such rows out")


def name_in(column: str, names: Container[str]) -> str:
    """Return the name of ``column`` in a table with these ``names``: NAME for NAME:SEPARATOR, unless that is a name."""
    return column if column in names else column.partition(":")[0]


def check_not_repeated(place: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raise an InputError if one of ``columns`` comes twice among the ``names`` of a table."""
    for name in (name_in(column, names) for column in columns):
        if (count := names.count(name)) > 1:
            raise InputError(f"{place}: {count} columns are called {name!r}; rename all but one of them")


def check_text_columns(place: str, schema: Any, columns: list[str]) -> None:
    """Raise an InputError if a column of a pyarrow schema holds neither text nor nested values."""
    from pyarrow import types

    for name in columns:
        kind = schema.field(name).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        if not (is_text or types.is_nested(kind) or types.is_null(kind)):
            raise InputError(f"{place}: {_not_text(name, kind)}")


def text_of(row: "Row | BadRowError", column: str, place: Callable[[], str]) -> tuple[str, bytes]:
    """Return the text in ``column`` and the same in UTF-8; both are empty if there is none.

    A list of strings is joined if ``column`` is NAME:SEPARATOR, where a backslash with n or t is a line break or a tab.
    BadRowError if the column is missing, or holds something that is not text; ``place`` names the row.
    """
    if isinstance(row, BadRowError):
        raise row
    name = name_in(column, row)
    text = row.get(name)
    if text is None:
        if name in row:
            return "", b""
        raise BadRowError(str(missing_column(place(), column, row)))
    if isinstance(text, list) and all(isinstance(one, str) for one in text):
        if name == column:
            raise BadRowError(
                f"{place()}: column {name!r} holds a list of texts; --text_column '{name}: ' joins them with a space, "
                f"'{name}:\\n' with line breaks"
            )
        text = column[len(name) + 1 :].replace("\\n", "\n").replace("\\t", "\t").join(text)
    if not isinstance(text, str):
        raise BadRowError(f"{place()}: {_not_text(name, type(text).__name__)}")
    try:
        return text, text.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"{place()}: column {name!r} holds half a surrogate pair at character {error.start}, which is not text"
        ) from None


def _not_text(column: str, kind: object) -> str:
    return f"column {column!r} holds {kind}, not text; choose another with --text_column"


def missing_column(place: str, column: str, columns: Any) -> InputError:
    """Return the error for a missing column, which lists the columns there are."""
    names = ", ".join(map(str, columns)) or "none"
    return InputError(f"{place}: no column {column!r}; there are: {names}; choose one with --text_column")
