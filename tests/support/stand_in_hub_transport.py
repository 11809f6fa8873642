"""One connection to the stand-in for the hub: receive calls, inject faults, send answers, and note both."""

import json
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote

if TYPE_CHECKING:
    from tests.support.stand_in_hub import StandInHub


class HttpError(Exception):
    """Ends a call with an error.

    Attributes:
        status: of the answer.
        code: the hub's name for the error, such as RepoNotFound; its client raises an exception of that name.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class HubConnection(BaseHTTPRequestHandler):
    """One connection of a client; a subclass answers the calls in ``answer``.

    Attributes:
        call: method and path, without the query.
        query: the first value of each name.
        body: what the client has sent.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is several writes, and the client would acknowledge each 40 ms later
    server: "StandInHub"

    def answer(self, path: str) -> None:
        """Send the answer to this call; ``path`` is still quoted.

        Raises:
            HttpError: the call has an error as its answer.
        """
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def send_json(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send an answer in JSON."""
        self.send_bytes(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send_bytes(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer, and note the call."""
        note = f"{self.call} {status}"
        if self.body:
            note += f", {len(self.body):,} bytes"
        self.server.calls.append(note)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _handle(self) -> None:
        path, _, query = self.path.partition("?")
        self.call = f"{self.command} {unquote(path)}"
        self.query = {name: values[0] for name, values in parse_qs(query).items()}
        length = int(self.headers.get("Content-Length", 0))
        fault = self.server.fault_of(self.call)
        if fault is not None and not fault.status:
            self._cut_connection(length)
            return
        self.body = self.rfile.read(length)
        if fault is not None:
            self.send_json(fault.content, fault.status, fault.headers)
            return
        try:
            self.answer(path)
        except HttpError as error:
            headers = {"X-Error-Message": str(error)}
            if error.code:
                headers["X-Error-Code"] = error.code
            self.send_json({"error": str(error)}, error.status, headers)

    def _cut_connection(self, length: int) -> None:
        """Cut the connection after half of the ``length`` bytes that the client sends."""
        self.rfile.read(length // 2)
        self.server.calls.append(f"{self.call} cut")
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
