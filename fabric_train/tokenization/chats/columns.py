"""Read the columns that a row with a chat may have in any format, and keep track of the columns that are used."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fabric_train.reading.documents import Message, excerpt, is_empty
from fabric_train.tokenization.chats.turns import TurnReader, is_spoken_by

SYSTEM = ("system", "system_prompt")
"""The columns with the text of a system turn."""
DESIRABLE = ("label", "kto_tag")
"""The columns with labels of unpaired answers (KTO): true if the answer is desirable, false if it is one to avoid."""
OF_EVERY_FORMAT = (*SYSTEM, "tools", "functions", "chat_template_kwargs", *DESIRABLE, "train_on_input", "mask")
"""The columns that a row of any format may have."""
# arguments of transformers' function that renders a template
_NOT_VARIABLES = frozenset(
    [
        *("conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "return_assistant_tokens_mask"),
    ]
)


class RowColumns(Mapping[str, Any]):
    """A row that remembers which of its columns have been read.

    Checking whether the row has a column (``in``) does not count as reading.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row
        self._used: set[str] = set()
        self._keys_left: set[str] = set()

    def __getitem__(self, column: str) -> Any:
        self._used.add(column)
        return self.row[column]

    def __contains__(self, column: object) -> bool:
        return column in self.row

    def __iter__(self) -> Iterator[str]:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)

    def leave(self, key: str) -> None:
        """Record that a key of a turn, or a column that was read, is not used."""
        self._keys_left.add(key)

    @property
    def unused(self) -> frozenset[str]:
        """The columns that are not empty and were not read, and the keys that are not used."""
        unused_columns: set[str] = set()
        for column, value in self.row.items():
            if column not in self._used and not is_empty(value):
                unused_columns.add(column)
        return frozenset(unused_columns | self._keys_left)


def read_system(columns: RowColumns) -> Message | None:
    """Return the system turn from the first column that has its text; None if there is none."""
    for column in SYSTEM:
        text = columns.get(column)
        if text is None or text == "":
            continue
        if not isinstance(text, str):
            raise TypeError(f"{column} must be text")
        return {"role": "system", "content": text}
    return None


def begin_with_system(columns: RowColumns, messages: list[Message]) -> list[Message]:
    """Return the messages after the system turn from the row's column, which may repeat the first message."""
    system = read_system(columns)
    if system is None or messages[:1] == [system]:
        return messages
    if messages and messages[0]["role"] == "system":
        raise ValueError("the column system differs from the system message")
    return [system, *messages]


def read_instruction(columns: RowColumns) -> str:
    """Return an instruction and its input as one text; TypeError if they are not text."""
    instruction = columns["instruction"]
    instruction_input = columns.get("input")
    if not instruction_input and columns.row.get("context"):  # Dolly's name for it
        instruction_input = columns["context"]
    if not isinstance(instruction, str) or not isinstance(instruction_input, str | None):
        raise TypeError("instruction and input must be text")
    return f"{instruction}\n\n{instruction_input}" if instruction_input else instruction


def read_history(columns: RowColumns, turns: TurnReader) -> list[Message]:
    """Return the turns before an instruction: a list of [question, answer], or of messages."""
    history = parsed(columns.get("history"), "history")
    if not history:
        return []
    if not isinstance(history, list):
        raise TypeError("history must be a list of [question, answer], or of messages")
    if all(isinstance(turn, Mapping) for turn in history):
        return turns.read(history)
    messages: list[Message] = []
    for exchange in history:
        is_exchange = isinstance(exchange, list | tuple) and len(exchange) == 2
        if not is_exchange or not all(isinstance(text, str) for text in exchange):
            raise TypeError("history must be a list of [question, answer], or of messages")
        question, answer = exchange
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def read_tools(columns: RowColumns) -> list[Any] | None:
    """Return the JSON schemas of the tools of a row, which may be JSON text; None if it has none."""
    tools = parsed(columns.get("tools"), "tools")
    functions = None if tools else parsed(columns.get("functions"), "functions")
    for schemas in (tools, functions):
        if schemas and not (isinstance(schemas, list) and all(isinstance(schema, dict) for schema in schemas)):
            raise TypeError("tools must be a list of JSON schemas")
    if functions:  # as the OpenAI API had them before there were other tools
        return [{"type": "function", "function": schema} for schema in functions]
    return tools or None


def read_template_variables(columns: RowColumns) -> dict[str, Any]:
    """Return the variables for the chat template in ``chat_template_kwargs``, such as enable_thinking."""
    variables = parsed(columns.get("chat_template_kwargs"), "chat_template_kwargs")
    if not variables:
        return {}
    if not isinstance(variables, dict):
        raise TypeError("chat_template_kwargs must be an object")
    for name in variables:
        if name in _NOT_VARIABLES or not name.isidentifier():
            raise ValueError(f"chat_template_kwargs has {name!r}, which is not a template variable")
    return variables


def find_label(row: Mapping[str, Any]) -> bool | None:
    """Return whether a row's label says that its answer is desirable; None if it has no label."""
    for column in DESIRABLE:
        value = row.get(column)
        if isinstance(value, str) and value.lower() in ("true", "false"):  # of a csv file
            return value.lower() == "true"
        if isinstance(value, bool):
            return value
    return None


def check_label(columns: RowColumns) -> None:
    """Raise a ValueError if a row has no label, or one that is neither true nor false."""
    if find_label(columns.row) is not None:
        return
    for column in DESIRABLE:
        value = columns.row.get(column)
        if value is not None:
            raise ValueError(f"{column} is {excerpt(value)}, but must be true or false")
    raise ValueError("label is missing; it is true for a desirable answer and false for one to avoid")


def read_is_undesirable(columns: RowColumns) -> bool:
    """Return whether a row has a label, like unpaired answers, that says that its answer is one to avoid."""
    for column in DESIRABLE:
        if column not in columns:
            continue
        value = columns[column]
        is_label = find_label({column: value}) is not None
        if not is_label and not is_empty(value):  # another label, such as the class of a text
            columns.leave(column)
    return find_label(columns.row) is False


def check_what_is_trained(columns: RowColumns) -> None:
    """Raise a ValueError if a row asks for the loss on its prompt, or on turns other than the assistant's."""
    value = columns.get("train_on_input")
    if value:
        columns.leave("train_on_input")  # --train_on all does what it asks for
    masked_speaker = columns.get("mask")  # NeMo's column: the speaker whose turns are not trained
    if masked_speaker is None or masked_speaker == "":
        return
    if not isinstance(masked_speaker, str):
        columns.leave("mask")
    elif not is_spoken_by("user", masked_speaker):
        raise ValueError(
            f"mask {masked_speaker!r} excludes turns other than the user's, but only the assistant's turns are trained"
        )


def parsed(value: Any, column: str) -> Any:
    """Return a value, read from JSON if it is text; None for text without content."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{column} is not JSON: {error}") from None
