"""Find out what the rows of a source hold, text or chats, and how they are encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.chats.chat_format import columns, detect_format, unexpected_format
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.reading.columns import missing_column, name_in
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.tokenizers.chat_template_file import set_chat_template

if TYPE_CHECKING:
    from arguments import TokenizeArguments
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder


@dataclass(frozen=True)
class SourceFormat:
    """How to encode a source's rows of a ``kind``: ``chat`` encodes chats; if it is None, ``columns[0]`` holds text."""

    kind: str
    columns: tuple[str, ...]
    chat: "ChatEncoder | None"


def find_kinds(sources: Sequence[Source], arguments: "TokenizeArguments") -> list[str]:
    """Return each source's data format, found from its first row.

    Raises:
        InputError: one line for each source whose first row is bad or neither text nor a chat.
    """
    kinds: list[str] = []
    faults: list[str] = []
    for source in sources:
        try:
            given, skips = arguments.data_format, arguments.on_bad_rows == "skip"
            kinds.append(find_kind(source, arguments.text_column, skips) if given == "auto" else given)
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    return kinds


def find_kind(source: Source, text_column: str, skips_bad_rows: bool) -> str:
    """Return the data format of a source's first row: text if it has that column, else that of a chat or instruction.

    Raises:
        InputError: it has none of them, or the row is bad and bad rows are not skipped.
    """
    looked_for = (text_column, *columns("auto"))
    for part in source.parts(1 << 20):
        reader = source.reader(part, looked_for)
        for number, row in reader:
            if isinstance(row, BadRowError):
                if not skips_bad_rows:
                    raise row.fault()
                continue
            if name_in(text_column, row) in row:
                return "text"
            kind = detect_format(row)
            if kind is None:
                no_text = str(missing_column(reader.place(number), text_column, row))
                raise InputError(unexpected_format(row, "auto", f"{no_text}; and no chat or instruction"))
            return kind
    return "text"


def open_formats(
    kinds: Sequence[str], tokenizer_folder: Path, arguments: "TokenizeArguments", by_parts: bool = True
) -> list[SourceFormat]:
    """Return how to encode the sources of these kinds.

    If there are chats, their template becomes that of ``tokenizer_folder``.

    Args:
        kinds: from ``find_kinds``.
        tokenizer_folder: holds ``tokenizer.json``.
        arguments: the command line of ``tokenize_dataset.py``, with the packing.
        by_parts: see ``ChatEncoder``.

    Raises:
        InputError: the chat template cannot be used.
    """
    formats = {"text": SourceFormat("text", (arguments.text_column,), None)}
    longest = None if arguments.packing == "concat" else arguments.max_length
    for kind in sorted(set(kinds) - {"text"}):
        from fabric_train.tokenization.chats.chat_encoder import ChatEncoder  # slow to import, and texts do not need it

        encoder = ChatEncoder(
            tokenizer_folder,
            kind,
            arguments.train_on,
            arguments.too_long,
            longest,
            by_parts=by_parts,
            is_chosen=arguments.chat_template is not None,
        )
        formats[kind] = SourceFormat(kind, columns(kind), encoder)
        set_chat_template(tokenizer_folder, encoder.chat_template)
    return [formats[kind] for kind in kinds]
