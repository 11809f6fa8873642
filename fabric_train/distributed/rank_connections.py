"""Connect every rank to rank 0 by TCP, and describe ranks in a line; ``watchdog`` acts on their messages.

A message is a line of JSON. No rank forwards messages, so the end of another rank does not delay a report. A thousand
ranks cost rank 0 less than two percent of a core (docs/contributing/scale.md).
"""

import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError, RunError
from fabric_train.cli.launcher import machine_name
from fabric_train.cli.output import number_ranges
from fabric_train.distributed.signals import Position

_JOIN_SECONDS = 60.0
_SEND_SECONDS = 1.0
_MAX_LISTED_MACHINES = 4  # in an error
_FILES_PER_RANK = 2  # torch's store and the watchdog of rank 0 each have a connection to every rank, gloo to each other
_MIN_OTHER_FILES = 128  # that any run has open
_RAISED_FILE_LIMIT = 65_536


@dataclass
class ConnectedRank:
    """A rank as this process knows it, and the connection to it."""

    rank: int
    host: str = ""
    pid: int = 0
    pid_namespace: str = ""
    connection: socket.socket | None = None
    position: Position = field(default_factory=Position)
    location: str = ""
    """The file, line and function that the main thread is in."""
    is_waiting: bool = False
    """Whether the main thread is in a collective."""
    min_pass_seconds: float = 0.0
    """The duration of the fastest forward and backward pass so far; 0 before the first one."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the last message arrived, on this process's monotonic clock."""
    _incomplete_line: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def introduce(self) -> dict[str, Any]:
        """Return the message that introduces this rank to another rank."""
        return {"rank": self.rank, "host": self.host, "pid": self.pid, "pid_namespace": self.pid_namespace}

    def update(self, position: Position, location: str, is_waiting: bool, min_pass_seconds: float) -> None:
        """Record a heartbeat."""
        self.heard_at = time.monotonic()
        self.position = position
        self.location = location
        self.is_waiting = is_waiting
        self.min_pass_seconds = min_pass_seconds

    def send(self, message: bytes) -> None:
        """Send an encoded message, see :func:`encode`, if the rank is connected."""
        if self.connection:
            with suppress(OSError):  # a broken connection is noticed when messages are read
                self.connection.sendall(message)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the connection has ended."""
        lines = self.read_lines()
        if lines is None:
            return None
        return [json.loads(line) for line in lines]

    def read_lines(self) -> list[bytes] | None:
        """Return the complete lines that have arrived, or None if the connection has ended."""
        assert self.connection is not None
        try:
            received = self.connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            return None
        self.heard_at = time.monotonic()
        lines = (self._incomplete_line + received).split(b"\n")
        self._incomplete_line = lines.pop()
        return lines

    def open(self, connection: socket.socket) -> None:
        """Use a connection for messages."""
        connection.settimeout(_SEND_SECONDS)
        # without this, the kernel holds back a message that follows a heartbeat, and drops it if this process ends soon
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self.connection:
            self.connection.close()
            self.connection = None


def this_process_as_rank(rank: int) -> ConnectedRank:
    """Return this process, without a connection."""
    return ConnectedRank(rank, machine_name(), os.getpid(), _pid_namespace())


def encode(**message: Any) -> bytes:
    """Return the bytes of a message, a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def listen(num_ranks: int, num_nodes: int) -> socket.socket:
    """Return the socket on which rank 0 waits for the other ranks; on one machine it is only on the loopback."""
    address = "127.0.0.1" if num_nodes == 1 else ""
    # all ranks connect at once: a rank that the queue has no room for would try again only after seconds
    return socket.create_server((address, 0), backlog=num_ranks)


def accept_ranks(server: socket.socket, num_ranks: int, token: str, rank_0: ConnectedRank) -> dict[int, ConnectedRank]:
    """Accept the connections of all other ranks on rank 0, and answer each.

    A rank first sends the token, then its introduction. A program that connects without the token is disconnected. It
    delays no rank, because this waits for all connections at the same time.

    Args:
        server: The socket that :func:`listen` has returned.
        num_ranks: Number of ranks of the run, rank 0 included.
        token: A secret that all ranks know.
        rank_0: This process.

    Returns:
        The other ranks by their number.

    Raises:
        RunError: some rank has not connected in a minute.
    """
    ranks: dict[int, ConnectedRank] = {}
    deadline = time.monotonic() + _JOIN_SECONDS
    answer = encode(**rank_0.introduce())
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(ranks) < num_ranks - 1:
            events = selector.select(deadline - time.monotonic())
            if time.monotonic() >= deadline:
                missing_ranks = [rank for rank in range(1, num_ranks) if rank not in ranks]
                noun = "rank" if len(missing_ranks) == 1 else "ranks"
                raise RunError(
                    f"{noun} {number_ranges(missing_ranks)} did not connect to rank 0 ({rank_0.host}, port "
                    f"{server.getsockname()[1]}) within {_JOIN_SECONDS:g} s; check that no firewall blocks connections "
                    "between the machines, and start the run again"
                )
            for key, _ in events:
                if key.fileobj is server:
                    _accept_connection(server, selector)
                    continue
                rank = _read_introduction(key, token, selector)
                if rank is not None:
                    ranks[rank.rank] = rank
                    rank.send(answer)
    return ranks


