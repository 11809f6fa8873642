"""The calls that the stand-in for the hub answers (``stand_in_hub.py``), as huggingface_hub and datasets make them."""

import base64
import hashlib
import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.support.stand_in_hub_accounts import Account, may_see, may_write
from tests.support.stand_in_hub_files import git_hash, list_paths, list_tree, sha256
from tests.support.stand_in_hub_transport import HttpError, HubConnection
from tests.support.stand_in_xet import address_of

if TYPE_CHECKING:
    from tests.support.stand_in_hub import Repository

_LARGE_FILES = (".safetensors", ".arrow", ".npy", ".bin")
"""Files that the hub keeps as large files whatever their size."""
_PULL_REQUESTS = "refs/pr/"

# a model has no word before OWNER/NAME in the address of its files, a dataset has
_API_CALL = re.compile(r"/api/(models|datasets)/([\w.-]+)/([\w.-]+)(?:/([\w-]+)(?:/(.*))?)?")
_FILE = re.compile(r"(/datasets)?/([\w.-]+)/([\w.-]+)/resolve/([^/]+)/(.*)")
_LARGE_FILE_BATCH = re.compile(r"(/datasets)?/([\w.-]+)/([\w.-]+)\.git/info/lfs/objects/batch")
_LARGE_FILE = re.compile(r"/lfs/([0-9a-f]{64})(?:/(\w+))?")


