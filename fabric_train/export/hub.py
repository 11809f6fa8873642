"""Push an export or a token dataset to the Hugging Face hub, and check beforehand that the token may."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, errors, get_token
from huggingface_hub.hf_api import DatasetInfo, ModelInfo
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from huggingface_hub.utils import logging as hub_logging

from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, RunError, first_line
from fabric_train.cli.output import redact
from fabric_train.cli.push_arguments import PushArguments

RepoType = Literal["model", "dataset"]
_REPLACED = {"model": ["*.safetensors", "*.safetensors.index.json"], "dataset": ["train/*", "validation/*"]}
"""Files of an earlier push that would look like a part of this one; they are removed unless they are pushed again."""
_NEW_TOKEN = "create one with write access at https://huggingface.co/settings/tokens"


class PushError(RunError):
    """A push to the hub that failed; the message gives the reason in one line."""


@dataclass(frozen=True)
class PushRequest:
    """The destination of a push, from the arguments of the command line."""

    repository: str
    """The repository, OWNER/NAME; a model and a dataset may have the same name."""
    repo_type: RepoType
    private: bool = True
    """Whether a new repository is private."""
    revision: str | None = None
    """A branch, which is created if missing, or refs/pr/N of an open pull request; None means main."""
    create_pr: bool = False
    """Whether to open a pull request."""

    @classmethod
    def from_arguments(cls, arguments: PushArguments, repo_type: RepoType) -> "PushRequest":
        assert arguments.push_to_hub is not None
        return cls(arguments.push_to_hub, repo_type, arguments.private, arguments.revision, arguments.create_pr)


def push(folder: Path, request: PushRequest, message: str, content: Path | None = None) -> str:
    """Upload a folder in one commit.

    Content that an earlier push has uploaded is not sent again: pieces of files with ``hf_xet``, full files without
    it. ``huggingface_hub`` retries a request that fails temporarily (a cut connection, 429, 5xx).

    Args:
        folder: The folder to upload, which messages name.
        request: The destination.
        message: The message of the commit.
        content: A folder with the files to upload, if they are not in ``folder``.

    Returns:
        The URL of the files or the pull request.

    Raises:
        PushError: the hub refused the push, or could not be reached.
    """
    api = HfApi()
    name = request.repository
    repo_type = request.repo_type
    content = content or folder
    files = [file for file in content.rglob("*") if file.is_file()]
    size = show_size(sum(file.stat().st_size for file in files))
    print(f"pushing {len(files)} files, {size}, to {_page_url(request)}", file=sys.stderr, flush=True)
    try:
        with _shown_progress():
            api.create_repo(name, repo_type=repo_type, private=request.private, exist_ok=True)
            if request.revision and not request.revision.startswith("refs/"):
                api.create_branch(name, repo_type=repo_type, branch=request.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name,
                repo_type=repo_type,
                folder_path=content,
                commit_message=message,
                revision=request.revision,
                create_pr=request.create_pr,
                delete_patterns=_REPLACED[repo_type],
            )
    # a ValueError if the hub refuses the card's metadata, a RuntimeError around the failure of one file
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        advice = "run the same command again to push the missing files"
        if request.create_pr:
            advice += "; if a pull request was opened, replace --create_pr with --revision refs/pr/N and its number"
        raise PushError(
            f"{folder} is complete, but pushing it to {name} failed: {_failure_reason(error)}; {advice}"
        ) from error
    return commit.pr_url or _page_url(request)


def _page_url(request: PushRequest) -> str:
    """Return the address of the repository, its branch or its pull request on the hub."""
    prefix = "" if request.repo_type == "model" else f"{request.repo_type}s/"
    page = f"{constants.ENDPOINT}/{prefix}{request.repository}"
    if not request.revision:
        return page
    if request.revision.startswith("refs/pr/"):
        return f"{page}/discussions/{request.revision.removeprefix('refs/pr/')}"
    return f"{page}/tree/{request.revision}"


def _failure_reason(error: BaseException) -> str:
    """Return in one line the hub's answer, or why there was none, without the token."""
    # the upload of a file wraps its failure in a RuntimeError
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__

    # subclasses come before their base classes
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set, so nothing is sent to the hub"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "the name is taken by a repository that this token cannot read or write"
    elif isinstance(error, errors.HfHubHTTPError):
        answer = error.server_message or error.response.reason_phrase
        reason = f"the hub answered {error.response.status_code} ({' '.join(answer.split())})"
    elif isinstance(error, errors.HTTPError):
        reason = f"no answer from {constants.ENDPOINT} ({first_line(error)})"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__

    # an answer may repeat the request
    token = get_token()
    if token:
        reason = reason.replace(token, "***")
    return redact(reason)


