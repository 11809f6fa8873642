"""download_model.py downloads a model completely or not at all, here from a server with the hub's interface."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from fabric_train.cli.errors import InputError
from fabric_train.programs import download_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Download = Callable[..., None]


class Hub(BaseHTTPRequestHandler):
    """The hub's answers about the repositories in ``files``."""

    files: dict[str, dict[str, bytes]] = {}  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        api = self.path.startswith("/api/models/")
        path = self.path.split("?")[0].removeprefix("/api/models/").strip("/")
        name = "/".join(path.split("/")[:2])
        rest = "/".join(path.split("/")[2:])
        there = self.files.get(name)
        if there is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api and rest.startswith("tree/"):
            entries = [self._entry(file, content) for file, content in there.items()]
            self._send(200, json.dumps(entries).encode())
        elif api and rest in ("revision/main", f"revision/{COMMIT}"):
            siblings = [{"rfilename": file, "size": len(content)} for file, content in there.items()]
            self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings, "tags": []}).encode())
        elif api:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            file = rest.removeprefix(f"resolve/{COMMIT}/")
            etag = self._entry(file, there[file])["oid"]
            self._send(200, there[file], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    @staticmethod
    def _entry(file: str, content: bytes) -> dict[str, object]:
        blob = b"blob %d\0" % len(content) + content
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(blob).hexdigest()}

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub(tiny_model_dir: Path) -> Iterator[str]:
    model = {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
    more = {
        "original/params.json": b"{}",
        "model.gguf": b"x",
        "pytorch_model.bin": b"x",
        "consolidated.safetensors": b"x",
    }
    pickled = {"config.json": model["config.json"], "pytorch_model.bin": b"x"}
    cut_off = model | {"model.safetensors": model["model.safetensors"][:5000]}
    Hub.files = {"some/model": model | more, "some/pickles": pickled, "some/broken": cut_off}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def download(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """Return ``download(name, *options)``, which runs the program's ``main`` in ``tmp_path``."""

    def run(name: str, *options: str, endpoint: str = hub) -> None:
        monkeypatch.chdir(tmp_path)
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("sys.argv", ["download_model.py", "--model_name", name, "--output_dir", "out", *options])
        download_model.main()

    return run


def test_the_program_downloads_safetensors_and_tokenizer_only(
    download: Download, tiny_model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    download("some/model")
    there = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    source = json.loads(there.pop("hub_source.json"))
    assert source == {"repository": "some/model", "revision": COMMIT}
    assert there == {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
    assert f"bytes of some/model at {COMMIT} in out" in capfd.readouterr().out
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("some/absent", [], "--model_name some/absent: the hub has no such model"),
        ("some/model", ["--revision", "v9"], "--revision v9: some/model has no such branch, tag or commit"),
        ("some/pickles", [], "--model_name some/pickles: its weights are pickles, not safetensors"),
        ("some/broken", [], "model.safetensors: not a complete safetensors file"),
    ],
)
def test_an_unusable_model_is_refused(
    download: Download, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, options: list[str], fault: str
) -> None:
    with pytest.raises(InputError) as refused:
        download(name, *options)
    assert len(refused.value.faults) == 1
    assert fault in refused.value.faults[0]
    assert "\n" not in refused.value.faults[0]
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_named_before_the_download(
    download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fabric_train.files.requirements.free_bytes", lambda _: 500_000)
    with pytest.raises(InputError, match=r"^out: some/model needs 0\.6 MB, but .* has 0\.5 MB left"):
        download("some/model")
    assert not any(tmp_path.rglob("*.safetensors"))


def test_a_hub_that_cannot_be_reached_is_refused_in_one_line(download: Download, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--model_name some/model: cannot be downloaded") as refused:
        download("some/model", endpoint="http://127.0.0.1:9")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
