"""Report a rank that dies or hangs in one line, and end the other ranks within a bounded time.

A thread of each rank keeps a connection to rank 0 and sends its main thread's position every second, or less often if
there are many ranks. A broken connection means a dead rank, silence means a stopped rank or a lost machine, and a rank
behind the others means a main thread that hangs. Rank 0 decides and reports; if rank 0 is lost, rank 1 reports it. The
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

from fabric_train.cli.errors import FAILURE, announce, exit_process, print_errors, program
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
"""In a slow phase, a rank may keep the others waiting this many times ``--rank_timeout``; see ``Position.is_slow``."""

_BEAT_SECONDS = 1.0
_MAX_BEATS_PER_SECOND = 256  # that rank 0 reads: many ranks send them less often
_MIN_BEATS_PER_TIMEOUT = 4  # that a rank sends
_MISSED_BEATS = 2  # after which a rank counts as silent, although not for the timeout yet
_SIGNAL_SECONDS = 0.1  # between two checks of this rank's stop signals
_PAUSE_SECONDS_PER_RANK = 1e-4  # between two reads of messages, which interrupt the main thread
_DECISION_SECONDS = 3.0  # for the watchdog to end this process if another rank has died
_ANSWER_SECONDS = 20.0  # rank 0 answers immediately, unless its main thread holds the interpreter lock
_MIN_PASSES = 5.0  # a rank hangs only after the time of this many passes, which may be longer than the timeout


class RankOfRun(Protocol):
    """The methods of Fabric that the watchdog needs."""

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's object, on all ranks."""


@contextmanager
def watch_ranks(fabric: RankOfRun, heartbeat: Heartbeat, timeout: float, num_nodes: int) -> Iterator[None]:
    """Make the ranks watch each other and end together; every rank must call it.

    Args:
        fabric: The run's Fabric, or an object with the same methods.
        heartbeat: Holds the position of this rank's main thread.
        timeout: Seconds for which a rank may keep the others waiting; 0 means no limit.
        num_nodes: Number of machines.
    """
    watchdog = Watchdog(fabric.global_rank, fabric.world_size, heartbeat, timeout)
    watchdog.start(fabric, num_nodes)
    program.connected_ranks = watchdog
    has_ended = False
    try:
        yield
        has_ended = True
    finally:
        if has_ended or fabric.world_size == 1:  # after an exception it continues, to end the other ranks
            program.connected_ranks = None
            watchdog.close()


