"""Many ranks: all of them end when one is lost, the report is one short line, and a stranger delays no start."""

import os
import re
import resource
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabric_train.cli.errors import InputError, RunError
from fabric_train.distributed import rank_connections
from fabric_train.distributed.rank_connections import (
    ConnectedRank,
    accept_ranks,
    allow_connections,
    connect_to_rank_0,
    describe_ranks,
    listen,
    this_process_as_rank,
)
from tests.support.watched_ranks import observe_ranks

TOKEN = "secret"


@pytest.mark.parametrize(
    ("fault", "timeout", "num_lost", "who"),
    [
        ("killed", 0, 1, r"rank 32 \(.+, process \d+\) died"),
        ("machine", 4, 8, r"ranks 32–39 \(\S+\) sent no heartbeat for 4 s"),
    ],
)
def test_of_64_ranks_all_end_when_some_are_lost(fault: str, timeout: float, num_lost: int, who: str) -> None:
    seen = observe_ranks(64, fault, timeout)
    assert seen.num_ended == 64 - num_lost
    (line,) = seen.lines
    assert re.match(f"error: {who} ", line), line


def test_the_lost_are_named_by_machine_and_many_are_counted() -> None:
    ranks = [ConnectedRank(number, f"node-{number // 8}", 1000 + number) for number in range(80)]
    assert describe_ranks(ranks[9:10]) == "rank 9 (node-1, process 1009)"
    assert (
        describe_ranks([ranks[17], *ranks[8:12], ranks[14]])
        == "ranks 8–11, 14 (node-1), rank 17 (node-2, process 1017)"
    )
    assert describe_ranks(reversed(ranks)).endswith("ranks 24–31 (node-3), 48 ranks of 6 more machines")


def test_strangers_delay_no_start() -> None:
    with listen(2, num_nodes=1) as server, ThreadPoolExecutor() as threads:
        address = server.getsockname()
        with socket.create_connection(address), socket.create_connection(address) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\n")
            accepted = threads.submit(accept_ranks, server, 2, TOKEN, this_process_as_rank(0))
            rank_0, _ = connect_to_rank_0(address, TOKEN, this_process_as_rank(1))
            assert list(accepted.result(10)) == [1]
            assert rank_0.pid == os.getpid()


def test_ranks_that_do_not_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_connections, "_JOIN_SECONDS", 0.05)
    with listen(5, num_nodes=1) as server, pytest.raises(RunError, match="ranks 1–4 did not connect to rank 0 "):
        accept_ranks(server, 5, TOKEN, this_process_as_rank(0))


def test_the_limit_of_open_files_is_raised_or_named() -> None:
    def check() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000))
        allow_connections(60)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 1000)
        allow_connections(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, 1000)
        with pytest.raises(InputError, match=r"1024 ranks need 2,176 open files .* the hard limit here is 1,000;"):
            allow_connections(1024)

    assert _exit_code_of(check) == 0


def _exit_code_of(check: Callable[[], None]) -> int:
    """Return the exit code of a fork that makes a check: no process can undo a hard limit."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        check()
        os._exit(0)
    finally:
        os._exit(1)
