"""The calls that the stand-in for the hub answers (``stand_in_hub.py``), as huggingface_hub and datasets make them."""

import base64
import hashlib
import json
import re
import socket
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from tests.support.stand_in_xet import address_of

if TYPE_CHECKING:
    from tests.support.stand_in_hub import Repository, StandInHub

_LARGE = (".safetensors", ".arrow", ".npy", ".bin")
"""Files that the hub keeps as large files whatever their size."""

_REPOSITORY = r"/(models|datasets)/([\w.-]+)/([\w.-]+)"


class _Answered(Exception):  # noqa: N818
    """Ends a call with an error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class HubCalls(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is several writes, and the client would acknowledge each 40 ms later
    server: "StandInHub"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    # ------------------------------------------------------------------------------------------------ one call

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.query = {name: values[0] for name, values in parse_qs(self.path.partition("?")[2]).items()}
        call = f"{self.command} {unquote(path)}"
        length = int(self.headers.get("Content-Length", 0))
        fault = self.server.fault_of(call)
        if fault is not None and not fault.status:
            self.rfile.read(length // 2)
            self.server.calls.append(f"{call} cut")
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.body = self.rfile.read(length)
        self.call = call
        try:
            if fault is not None:
                self._send_json(fault.content, fault.status, fault.headers)
            else:
                self._route(path)
        except _Answered as end:
            headers = {"X-Error-Message": str(end), **({"X-Error-Code": end.code} if end.code else {})}
            self._send_json({"error": str(end)}, end.status, headers)

    def _route(self, path: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.who = self.server.accounts.get(token)
        if token and self.who is None:
            raise _Answered(401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            self._send_json(self.who or {})
        elif path == "/api/repos/create":
            self._create(json.loads(self.body))
        elif path == "/api/validate-yaml":
            self._send_json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/lfs/([0-9a-f]{64})(?:/(\w+))?", path):
            self._large_file(found[1], found[2] or "")
        elif found := re.fullmatch(r"(/datasets)?/([\w.-]+)/([\w.-]+)\.git/info/lfs/objects/batch", path):
            self._batch(f"{(found[1] or '/models')[1:]}/{found[2]}/{found[3]}", json.loads(self.body))
        elif found := re.fullmatch(rf"/api{_REPOSITORY}(?:/([\w-]+)(?:/(.*))?)?", path):
            self._api("/".join(found.group(1, 2, 3)), found[4] or "revision", found[5] or "")
        elif found := re.fullmatch(r"(/datasets)?/([\w.-]+)/([\w.-]+)/resolve/([^/]+)/(.*)", path):
            name = f"{(found[1] or '/models')[1:]}/{found[2]}/{found[3]}"
            self._send_file(self._repository(name), unquote(found[4]), unquote(found[5]))
        else:
            raise _Answered(404, "no such page")

    # ------------------------------------------------------------------------------------- a repository's calls

    def _repository(self, name: str) -> "Repository":
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not (self.who and self._may_see(name))):
            raise _Answered(404 if self.who else 401, "Repository not found", "RepoNotFound")
        return repository

    def _may_see(self, name: str) -> bool:
        assert self.who is not None
        return name.split("/")[1] in {self.who["name"], *(org["name"] for org in self.who["orgs"])}

    def _write_to(self, name: str) -> "Repository":
        repository = self._repository(name)
        if self.who is None or not _may_write(self.who, name.partition("/")[2]):
            raise _Answered(403, f"You don't have the rights to write to {name}")
        return repository

    def _change(self, name: str, revision: str) -> None:
        """Check that the token may change a branch; a pull request needs no right to write."""
        if self.who is None or not revision.startswith("refs/pr/"):
            self._write_to(name)

    def _api(self, name: str, what: str, rest: str) -> None:
        repository = self._repository(name)
        first, _, inner = map(unquote, rest.partition("/"))
        rest = unquote(rest)
        if what == "revision":
            self._send_json(self._info(name, repository, rest or "main"))
        elif what == "auth-check":
            if rest == "write":
                self._write_to(name)
            self._send_json({})
        elif what in ("tree", "paths-info"):
            self._list(self._files(repository, first), what, inner)
        elif what == "branch":
            self._branch(self._write_to(name), rest)
        elif what == "preupload":
            self._change(name, "refs/pr/" if "create_pr" in self.query else rest)
            self._preupload(self._files(repository, rest), json.loads(self.body)["files"])
        elif what == "commit":
            self._change(name, "refs/pr/" if "create_pr" in self.query else rest)
            self._commit(name, repository, rest, "create_pr" in self.query)
        elif what == "discussions" and self.command == "POST":
            self._send_json({"num": self._open_pull_request(repository)})
        elif what == "discussions":
            self._send_json(self._discussion(name, int(rest)))
        elif what == "xet-write-token":
            assert self.server.xet_storage is not None
            self._send_json(
                {
                    "casUrl": address_of(self.server.xet_storage),
                    "accessToken": "of-the-storage",
                    "exp": int(time.time()) + 3600,
                }
            )
        else:
            raise _Answered(404, f"no such call: {what}")

    def _files(self, repository: "Repository", revision: str) -> dict[str, bytes]:
        if repository.branches.get(revision, revision) not in repository.commits:
            raise _Answered(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.files(revision)

    def _info(self, name: str, repository: "Repository", revision: str) -> dict[str, object]:
        siblings = [{"rfilename": file} for file in self._files(repository, revision)]
        sha = repository.branches.get(revision, revision)
        plain = name.partition("/")[2]
        return {"id": plain, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []}

    def _create(self, asked: dict[str, Any]) -> None:
        if self.who is None:
            raise _Answered(401, "Invalid username or password.")
        plain = f"{asked.get('organization') or self.who['name']}/{asked['name']}"
        name = f"{asked.get('type') or 'model'}s/{plain}"
        url = f"{self.server.address}/{name.removeprefix('models/')}"
        if not _may_write(self.who, plain):
            raise _Answered(403, f"You don't have the rights to create a {name.split('/')[0][:-1]} under {plain}")
        if name in self.server.repositories:
            self._send_json({"error": "You already created this repo", "url": url}, 409)
            return
        self.server.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, asked.get("visibility") == "private")
        self._send_json({"url": url, "name": plain, "id": plain})

    def _branch(self, repository: "Repository", branch: str) -> None:
        if branch in repository.branches:
            raise _Answered(409, f"Reference already exists: {branch}")
        repository.branches[branch] = repository.branches["main"]
        self._send_json({})

    def _preupload(self, there: dict[str, bytes], files: list[dict[str, Any]]) -> None:
        answers = []
        for file in files:
            is_large = file["path"].endswith(_LARGE)
            content = there.get(file["path"])
            hash_of = _sha256 if is_large else _git_hash
            answers.append(
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if is_large else "regular",
                    "shouldIgnore": False,
                    "oid": None if content is None else hash_of(content),
                }
            )
        self._send_json({"files": answers})

    def _commit(self, name: str, repository: "Repository", revision: str, opens: bool) -> None:
        lines = [json.loads(line) for line in self.body.splitlines()]
        assert lines[0]["key"] == "header"
        if opens:
            revision = f"refs/pr/{self._open_pull_request(repository)}"
        with self.server.lock:
            files = dict(self._files(repository, revision))
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "deletedFile":
                    del files[value["path"]]
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif (content := self.server.large_file(value["oid"])) is not None:
                    files[value["path"]] = content
                else:
                    raise _Answered(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
            oid = repository.commit(revision, files)
        repository.messages.append(lines[0]["value"]["summary"])
        url = f"{self.server.address}/{name.removeprefix('models/')}"
        number = revision.removeprefix("refs/pr/")
        opened = {"pullRequestUrl": f"{url}/discussions/{number}"} if opens else {}
        self._send_json({"commitUrl": f"{url}/commit/{oid}", "commitOid": oid, **opened})

    def _open_pull_request(self, repository: "Repository") -> int:
        number = sum(branch.startswith("refs/pr/") for branch in repository.branches) + 1
        repository.branches[f"refs/pr/{number}"] = repository.branches["main"]
        return number

    def _discussion(self, name: str, number: int) -> dict[str, object]:
        return {
            "num": number,
            "title": "",
            "status": "draft",
            "isPullRequest": True,
            "author": {"name": self.who["name"] if self.who else "nobody"},
            "createdAt": "2026-01-01T00:00:00.000Z",
            "repo": {"name": name.partition("/")[2], "type": name.partition("/")[0][:-1]},
            "changes": {"base": "refs/heads/main"},
            "filesWithConflicts": [],
            "events": [],
        }

    # -------------------------------------------------------------------------------------------- large files

    def _batch(self, name: str, asked: dict[str, Any]) -> None:
        self._change(name, asked.get("ref", {"name": "refs/pr/"})["name"])  # without a branch for a pull request
        objects = []
        for one in asked["objects"]:
            oid = one["oid"]
            size = one["size"]
            url = f"{self.server.address}/lfs/{oid}"
            upload: dict[str, Any] = {"href": f"{url}?X-Amz-Signature=secret"}
            if size > self.server.part_bytes:
                count = -(-size // self.server.part_bytes)
                parts = {str(number): f"{url}/{number}?X-Amz-Signature=secret" for number in range(1, count + 1)}
                upload = {"href": f"{url}/complete", "header": {"chunk_size": str(self.server.part_bytes), **parts}}
            actions = {"actions": {"upload": upload, "verify": {"href": f"{url}/verify"}}}
            objects.append({**one, **({} if oid in self.server.objects else actions)})
        self._send_json({"transfer": "multipart", "objects": objects})

    def _large_file(self, oid: str, what: str) -> None:
        if what == "verify":
            asked = json.loads(self.body)
            if len(self.server.objects.get(oid, b"")) != asked["size"]:
                raise _Answered(404, "no such object")
            self._send_json({})
            return
        if what.isdigit():
            self.server.parts[oid, int(what)] = self.body
            self._send(200, b"", {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
            return
        content = self.body
        if what == "complete":
            content = b"".join(self.server.parts[oid, part["partNumber"]] for part in json.loads(self.body)["parts"])
        if _sha256(content) != oid:
            raise _Answered(400, "the content does not have this hash")
        self.server.objects[oid] = content
        self._send_json({})

    # ------------------------------------------------------------------------------------------------- reading

    def _list(self, files: dict[str, bytes], what: str, inner: str) -> None:
        if what == "tree":
            self._send_json(_tree(files, inner, self.query.get("recursive", "").lower() == "true"))
        else:
            self._send_json([entry for path in json.loads(self.body)["paths"] for entry in _entries(files, path)])

    def _send_file(self, repository: "Repository", revision: str, path: str) -> None:
        commit = repository.branches.get(revision, revision)
        files = self._files(repository, revision)
        if path not in files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = files[path]
        headers = {"ETag": f'"{_git_hash(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        given = self.headers.get("Range", "")
        if given.startswith("bytes="):
            first, _, last = given.removeprefix("bytes=").partition("-")
            start = int(first)
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            self._send(206, content[start:stop], headers)
        else:
            self._send(200, content, headers)

    def _send_json(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.server.calls.append(f"{self.call} {status}" + (f", {len(self.body):,} bytes" if self.body else ""))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entries(files: dict[str, bytes], path: str) -> list[dict[str, object]]:
    if path in files:
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": _git_hash(files[path])}]
    if any(file.startswith(f"{path}/") for file in files):
        return [{"type": "directory", "path": path, "oid": _git_hash(path.encode())}]
    return []


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, object]]:
    prefix = f"{folder}/" if folder else ""
    inside = [file.removeprefix(prefix) for file in files if file.startswith(prefix)]
    folders = {"/".join(file.split("/")[:depth]) for file in inside for depth in range(1, file.count("/") + 1)}
    shown = [path for path in sorted({*inside, *folders}) if recursive or "/" not in path]
    return [entry for path in shown for entry in _entries(files, prefix + path)]


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _may_write(who: dict[str, Any], repository: str) -> bool:
    """Whether a token may write to the repository OWNER/NAME, by the account's roles and the token's scopes."""
    owner = repository.split("/")[0]
    token = who["auth"]["accessToken"]
    roles = {who["name"]: "admin", **{org["name"]: org["roleInOrg"] for org in who["orgs"]}}
    if token["role"] == "read" or roles.get(owner, "read") == "read":
        return False
    if token["role"] == "write":
        return True
    given = [
        permission
        for scope in token["fineGrained"]["scoped"]
        if scope["entity"]["name"] in (owner, repository)
        for permission in scope["permissions"]
    ]
    return bool({"repo.write", "repo.content.write"} & set(given))
