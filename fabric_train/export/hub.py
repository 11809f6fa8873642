"""Push a finished folder, an exported model or a token dataset, to a repository on the Hugging Face hub."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import logging as hub_logging

from fabric_train.cli.errors import first_line
from fabric_train.cli.redaction import redact
from fabric_train.files.sizes import show_size

if TYPE_CHECKING:
    from arguments import PushArguments

RepoType = Literal["model", "dataset"]

_REPLACED = {
    "model": ["*.safetensors", "*.safetensors.index.json"],
    "dataset": ["train/*", "validation/*"],
}
"""Files of an earlier push that a reader could take for a part of this one: removed unless they are pushed again."""


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
