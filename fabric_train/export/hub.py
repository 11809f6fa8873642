"""The Hugging Face hub: push an export or a token dataset, check beforehand that this may be done, download a model."""

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_download, snapshot_download
from huggingface_hub.hf_api import DatasetInfo, ModelInfo
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fabric_train.cli.argument_types import PushArguments, show_size
from fabric_train.cli.errors import InputError, RunError, first_line
from fabric_train.cli.output import redact
from fabric_train.files.atomic_folder import check_not_taken, sync_and_rename
from fabric_train.files.regular_file import check_no_links_in, write_atomically
from fabric_train.files.requirements import check_room
from fabric_train.model.origin import HUB_SOURCE, HubSource
from fabric_train.model.weight_files import check_weight_files, shard_names

RepoType = Literal["model", "dataset"]
_REPLACED = {"model": ["*.safetensors", "*.safetensors.index.json"], "dataset": ["train/*", "validation/*"]}
"""Files of an earlier push that a reader could take for a part of this one: removed unless they are pushed again."""
_NEW_TOKEN = "create one with write access at https://huggingface.co/settings/tokens"
_TEXTS = re.compile(r"[^/]+\.(json|jinja|txt|md|model|tiktoken)|LICENSE[^/]*|NOTICE[^/]*|USE_POLICY[^/]*", re.ASCII)
_INDEX = re.compile(r".*\.index(\.[^/]*)?\.json")


class PushError(RunError):
    """A push to the hub that failed; the message gives the reason in one line."""


@dataclass(frozen=True)
class PushRequest:
    repository: str  # OWNER/NAME; a model and a dataset may have the same
    repo_type: RepoType
    private: bool = True
    revision: str | None = None  # a branch, created if it is missing, or refs/pr/N that is open; None is main
    create_pr: bool = False

    @classmethod
    def of(cls, arguments: PushArguments, repo_type: RepoType) -> "PushRequest":
        assert arguments.push_to_hub is not None
        return cls(arguments.push_to_hub, repo_type, arguments.private, arguments.revision, arguments.create_pr)


def push(folder: Path, request: PushRequest, message: str, content: Path | None = None) -> str:
    """Upload a folder in a commit with ``message``, and return the URL of the files or the pull request.

    What an earlier push of the same content has uploaded is not sent again: pieces of files with ``hf_xet``, whole
    files without it. ``huggingface_hub`` sends a request again that fails for a moment (a cut connection, 429, 5xx).
    ``content`` has the files to upload, if they are not in ``folder``, which messages name.
    """
    api = HfApi()
    name = request.repository
    kind = request.repo_type
    content = content or folder
    files = [file for file in content.rglob("*") if file.is_file()]
    size = show_size(sum(file.stat().st_size for file in files))
    print(f"pushing {len(files)} files, {size}, to {_page_of(request)}", file=sys.stderr, flush=True)
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
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        further = "; if a pull request was opened, give --revision refs/pr/N with its number instead of --create_pr"
        raise PushError(
            f"{folder} is complete, but pushing it to {name} failed: {_reason_of(error)}; the same command pushes "
            f"the missing files{further if request.create_pr else ''}"
        ) from error
    return commit.pr_url or _page_of(request)


def _page_of(request: PushRequest) -> str:
    prefix = "" if request.repo_type == "model" else f"{request.repo_type}s/"
    page = f"{constants.ENDPOINT}/{prefix}{request.repository}"
    if request.revision and request.revision.startswith("refs/pr/"):
        return f"{page}/discussions/{request.revision.removeprefix('refs/pr/')}"
    return f"{page}/tree/{request.revision}" if request.revision else page


def _reason_of(error: BaseException) -> str:
    """Return in one line, without the token, what the hub answered or why there was no answer."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set, so nothing is sent to the hub"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "the name is taken by a repository that this token cannot see or write"
    elif isinstance(error, errors.HfHubHTTPError):
        said = " ".join((error.server_message or error.response.reason_phrase).split())
        reason = f"the hub answered {error.response.status_code} ({said})"
    elif isinstance(error, errors.HTTPError):
        reason = f"no answer from {constants.ENDPOINT} ({first_line(error)})"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    return redact(reason.replace(token, "***") if token else reason)


class _WithoutSecrets(logging.Filter):
    """Removes what authorizes an upload from the addresses in a log line."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = redact(record.getMessage())
        record.args = ()
        return True


