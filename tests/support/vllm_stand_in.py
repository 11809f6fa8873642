"""Answer the requests of the vLLM sampler as ``vllm serve`` does, with transformers. It starts in seconds.

A shell script in place of the Python of vLLM starts this file, see ``write_stand_in``. After SIGUSR1, it completes no
request any more, and every second answer about its state is an error.
"""

import json
import signal
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


def write_stand_in(path: Path) -> Path:
    """Write the script, and return its path for ``--vllm_python``."""
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -I ]; then echo 0.32.0; exit; fi\n'  # the version is asked for
        f'exec {sys.executable} {__file__} "$@"\n'
    )
    path.chmod(0o755)
    return path


class _Engine:
    """The model of the folder that was loaded last."""

    def __init__(self, model_dir: str) -> None:
        self.version = ""
        self.num_tokens = 0
        self.is_asleep = False
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.num_polls = 0
        self._lock = threading.Lock()
        self.load(model_dir)

    def load(self, model_dir: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir).eval()

    def generate(self, prompt_ids: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        import torch

        self.may_compute.wait()
        with self._lock, torch.no_grad():
            assert not self.is_asleep
            generator = torch.Generator().manual_seed(parameters["seed"])
            token_ids = list(prompt_ids)
            tokens: list[dict[str, float]] = []
            while len(tokens) < parameters["max_tokens"]:
                logits = self._model(input_ids=torch.tensor([token_ids])).logits[0, -1].float()
                log_probabilities = torch.log_softmax(logits / parameters["temperature"], dim=0)
                token_id = int(torch.multinomial(log_probabilities.exp(), 1, generator=generator))
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
                logits = self._model(input_ids=torch.tensor([prompt_ids])).logits[0].float()
                log_probabilities = torch.log_softmax(logits, dim=1)
                candidates: list[Any] = [None]
                for position, token_id in enumerate(prompt_ids[1:]):
                    candidates.append({str(token_id): {"logprob": float(log_probabilities[position, token_id])}})
                answer["prompt_logprobs"] = candidates
            return answer


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64
    engine: _Engine


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
            answer = engine.generate(content["token_ids"], content["sampling_params"])
        elif self.path == "/collective_rpc":
            engine.load(content["kwargs"]["weights_path"])
        elif self.path == "/reset_prefix_cache":
            answer = {"success": True}
        elif self.path == "/update_weight_version":
            engine.version = content["new_version"]
        else:
            engine.is_asleep = self.path.startswith("/sleep")
        self._answer(json.dumps(answer).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log: the address of a Unix socket has no host."""


def main() -> None:
    """Serve until the process is killed."""
    model_dir = sys.argv[sys.argv.index("serve") + 1]
    path = sys.argv[sys.argv.index("--uds") + 1]
    engine = _Engine(model_dir)
    signal.signal(signal.SIGUSR1, lambda *_: engine.may_compute.clear())
    with _Server(path, _Handler) as server:
        server.engine = engine
        server.serve_forever(0.05)


if __name__ == "__main__":
    main()
