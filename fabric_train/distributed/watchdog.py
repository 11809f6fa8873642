"""Report a rank that dies or hangs in one line, and end the other ranks within a bounded time.

A thread of each rank keeps a connection to rank 0 and sends its main thread's position every second, or less often if
there are many ranks. A connection that breaks means a dead rank, silence a stopped rank or a lost machine, and a rank
behind the others a main thread that hangs. Rank 0 decides and reports; if it is lost itself, rank 1 reports it. The
ranks also agree over these connections on where to stop after a signal, see ``signals.StopBorder``.
"""

import os
import secrets
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, NoReturn, Protocol

from fabric_train.cli.errors import FAILURE, announce, exit_process, print_errors, set_connected_ranks
from fabric_train.distributed.rank_connections import (
    ConnectedRank,
    accept_ranks,
    connect_to_rank_0,
    describe_ranks,
    encode,
    listen,
    this_process_as_rank,
)
from fabric_train.distributed.signals import Border, Heartbeat, Position, StepPhase, describe_signal, stop_signals

SLOW_PHASE_FACTOR = 10
"""A rank may keep the others waiting this many times ``--rank_timeout`` in a slow phase: see ``Position.is_slow``."""

_BEAT_SECONDS = 1.0
_BEATS_PER_SECOND = 256  # that rank 0 reads at most: many ranks send them less often
_BEATS_PER_TIMEOUT = 4  # that a rank sends at least
_MISSED_BEATS = 2  # by which a rank is behind that is silent, although not for the timeout yet
_SIGNAL_SECONDS = 0.1  # between two looks at this rank's stop signals
_PAUSE_PER_RANK = 1e-4  # between two looks at the messages, which interrupt the main thread
_DECISION_SECONDS = 3.0
_ANSWER_SECONDS = 20.0  # rank 0 answers at once, unless its main thread holds the interpreter lock
_MIN_PASSES = 5.0  # a rank hangs only after the time of this many passes, which may be longer than the timeout


class RankOfRun(Protocol):
    """What the watchdog needs of Fabric."""

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's object, on all ranks."""


@contextmanager
def watch_ranks(fabric: RankOfRun, heartbeat: Heartbeat, timeout: float, num_nodes: int) -> Iterator[None]:
    """Make the ranks, which all call it, watch each other and end together; a ``timeout`` of 0 is no limit."""
    watchdog = Watchdog(fabric.global_rank, fabric.world_size, heartbeat, timeout)
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