def _accept_connection(server: socket.socket, selector: selectors.BaseSelector) -> None:
    """Accept a connection, and let ``selector`` wait for its first message, which says which rank it is."""
    with suppress(BlockingIOError, ConnectionAbortedError):  # it has been closed again
        connection = server.accept()[0]
        unknown_rank = ConnectedRank(-1)
        unknown_rank.open(connection)
        selector.register(connection, selectors.EVENT_READ, unknown_rank)


def _read_introduction(
    key: selectors.SelectorKey, token: str, selector: selectors.BaseSelector
) -> ConnectedRank | None:
    """Read what has arrived on a connection that :func:`_accept_connection` has accepted.

    Returns:
        The rank, if its introduction is complete. None if the line is not complete yet, or if the connection has ended
        or did not send the token; then it is closed.
    """
    unknown_rank: ConnectedRank = key.data
    lines = unknown_rank.read_lines()
    if lines is not None and not lines:  # the introduction is not complete yet
        return None
    selector.unregister(key.fileobj)
    if lines is None or not lines[0].startswith(token.encode()):  # it has ended, or is no rank of this run
        unknown_rank.close()
        return None
    introduction = json.loads(lines[0].removeprefix(token.encode()))
    return ConnectedRank(**introduction, connection=unknown_rank.connection)


def connect_to_rank_0(
    address: tuple[str, int], token: str, this_rank: ConnectedRank
) -> tuple[ConnectedRank, list[dict[str, Any]]]:
    """Connect this rank to rank 0.

    Returns:
        Rank 0, and the messages that it has sent after its answer.

    Raises:
        OSError: rank 0 cannot be reached, or has ended.
    """
    rank_0 = ConnectedRank(0)
    rank_0.open(socket.create_connection(address, timeout=_JOIN_SECONDS))
    assert rank_0.connection is not None
    rank_0.connection.settimeout(_JOIN_SECONDS)
    # only this: rank 0 reads one line before it knows all ranks, and a second one would be lost
    rank_0.send(token.encode() + encode(**this_rank.introduce()))
    messages: list[dict[str, Any]] | None = []
    while messages == []:
        messages = rank_0.read()
    if messages is None:
        raise ConnectionError("rank 0 ended before it answered")
    introduction, *later_messages = messages
    rank_0.host = introduction["host"]
    rank_0.pid = introduction["pid"]
    rank_0.pid_namespace = introduction["pid_namespace"]
    rank_0.connection.settimeout(_SEND_SECONDS)
    return rank_0, later_messages


def describe_ranks(ranks: Iterable[ConnectedRank]) -> str:
    """Return the names of ranks by machine; after four machines, only the number of the other ranks.

    Several ranks of one machine are "ranks 0-3 (HOST)", a single rank is "rank 4 (HOST, process PID)".
    """
    ranks_by_host: dict[str, list[ConnectedRank]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        ranks_by_host.setdefault(rank.host, []).append(rank)
    hosts = list(ranks_by_host)
    texts = []
    for host in hosts[:_MAX_LISTED_MACHINES]:
        host_ranks = ranks_by_host[host]
        if len(host_ranks) == 1:
            texts.append(host_ranks[0].name)
        else:
            texts.append(f"ranks {number_ranges(rank.rank for rank in host_ranks)} ({host})")
    unlisted_hosts = hosts[_MAX_LISTED_MACHINES:]
    if unlisted_hosts:
        num_unlisted_ranks = sum(len(ranks_by_host[host]) for host in unlisted_hosts)
        texts.append(f"{num_unlisted_ranks} ranks of {len(unlisted_hosts)} more machines")
    return ", ".join(texts)


def allow_connections(num_ranks: int) -> None:
    """Let this process open as many files as a run of many ranks needs: raise its soft limit up to the hard limit.

    Raises:
        InputError: the hard limit is too low.
    """
    needed_files = _FILES_PER_RANK * num_ranks + _MIN_OTHER_FILES
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= needed_files:
        return
    if hard_limit != resource.RLIM_INFINITY and hard_limit < needed_files:
        raise InputError(
            f"{num_ranks} ranks need {needed_files:,} open files in a process, but the hard limit here is "
            f"{hard_limit:,}; raise it (LimitNOFILE of the service that starts the ranks, docker run --ulimit "
            "nofile=65536, or nofile in /etc/security/limits.conf)"
        )
    raised_limit = max(needed_files, _RAISED_FILE_LIMIT)
    if hard_limit != resource.RLIM_INFINITY:
        raised_limit = min(raised_limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised_limit, hard_limit))


def _pid_namespace() -> str:
    """Return a name of the machine or container in which process ids are unique."""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot_id + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()
