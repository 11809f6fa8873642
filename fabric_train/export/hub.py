"""Push an exported folder to a repository on the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from fabric_train.cli.errors import InputError, first_line


class PushError(RuntimeError):
    """A push to the hub that failed; the message gives the reason in one line."""


def check_push(repository: str) -> None:
    """Check, before any work, the repository's name and that there is a token.

    Raises:
        InputError: ``repository`` is not a valid name on the hub, or there is no token.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"--push_to_hub {repository}: {error}") from error
    if get_token() is None:
        raise InputError(
            "--push_to_hub needs a Hugging Face token with write access: run `hf auth login`, or set HF_TOKEN "
            "(create one at https://huggingface.co/settings/tokens)"
        )


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Upload ``folder`` to ``repository`` (OWNER/NAME), created if it does not exist, and return its URL.

    Raises:
        PushError: the hub cannot be reached or refuses the push.
    """
    disable_progress_bars()
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message=message)
    except (HTTPError, OSError, ValueError) as error:  # a ValueError if the hub refuses the card's metadata
        reason = " ".join(str(error).split()) if isinstance(error, ValueError) else first_line(error)
        raise PushError(f"{folder} is complete, but pushing it to {repository} failed: {reason}") from error
    return str(url)
