"""What a push tells the hub, here a server that answers like it, and how a refusal is reported."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import convert_to_hf
from fabric_train.cli.errors import FAILURE
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.exports import verify_in_this_process


class RefusingHub(BaseHTTPRequestHandler):
    """A hub that creates repositories and refuses the metadata of every card."""

    asked: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if self.path == "/api/repos/create":
            name = f"{body.get('organization', 'someone')}/{body['name']}"
            self._answer(200, {"url": f"http://{self.headers['Host']}/{name}", "name": name})
        else:
            self._answer(400, {"errors": [{"message": '"license" must be one of [apache-2.0, ...]'}]})

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RefusingHub]]:
    RefusingHub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), RefusingHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", "hf_notatokenatall")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield RefusingHub
    server.shutdown()


def test_a_card_that_the_hub_refuses_is_reported_in_one_line(
    tmp_path: Path,
    tiny_model_dir: Path,
    hub: type[RefusingHub],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoint = write_full(tmp_path / "step-00000001", tiny_model_dir, trained_weights(tiny_model_dir), step=1)
    argv = ["--checkpoint", checkpoint, "--output_dir", tmp_path / "local-name", "--push_to_hub", "owner/pushed"]
    argv += ["--license", "my-license", "--language", "es", "ca", "--base_model", "some/base"]
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    with verify_in_this_process(), pytest.raises(SystemExit) as end:
        convert_to_hf.main()
    assert end.value.code == FAILURE
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "is complete, but pushing it to owner/pushed failed: Invalid metadata in README.md. " in line
    assert '"license" must be one of' in line
    asked = dict(hub.asked)
    card = asked["/api/validate-yaml"]["content"]
    assert card == (tmp_path / "local-name" / "README.md").read_text()
    assert 'from_pretrained("owner/pushed"' in card
    assert "local-name" not in card
    for metadata in ("license: my-license", "language:\n- es\n- ca", "base_model: some/base"):
        assert metadata in card
