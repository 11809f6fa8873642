"""Answer the requests of the vLLM sampler as ``vllm serve`` does, with NumPy. It starts in less than a second.

A shell script in place of the Python of vLLM starts this module, see ``write_stand_in``. After SIGUSR1, it completes no
request any more, and every second answer about its state is an error.
"""

import json
import shlex
import signal
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.numpy_llama import NumpyLlama, log_softmax
from tests.support.programs import ROOT


def write_stand_in(path: Path, before: str = "") -> Path:
    """Write the script, and return its path for ``--vllm_python``.

    Args:
        path: The script.
        before: Python source that the server executes before it starts, with this module as ``vllm_stand_in``. It can
            make the server fail.
    """
    program = path.with_name(f"{path.name}-vllm_stand_in.py")
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.support import vllm_stand_in\n{before}\n"
        "vllm_stand_in.main()\n"
    )
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -I ]; then echo 0.32.0; exit; fi\n'  # the version is asked for
        f'exec {shlex.join([sys.executable, str(program)])} "$@"\n'
    )
    path.chmod(0o755)
    return path


class Engine:
    """The model of the folder that was loaded last."""

    def __init__(self, model_dir: Path) -> None:
        self.version = ""
        self.num_tokens = 0
        self.is_asleep = False
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.num_polls = 0
        self._lock = threading.Lock()
        self.load(model_dir)

    def load(self, model_dir: Path) -> None:
        self._model = NumpyLlama(model_dir)

    def generate(self, prompt_ids: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; the same seed gives the same tokens."""
        self.may_compute.wait()
        with self._lock:
            assert not self.is_asleep
            generator = np.random.default_rng(parameters["seed"])
            token_ids = list(prompt_ids)
            tokens: list[dict[str, float]] = []
            while len(tokens) < parameters["max_tokens"]:
                logits = self._model.compute_logits(token_ids)[-1]
                log_probabilities = log_softmax(logits / parameters["temperature"])
                token_id = int(generator.choice(len(logits), p=np.exp(log_probabilities)))
                tokens.append({"logprob": float(log_probabilities[token_id])})
                token_ids.append(token_id)
                self.num_tokens += 1
                if token_id in parameters["stop_token_ids"]:
                    break
            choice = {
                "token_ids": token_ids[len(prompt_ids) :],
                "logprobs": {"content": tokens},
                "finish_reason": "stop" if token_ids[-1] in parameters["stop_token_ids"] else "length",
                "weight_versions": [{"version": self.version}],
            }
            answer: dict[str, Any] = {"choices": [choice]}
            if "prompt_logprobs" in parameters:
                log_probabilities = log_softmax(self._model.compute_logits(prompt_ids))
                candidates: list[Any] = [None]
                for position, token_id in enumerate(prompt_ids[1:]):
                    candidates.append({str(token_id): {"logprob": float(log_probabilities[position, token_id])}})
                answer["prompt_logprobs"] = candidates
            return answer


class RequestRefusedError(Exception):
    """The request is answered with 400 and this message."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    engine: Engine


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        engine = self.server.engine
        engine.num_polls += 1
        if not engine.may_compute.is_set() and engine.num_polls % 2:
            self.send_error(503)
            return
        self._answer(f'vllm:generation_tokens_total{{engine="0"}} {engine.num_tokens}\n'.encode())

    def do_POST(self) -> None:
        engine = self.server.engine
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        content = json.loads(body) if body else {}
        answer: Any = None
        if self.path == "/inference/v1/generate":
            try:
                answer = engine.generate(content["token_ids"], content["sampling_params"])
            except RequestRefusedError as error:
                error_json = {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
                self._answer(json.dumps(error_json).encode(), 400)
                return
        elif self.path == "/collective_rpc":
            engine.load(Path(content["kwargs"]["weights_path"]))
        elif self.path == "/reset_prefix_cache":
            answer = {"success": True}
        elif self.path == "/update_weight_version":
            engine.version = content["new_version"]
        else:
            engine.is_asleep = self.path.startswith("/sleep")
        self._answer(json.dumps(answer).encode())

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log: the address of a Unix socket has no host."""


def main() -> None:
    """Serve until the process is killed."""
    model_dir = Path(sys.argv[sys.argv.index("serve") + 1])
    path = sys.argv[sys.argv.index("--uds") + 1]
    engine = Engine(model_dir)
    signal.signal(signal.SIGUSR1, lambda *_: engine.may_compute.clear())
    with _Server(path, _Handler) as server:
        server.engine = engine
        server.serve_forever(0.05)