class _WithoutSecrets(logging.Filter):
    """Removes the parts that authorize an upload from the addresses in a log line."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = redact(record.getMessage())
        record.args = ()
        return True


@contextmanager
def _shown_progress() -> Iterator[None]:
    """Let huggingface_hub show its retries and its progress, as bars on a terminal and otherwise as lines."""
    # remember what is changed
    is_terminal = sys.stderr.isatty()
    user_decides = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None  # the environment variable decides about bars
    had_progress_bars = not are_progress_bars_disabled()
    verbosity = hub_logging.get_verbosity()
    pipeline_log = logging.getLogger("huggingface_hub._upload_pipeline")
    secrets_filter = _WithoutSecrets()
    handlers = logging.getLogger("huggingface_hub").handlers
    hub_logging.set_verbosity_warning()
    if not is_terminal:
        pipeline_log.setLevel(logging.INFO)  # a line every half a minute
    if not user_decides:
        _set_progress_bars(is_terminal)
    for handler in handlers:
        handler.addFilter(secrets_filter)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(secrets_filter)
        pipeline_log.setLevel(logging.NOTSET)
        hub_logging.set_verbosity(verbosity)
        if not user_decides:
            _set_progress_bars(had_progress_bars)


def _set_progress_bars(enabled: bool) -> None:
    if enabled:
        enable_progress_bars()
    else:
        disable_progress_bars()


def check_push(request: PushRequest) -> None:
    """Raise an InputError if the hub says that the token may not push to ``request.repository``; create nothing there.

    A user without permission learns this before hours of tokenization or conversion. Facts that the user should know
    about an existing repository are printed as notes on standard error.
    """
    option = f"--push_to_hub {request.repository}"
    api = HfApi()
    try:
        validate_repo_id(request.repository)
        if get_token() is None:
            raise InputError(
                "--push_to_hub needs a Hugging Face token with write access; run `hf auth login`, or set HF_TOKEN "
                f"({_NEW_TOKEN})"
            )
        account = api.whoami()
        repository = _find_repository(api, request, request.repo_type)
        if repository is None:
            refusal = _refusal_to_create(account, request)
        else:
            refusal = _refusal_to_write(api, account, request)
        notes = _push_notes(api, request, repository)
    except errors.HFValidationError as error:
        raise InputError(f"{option}: {error}") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise InputError(
                f"{option}: the hub does not accept the token (HF_TOKEN, or the token from `hf auth login`); "
                f"{_NEW_TOKEN}"
            ) from error
        raise InputError(f"{option}: {_failure_reason(error)}; try again later") from error
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError) as error:
        raise InputError(
            f"{option}: {_failure_reason(error)}; without internet access, leave out --push_to_hub here, and run the "
            "same command with it on a machine that can reach the hub (HF_ENDPOINT, HF_HUB_OFFLINE) to push the "
            "finished folder"
        ) from error
    if refusal:
        raise InputError(f"{option}: {refusal}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _find_repository(api: HfApi, request: PushRequest, repo_type: str) -> ModelInfo | DatasetInfo | None:
    try:
        return api.repo_info(request.repository, repo_type=repo_type)  # type: ignore[return-value]
    except errors.RepositoryNotFoundError:
        return None


def _refusal_to_write(api: HfApi, account: dict[str, Any], request: PushRequest) -> str | None:
    """Return why the token cannot write to an existing repository, by the hub's own check; None if it can."""
    token = _read_token(account)
    if request.revision and request.revision.startswith("refs/pr/"):
        # the token may belong to the author of the pull request, who may have no other right to write
        if api.revision_exists(request.repository, request.revision, repo_type=request.repo_type):
            return None
        return f"--revision {request.revision}: there is no such pull request"
    if request.create_pr:  # anyone may propose a change
        return f"{token.description} can only read; {_NEW_TOKEN}" if token.role == "read" else None
    try:
        api.auth_check(request.repository, repo_type=request.repo_type, write=True)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
            return (
                f"it exists, but {token.description} cannot write to it; {_NEW_TOKEN}, or propose a change with "
                "--create_pr true"
            )
        if status != 404:  # 404: a mirror without this call; the push itself will show it
            raise
    return None


