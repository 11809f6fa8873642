"""Ranks watch each other: one that dies or hangs is named in one line, and the others end within a bounded time.

A thread of each rank keeps a connection to rank 0 and says every second where the main thread is. A connection that
breaks off means a dead rank, silence a stopped one or a lost machine, and a rank behind the others one whose main
thread hangs. Rank 0 judges and speaks; where it is rank 0 itself that is lost, rank 1 does.
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

from fabric_train.cli.errors import FAILURE, end_through, leave, say
from fabric_train.distributed.heartbeat import Mark, Phase, Progress
from fabric_train.distributed.signals import stop_signals

PATIENCE = 10
"""Times --rank_timeout that a rank may keep the others waiting where that is lawful: see ``progress.Mark.lasts``."""

_BEAT_SECONDS = 1.0
_JOIN_SECONDS = 60.0
_VERDICT_SECONDS = 3.0
_ANSWER_SECONDS = 20.0  # rank 0 answers at once, unless its main thread keeps the interpreter to itself
_PASSES = 5.0  # a rank whose passes take minutes each hangs only after so many


@contextmanager
def watch_ranks(fabric: Fabric, progress: Progress, timeout: float, num_nodes: int) -> Iterator[None]:
    """Have the ranks watch each other while the block runs, and end together. All ranks call it.

    Args:
        fabric: launched.
        progress: where this rank's main thread is.
        timeout: seconds that a rank may be silent, or keep the others waiting; 0 for ever.
        num_nodes: machines that take part.

    Raises:
        OSError: the ranks do not reach each other.
    """
    watch = Watch(fabric.global_rank, progress, timeout)
    watch.start(fabric, num_nodes)
    end_through(watch)
    yield  # after an exception the watch goes on: the ranks end through it
    end_through(None)
    watch.close()


@dataclass
class _Rank:
    """What is known of a rank; ``heard`` and ``moved`` are times on this process's clock."""

    rank: int
    host: str = ""
    pid: int = 0
    processes: str = ""
    """Which process ids are the same processes' as there."""
    connection: socket.socket | None = None
    mark: Mark = field(default_factory=Mark)
    place: str = ""
    waits: bool = False
    quickest: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    unread: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def hear(self, mark: Mark, place: str, waits: bool, quickest: float) -> None:
        """Take a sign of life."""
        self.heard = time.monotonic()
        if mark != self.mark:
            self.moved = self.heard
        self.mark, self.place, self.waits, self.quickest = mark, place, waits, quickest

    def send(self, **message: Any) -> None:
        if self.connection:
            with suppress(OSError):  # it is gone, which is seen where messages are read
                self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, None where the connection has ended."""
        assert self.connection is not None
        try:
            received = self.connection.recv(1 << 16)
        except OSError:
            received = b""
        *lines, self.unread = (self.unread + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None


class Watch:
    """This rank's part in the watch."""

    def __init__(self, rank: int, progress: Progress, timeout: float) -> None:
        self._me = _Rank(rank, socket.gethostname(), os.getpid(), _process_space())
        self._others: dict[int, _Rank] = {}  # rank 0 knows all, the others know rank 0
        self._progress, self._timeout = progress, timeout
        self._selector = selectors.DefaultSelector()
        self._main_thread = threading.main_thread().ident or 0
        self._end = threading.Lock()  # who takes it ends the process
        self._closes = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    def start(self, fabric: Fabric, num_nodes: int) -> None:
        """Connect the ranks and begin to watch.

        Raises:
            OSError: they do not reach each other.
        """
        is_local = num_nodes == 1
        server = socket.create_server(("127.0.0.1" if is_local else "", 0)) if fabric.is_global_zero else None
        port, token = fabric.broadcast((server.getsockname()[1] if server else 0, secrets.token_hex(16)))
        if server:
            with server:
                self._welcome(server, fabric.world_size, token)
        else:
            host = "127.0.0.1" if is_local else os.environ["MASTER_ADDR"]
            rank_0 = _Rank(0, connection=socket.create_connection((host, port), timeout=_JOIN_SECONDS))
            rank_0.send(token=token, **self._introduction())
            answer = rank_0.read()  # rank 0 reads no more than the introduction: an earlier message would be lost
            if not answer:
                raise ConnectionError("rank 0 has ended before it could answer")
            self._add(rank_0)
            for message in answer:
                self._take(rank_0, message)
        os.register_at_fork(after_in_child=self._close_connections)  # no worker may keep a dead rank's open
        self._thread.start()

    def close(self) -> None:
        """End the watch: this rank has come to its end."""
        self._closes = True
        for other in list(self._others.values()):
            other.send(bye=True)

    def end(self, code: int, lines: Sequence[str], may_follow_another: bool) -> None:
        """See ``errors.Ranks``."""
        if may_follow_another:
            time.sleep(_VERDICT_SECONDS)  # the thread learns of a rank's death at once, and ends this process
        if self._me.rank == 0:
            self._end_all(code, *lines)
        elif 0 in self._others:
            self._others[0].send(end=code, lines=list(lines))
            time.sleep(_ANSWER_SECONDS)

    # ------------------------------------------------------------------------------------------------ coming together

    def _welcome(self, server: socket.socket, num_ranks: int, token: str) -> None:
        """Wait for every other rank to introduce itself."""
        server.settimeout(_JOIN_SECONDS)
        while len(self._others) < num_ranks - 1:
            stranger = _Rank(0, connection=server.accept()[0])
            assert stranger.connection is not None
            stranger.connection.settimeout(_JOIN_SECONDS)
            for introduction in stranger.read() or []:
                if introduction.pop("token", "") == token:
                    self._add(_Rank(**introduction, connection=stranger.connection))

    def _introduction(self) -> dict[str, Any]:
        return {name: getattr(self._me, name) for name in ("rank", "host", "pid", "processes")}

    def _add(self, other: _Rank) -> None:
        assert other.connection is not None
        other.connection.settimeout(_BEAT_SECONDS)
        self._others[other.rank] = other
        self._selector.register(other.connection, selectors.EVENT_READ, other)
        if self._me.rank == 0:
            other.send(**self._introduction())

    def _close_connections(self) -> None:
        for other in self._others.values():
            if other.connection:
                other.connection.close()

    # ----------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closes:
            for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                self._listen_to(key.data)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                self._beat()

    def _beat(self) -> None:
        frame = sys._current_frames()[self._main_thread]
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}"
        waits = "torch/distributed" in frame.f_code.co_filename
        mark, quickest = self._progress.mark, self._progress.quickest
        self._me.hear(mark, place, waits, quickest)
        for other in self._others.values():
            other.send(mark=astuple(mark), place=place, waits=waits, quickest=quickest)
        stop_signals.heed_launcher()
        if self._timeout:
            self._judge()

    def _listen_to(self, other: _Rank) -> None:
        messages = other.read()
        if messages is None:
            assert other.connection is not None
            self._selector.unregister(other.connection)
            other.connection.close()
            other.connection = None
            if not self._closes and other.rank in self._others:
                # where this rank is now says more than where that one was at its last beat
                self._lose([other], f"died as the run was at {self._progress.mark} (killed, or its memory ran out)")
        for message in messages or []:
            self._take(other, message)

    def _take(self, other: _Rank, message: dict[str, Any]) -> None:
        """Do what a message asks for."""
        if "mark" in message:
            other.hear(Mark(*message.pop("mark")), **message)
        elif "bye" in message:
            del self._others[other.rank]
        elif "end" not in message:
            other.host, other.pid, other.processes = (message[name] for name in ("host", "pid", "processes"))
        elif self._me.rank:
            leave(message["end"])
        else:
            self._end_all(message["end"], *message["lines"])

    def _judge(self) -> None:
        """Find ranks that are silent and, on rank 0, those that all the others have left behind for too long; where
        nobody moves at all, those that do not just wait for others.
        """
        now = time.monotonic()
        silent = [other for other in self._others.values() if now - other.heard > self._timeout]
        if silent:
            how = f"gave no sign for {self._timeout:g} s, stopped or out of reach"
            self._lose(silent, f"{how}, as the run was at {self._progress.mark}")
        if self._me.rank or not self._others:
            return
        ranks = [self._me, *self._others.values()]
        last = min(rank.mark for rank in ranks)
        behind = [rank for rank in ranks if rank.mark == last]
        stands = now - max(rank.moved for rank in behind)
        slow = _PASSES * max(rank.quickest for rank in ranks)
        if stands < max(self._timeout, slow) * (PATIENCE if last.lasts else 1):
            return
        if len(behind) == len(ranks):
            if last.lasts or last.phase == Phase.DATA:
                return  # all load, save or wait for data: no rank keeps another waiting
            behind = [rank for rank in ranks if not rank.waits] or ranks
        self._lose(behind, f"hung at {last} for {stands:.0f} s, in {behind[0].place}")

    def _lose(self, lost: list[_Rank], how: str) -> NoReturn:
        """Say which ranks are lost, and end the run. Those that may still live on this machine are killed, since
        they do not hear that they are to end.
        """
        speaks = self._me.rank in (0, 1)  # to rank 1 only rank 0 can be lost; the others are silent as it speaks
        for rank in lost:
            if speaks and rank.connection and rank.processes == self._me.processes:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        names = ", ".join(rank.name for rank in lost)
        line = f"error: {names} {how}; the other ranks have ended: go on with --resume true"
        if self._me.rank == 0:
            self._end_all(FAILURE, line)
        if speaks:
            say(line)
        leave(FAILURE)

    def _end_all(self, code: int, *lines: str) -> NoReturn:
        self._end.acquire()  # never released: another thread with another reason waits here for the end
        say(*lines)
        for other in self._others.values():
            other.send(end=code)
        leave(code)


def _process_space() -> str:
    """Name what process ids are unique in: this machine, or on it the container."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()