@contextmanager
def _shown_progress() -> Iterator[None]:
    """Let huggingface_hub show its progress, as bars on a terminal and else as lines, and its retries."""
    is_free = constants.HF_HUB_DISABLE_PROGRESS_BARS is None  # else the user's variable decides about bars
    were_disabled = are_progress_bars_disabled()
    verbosity = hub_logging.get_verbosity()
    pipeline = logging.getLogger("huggingface_hub._upload_pipeline")
    hidden = _WithoutSecrets()
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
    """Raise an InputError if the hub says that the token may not push to ``request.repository``; create nothing there.

    So who lacks the right hears it before hours of tokenization or conversion. What the user should know about a
    repository that exists is printed as notes on standard error.
    """
    asked = f"--push_to_hub {request.repository}"
    api = HfApi()
    try:
        validate_repo_id(request.repository)
        if get_token() is None:
            raise InputError(
                "--push_to_hub needs a Hugging Face token with write access: run `hf auth login`, or set HF_TOKEN "
                f"({_NEW_TOKEN})"
            )
        account = api.whoami()
        repository = _find(api, request, request.repo_type)
        missing = _missing_right(account, request) if repository is None else _refusal(api, account, request)
        notes = _notes(api, request, repository)
    except errors.HFValidationError as error:
        raise InputError(f"{asked}: {error}") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise InputError(
                f"{asked}: the hub does not accept the token (HF_TOKEN, else the one of `hf auth login`); {_NEW_TOKEN}"
            ) from error
        raise InputError(f"{asked}: {_reason_of(error)}; try again later") from error
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError) as error:
        raise InputError(
            f"{asked}: {_reason_of(error)}; without internet, leave out --push_to_hub here, and give the same command "
            "with it on a machine that reaches the hub (HF_ENDPOINT, HF_HUB_OFFLINE): it pushes the finished folder"
        ) from error
    if missing:
        raise InputError(f"{asked}: {missing}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _find(api: HfApi, request: PushRequest, repo_type: str) -> ModelInfo | DatasetInfo | None:
    try:
        return api.repo_info(request.repository, repo_type=repo_type)  # type: ignore[return-value]
    except errors.RepositoryNotFoundError:
        return None


def _refusal(api: HfApi, account: dict[str, Any], request: PushRequest) -> str | None:
    """Return why the token cannot write to a repository that exists, by the hub's own check; None if it can."""
    shown, role, _ = _token(account)
    if (request.revision or "").startswith("refs/pr/"):  # the token may be its author, with no other right to write
        is_there = api.revision_exists(request.repository, request.revision or "", repo_type=request.repo_type)
        return None if is_there else f"--revision {request.revision}: there is no such pull request"
    if request.create_pr:  # anyone may propose a change
        return f"{shown} can only read; {_NEW_TOKEN}" if role == "read" else None
    try:
        api.auth_check(request.repository, repo_type=request.repo_type, write=True)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
            return f"it exists, and {shown} cannot write to it; {_NEW_TOKEN}, or propose a change with --create_pr true"
        if status != 404:  # 404: a mirror without this call; the push itself will show it
            raise
    return None


def _missing_right(account: dict[str, Any], request: PushRequest) -> str | None:
    """Return why the token cannot create the repository, None if nothing that is known here speaks against it."""
    name = account.get("name")
    owner = request.repository.split("/")[0]
    shown, role, scopes = _token(account)
    if role == "read":
        return f"{shown} can only read; {_NEW_TOKEN}"
    organizations = {org["name"]: org.get("roleInOrg") for org in account.get("orgs") or ()}
    if name and owner.casefold() not in map(str.casefold, (name, *organizations)):
        places = ", ".join([name, *organizations])
        return (
            f"{name} cannot create a repository of {owner}; give the name of the account or an organization: {places}"
        )
    if "read" in [role for org, role in organizations.items() if org.casefold() == owner.casefold()]:
        return f"{name} can only read in the organization {owner}; ask for the role write or contributor"
    if role == "fineGrained" and "repo.write" not in {*scopes.get("", ()), *scopes.get(owner.casefold(), ())}:
        return f"{shown} has no write access to the repositories of {owner}; add it (repo.write), or {_NEW_TOKEN}"
    return None


def _token(account: dict[str, Any]) -> tuple[str, str | None, dict[str, list[str]]]:
    """Return a token's name in a message, its role, and the permissions of a fine-grained one by owner ("": all)."""
    token = (account.get("auth") or {}).get("accessToken") or {}  # other kinds, such as a CI job's, have none
    grained = token.get("fineGrained") or {}
    scopes = {"": list(grained.get("global") or ())}
    for scope in grained.get("scoped") or ():
        owner = str((scope.get("entity") or {}).get("name")).casefold()
        scopes.setdefault(owner, []).extend(scope.get("permissions") or ())
    return f"the token {token.get('displayName')!r} of {account.get('name')}", token.get("role"), scopes


def _notes(api: HfApi, request: PushRequest, repository: ModelInfo | DatasetInfo | None) -> list[str]:
    if repository is None:
        other: RepoType = "dataset" if request.repo_type == "model" else "model"
        own = f"{request.repository} is a {other} on the hub; the {request.repo_type} gets a repository of its own"
        return [own] if _find(api, request, other) else []
    notes = []
    if request.private and not repository.private:
        notes.append(f"{request.repository} exists and is public: --private true is only for new repositories")
    files = [file for file in repository.siblings or () if file.rfilename != ".gitattributes"]
    if files and not (request.create_pr or request.revision):
        notes.append(
            f"{request.repository} has {len(files)} files; files of the same name and earlier weights or rows are "
            "replaced, others stay"
        )
    return notes


def download(
    name: str, folder: Path, revision: str = "main", tokenizer_only: bool = False, pickles: bool = False
) -> tuple[str, dict[str, int]]:
    """Download the model ``name`` into ``folder``, which is complete or absent; return its commit, and bytes by file.

    ``hub_source.json`` there says which repository and commit it is. Files that an interrupted download has left are
    not fetched again. ``pickles`` allows weights that are not safetensors.
    """
    check_not_taken(folder)
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.unfinished")
    check_no_links_in(unfinished)
    asked = f"--model_name {name}"
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        there = {file.rfilename for file in info.siblings or ()}
        assert info.sha is not None  # the hub sends it for every revision
        names = sorted(text_files(there))
        if not tokenizer_only:
            names += _weights(name, there, info.sha, unfinished, pickles)
        needed = sum(file.size or 0 for file in info.siblings or () if file.rfilename in names)
        check_room(folder, needed, name)
        snapshot_download(name, revision=info.sha, allow_patterns=names, local_dir=unfinished)
    except errors.GatedRepoError as error:
        raise InputError(
            f"{asked}: its owner asks you to accept its terms: do so on the hub, then run hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"--revision {revision}: {name} has no such branch, tag or commit") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(f"{asked}: the hub has no such model; for a private one, run hf auth login") from error
    except (OSError, errors.HTTPError) as error:
        raise InputError(f"{asked}: cannot be downloaded: {first_line(error).rstrip('.')}; start again") from error
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)  # of huggingface_hub; it does not name the repository
    write_atomically(unfinished / HUB_SOURCE, json.dumps(asdict(HubSource(name, info.sha)), indent=2) + "\n")
    if not tokenizer_only:
        check_weight_files(unfinished)
    if folder.is_dir():
        folder.rmdir()
    sync_and_rename(unfinished, folder.absolute())
    return info.sha, {file: (folder / file).stat().st_size for file in names}


def text_files(there: Iterable[str]) -> list[str]:
    """Return the files of configuration, tokenizer, template and licence; an index belongs to the weights."""
    return [name for name in there if _TEXTS.fullmatch(name) and not _INDEX.fullmatch(name)]


def _weights(name: str, there: set[str], commit: str, unfinished: Path, pickles: bool) -> list[str]:
    """Return the files of the weights: safetensors, or pickles if they are requested and nothing else exists."""
    kinds = [(SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)]
    kinds += [(WEIGHTS_INDEX_NAME, WEIGHTS_NAME)] if pickles else []
    for index, single in kinds:
        if index in there:
            file = hf_hub_download(name, index, revision=commit, local_dir=unfinished)
            return [index, *shard_names(Path(file))]
        if single in there:
            return [single]
    if {WEIGHTS_NAME, WEIGHTS_INDEX_NAME} & there:
        raise InputError(
            f"--model_name {name}: its weights are pickles, not safetensors; use --pickles true "
            "(they are loaded without running code), or another model"
        )
    raise InputError(f"--model_name {name}: it has no weights; use --tokenizer_only true for its tokenizer")