class Watchdog:
    """This rank's thread that watches the other ranks."""

    def __init__(self, rank: int, num_ranks: int, heartbeat: Heartbeat, timeout: float) -> None:
        self._this_rank = this_process_as_rank(rank)
        self._connected_ranks: dict[int, ConnectedRank] = {}  # on rank 0 all other ranks, elsewhere only rank 0
        self._heartbeat = heartbeat
        self._timeout = timeout
        # Rank 0 reads the beats of all ranks: many ranks send them less often, though several within the timeout.
        self._beat_seconds = max(_BEAT_SECONDS, num_ranks / _MAX_BEATS_PER_SECOND)
        if timeout:
            self._beat_seconds = min(self._beat_seconds, timeout / _MIN_BEATS_PER_TIMEOUT)
        # Each read interrupts the main thread: with many ranks, a read waits for the messages of more of them.
        self._pause_seconds = min(num_ranks * _PAUSE_SECONDS_PER_RANK, _SIGNAL_SECONDS)
        self._selector = selectors.DefaultSelector()
        # On rank 0: the position of the slowest rank, and the time at which the slowest rank came to it.
        self._earliest_position = Position()
        self._earliest_since = time.monotonic()
        self._main_thread_id = threading.main_thread().ident or 0
        self._end_lock = threading.Lock()  # the thread that acquires it ends the process
        self._is_closed = False
        self._stop_signal = 0  # number of the signal for which the run is stopping, 0 if it is not
        self._passed_borders: dict[int, Border] = {}  # on rank 0 while it stops the run: last border by rank
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def start(self, fabric: RankOfRun, num_nodes: int) -> None:
        """Connect the ranks and start the thread."""
        # rank 0 tells the others its port, and a token that keeps strangers out
        server = listen(fabric.world_size, num_nodes) if self._this_rank.rank == 0 else None
        rank_0_port = server.getsockname()[1] if server else 0
        port, token = fabric.broadcast((rank_0_port, secrets.token_hex(16)))

        if server:
            with server:
                ranks = accept_ranks(server, fabric.world_size, token, self._this_rank)
            for rank in ranks.values():
                self._add_rank(rank)
        else:
            host = "127.0.0.1" if num_nodes == 1 else os.environ["MASTER_ADDR"]
            rank_0, messages = connect_to_rank_0((host, port), token, self._this_rank)
            self._add_rank(rank_0)
            for message in messages:
                self._handle_message(rank_0, message)

        machines = {self._this_rank.rank: self._this_rank.host}
        for rank in self._connected_ranks.values():
            machines[rank.rank] = rank.host
        self._heartbeat.machines = machines
        # a DataLoader worker inherits the connections: with them, it would keep those of a dead rank open
        os.register_at_fork(after_in_child=self._close_connections)
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this rank has finished."""
        self._is_closed = True
        self._send_to_all(bye=True)

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """See ``errors.ConnectedRanks``."""
        if may_follow_another:
            time.sleep(_DECISION_SECONDS)  # if another rank has died, the thread ends this process first
        if self._this_rank.rank == 0:
            self._end_all_ranks(code, *lines)
        elif 0 in self._connected_ranks:
            self._connected_ranks[0].send(encode(end=code, lines=list(lines)))
            time.sleep(_ANSWER_SECONDS)

    def _add_rank(self, rank: ConnectedRank) -> None:
        assert rank.connection is not None
        self._connected_ranks[rank.rank] = rank
        self._selector.register(rank.connection, selectors.EVENT_READ, rank)

    def _close_connections(self) -> None:
        for rank in self._connected_ranks.values():
            rank.close()

    def _run(self) -> None:
        """Read messages, send heartbeats and act on signals until the rank has finished, in a separate thread."""
        next_beat = 0.0
        while not self._is_closed:
            dead_ranks = []
            for key, _ in self._selector.select(_SIGNAL_SECONDS):
                rank = key.data
                if self._receive_from(rank):
                    dead_ranks.append(rank)
            if dead_ranks:
                self._end_without_dead(dead_ranks)
            if stop_signals.received and stop_signals.is_deferred:
                self._ask_to_stop(stop_signals.received)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._beat_seconds
                self._beat()
            time.sleep(self._pause_seconds)

    def _beat(self) -> None:
        """Send the main thread's state to the connected ranks, and check theirs."""
        frame = sys._current_frames()[self._main_thread_id]
        position = self._heartbeat.position
        state: dict[str, Any] = {
            "location": f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}",
            "is_waiting": "torch/distributed" in frame.f_code.co_filename,
            "min_pass_seconds": self._heartbeat.min_pass_seconds,
        }
        self._this_rank.update(position, **state)
        if self._this_rank.rank == 0:
            message = encode()  # the other ranks need to know only that rank 0 is alive
        else:
            message = encode(position=astuple(position), **state)
        for rank in self._connected_ranks.values():
            rank.send(message)
        if self._timeout:
            self._check_ranks()

    def _receive_from(self, rank: ConnectedRank) -> bool:
        """Handle a rank's messages; return whether its connection has ended although the rank has not finished."""
        messages = rank.read()
        if messages is None:
            assert rank.connection is not None
            self._selector.unregister(rank.connection)
            rank.close()
            # a rank that has said goodbye is no longer among the connected ones
            return not self._is_closed and rank.rank in self._connected_ranks
        for message in messages:
            self._handle_message(rank, message)
        return False

    def _handle_message(self, sender: ConnectedRank, message: dict[str, Any]) -> None:
        """Act on a message from a connected rank; its key says what kind of message it is."""
        if "position" in message:  # a heartbeat
            position = Position(*message.pop("position"))
            sender.update(position, **message)
        elif "bye" in message:  # the rank has finished
            del self._connected_ranks[sender.rank]
        elif "stop" in message:  # to rank 0: a rank has received a signal
            self._ask_to_stop(message["stop"])
        elif "freeze" in message:  # from rank 0: wait at the next border
            self._stop_signal = message["freeze"]
            sender.send(encode(passed=self._heartbeat.stop_border.freeze()))
        elif "passed" in message:  # to rank 0: the last border that the rank has passed
            step, micro_batch = message["passed"]
            self._passed_borders[sender.rank] = (step, micro_batch)
            self._decide_where_to_stop()
        elif "stop_after" in message:  # from rank 0: the last border to pass
            step, micro_batch = message["stop_after"]
            self._heartbeat.stop_border.stop_after((step, micro_batch), self._stop_signal)
        elif "end" in message and self._this_rank.rank == 0:  # a rank has failed
            self._end_all_ranks(message["end"], *message["lines"])
        elif "end" in message:  # from rank 0, which has reported why
            exit_process(message["end"])

    def _send_to_all(self, **message: Any) -> None:
        encoded = encode(**message)
        for rank in list(self._connected_ranks.values()):  # a copy: another thread may remove a rank
            rank.send(encoded)

    def _ask_to_stop(self, signal_number: int) -> None:
        """Begin to stop the run for a signal: rank 0 freezes all ranks, another rank asks rank 0 to do so."""
        if self._stop_signal:
            return
        self._stop_signal = signal_number
        if self._this_rank.rank != 0:
            self._send_to_all(stop=signal_number)
            return
        announce(f"{describe_signal(signal_number)}: stopping and saving; send it again to end without saving")
        self._passed_borders[0] = self._heartbeat.stop_border.freeze()
        self._send_to_all(freeze=signal_number)
        self._decide_where_to_stop()

    def _decide_where_to_stop(self) -> None:
        """Once every rank has answered, tell all ranks which border is the last one that they pass."""
        num_ranks = 1 + len(self._connected_ranks)
        if len(self._passed_borders) < num_ranks:
            return
        last_border = max(self._passed_borders.values())
        self._send_to_all(stop_after=last_border)
        self._heartbeat.stop_border.stop_after(last_border, self._stop_signal)

    def _check_ranks(self) -> None:
        """End the run if a rank is silent or, on rank 0, if a rank hangs.

        The ranks at the earliest position hang if it has been the earliest for too long. Earlier time does not
        count: while a rank waited there for a slower one, it kept no rank waiting. If all ranks are at this position,
        the ones that are not in a collective hang.
        """
        now = time.monotonic()

        # silent ranks; the last beats of a machine's ranks are up to a beat apart, so wait a beat to name them all
        silent_ranks = []
        longest_silence = 0.0
        for rank in self._connected_ranks.values():
            silence = now - rank.heard_at
            if silence > self._timeout:
                silent_ranks.append(rank)
                longest_silence = max(longest_silence, silence)
        if longest_silence > self._timeout + self._beat_seconds:
            self._end_without(
                silent_ranks,
                f"sent no heartbeat for {self._timeout:g} s (stopped or unreachable) while the run was at "
                f"{self._heartbeat.position}",
            )

        # only rank 0 knows the positions of all ranks
        if self._this_rank.rank != 0 or not self._connected_ranks:
            return
        ranks = [self._this_rank, *self._connected_ranks.values()]
        earliest_position = min(rank.position for rank in ranks)
        if earliest_position != self._earliest_position:
            self._earliest_position = earliest_position
            self._earliest_since = now

        # is it late enough?
        seconds = now - self._earliest_since
        slowest_pass = max(rank.min_pass_seconds for rank in ranks)
        limit = max(self._timeout, _MIN_PASSES * slowest_pass)
        if earliest_position.is_slow:
            limit *= SLOW_PHASE_FACTOR
        if seconds < limit:
            return

        # which ranks hang?
        hanging_ranks = [rank for rank in ranks if rank.position == earliest_position]
        if any(now - rank.heard_at > _MISSED_BEATS * self._beat_seconds for rank in hanging_ranks):
            return  # it does not hang, it is silent
        if len(hanging_ranks) == len(ranks):
            if earliest_position.is_slow or earliest_position.phase == StepPhase.DATA:
                return  # all ranks load, save or wait for data: none keeps another waiting
            hanging_ranks = [rank for rank in ranks if not rank.is_waiting]
            if not hanging_ranks:  # all are in a collective that does not end
                hanging_ranks = ranks
        self._end_without(
            hanging_ranks, f"hung at {earliest_position} for {seconds:.0f} s, in {hanging_ranks[0].location}"
        )

    def _end_without_dead(self, dead_ranks: list[ConnectedRank]) -> NoReturn:
        """Report ranks whose connection has ended, and end the run."""
        # this rank's position is newer than the one in the dead rank's last heartbeat
        reason = f"died while the run was at {self._heartbeat.position}"
        if self._stop_signal:
            reason += f", stopping for {describe_signal(self._stop_signal)} (a launcher kills ranks that save for "
            reason += "longer than its grace period)"
        else:
            reason += " (killed, or out of memory)"
        self._end_without(dead_ranks, reason)

    def _end_without(self, lost_ranks: list[ConnectedRank], reason: str) -> NoReturn:
        """Report the lost ranks, kill those on this machine, which may still be alive, and end the run."""
        # Rank 0 reports the ranks that it has lost. Each other rank can lose only rank 0; then rank 1 alone reports it.
        is_reporter = self._this_rank.rank in (0, 1)
        for rank in lost_ranks:
            is_on_this_machine = rank.pid_namespace == self._this_rank.pid_namespace
            # this rank, which may be among those that hang, has no connection
            if is_reporter and rank.connection and is_on_this_machine:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        line = (
            f"error: {describe_ranks(lost_ranks)} {reason}; the other ranks have ended; continue with --resume true "
            "(docs/reference/errors.md#lost-rank)"
        )
        if self._this_rank.rank == 0:
            self._end_all_ranks(FAILURE, line)
        if is_reporter:
            print_errors(line)
        exit_process(FAILURE)

    def _end_all_ranks(self, code: int, *lines: str) -> NoReturn:
        """Print lines, and end this process and all connected ranks with an exit code."""
        self._end_lock.acquire()  # never released: another thread that wants to end the run waits here
        print_errors(*lines)
        self._send_to_all(end=code)
        exit_process(code)
