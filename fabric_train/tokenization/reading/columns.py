"""Check the columns of a table, and take a document's text from a row."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.documents import BadRowError

Row = Mapping[str, Any]


def name_in(column: str, names: Container[str]) -> str:
    """Return the name of ``column`` in a table with these ``names``: NAME for NAME:SEPARATOR, unless that is a name."""
    return column if column in names else column.partition(":")[0]


def check_not_repeated(place: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Check that none of ``columns`` comes twice among the ``names`` of a table.

    Raises:
        InputError: one does, so that it is not known which one is meant.
    """
    for name in (name_in(column, names) for column in columns):
        if (count := names.count(name)) > 1:
            raise InputError(f"{place}: {count} columns are called {name!r}; rename all but one of them")


def check_text_columns(place: str, schema: Any, columns: list[str]) -> None:
    """Check that ``columns`` of a pyarrow schema hold text or nested values.

    Raises:
        InputError: a column holds something else, such as numbers.
    """
    from pyarrow import types

    for name in columns:
        kind = schema.field(name).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        if not (is_text or types.is_nested(kind) or types.is_null(kind)):
            raise InputError(f"{place}: {_not_text(name, kind)}")


def text_of(row: Row, column: str, place: Callable[[], str]) -> tuple[str, bytes]:
    """Return the text in ``column`` and the same in UTF-8; both are empty if there is none.

    A list of strings is joined if ``column`` is NAME:SEPARATOR, where a backslash with n or t is a line break or a tab.

    Raises:
        BadRowError: the column is missing, or holds something that is not text; ``place`` names the row.
    """
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
