"""A server with the part of the Hugging Face hub's interface that loads and streams datasets."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote


class DatasetHub(BaseHTTPRequestHandler):
    """The hub's answers about datasets.

    ``repositories`` has the files of each dataset by commit; ``branches`` has each dataset's commit of a branch or tag.
    """

    repositories: dict[str, dict[str, dict[str, bytes]]] = {}  # noqa: RUF012
    branches: dict[str, dict[str, str]] = {}  # noqa: RUF012
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        is_api = path.startswith("/api/datasets/")
        owner, name, *rest = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        repository = self.repositories.get(f"{owner}/{name}")
        if repository is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        kind, revision = rest[:2] if len(rest) > 1 else ("revision", "main")
        commit = self.branches[f"{owner}/{name}"].get(revision, revision)
        if commit not in repository:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files, inner = repository[commit], "/".join(rest[2:])
        if is_api and kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            self._send_json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings, "tags": []})
        elif is_api and kind == "tree":
            self._send_json(self._tree(files, inner, "recursive=true" in self.path.lower()))
        elif is_api and kind == "paths-info":
            asked = json.loads(self._body)["paths"]
            self._send_json([entry for path in asked for entry in self._entries(files, path)])
        elif inner in files:
            self._send_file(files[inner], commit)
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})

    def _entries(self, files: dict[str, bytes], path: str) -> list[dict[str, object]]:
        if path in files:
            return [{"type": "file", "path": path, "size": len(files[path]), "oid": _object_id(files[path])}]
        if any(file.startswith(f"{path}/") for file in files):
            return [{"type": "directory", "path": path, "oid": _object_id(path.encode())}]
        return []

    def _tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, object]]:
        prefix = f"{folder}/" if folder else ""
        inside = [file.removeprefix(prefix) for file in files if file.startswith(prefix)]
        folders = {"/".join(file.split("/")[:depth]) for file in inside for depth in range(1, file.count("/") + 1)}
        shown = [path for path in sorted({*inside, *folders}) if recursive or "/" not in path]
        return [entry for path in shown for entry in self._entries(files, prefix + path)]

    def _send_file(self, content: bytes, commit: str) -> None:
        headers = {"ETag": f'"{_object_id(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        given = self.headers.get("Range", "")
        if given.startswith("bytes="):
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self._send(206, content[start:stop], headers)
        else:
            self._send(200, content, headers)

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _object_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