def _refusal_to_create(account: dict[str, Any], request: PushRequest) -> str | None:
    """Return why the token cannot create the repository; None if the account's data do not rule it out."""
    name = account.get("name")
    owner = request.repository.split("/")[0]
    token = _read_token(account)
    if token.role == "read":
        return f"{token.description} can only read; {_NEW_TOKEN}"

    # the owner must be the account or one of its organizations, which the account may write to;
    # names on the hub do not depend on the case of letters
    organization_roles = {org["name"]: org.get("roleInOrg") for org in account.get("orgs") or ()}
    if name:
        owner_names = [name, *organization_roles]
        if owner.casefold() not in map(str.casefold, owner_names):
            return (
                f"{name} cannot create a repository for {owner}; use the name of the account or an organization: "
                f"{', '.join(owner_names)}"
            )
    for organization, role in organization_roles.items():
        if organization.casefold() == owner.casefold() and role == "read":
            return f"{name} only has read access to the organization {owner}; ask for the write or contributor role"

    # a fine-grained token names what it may do
    if token.role == "fineGrained" and "repo.write" not in token.permissions_for(owner):
        return (
            f"{token.description} has no write access to the repositories of {owner}; add it (repo.write), or "
            f"{_NEW_TOKEN}"
        )
    return None


@dataclass(frozen=True)
class _Token:
    """The hub's data about a token."""

    description: str
    """The token's name and account, for messages."""
    role: str | None
    """"read", "write" or "fineGrained"; None if the hub does not say."""
    permissions_by_owner: dict[str, list[str]]
    """The permissions of a fine-grained token, by owner in lower case; the key "" has the permissions for all
    owners."""

    def permissions_for(self, owner: str) -> set[str]:
        return {*self.permissions_by_owner.get("", ()), *self.permissions_by_owner.get(owner.casefold(), ())}


def _read_token(account: dict[str, Any]) -> _Token:
    """Return the token that ``HfApi.whoami`` describes."""
    auth = account.get("auth") or {}
    token = auth.get("accessToken") or {}  # other kinds, such as a CI job's, have none
    fine_grained = token.get("fineGrained") or {}
    permissions_by_owner = {"": list(fine_grained.get("global") or ())}
    for scope in fine_grained.get("scoped") or ():
        entity = scope.get("entity") or {}
        owner = str(entity.get("name")).casefold()
        permissions_by_owner.setdefault(owner, []).extend(scope.get("permissions") or ())
    return _Token(
        description=f"the token {token.get('displayName')!r} of {account.get('name')}",
        role=token.get("role"),
        permissions_by_owner=permissions_by_owner,
    )


def _push_notes(api: HfApi, request: PushRequest, repository: ModelInfo | DatasetInfo | None) -> list[str]:
    """Return notes for the user before a push to ``repository``, which is None if it does not exist."""
    if repository is None:
        other_type: RepoType = "dataset" if request.repo_type == "model" else "model"
        if _find_repository(api, request, other_type) is None:
            return []
        return [
            f"{request.repository} is a {other_type} on the hub; the {request.repo_type} gets a separate repository"
        ]
    notes = []
    if request.private and not repository.private:
        notes.append(
            f"{request.repository} already exists and is public; --private true only applies to new repositories"
        )
    files = [file for file in repository.siblings or () if file.rfilename != ".gitattributes"]
    if files and not (request.create_pr or request.revision):
        notes.append(
            f"{request.repository} has {len(files)} files; files of the same name and earlier weights or rows are "
            "replaced, and others are kept"
        )
    return notes
