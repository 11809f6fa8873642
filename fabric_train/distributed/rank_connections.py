"""Connect every rank to rank 0 by TCP, and describe ranks in a line; ``watchdog`` decides what follows from messages.

A message is a line of JSON. No rank passes messages on: a thousand ranks cost rank 0 less than two percent of a core,
and no other rank's end delays a report (docs/scale.md).
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
_LISTED_MACHINES = 4  # in an error
_FILES_PER_RANK = 2  # torch's store and the watchdog of rank 0 each have a connection to every rank, gloo to each other
_OTHER_FILES = 128  # that a run has open at least
_RAISED_LIMIT = 65_536


@dataclass
class ConnectedRank:
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
    _partial: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def introduce(self) -> dict[str, Any]:
        """Return the message by which another rank gets to know this one."""
        return {name: getattr(self, name) for name in ("rank", "host", "pid", "pid_namespace")}

    def update(self, position: Position, location: str, is_waiting: bool, min_pass_seconds: float) -> None:
        self.heard_at = time.monotonic()
        self.position = position
        self.location = location
        self.is_waiting = is_waiting
        self.min_pass_seconds = min_pass_seconds

    def send(self, message: bytes) -> None:
        """Send what :func:`encode` has returned."""
        if self.connection:
            with suppress(OSError):  # a broken connection is noticed when messages are read
                self.connection.sendall(message)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, or None if the connection has ended."""
        lines = self.read_lines()
        return None if lines is None else [json.loads(line) for line in lines]

    def read_lines(self) -> list[bytes] | None:
        """Return the whole lines that have arrived, or None if the connection has ended."""
        assert self.connection is not None
        try:
            received = self.connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            return None
        self.heard_at = time.monotonic()
        *lines, self._partial = (self._partial + received).split(b"\n")
        return lines

    def open(self, connection: socket.socket) -> None:
        """Use a connection for messages."""
        connection.settimeout(_SEND_SECONDS)
        # without it, the kernel holds back a message that follows a heartbeat, and drops it if this process ends first
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self.connection:
            self.connection.close()
            self.connection = None


def this_rank(rank: int) -> ConnectedRank:
    """Return this process, without a connection."""
    return ConnectedRank(rank, machine_name(), os.getpid(), _pid_namespace())


def encode(**message: Any) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def listen(num_ranks: int, num_nodes: int) -> socket.socket:
    """Return the socket at which rank 0 waits for the others, on one machine only on its loopback."""
    # all ranks connect at once: one that finds no place in the queue would try again only after seconds
    return socket.create_server(("127.0.0.1" if num_nodes == 1 else "", 0), backlog=num_ranks)


def accept_ranks(server: socket.socket, num_ranks: int, token: str, me: ConnectedRank) -> dict[int, ConnectedRank]:
    """Accept the other ranks, which know the token, and answer each; whoever else connects keeps none waiting.

    Raises:
        RunError: some rank has not connected in a minute.
    """
    ranks: dict[int, ConnectedRank] = {}
    deadline = time.monotonic() + _JOIN_SECONDS
    answer = encode(**me.introduce())
    server.setblocking(False)
    with selectors.DefaultSelector() as joining:
        joining.register(server, selectors.EVENT_READ)
        while len(ranks) < num_ranks - 1:
            arrived = joining.select(deadline - time.monotonic())
            if time.monotonic() >= deadline:
                missing = number_ranges(rank for rank in range(1, num_ranks) if rank not in ranks)
                where = f"rank 0 ({me.host}, port {server.getsockname()[1]})"
                raise RunError(
                    f"rank {missing} did not connect to {where} within {_JOIN_SECONDS:g} s; see that no firewall is "
                    "between the machines, and start the run again"
                )
            for key, _ in arrived:
                if key.fileobj is server:
                    with suppress(BlockingIOError, ConnectionAbortedError):  # it has gone again
                        connection = server.accept()[0]
                        unknown = ConnectedRank(-1)
                        unknown.open(connection)
                        joining.register(connection, selectors.EVENT_READ, unknown)
                elif (lines := key.data.read_lines()) != []:  # else a part of a line has arrived
                    joining.unregister(key.fileobj)
                    if not lines or not lines[0].startswith(token.encode()):
                        key.data.close()
                        continue
                    introduction = json.loads(lines[0].removeprefix(token.encode()))
                    rank = ConnectedRank(**introduction, connection=key.data.connection)
                    ranks[rank.rank] = rank
                    rank.send(answer)
    return ranks


def connect_to_rank_0(
    address: tuple[str, int], token: str, me: ConnectedRank
) -> tuple[ConnectedRank, list[dict[str, Any]]]:
    """Return rank 0, and what it has sent after its answer.

    Raises:
        OSError: rank 0 cannot be reached, or has ended.
    """
    rank_0 = ConnectedRank(0)
    rank_0.open(socket.create_connection(address, timeout=_JOIN_SECONDS))
    assert rank_0.connection is not None
    rank_0.connection.settimeout(_JOIN_SECONDS)
    # rank 0 reads only the first line before it knows all ranks, so an earlier message would be lost
    rank_0.send(token.encode() + encode(**me.introduce()))
    messages: list[dict[str, Any]] | None = []
    while messages == []:
        messages = rank_0.read()
    if messages is None:
        raise ConnectionError("rank 0 ended before it answered")
    introduction, *others = messages
    rank_0.host = introduction["host"]
    rank_0.pid = introduction["pid"]
    rank_0.pid_namespace = introduction["pid_namespace"]
    rank_0.connection.settimeout(_SEND_SECONDS)
    return rank_0, others


def describe_ranks(ranks: Iterable[ConnectedRank]) -> str:
    """Return the names of ranks by machine, and a number instead of names beyond four machines."""
    of_machines: dict[str, list[ConnectedRank]] = {}
    for rank in sorted(ranks, key=lambda each: each.rank):
        of_machines.setdefault(rank.host, []).append(rank)
    listed = list(of_machines.items())[:_LISTED_MACHINES]
    texts = [
        of[0].name if len(of) == 1 else f"ranks {number_ranges(rank.rank for rank in of)} ({host})"
        for host, of in listed
    ]
    if more := list(of_machines.values())[_LISTED_MACHINES:]:
        texts.append(f"{sum(map(len, more))} ranks of {len(more)} more machines")
    return ", ".join(texts)


def allow_connections(num_ranks: int) -> None:
    """Let this process open as many files as a run of many ranks needs: raise its soft limit, up to the hard one.

    Raises:
        InputError: the hard limit is too low.
    """
    needed = _FILES_PER_RANK * num_ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"{num_ranks} ranks need {needed:,} open files in a process, and the hard limit here is {hard:,}; raise it "
            "(LimitNOFILE of the service that starts the ranks, docker run --ulimit nofile=65536, or nofile in "
            "/etc/security/limits.conf)"
        )
    raised = max(needed, _RAISED_LIMIT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard))


def _pid_namespace() -> str:
    """Return a name of the machine or container in which process ids are unique."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()
