"""Send requests to a vLLM server: token ids in, token ids and log-probabilities out, never text.

The server listens on a Unix socket in a folder that only this user can open. A port on loopback would be open to every
user of the machine: vLLM's key protects the paths under /v1 and /inference, but not those that load other weights.
"""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import RunError

_REQUEST_SECONDS = 3600.0
"""After this time without an answer, a request has failed: the server hangs."""
_SHOWN_CHARACTERS = 500


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class VllmClient:
    """Sends requests to the server of a socket; any number of threads may use it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_healthy(self) -> bool:
        """Return whether the server has started and its engine runs."""
        connection = _SocketConnection(self.path, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def post(self, path: str, content: Any = None) -> Any:
        """Send a request, and return the JSON of the answer.

        Raises:
            RunError: there is no answer, or it is an error.
        """
        connection = _SocketConnection(self.path, _REQUEST_SECONDS)
        body = b"" if content is None else json.dumps(content).encode()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise RunError(f"vLLM did not answer {path}: {reason}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise RunError(f"vLLM answered {path} with {response.status}: {_message_of(answer)}")
        return json.loads(answer) if answer else None


def _message_of(answer: bytes) -> str:
    """Return the message in an answer that is an error, in one line."""
    text = answer.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass  # it is no JSON of vLLM
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
