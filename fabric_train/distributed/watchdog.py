"""Report a rank that dies or hangs in one line, and end the other ranks within a bounded time.

A thread of each rank keeps a connection to rank 0 and sends its main thread's position every second. A connection that
breaks means a dead rank, silence a stopped rank or a lost machine, and a rank behind the others a main thread that
hangs. Rank 0 decides and reports; if it is lost itself, rank 1 reports it. The ranks also agree over these connections
on where to stop after a signal, see ``signals.StopBorder``.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lightning import Fabric

from fabric_train.cli.errors import FAILURE, announce, exit_process, print_errors, set_connected_ranks
from fabric_train.cli.launcher import machine_name
from fabric_train.distributed.signals import Border, Heartbeat, Position, StepPhase, describe_signal, stop_signals

SLOW_PHASE_FACTOR = 10
"""A rank may keep the others waiting this many times ``--rank_timeout`` in a slow phase: see ``Position.is_slow``."""

_BEAT_SECONDS = 1.0
_SIGNAL_SECONDS = 0.1  # between two looks at this rank's stop signals
_JOIN_SECONDS = 60.0
_DECISION_SECONDS = 3.0
_ANSWER_SECONDS = 20.0  # rank 0 answers at once, unless its main thread holds the interpreter lock
_MIN_PASSES = 5.0  # a rank hangs only after the time of this many passes, which may be longer than the timeout


@contextmanager
def watch_ranks(fabric: Fabric, heartbeat: Heartbeat, timeout: float, num_nodes: int) -> Iterator[None]:
    """Make the ranks, which all call it, watch each other and end together; a ``timeout`` of 0 is no limit."""
    watchdog = Watchdog(fabric.global_rank, heartbeat, timeout)
    watchdog.start(fabric, num_nodes)
    set_connected_ranks(watchdog)
    has_ended = False
    try:
        yield
        has_ended = True
    finally:
        if has_ended or fabric.world_size == 1:  # after an exception it continues, to end the other ranks
            set_connected_ranks(None)
            watchdog.close()


@dataclass
class _RankState:
    """What this process knows of a rank; ``heard_at`` is a time of this process's monotonic clock."""

    rank: int
    host: str = ""
    pid: int = 0
    pid_namespace: str = ""
    connection: socket.socket | None = None
    position: Position = field(default_factory=Position)
    location: str = ""
    """File, line and function that the main thread is in."""
    is_waiting: bool = False
    """The main thread is in a collective."""
    min_pass_seconds: float = 0.0
    heard_at: float = field(default_factory=time.monotonic)
    partial_message: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def update(self, position: Position, location: str, is_waiting: bool, min_pass_seconds: float) -> None:
        self.heard_at = time.monotonic()
        self.position, self.location = position, location
        self.is_waiting, self.min_pass_seconds = is_waiting, min_pass_seconds

    def send(self, **message: Any) -> None:
        if self.connection:
            with suppress(OSError):  # a broken connection is noticed when messages are read
                self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the connection has ended."""
        assert self.connection is not None
        try:
            received = self.connection.recv(1 << 16)
        except OSError:
            received = b""
        *lines, self.partial_message = (self.partial_message + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None


class Watchdog:
    """This rank's thread that watches the other ranks."""

    def __init__(self, rank: int, heartbeat: Heartbeat, timeout: float) -> None:
        self._me = _RankState(rank, machine_name(), os.getpid(), _pid_namespace())
        self._others: dict[int, _RankState] = {}  # rank 0 knows all ranks, the others know only rank 0
        self._heartbeat, self._timeout = heartbeat, timeout
        self._selector = selectors.DefaultSelector()
        self._earliest, self._earliest_since = Position(), time.monotonic()
        self._main_thread = threading.main_thread().ident or 0
        self._end_lock = threading.Lock()  # the thread that acquires it ends the process
        self._is_closed, self._stop_signal = False, 0
        self._passed: dict[int, Border] = {}  # on rank 0 while it stops the run: rank → last border it has passed
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def start(self, fabric: Fabric, num_nodes: int) -> None:
        """Connect the ranks and start the thread."""
        is_local = num_nodes == 1
        server = socket.create_server(("127.0.0.1" if is_local else "", 0)) if fabric.is_global_zero else None
        port, token = fabric.broadcast((server.getsockname()[1] if server else 0, secrets.token_hex(16)))
        if server:
            with server:
                self._accept_ranks(server, fabric.world_size, token)
        else:
            host = "127.0.0.1" if is_local else os.environ["MASTER_ADDR"]
            rank_0 = _RankState(0, connection=socket.create_connection((host, port), timeout=_JOIN_SECONDS))
            rank_0.send(token=token, **self._introduction())
            # rank 0 reads only the introduction here, so an earlier message would be lost
            answer = rank_0.read()
            if not answer:
                raise ConnectionError("rank 0 ended before it answered")
            self._add(rank_0)
            for message in answer:
                self._handle(rank_0, message)
        self._heartbeat.machines = {rank.rank: rank.host for rank in (self._me, *self._others.values())}
        os.register_at_fork(after_in_child=self._close_connections)  # a worker must not keep a dead rank's open
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this rank has finished."""
        self._is_closed = True
        for other in list(self._others.values()):
            other.send(bye=True)

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """See ``errors.ConnectedRanks``."""
        if may_follow_another:
            time.sleep(_DECISION_SECONDS)  # if another rank has died, the thread ends this process first
        if self._me.rank == 0:
            self._end_all_ranks(code, *lines)
        elif 0 in self._others:
            self._others[0].send(end=code, lines=list(lines))
            time.sleep(_ANSWER_SECONDS)

    def _accept_ranks(self, server: socket.socket, num_ranks: int, token: str) -> None:
        server.settimeout(_JOIN_SECONDS)
        while len(self._others) < num_ranks - 1:
            unknown = _RankState(0, connection=server.accept()[0])
            assert unknown.connection is not None
            unknown.connection.settimeout(_JOIN_SECONDS)
            for introduction in unknown.read() or []:
                if introduction.pop("token", "") == token:
                    self._add(_RankState(**introduction, connection=unknown.connection))

    def _introduction(self) -> dict[str, Any]:
        return {name: getattr(self._me, name) for name in ("rank", "host", "pid", "pid_namespace")}

    def _add(self, other: _RankState) -> None:
        assert other.connection is not None
        other.connection.settimeout(_BEAT_SECONDS)
        # without it, the kernel holds back a message that follows a heartbeat, and drops it if this process ends first
        other.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._others[other.rank] = other
        self._selector.register(other.connection, selectors.EVENT_READ, other)
        if self._me.rank == 0:
            other.send(**self._introduction())

    def _close_connections(self) -> None:
        for other in self._others.values():
            if other.connection:
                other.connection.close()

    def _run(self) -> None:
        next_beat = 0.0
        while not self._is_closed:
            for key, _ in self._selector.select(_SIGNAL_SECONDS):
                self._receive_from(key.data)
            if stop_signals.received and stop_signals.is_deferred:
                self._ask_to_stop(stop_signals.received)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                self._beat()

    def _beat(self) -> None:
        frame = sys._current_frames()[self._main_thread]
        location = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}"
        is_waiting = "torch/distributed" in frame.f_code.co_filename
        position, fastest = self._heartbeat.position, self._heartbeat.min_pass_seconds
        state: dict[str, Any] = {"location": location, "is_waiting": is_waiting, "min_pass_seconds": fastest}
        self._me.update(position, **state)
        for other in self._others.values():
            other.send(position=astuple(position), **state)
        if self._timeout:
            self._check_ranks()

    def _receive_from(self, other: _RankState) -> None:
        messages = other.read()
        if messages is None:
            assert other.connection is not None
            self._selector.unregister(other.connection)
            other.connection.close()
            other.connection = None
            if not self._is_closed and other.rank in self._others:
                # this rank's position is newer than the other's last heartbeat
                at = f"died while the run was at {self._heartbeat.position}"
                if self._stop_signal:
                    at += f", stopping for {describe_signal(self._stop_signal)}"
                    why = "a launcher kills ranks that save for longer than its grace period"
                else:
                    why = "killed, or out of memory"
                self._end_without([other], f"{at} ({why})")
        for message in messages or []:
            self._handle(other, message)

    def _handle(self, other: _RankState, message: dict[str, Any]) -> None:
        if "position" in message:
            other.update(Position(*message.pop("position")), **message)
        elif "bye" in message:
            del self._others[other.rank]
        elif "stop" in message:
            self._ask_to_stop(message["stop"])
        elif "freeze" in message:
            self._stop_signal = message["freeze"]
            other.send(passed=self._heartbeat.stop_border.freeze())
        elif "passed" in message:
            step, micro_batch = message["passed"]
            self._passed[other.rank] = step, micro_batch
            self._decide_where_to_stop()
        elif "stop_after" in message:
            step, micro_batch = message["stop_after"]
            self._heartbeat.stop_border.stop_after((step, micro_batch), self._stop_signal)
        elif "end" not in message:
            other.host, other.pid, other.pid_namespace = (message[key] for key in ("host", "pid", "pid_namespace"))
        elif self._me.rank:
            exit_process(message["end"])
        else:
            self._end_all_ranks(message["end"], *message["lines"])

    def _ask_to_stop(self, number: int) -> None:
        """Begin to stop the run for signal ``number``: rank 0 freezes all ranks, the others ask rank 0 to do so."""
        if self._stop_signal:
            return
        self._stop_signal = number
        if self._me.rank:
            for rank_0 in self._others.values():
                rank_0.send(stop=number)
            return
        announce(f"{describe_signal(number)}: stopping and saving; once more ends without saving")
        self._passed[0] = self._heartbeat.stop_border.freeze()
        for other in self._others.values():
            other.send(freeze=number)
        self._decide_where_to_stop()

    def _decide_where_to_stop(self) -> None:
        """Tell all ranks, once every one has answered, which micro-batch is the last."""
        if len(self._passed) <= len(self._others):
            return
        last = max(self._passed.values())
        for other in self._others.values():
            other.send(stop_after=last)
        self._heartbeat.stop_border.stop_after(last, self._stop_signal)

    def _check_ranks(self) -> None:
        """End the run if a rank is silent or, on rank 0, if a rank hangs.

        The ranks at the earliest position hang if it has been the earliest for too long: while a rank waited there for
        one before it, it kept nobody waiting. If all ranks are there, those hang that are not in a collective.
        """
        now = time.monotonic()
        silent = [other for other in self._others.values() if now - other.heard_at > self._timeout]
        if silent:
            how = f"sent no heartbeat for {self._timeout:g} s (stopped or unreachable)"
            self._end_without(silent, f"{how} while the run was at {self._heartbeat.position}")
        if self._me.rank or not self._others:
            return
        ranks = [self._me, *self._others.values()]
        earliest = min(rank.position for rank in ranks)
        behind = [rank for rank in ranks if rank.position == earliest]
        if earliest != self._earliest:
            self._earliest, self._earliest_since = earliest, now
        seconds = now - self._earliest_since
        limit = max(self._timeout, _MIN_PASSES * max(rank.min_pass_seconds for rank in ranks))
        if seconds < limit * (SLOW_PHASE_FACTOR if earliest.is_slow else 1):
            return
        if len(behind) == len(ranks):
            if earliest.is_slow or earliest.phase == StepPhase.DATA:
                return  # all ranks load, save or wait for data: none keeps another waiting
            behind = [rank for rank in ranks if not rank.is_waiting] or ranks
        self._end_without(behind, f"hung at {earliest} for {seconds:.0f} s, in {behind[0].location}")

    def _end_without(self, lost: list[_RankState], how: str) -> NoReturn:
        """Report the lost ranks, kill those on this machine, which may still be alive, and end the run."""
        reports = self._me.rank in (0, 1)  # rank 1 can lose only rank 0; the others leave the report to it
        for rank in lost:
            if reports and rank.connection and rank.pid_namespace == self._me.pid_namespace:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        names = ", ".join(rank.name for rank in lost)
        go_on = "continue with --resume true (docs/reference/errors.md#lost-rank)"
        line = f"error: {names} {how}; the other ranks have ended; {go_on}"
        if self._me.rank == 0:
            self._end_all_ranks(FAILURE, line)
        if reports:
            print_errors(line)
        exit_process(FAILURE)

    def _end_all_ranks(self, code: int, *lines: str) -> NoReturn:
        self._end_lock.acquire()  # never released: another thread that wants to end the run waits here
        print_errors(*lines)
        for other in self._others.values():
            other.send(end=code)
        exit_process(code)


def _pid_namespace() -> str:
    """Return a name of the machine or container in which process ids are unique."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()
