"""A stand-in for the Hugging Face hub on loopback: the calls with which its clients read, load, create and push.

Repositories, branches, commits, pull requests and large files are kept in memory. Accounts, and faults such as a cut
connection or 429, are set by the test. The real clients speak to it: nothing of them is replaced.
"""

import hashlib
import re
import threading
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.stand_in_hub_accounts import Account, account
from tests.support.stand_in_hub_calls import HubCalls
from tests.support.stand_in_hub_files import sha256
from tests.support.stand_in_xet import read_file

TOKEN = "hf_standInTokenOfAlice"


@dataclass
class Repository:
    """A repository of models or datasets."""

    commits: dict[str, dict[str, bytes]]
    """The files of each commit: their content by path."""
    branches: dict[str, str]
    """The commit of each branch, tag and pull request."""
    private: bool = False
    messages: list[str] = field(default_factory=list)
    """The first lines of the commits' messages, in order."""

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a branch, tag, pull request or commit."""
        return self.commits[self.branches.get(revision, revision)]

    def commit(self, revision: str, files: dict[str, bytes]) -> str:
        """Add a commit to a branch and return its name."""
        hashes = sorted((path, sha256(content)) for path, content in files.items())
        oid = hashlib.sha1(repr((hashes, len(self.commits))).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[revision] = oid
        return oid


@dataclass
class Fault:
    """An answer instead of the right one, to calls that match ``call``, such as ``PUT /lfs/.*/2$``.

    ``status`` 0 cuts the connection after half of what the client sends. The first ``after`` calls that match are
    answered as usual, and after that ``times`` calls have the fault.
    """

    call: str
    status: int = 0
    times: int = 1_000_000
    after: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)


class StandInHub(ThreadingHTTPServer):
    """The server, which answers while the context is open.

    Args:
        part_bytes: larger files are uploaded in parts of this size.
    """

    daemon_threads = True

    def __init__(self, part_bytes: int = 1 << 16) -> None:
        super().__init__(("127.0.0.1", 0), HubCalls)
        self.part_bytes = part_bytes
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        """By models/OWNER/NAME or datasets/OWNER/NAME."""
        self.accounts: dict[str, Account] = {TOKEN: account("alice")}
        """By token."""
        self.objects: dict[str, bytes] = {}
        """Content of large files by SHA-256."""
        self.parts: dict[tuple[str, int], bytes] = {}
        """Parts of large files that are being uploaded, by SHA-256 of the file and number of the part."""
        self.xet_storage: Path | None = None
        """The folder that clients with hf_xet upload large files to."""
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        """Every call, its answer's status and the bytes received."""

    def __enter__(self) -> "StandInHub":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def add(self, name: str, files: dict[str, bytes], private: bool = False) -> Repository:
        """Add a repository, such as models/alice/model, with files on its main branch."""
        self.repositories[name] = Repository({}, {}, private)
        self.repositories[name].commit("main", files)
        return self.repositories[name]

    def calls_of(self, pattern: str) -> list[str]:
        """Return the calls that match, in order."""
        return [call for call in self.calls if re.search(pattern, call)]

    def large_file(self, oid: str) -> bytes | None:
        """Return the content of a large file by its SHA-256, None if it was not uploaded."""
        if oid in self.objects or self.xet_storage is None:
            return self.objects.get(oid)
        return read_file(self.xet_storage, oid)

    def fault_of(self, call: str) -> Fault | None:
        """Return the fault that a call has, and count the call."""
        with self.lock:
            for fault in self.faults:
                if not re.search(fault.call, call):
                    continue
                fault.after -= 1
                if fault.after < 0 and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None
