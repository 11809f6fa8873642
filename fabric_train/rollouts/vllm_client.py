"""Send requests to a vLLM server: token ids in, token ids and log-probabilities out, never text.

The server listens on a Unix socket in a folder that only this user can open. A port on loopback would be open to every
user of the machine: vLLM's key protects the paths under /v1 and /inference, but not those that load other weights.
"""

import http.client
import json
import math
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import RunError

CONTROL_SECONDS = 600.0
"""The server hangs if it has not answered a request without sampling, or the comparison's, in this time. It loads the
weights of a whole GPU in less."""
_GET_SECONDS = 10.0
_SHOWN_CHARACTERS = 500
_ADVICE = (
    "install vLLM 0.32.0, the version that is tested, or leave out --sampler to sample in the processes that train"
)
"""For answers that another server of the same version would repeat."""
_TOKEN_COUNTS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total{[^}]*} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class GeneratedTokens:
    """The server's answer to a request for a completion."""

    token_ids: list[int]
    log_probabilities: list[float]
    """The log-probability of each token."""
    finish_reason: str
    weight_versions: set[str]
    """The versions of the weights that the tokens were sampled with."""
    prompt_log_probabilities: list[float]
    """The log-probability of each token of the prompt after the first one; empty if the request does not ask for it."""


class ServerFailedError(RunError):
    """The server ended, hangs, or answered that it failed (5xx); another server may succeed.

    What would recur is another RunError: a request that the server refuses (4xx), or an answer in an unknown form.
    """


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float | None) -> None:
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
        return self._get("/health") is not None

    def num_tokens(self) -> float | None:
        """Return how many tokens the server has read and sampled since its start; None if it does not answer."""
        answer = self._get("/metrics/")  # without the slash at the end, vLLM redirects
        if answer is None:
            return None
        counts = _TOKEN_COUNTS.findall(answer.decode(errors="replace"))
        if not counts:
            return math.nan  # it counts no tokens; NaN differs from itself, so this server never seems to hang
        return sum(float(count) for count in counts)

    def _get(self, path: str) -> bytes | None:
        """Return the answer to a request without content; None if there is none within 10 s, or it is an error."""
        connection = _SocketConnection(self.path, timeout=_GET_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return answer if response.status == http.client.OK else None

    def generate(
        self,
        prompt_ids: Sequence[int],
        parameters: dict[str, Any],
        replica: int | None = None,
        *,
        waits: bool = True,
    ) -> GeneratedTokens:
        """Return a completion of a prompt.

        Args:
            prompt_ids: The token ids of the prompt.
            parameters: vLLM's sampling parameters.
            replica: The index of the copy of the model that answers; None: the server chooses one.
            waits: Whether to wait for the answer until the server ends, however long; see ``post``.

        Raises:
            ServerFailedError: there is no answer, or it says that the server failed.
            RunError: the request is refused, or the answer has an unknown form.
        """
        path = "/inference/v1/generate"
        headers = {}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica)
        answer = self.post(path, {"token_ids": list(prompt_ids), "sampling_params": parameters}, headers, waits=waits)
        try:
            return _read_generated(answer, prompt_ids, has_prompt="prompt_logprobs" in parameters)
        except (LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"vLLM answered {path} in an unknown form ({reason}); {_ADVICE}") from error

    def post(
        self,
        path: str,
        content: Any = None,
        headers: dict[str, str] | None = None,
        *,
        waits: bool = False,
    ) -> Any:
        """Send a request, and return the JSON of the answer.

        With ``waits``, there is no limit on its time; otherwise, the server hangs after ``CONTROL_SECONDS``.

        Raises:
            ServerFailedError: there is no answer, or it says that the server failed.
            RunError: the request is refused, or the answer is no JSON.
        """
        connection = _SocketConnection(self.path, None if waits else CONTROL_SECONDS)
        body = b"" if content is None else json.dumps(content).encode()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerFailedError(f"vLLM did not answer {path}: {reason}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            message = f"vLLM answered {path} with {response.status}: {_message_of(answer)}"
            if response.status >= http.client.INTERNAL_SERVER_ERROR:
                raise ServerFailedError(message)
            raise RunError(f"{message}; {_ADVICE}")
        if not answer:
            return None
        try:
            return json.loads(answer)
        except ValueError as error:
            message = f"vLLM answered {path} with text that is not JSON: {_message_of(answer)}"
            raise RunError(f"{message}; {_ADVICE}") from error


def _read_generated(answer: Any, prompt_ids: Sequence[int], *, has_prompt: bool) -> GeneratedTokens:
    """Return the completion in the JSON of an answer; a LookupError, TypeError or ValueError if it has another form.

    With ``has_prompt``, the answer must have the log-probabilities of the prompt as well.
    """
    (choice,) = answer["choices"]
    token_ids = [int(token_id) for token_id in choice["token_ids"]]
    log_probabilities = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
    if not token_ids:
        raise ValueError("it has no tokens")
    if len(token_ids) != len(log_probabilities):
        raise ValueError(f"{len(token_ids)} tokens have {len(log_probabilities)} log-probabilities")
    prompt_log_probabilities = []
    if has_prompt:
        for token_id, candidates in zip(prompt_ids[1:], answer["prompt_logprobs"][1:], strict=True):
            prompt_log_probabilities.append(float(candidates[str(token_id)]["logprob"]))
    return GeneratedTokens(
        token_ids=token_ids,
        log_probabilities=log_probabilities,
        finish_reason=str(choice["finish_reason"]),
        weight_versions={str(span["version"]) for span in choice["weight_versions"]},
        prompt_log_probabilities=prompt_log_probabilities,
    )


def _message_of(answer: bytes) -> str:
    """Return the message in an answer that is an error, in one line."""
    text = answer.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass  # it is no JSON of vLLM
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