class Watchdog:
    """This rank's thread that watches the other ranks."""

    def __init__(self, rank: int, num_ranks: int, heartbeat: Heartbeat, timeout: float) -> None:
        self._me = this_process_as_rank(rank)
        self._others: dict[int, ConnectedRank] = {}  # rank 0 knows all ranks, the others know only rank 0
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._beat_seconds = max(_BEAT_SECONDS, num_ranks / _BEATS_PER_SECOND)
        if timeout:
            self._beat_seconds = min(self._beat_seconds, timeout / _BEATS_PER_TIMEOUT)
        self._pause = min(num_ranks * _PAUSE_PER_RANK, _SIGNAL_SECONDS)
        self._selector = selectors.DefaultSelector()
        self._earliest = Position()
        self._earliest_since = time.monotonic()
        self._main_thread = threading.main_thread().ident or 0
        self._end_lock = threading.Lock()  # the thread that acquires it ends the process
        self._is_closed = False
        self._stop_signal = 0
        self._passed: dict[int, Border] = {}  # on rank 0 while it stops the run: rank → last border it has passed
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def start(self, fabric: RankOfRun, num_nodes: int) -> None:
        """Connect the ranks and start the thread."""
        server = listen(fabric.world_size, num_nodes) if self._me.rank == 0 else None
        port, token = fabric.broadcast((server.getsockname()[1] if server else 0, secrets.token_hex(16)))
        if server:
            with server:
                for rank in accept_ranks(server, fabric.world_size, token, self._me).values():
                    self._add(rank)
        else:
            host = "127.0.0.1" if num_nodes == 1 else os.environ["MASTER_ADDR"]
            rank_0, messages = connect_to_rank_0((host, port), token, self._me)
            self._add(rank_0)
            for message in messages:
                self._handle(rank_0, message)
        self._heartbeat.machines = {rank.rank: rank.host for rank in (self._me, *self._others.values())}
        os.register_at_fork(after_in_child=self._close_connections)  # a worker must not keep a dead rank's open
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this rank has finished."""
        self._is_closed = True
        self._send_to_all(bye=True)

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """See ``errors.ConnectedRanks``."""
        if may_follow_another:
            time.sleep(_DECISION_SECONDS)  # if another rank has died, the thread ends this process first
        if self._me.rank == 0:
            self._end_all_ranks(code, *lines)
        elif 0 in self._others:
            self._others[0].send(encode(end=code, lines=list(lines)))
            time.sleep(_ANSWER_SECONDS)

    def _add(self, other: ConnectedRank) -> None:
        assert other.connection is not None
        self._others[other.rank] = other
        self._selector.register(other.connection, selectors.EVENT_READ, other)

    def _close_connections(self) -> None:
        for other in self._others.values():
            other.close()

    def _run(self) -> None:
        next_beat = 0.0
        while not self._is_closed:
            arrived = [key.data for key, _ in self._selector.select(_SIGNAL_SECONDS)]
            if died := [other for other in arrived if self._receive_from(other)]:
                self._end_without_dead(died)
            if stop_signals.received and stop_signals.is_deferred:
                self._ask_to_stop(stop_signals.received)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._beat_seconds
                self._beat()
            time.sleep(self._pause)

    def _beat(self) -> None:
        frame = sys._current_frames()[self._main_thread]
        location = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}"
        is_waiting = "torch/distributed" in frame.f_code.co_filename
        position = self._heartbeat.position
        fastest = self._heartbeat.min_pass_seconds
        state: dict[str, Any] = {"location": location, "is_waiting": is_waiting, "min_pass_seconds": fastest}
        self._me.update(position, **state)
        # the others need to hear only that rank 0 is there
        message = encode(position=astuple(position), **state) if self._me.rank else encode()
        for other in self._others.values():
            other.send(message)
        if self._timeout:
            self._check_ranks()

    def _receive_from(self, other: ConnectedRank) -> bool:
        """Handle a rank's messages; return whether its connection has ended although it should not."""
        messages = other.read()
        if messages is None:
            assert other.connection is not None
            self._selector.unregister(other.connection)
            other.close()
        for message in messages or []:
            self._handle(other, message)
        return messages is None and not self._is_closed and other.rank in self._others

    def _handle(self, other: ConnectedRank, message: dict[str, Any]) -> None:
        if "position" in message:
            other.update(Position(*message.pop("position")), **message)
        elif "bye" in message:
            del self._others[other.rank]
        elif "stop" in message:
            self._ask_to_stop(message["stop"])
        elif "freeze" in message:
            self._stop_signal = message["freeze"]
            other.send(encode(passed=self._heartbeat.stop_border.freeze()))
        elif "passed" in message:
            step, micro_batch = message["passed"]
            self._passed[other.rank] = step, micro_batch
            self._decide_where_to_stop()
        elif "stop_after" in message:
            step, micro_batch = message["stop_after"]
            self._heartbeat.stop_border.stop_after((step, micro_batch), self._stop_signal)
        elif "end" in message:
            if self._me.rank:
                exit_process(message["end"])
            self._end_all_ranks(message["end"], *message["lines"])

    def _send_to_all(self, **message: Any) -> None:
        encoded = encode(**message)
        for other in list(self._others.values()):
            other.send(encoded)

    def _ask_to_stop(self, number: int) -> None:
        """Begin to stop the run for signal ``number``: rank 0 freezes all ranks, the others ask rank 0 to do so."""
        if self._stop_signal:
            return
        self._stop_signal = number
        if self._me.rank:
            self._send_to_all(stop=number)
            return
        announce(f"{describe_signal(number)}: stopping and saving; once more ends without saving")
        self._passed[0] = self._heartbeat.stop_border.freeze()
        self._send_to_all(freeze=number)
        self._decide_where_to_stop()

    def _decide_where_to_stop(self) -> None:
        """Tell all ranks, once every one has answered, which micro-batch is the last."""
        if len(self._passed) <= len(self._others):
            return
        last = max(self._passed.values())
        self._send_to_all(stop_after=last)
        self._heartbeat.stop_border.stop_after(last, self._stop_signal)

    def _check_ranks(self) -> None:
        """End the run if a rank is silent or, on rank 0, if a rank hangs.

        The ranks at the earliest position hang if it has been the earliest for too long: while a rank waited there for
        one before it, it kept nobody waiting. If all ranks are there, those hang that are not in a collective.
        """
        now = time.monotonic()
        silent = [other for other in self._others.values() if now - other.heard_at > self._timeout]
        # the last beats of a machine's ranks are up to a beat apart: wait for the last one, to name them all
        if any(now - other.heard_at > self._timeout + self._beat_seconds for other in silent):
            how = f"sent no heartbeat for {self._timeout:g} s (stopped or unreachable)"
            self._end_without(silent, f"{how} while the run was at {self._heartbeat.position}")
        if self._me.rank or not self._others:
            return
        ranks = [self._me, *self._others.values()]
        earliest = min(rank.position for rank in ranks)
        behind = [rank for rank in ranks if rank.position == earliest]
        if earliest != self._earliest:
            self._earliest = earliest
            self._earliest_since = now
        seconds = now - self._earliest_since
        limit = max(self._timeout, _MIN_PASSES * max(rank.min_pass_seconds for rank in ranks))
        if seconds < limit * (SLOW_PHASE_FACTOR if earliest.is_slow else 1):
            return
        if any(now - rank.heard_at > _MISSED_BEATS * self._beat_seconds for rank in behind):
            return  # it does not hang, it is silent
        if len(behind) == len(ranks):
            if earliest.is_slow or earliest.phase == StepPhase.DATA:
                return  # all ranks load, save or wait for data: none keeps another waiting
            behind = [rank for rank in ranks if not rank.is_waiting] or ranks
        self._end_without(behind, f"hung at {earliest} for {seconds:.0f} s, in {behind[0].location}")

    def _end_without_dead(self, died: list[ConnectedRank]) -> NoReturn:
        # this rank's position is newer than the other's last heartbeat
        at = f"died while the run was at {self._heartbeat.position}"
        if self._stop_signal:
            at += f", stopping for {describe_signal(self._stop_signal)}"
            self._end_without(died, f"{at} (a launcher kills ranks that save for longer than its grace period)")
        self._end_without(died, f"{at} (killed, or out of memory)")

    def _end_without(self, lost: list[ConnectedRank], how: str) -> NoReturn:
        """Report the lost ranks, kill those on this machine, which may still be alive, and end the run."""
        reports = self._me.rank in (0, 1)  # rank 1 can lose only rank 0; the others leave the report to it
        for rank in lost:
            if reports and rank.connection and rank.pid_namespace == self._me.pid_namespace:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        go_on = "continue with --resume true (docs/reference/errors.md#lost-rank)"
        line = f"error: {describe_ranks(lost)} {how}; the other ranks have ended; {go_on}"
        if self._me.rank == 0:
            self._end_all_ranks(FAILURE, line)
        if reports:
            print_errors(line)
        exit_process(FAILURE)

    def _end_all_ranks(self, code: int, *lines: str) -> NoReturn:
        self._end_lock.acquire()  # never released: another thread that wants to end the run waits here
        print_errors(*lines)
        self._send_to_all(end=code)
        exit_process(code)
