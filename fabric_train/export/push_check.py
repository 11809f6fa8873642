"""Check, before any work, that a push to the Hugging Face hub can succeed: the name, the token and its rights."""

import sys
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import DatasetInfo, ModelInfo
from huggingface_hub.utils import validate_repo_id

from fabric_train.cli.errors import InputError
from fabric_train.export.hub import PushRequest, RepoType, reason_of

_NEW_TOKEN = "create one with write access at https://huggingface.co/settings/tokens"


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
