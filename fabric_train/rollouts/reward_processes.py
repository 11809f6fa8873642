"""Call a reward in a process of its own, with limits of time and memory.

The process is a new Python (``reward_worker.py``), not a fork of the run. It lives as long as the run, so the function
keeps its global variables between calls; it is killed and started again when a call takes too long, or when it dies.
What the function prints is discarded. Environment variables whose names say that they are secret are not passed on.

This is no sandbox: see ``reward_worker.py``.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from fabric_train.cli.commands import project_first
from fabric_train.cli.errors import describe_os_error
from fabric_train.cli.output import escape_controls, is_secret_variable
from fabric_train.files.typed_json import parse_json
from fabric_train.rollouts.reward_messages import (
    CallAnswer,
    LoadAnswer,
    LoadRequest,
    MessageChannel,
    RewardCall,
    RewardInterruptedError,
    never,
)

_MAX_CHARACTERS = 400
"""The length of an error, for a table and one line of a log."""
_MAX_ANSWER_BYTES = 1 << 20
_MAX_ANSWER_BYTES_PER_COMPLETION = 1 << 13  # a value, and an error of 300 characters
_EXIT_SECONDS = 5  # for a process that has closed its socket to end
_START_SECONDS = 120  # for a process to start and to import what its file imports
Answer = TypeVar("Answer", LoadAnswer, CallAnswer)


@dataclass(frozen=True)
class RewardLimits:
    """What a reward may use."""

    call_seconds: float = 10.0
    """The time of a call with all completions of a step."""
    retry_seconds: float = 40.0
    """The time of all calls with one completion together, after a call with all completions has failed."""
    memory_bytes: int = 4_000_000_000
    """The address space of the process."""


class RewardFailedError(Exception):
    """A reward gave no answer; the message says why."""


class RewardProcess:
    """The process of one reward."""

    def __init__(self, request: LoadRequest, limits: RewardLimits) -> None:
        self._request = request
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: MessageChannel | None = None
        self._deadline = 0.0
        self._is_interrupted: Callable[[], bool] = never
        self._call_seconds = 0.0
        self._num_completions = 0
        self._send_failure: RewardFailedError | None = None

    def start(self) -> None:
        """Start the process; it loads its function meanwhile, see :meth:`wait_until_loaded`."""
        run_end, process_end = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not is_secret_variable(name)}
        environment["OMP_NUM_THREADS"] = "1"  # a rank may have several processes
        environment["PYTHONHASHSEED"] = "0"  # so that a set has the same order in each run
        with process_end:
            descriptor = process_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fabric_train.rollouts.reward_worker", str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                env={**environment, **project_first()},
                start_new_session=True,  # Ctrl-C reaches only the run; what the function starts is killed with it
            )
        self._channel = MessageChannel(run_end)
        self._deadline = time.monotonic() + _START_SECONDS

    def wait_until_loaded(self) -> LoadAnswer:
        """Send the request, and return what the process says about its function.

        Raises:
            RewardFailedError: The process died, or did not answer in time. It is killed.
        """
        channel = self._connected_channel()
        try:
            channel.send(self._request, self._deadline, self._is_interrupted)
            answer = self._receive(LoadAnswer, _MAX_ANSWER_BYTES)
        except TimeoutError:
            self.kill()
            raise RewardFailedError(f"it was not imported within {_START_SECONDS} s") from None
        except ConnectionError:
            raise self._died() from None
        failure = None if answer.failure is None else one_line(answer.failure)
        return replace(answer, failure=failure)

    def send(self, call: RewardCall, seconds: float, is_interrupted: Callable[[], bool] = never) -> None:
        """Start a call, in a new process if there is none; :meth:`receive` raises the errors.

        Args:
            call: The completions, at least one.
            seconds: How long the call may take.
            is_interrupted: Called before the call and several times a second during it; True ends it.

        Raises:
            RewardInterruptedError: ``is_interrupted`` returned True. The process must be killed.
        """
        if is_interrupted():
            raise RewardInterruptedError
        self._send_failure = None
        self._is_interrupted = is_interrupted
        self._call_seconds = seconds
        self._num_completions = len(call.completions)
        try:
            if self._process is not None and self._process.poll() is not None:  # it has died between two calls
                self.kill()
            if self._process is None:
                self._restart()
            self._deadline = time.monotonic() + seconds
            self._connected_channel().send(call, self._deadline, is_interrupted)
        except RewardFailedError as failure:
            self._send_failure = failure
        except TimeoutError:
            self._send_failure = self._took_too_long()
        except ConnectionError:
            self._send_failure = self._died()
        except OSError as error:  # a limit on processes, files or memory is reached
            self.kill()
            self._send_failure = RewardFailedError(
                f"its process could not be started again: {one_line(describe_os_error(error))}"
            )

    def receive(self) -> CallAnswer:
        """Wait for the answer to the last call and return it, with a value and an error for each completion.

        Raises:
            RewardFailedError: The function raised, the process died, or the call took too long, for which the process
                is killed.
            RewardInterruptedError: See :meth:`send`.
        """
        if self._send_failure is not None:
            raise self._send_failure
        max_bytes = _MAX_ANSWER_BYTES + _MAX_ANSWER_BYTES_PER_COMPLETION * self._num_completions
        try:
            answer = self._receive(CallAnswer, max_bytes)
        except TimeoutError:
            raise self._took_too_long() from None
        except ConnectionError:
            raise self._died() from None
        if answer.failure is not None:
            advice = "; raise --reward_memory_gb" if answer.failure == "out of memory" else ""
            raise RewardFailedError(one_line(answer.failure) + advice)
        if not len(answer.values) == len(answer.errors) == self._num_completions:
            self.kill()
            raise RewardFailedError("its process sent a wrong message")
        errors = [None if error is None else one_line(error) for error in answer.errors]
        return CallAnswer(None, answer.values, errors)

    def kill(self) -> None:
        """Kill the process and all that the function has started, and wait for the end of the process."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _restart(self) -> None:
        """Start the process again and load the function; RewardFailedError if it cannot be loaded any more."""
        self.start()
        answer = self.wait_until_loaded()
        if answer.failure is not None:
            self.kill()
            raise RewardFailedError(f"it could not be loaded again: {answer.failure}")

    def _receive(self, kind: type[Answer], max_bytes: int) -> Answer:
        """Return the next message of the process, whose content is not trusted."""
        content = self._connected_channel().receive(max_bytes, self._deadline, self._is_interrupted)
        try:
            return parse_json(content, kind)
        except ValueError:
            self.kill()
            raise RewardFailedError("its process sent a wrong message") from None

    def _connected_channel(self) -> MessageChannel:
        assert self._channel is not None
        return self._channel

    def _took_too_long(self) -> RewardFailedError:
        """Kill the process, and return the error."""
        self.kill()
        limit = self._limits.call_seconds
        if self._call_seconds < limit:
            allowed = f"it took longer than {self._call_seconds:.3g} s for this completion alone"
        else:
            allowed = f"it took longer than {limit:g} s"
        return RewardFailedError(f"{allowed}; raise --reward_timeout")

    def _died(self) -> RewardFailedError:
        """Return the error of a process that has closed its socket; it is killed if it has not ended."""
        assert self._process is not None
        try:
            exit_code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            exit_code = None
        self.kill()
        if exit_code is None:
            return RewardFailedError("its process closed the connection to the run")
        if exit_code < 0:
            name = _signal_name(-exit_code)
            return RewardFailedError(f"its process was killed by {name}, as when memory runs out")
        return RewardFailedError(f"its process ended with exit code {exit_code}")


def _signal_name(number: int) -> str:
    names = {member.value: member.name for member in signal.Signals}  # without most real-time signals
    return names.get(number, f"signal {number}")


def one_line(text: str) -> str:
    """Return a text of a process or a user as one line that can be stored and printed."""
    line = " ".join(text.split())[:_MAX_CHARACTERS]
    encodable = line.encode("utf-8", "backslashreplace").decode("utf-8")  # a file name may have lone surrogates
    return escape_controls(encodable)
