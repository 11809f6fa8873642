"""Messages between a run and the processes of its rewards: JSON over a socket, with its length in front.

JSON holds no code, unlike pickle: a process that runs the code of others cannot make the run execute anything.
"""

import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

CALL_ARGUMENTS = ("completions", "prompts")
"""The arguments of a reward that are no columns of the prompts file."""
_LENGTH = struct.Struct("!Q")  # the number of bytes of the JSON that follows
_TRANSFER_SECONDS = 5.0
"""The time for the rest of a message that has begun to arrive: it is sent at once, but a socket buffers little."""
_CHECK_SECONDS = 0.2
"""The time between two checks of whether a wait is interrupted."""
Transferred = TypeVar("Transferred")


@dataclass(frozen=True)
class LoadRequest:
    """The first message to a process: the function to load."""

    file: str
    """The path of the file that defines the function; empty for a built-in reward."""
    source: str
    """The text of the file as it was when the run started, so that a process that is restarted has the same code."""
    function: str
    """The name of the function, or of the built-in reward."""
    settings: dict[str, Any]
    """Values of columns that are the same for all prompts."""
    memory_bytes: int
    """The address space that the process may have."""


@dataclass(frozen=True)
class LoadAnswer:
    """What a process says about the function that it has loaded."""

    failure: str | None
    """Why the function cannot be used; None if it can."""
    required_columns: list[str]
    """The columns that the function names as parameters without a default."""


@dataclass(frozen=True)
class RewardCall:
    """Completions to reward. All lists have the same length."""

    completions: list[str]
    prompts: list[Any]
    """The prompt of each completion, as in its file: a text, or the list of messages of a chat."""
    columns: dict[str, list[Any]]
    """The further columns of the prompts file by name."""

    def of_one_completion(self, index: int) -> "RewardCall":
        """Return the call for a single completion."""
        columns = {name: [values[index]] for name, values in self.columns.items()}
        return RewardCall([self.completions[index]], [self.prompts[index]], columns)


@dataclass(frozen=True)
class CallAnswer:
    """The rewards of a call, or why it has none."""

    failure: str | None
    """Why the call as a whole failed; None if ``values`` and ``errors`` have an entry for each completion."""
    values: list[float]
    """The reward of each completion, finite; 0 if it has an error."""
    errors: list[str | None]
    """Why a completion has no reward; None if it has one."""


Message = LoadRequest | LoadAnswer | RewardCall | CallAnswer


class RewardInterruptedError(Exception):
    """A wait for the process of a reward was interrupted; the process may be in the middle of a message."""


def never() -> bool:
    """Interrupt no wait."""
    return False


class MessageChannel:
    """Sends and receives messages; both ends take turns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Message, deadline: float | None = None, is_interrupted: Callable[[], bool] = never) -> None:
        """Send a message.

        Args:
            message: The message. A value in it that JSON does not have, such as a date, is sent as its text.
            deadline: The time of ``time.monotonic`` until which the other end must have read it; None waits forever.
            is_interrupted: See :meth:`receive`.

        Raises:
            TimeoutError: The other end did not read it in time.
            ConnectionError: The other end was closed.
            RewardInterruptedError: ``is_interrupted`` returned True.
        """
        content = json.dumps(vars(message), default=str).encode("ascii")
        unsent = memoryview(_LENGTH.pack(len(content)) + content)
        while len(unsent) > 0:
            num_sent = self._when_ready(partial(self._connection.send, unsent), deadline, is_interrupted)
            unsent = unsent[num_sent:]

    def receive(
        self,
        max_bytes: int | None = None,
        deadline: float | None = None,
        is_interrupted: Callable[[], bool] = never,
    ) -> bytes:
        """Return the JSON of the next message.

        Args:
            max_bytes: The largest message to accept; None accepts any.
            deadline: The time of ``time.monotonic`` until which to wait for the message; None waits forever. A message
                that has arrived is returned even if the deadline has passed.
            is_interrupted: Called several times a second during a wait with a deadline; True ends the wait.

        Raises:
            TimeoutError: The message had not arrived at the deadline.
            ConnectionError: The other end was closed, or sent something else than a message.
            RewardInterruptedError: ``is_interrupted`` returned True.
        """
        (num_bytes,) = _LENGTH.unpack(self._receive_bytes(_LENGTH.size, deadline, is_interrupted))
        if deadline is not None:
            deadline = max(deadline, time.monotonic() + _TRANSFER_SECONDS)
        if max_bytes is not None and num_bytes > max_bytes:
            raise ConnectionError(f"a message of {num_bytes} bytes")
        return self._receive_bytes(num_bytes, deadline, is_interrupted)

    def _receive_bytes(self, num_bytes: int, deadline: float | None, is_interrupted: Callable[[], bool]) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            max_bytes = min(num_bytes - len(content), 1 << 20)
            received = self._when_ready(partial(self._connection.recv, max_bytes), deadline, is_interrupted)
            if not received:
                raise ConnectionError("the other end was closed")
            content += received
        return bytes(content)

    def _when_ready(
        self, transfer: Callable[[], Transferred], deadline: float | None, is_interrupted: Callable[[], bool]
    ) -> Transferred:
        """Send or receive some bytes as soon as the socket is ready for it, see :meth:`receive`."""
        if deadline is None:
            self._connection.settimeout(None)
            return transfer()
        while True:
            # a wait that ends without the socket being ready has transferred nothing, so it can be repeated
            seconds_left = max(deadline - time.monotonic(), 0)
            self._connection.settimeout(min(seconds_left, _CHECK_SECONDS))
            try:
                return transfer()
            except (TimeoutError, BlockingIOError):  # the latter if no time was left
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
            if is_interrupted():
                raise RewardInterruptedError

    def close(self) -> None:
        self._connection.close()