class HubCalls(HubConnection):
    """One connection of a client.

    A repository is named models/OWNER/NAME or datasets/OWNER/NAME. A revision is a branch, a tag, a commit or
    refs/pr/NUMBER, a pull request.
    """

    caller: Account | None
    """The account of the token; None without a token."""

    def answer(self, path: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.caller = self.server.accounts.get(token)
        if token and self.caller is None:
            raise HttpError(401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            self.send_json(self.caller or {})
        elif path == "/api/repos/create":
            self._create_repository(json.loads(self.body))
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif match := _LARGE_FILE.fullmatch(path):
            oid, action = match.groups()
            self._receive_large_file(oid, action or "")
        elif match := _LARGE_FILE_BATCH.fullmatch(path):
            repository_type, owner, name = match.groups()
            self._announce_large_files(_full_name(repository_type, owner, name), json.loads(self.body))
        elif match := _API_CALL.fullmatch(path):
            repository_type, owner, name, action, argument = match.groups()
            self._answer_api_call(f"{repository_type}/{owner}/{name}", action or "revision", argument or "")
        elif match := _FILE.fullmatch(path):
            repository_type, owner, name, revision, file = match.groups()
            repository = self._visible_repository(_full_name(repository_type, owner, name))
            self._send_file(repository, unquote(revision), unquote(file))
        else:
            raise HttpError(404, "no such page")

    # -------------------------------------------------------------------------------------------------- rights

    def _visible_repository(self, name: str) -> "Repository":
        repository = self.server.repositories.get(name)
        owner = name.split("/")[1]
        is_hidden = repository is not None and repository.private and not (self.caller and may_see(self.caller, owner))
        if repository is None or is_hidden:
            raise HttpError(404 if self.caller else 401, "Repository not found", "RepoNotFound")
        return repository

    def _writable_repository(self, name: str) -> "Repository":
        repository = self._visible_repository(name)
        if self.caller is None or not may_write(self.caller, _without_type(name)):
            raise HttpError(403, f"You don't have the rights to write to {name}")
        return repository

    def _check_may_change(self, name: str, revision: str) -> None:
        """Check that the caller may change a revision; whoever has an account may change a pull request."""
        if self.caller is None or not revision.startswith(_PULL_REQUESTS):
            self._writable_repository(name)

    # ------------------------------------------------------------------------------------- a repository's calls

    def _answer_api_call(self, name: str, action: str, argument: str) -> None:
        """Answer ``/api/TYPE/OWNER/NAME/ACTION/ARGUMENT``; the argument is still quoted."""
        repository = self._visible_repository(name)
        # a quoted slash belongs to the revision, and the first unquoted one ends it
        quoted_revision, _, quoted_folder = argument.partition("/")
        argument = unquote(argument)
        opens_pull_request = "create_pr" in self.query
        if action == "revision":
            self._send_description(name, repository, argument or "main")
        elif action == "auth-check":
            if argument == "write":
                self._writable_repository(name)
            self.send_json({})
        elif action == "tree":
            files = self._files(repository, unquote(quoted_revision))
            recursive = self.query.get("recursive", "").lower() == "true"
            self.send_json(list_tree(files, unquote(quoted_folder), recursive=recursive))
        elif action == "paths-info":
            files = self._files(repository, unquote(quoted_revision))
            self.send_json(list_paths(files, json.loads(self.body)["paths"]))
        elif action == "branch":
            self._create_branch(self._writable_repository(name), argument)
        elif action == "preupload":
            self._check_may_change(name, _PULL_REQUESTS if opens_pull_request else argument)
            self._send_upload_modes(self._files(repository, argument), json.loads(self.body)["files"])
        elif action == "commit":
            self._check_may_change(name, _PULL_REQUESTS if opens_pull_request else argument)
            self._commit(name, repository, argument, opens_pull_request=opens_pull_request)
        elif action == "discussions" and self.command == "POST":
            self.send_json({"num": _open_pull_request(repository)})
        elif action == "discussions":
            self._send_discussion(name, int(argument))
        elif action == "xet-write-token":
            self._send_xet_token()
        else:
            raise HttpError(404, f"no such call: {action}")

    def _files(self, repository: "Repository", revision: str) -> dict[str, bytes]:
        if repository.branches.get(revision, revision) not in repository.commits:
            raise HttpError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.files(revision)

    def _send_description(self, name: str, repository: "Repository", revision: str) -> None:
        siblings = [{"rfilename": file} for file in self._files(repository, revision)]
        self.send_json(
            {
                "id": _without_type(name),
                "sha": repository.branches.get(revision, revision),
                "private": repository.private,
                "siblings": siblings,
                "tags": [],
            }
        )

    def _create_repository(self, request: dict[str, Any]) -> None:
        if self.caller is None:
            raise HttpError(401, "Invalid username or password.")
        repository_type = request.get("type") or "model"
        owner = request.get("organization") or self.caller["name"]
        repository_id = f"{owner}/{request['name']}"
        name = f"{repository_type}s/{repository_id}"
        url = self._url(name)
        if not may_write(self.caller, repository_id):
            raise HttpError(403, f"You don't have the rights to create a {repository_type} under {repository_id}")
        if name in self.server.repositories:
            self.send_json({"error": "You already created this repo", "url": url}, 409)
            return
        is_private = request.get("visibility") == "private"
        self.server.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, is_private)
        self.send_json({"url": url, "name": repository_id, "id": repository_id})

    def _create_branch(self, repository: "Repository", branch: str) -> None:
        if branch in repository.branches:
            raise HttpError(409, f"Reference already exists: {branch}")
        repository.branches[branch] = repository.branches["main"]
        self.send_json({})

    def _send_upload_modes(self, stored_files: dict[str, bytes], announced_files: list[dict[str, Any]]) -> None:
        """Tell the client how to upload each file; it leaves out a file that is stored with the same hash."""
        answers = []
        for announced in announced_files:
            path = announced["path"]
            is_large = path.endswith(_LARGE_FILES)
            oid = None
            if path in stored_files:
                oid = sha256(stored_files[path]) if is_large else git_hash(stored_files[path])
            upload_mode = "lfs" if is_large else "regular"
            answers.append({"path": path, "uploadMode": upload_mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": answers})

    def _commit(self, name: str, repository: "Repository", revision: str, *, opens_pull_request: bool) -> None:
        # a JSON line for the header, and one for each operation
        header, *operations = (json.loads(line) for line in self.body.splitlines())
        assert header["key"] == "header"
        if opens_pull_request:
            revision = f"{_PULL_REQUESTS}{_open_pull_request(repository)}"
        with self.server.lock:
            files = dict(self._files(repository, revision))
            for operation in operations:
                self._apply(operation["key"], operation["value"], files)
            oid = repository.commit(revision, files)
        repository.messages.append(header["value"]["summary"])
        answer = {"commitUrl": f"{self._url(name)}/commit/{oid}", "commitOid": oid}
        if opens_pull_request:
            pull_request = revision.removeprefix(_PULL_REQUESTS)
            answer["pullRequestUrl"] = f"{self._url(name)}/discussions/{pull_request}"
        self.send_json(answer)

    def _apply(self, key: str, value: dict[str, Any], files: dict[str, bytes]) -> None:
        """Apply one operation of a commit to the files."""
        path = value["path"]
        if key == "deletedFile":
            del files[path]
        elif key == "file":
            files[path] = base64.b64decode(value["content"])
        else:
            content = self.server.large_file(value["oid"])
            if content is None:
                raise HttpError(400, f"LFS pointer pointed to a file that does not exist: {path}")
            files[path] = content

    def _send_discussion(self, name: str, number_of_pull_request: int) -> None:
        repository_type, _, repository_id = name.partition("/")
        self.send_json(
            {
                "num": number_of_pull_request,
                "title": "",
                "status": "draft",
                "isPullRequest": True,
                "author": {"name": self.caller["name"] if self.caller else "nobody"},
                "createdAt": "2026-01-01T00:00:00.000Z",
                "repo": {"name": repository_id, "type": repository_type.removesuffix("s")},
                "changes": {"base": "refs/heads/main"},
                "filesWithConflicts": [],
                "events": [],
            }
        )

    def _url(self, name: str) -> str:
        """Return the address of a repository's page."""
        return f"{self.server.address}/{name.removeprefix('models/')}"

    # -------------------------------------------------------------------------------------------- large files

    def _send_xet_token(self) -> None:
        assert self.server.xet_storage is not None
        address = address_of(self.server.xet_storage)
        expires_at = int(time.time()) + 3600
        self.send_json({"casUrl": address, "accessToken": "of-the-storage", "exp": expires_at})

    def _announce_large_files(self, name: str, request: dict[str, Any]) -> None:
        """Tell the client where to upload the large files that are not stored: whole, or in parts (Git LFS)."""
        # without a branch, they are for a pull request
        self._check_may_change(name, request.get("ref", {"name": _PULL_REQUESTS})["name"])
        answers = []
        for announced in request["objects"]:
            answer = dict(announced)
            if announced["oid"] not in self.server.objects:
                url = f"{self.server.address}/lfs/{announced['oid']}"
                upload = self._upload_action(url, announced["size"])
                answer["actions"] = {"upload": upload, "verify": {"href": f"{url}/verify"}}
            answers.append(answer)
        self.send_json({"transfer": "multipart", "objects": answers})

    def _upload_action(self, url: str, size: int) -> dict[str, Any]:
        part_bytes = self.server.part_bytes
        if size <= part_bytes:
            return {"href": f"{url}?X-Amz-Signature=secret"}
        header = {"chunk_size": str(part_bytes)}
        num_parts = -(-size // part_bytes)
        for part_number in range(1, num_parts + 1):
            header[str(part_number)] = f"{url}/{part_number}?X-Amz-Signature=secret"
        return {"href": f"{url}/complete", "header": header}

    def _receive_large_file(self, oid: str, action: str) -> None:
        """Receive a file ("" as action), part NUMBER of one, the list of its parts ("complete"), or "verify" one."""
        if action == "verify":
            stored = self.server.objects.get(oid, b"")
            if len(stored) != json.loads(self.body)["size"]:
                raise HttpError(404, "no such object")
            self.send_json({})
            return
        if action.isdigit():
            self.server.parts[oid, int(action)] = self.body
            self.send_bytes(200, b"", {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
            return
        content = self.body
        if action == "complete":
            parts = json.loads(self.body)["parts"]
            content = b"".join(self.server.parts[oid, part["partNumber"]] for part in parts)
        if sha256(content) != oid:
            raise HttpError(400, "the content does not have this hash")
        self.server.objects[oid] = content
        self.send_json({})

    # ------------------------------------------------------------------------------------------------- reading

    def _send_file(self, repository: "Repository", revision: str, path: str) -> None:
        """Send a file, or the range of bytes that the client asks for."""
        commit = repository.branches.get(revision, revision)
        files = self._files(repository, revision)
        if path not in files:
            self.send_bytes(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = files[path]
        headers = {"ETag": f'"{git_hash(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        byte_range = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if byte_range is None:
            self.send_bytes(200, content, headers)
            return
        start = int(byte_range[1])
        stop = len(content)
        if byte_range[2]:
            stop = min(int(byte_range[2]) + 1, len(content))  # the last byte of a range belongs to it
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self.send_bytes(206, content[start:stop], headers)


def _full_name(repository_type: str | None, owner: str, name: str) -> str:
    """Return the name of a repository by the address of its files."""
    return f"{'datasets' if repository_type else 'models'}/{owner}/{name}"


def _without_type(name: str) -> str:
    """Return OWNER/NAME."""
    return name.partition("/")[2]


def _open_pull_request(repository: "Repository") -> int:
    """Open a pull request on the main branch and return its number."""
    num_pull_requests = sum(branch.startswith(_PULL_REQUESTS) for branch in repository.branches)
    number_of_pull_request = num_pull_requests + 1
    repository.branches[f"{_PULL_REQUESTS}{number_of_pull_request}"] = repository.branches["main"]
    return number_of_pull_request
