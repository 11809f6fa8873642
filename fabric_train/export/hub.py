"""Push a finished folder, an exported model or a token dataset, to a repository on the Hugging Face hub."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import DatasetInfo, ModelInfo
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from huggingface_hub.utils import logging as hub_logging

from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, first_line
from fabric_train.cli.output import redact

if TYPE_CHECKING:
    from fabric_train.cli.shared_arguments import PushArguments

RepoType = Literal["model", "dataset"]
_REPLACED = {
    "model": ["*.safetensors", "*.safetensors.index.json"],
    "dataset": ["train/*", "validation/*"],
}
"""Files of an earlier push that a reader could take for a part of this one: removed unless they are pushed again."""
_NEW_TOKEN = "create one with write access at https://huggingface.co/settings/tokens"


class PushError(RuntimeError):
    """A push to the hub that failed; the message gives the reason in one line."""


@dataclass(frozen=True)
class PushRequest:
    """Where a folder is pushed.

    Args:
        repository: OWNER/NAME.
        repo_type: models and datasets have repositories of their own, which may have the same name.
        private: whether a repository that the push creates is private.
        revision: a branch, created if it is missing, or ``refs/pr/N`` for a pull request that is open; None is main.
        create_pr: open a pull request instead of changing main.
    """

    repository: str
    repo_type: RepoType
    private: bool = True
    revision: str | None = None
    create_pr: bool = False

    @classmethod
    def of(cls, arguments: "PushArguments", repo_type: RepoType) -> "PushRequest":
        """Return what a command line with --push_to_hub asks for."""
        assert arguments.push_to_hub is not None
        return cls(arguments.push_to_hub, repo_type, arguments.private, arguments.revision, arguments.create_pr)


def push(folder: Path, request: PushRequest, message: str, content: Path | None = None) -> str:
    """Upload a folder in a commit with ``message``, and return the URL where it is: of the files or the pull request.

    What an earlier push of the same content has uploaded is not sent again: pieces of files with ``hf_xet``, whole
    files without it. ``huggingface_hub`` sends a request again that fails for a moment (a cut connection, 429, 5xx).

    Args:
        folder: what the user has made.
        request: where it is pushed.
        message: of the commit, and title of a pull request.
        content: the files to upload, if they are not those of ``folder``.

    Raises:
        PushError: the hub cannot be reached or refuses the push.
    """
    api = HfApi()
    name, kind = request.repository, request.repo_type
    content = content or folder
    files = [file for file in content.rglob("*") if file.is_file()]
    size = show_size(sum(file.stat().st_size for file in files))
    print(f"pushing {len(files)} files, {size}, to {page_of(request)}", file=sys.stderr, flush=True)
    try:
        with _shown_progress():
            api.create_repo(name, repo_type=kind, private=request.private, exist_ok=True)
            if request.revision and not request.revision.startswith("refs/"):
                api.create_branch(name, repo_type=kind, branch=request.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name,
                repo_type=kind,
                folder_path=content,
                commit_message=message,
                revision=request.revision,
                create_pr=request.create_pr,
                delete_patterns=_REPLACED[kind],
            )
    # a ValueError if the hub refuses the card's metadata, a RuntimeError around the failure of one file
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        further = (
            "; if a pull request was opened, give --revision refs/pr/N with its number instead of --create_pr"
            if request.create_pr
            else ""
        )
        raise PushError(
            f"{folder} is complete, but pushing it to {name} failed: {reason_of(error)}; the same "
            f"command pushes what is missing{further}"
        ) from error
    return commit.pr_url or page_of(request)


def page_of(request: PushRequest) -> str:
    """Return the address of a repository, or of its branch or pull request."""
    prefix = "" if request.repo_type == "model" else f"{request.repo_type}s/"
    page = f"{constants.ENDPOINT}/{prefix}{request.repository}"
    if request.revision and request.revision.startswith("refs/pr/"):
        return f"{page}/discussions/{request.revision.removeprefix('refs/pr/')}"
    return f"{page}/tree/{request.revision}" if request.revision else page


def reason_of(error: BaseException) -> str:
    """Return in one line, without the token, what the hub answered or why there was no answer."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set, so nothing is sent to the hub"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "the name is taken by a repository that this token cannot see or write"
    elif isinstance(error, HfHubHTTPError):
        said = " ".join((error.server_message or error.response.reason_phrase).split())
        reason = f"the hub answered {error.response.status_code} ({said})"
    elif isinstance(error, HTTPError):
        reason = f"no answer from {constants.ENDPOINT} ({first_line(error)})"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    return redact(reason.replace(token, "***") if token else reason)


class _WithoutSecrets(logging.Filter):
    """Removes what authorizes an upload from the addresses in a log line."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


@contextmanager
def _shown_progress() -> Iterator[None]:
    """Let huggingface_hub show its progress, as bars on a terminal and else as lines, and its retries."""
    is_free = constants.HF_HUB_DISABLE_PROGRESS_BARS is None  # else the user's variable decides about bars
    were_disabled, verbosity = are_progress_bars_disabled(), hub_logging.get_verbosity()
    pipeline, hidden = logging.getLogger("huggingface_hub._upload_pipeline"), _WithoutSecrets()
    handlers = logging.getLogger("huggingface_hub").handlers
    hub_logging.set_verbosity_warning()
    if not sys.stderr.isatty():
        pipeline.setLevel(logging.INFO)  # a line every half a minute
    if is_free:
        (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()
    for handler in handlers:
        handler.addFilter(hidden)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(hidden)
        pipeline.setLevel(logging.NOTSET)
        hub_logging.set_verbosity(verbosity)
        if is_free:
            (disable_progress_bars if were_disabled else enable_progress_bars)()


def check_push(request: PushRequest) -> None:
    """Ask the hub whether the token may push to ``request.repository``; nothing is created there.

    What the user should know about a repository that exists is printed as notes on standard error.

    Raises:
        InputError: the name is not valid, there is no token, the hub does not accept it or cannot be reached, or the
            token lacks the right to write to the repository or to create it.
    """
    asked = f"--push_to_hub {request.repository}"
    try:
        validate_repo_id(request.repository)
    except HFValidationError as error:
        raise InputError(f"{asked}: {error}") from error
    if get_token() is None:
        raise InputError(
            "--push_to_hub needs a Hugging Face token with write access: run `hf auth login`, or set HF_TOKEN "
            f"({_NEW_TOKEN})"
        )
    api = HfApi()
    try:
        account = api.whoami()
        repository = _find(api, request, request.repo_type)
        missing = _missing_right(account, request) if repository is None else _refusal(api, account, request)
        notes = _notes(api, request, repository)
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise InputError(
                f"{asked}: the hub does not accept the token (HF_TOKEN, else that of `hf auth login`); {_NEW_TOKEN}"
            ) from error
        raise InputError(f"{asked}: {reason_of(error)}; try again later") from error
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        raise InputError(
            f"{asked}: {reason_of(error)}; without internet, leave out --push_to_hub here, and give the same command "
            "with it on a machine that reaches the hub (HF_ENDPOINT, HF_HUB_OFFLINE): it pushes the finished folder"
        ) from error
    if missing:
        raise InputError(f"{asked}: {missing}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _find(api: HfApi, request: PushRequest, repo_type: str) -> ModelInfo | DatasetInfo | None:
    """Return what the hub says about the repository of this type, or None if there is none that the token can see."""
    try:
        return api.repo_info(request.repository, repo_type=repo_type)  # type: ignore[return-value]
    except RepositoryNotFoundError:
        return None


def _refusal(api: HfApi, account: dict[str, Any], request: PushRequest) -> str | None:
    """Return why the token cannot write to a repository that exists, by the hub's own check; None if it can."""
    token, revision = _token(account), request.revision or ""
    if revision.startswith("refs/pr/"):  # of which the token may be the author, without a right to write elsewhere
        is_there = api.revision_exists(request.repository, revision, repo_type=request.repo_type)
        return None if is_there else f"--revision {revision}: there is no such pull request"
    shown = f"the token {token.get('displayName')!r} of {account.get('name')}"
    if request.create_pr:  # anyone may propose a change
        return f"{shown} can only read; {_NEW_TOKEN}" if _only_reads(token) else None
    try:
        api.auth_check(request.repository, repo_type=request.repo_type, write=True)
    except HfHubHTTPError as error:
        if not isinstance(error, RepositoryNotFoundError) and error.response.status_code not in (401, 403):
            if error.response.status_code == 404:  # a mirror without this call: the push itself will show it
                return None
            raise
        return f"it exists, and {shown} cannot write to it; {_NEW_TOKEN}, or propose a change with --create_pr true"
    return None


def _missing_right(account: dict[str, Any], request: PushRequest) -> str | None:
    """Return why the token cannot create the repository, None if nothing speaks against it.

    An account or token of a kind that is not known here is not refused: the push itself will show it.
    """
    name, token, owner = account.get("name"), _token(account), request.repository.split("/")[0]
    shown = f"the token {token.get('displayName')!r} of {name}"
    if _only_reads(token):
        return f"{shown} can only read; {_NEW_TOKEN}"
    roles = {org["name"].casefold(): org.get("roleInOrg") for org in account.get("orgs") or ()}
    if name and owner.casefold() not in {name.casefold(), *roles}:
        places = ", ".join([name, *(org["name"] for org in account.get("orgs") or ())])
        return (
            f"{name} cannot create a repository of {owner}; give the name of the account or an organization: {places}"
        )
    if roles.get(owner.casefold()) == "read":
        return f"{name} can only read in the organization {owner}; ask for the role write or contributor"
    if token.get("role") == "fineGrained" and "repo.write" not in _permissions(token, owner):
        return f"{shown} has no write access to the repositories of {owner}; add it (repo.write), or {_NEW_TOKEN}"
    return None


def _token(account: dict[str, Any]) -> dict[str, Any]:
    """Return what the hub says about the token; empty for kinds such as those of a CI job."""
    return (account.get("auth") or {}).get("accessToken") or {}


def _only_reads(token: dict[str, Any]) -> bool:
    return token.get("role") == "read"


def _permissions(token: dict[str, Any], owner: str) -> set[str]:
    """Return the permissions of a fine-grained token for new repositories of ``owner``."""
    grained = token.get("fineGrained") or {}
    scoped = [
        permission
        for scope in grained.get("scoped") or ()
        if str((scope.get("entity") or {}).get("name")).casefold() == owner.casefold()
        for permission in scope.get("permissions") or ()
    ]
    return {*(grained.get("global") or ()), *scoped}


def _notes(api: HfApi, request: PushRequest, repository: ModelInfo | DatasetInfo | None) -> list[str]:
    if repository is None:
        other: RepoType = "dataset" if request.repo_type == "model" else "model"
        own = f"{request.repository} is a {other} on the hub; the {request.repo_type} gets a repository of its own"
        return [own] if _find(api, request, other) else []
    notes = []
    if request.private and not repository.private:
        notes.append(f"{request.repository} exists and is public: --private true is only for new repositories")
    files = [file.rfilename for file in repository.siblings or () if file.rfilename != ".gitattributes"]
    if files and not (request.create_pr or request.revision):
        notes.append(
            f"{request.repository} has {len(files)} files; those of the same name and earlier weights or rows are "
            "replaced, others stay"
        )
    return notes
