"""An exported folder → a repository on the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from fabric_train.cli.errors import InputError


class PushError(RuntimeError):
    """The hub did not take the folder; the message says in one line why."""


def refuse_push(repository: str) -> None:
    """Refuse, before any work, a push that cannot succeed.

    Raises:
        InputError: ``repository`` is not a name the hub allows, or there is no token.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(f"--push_to_hub {repository}: {error}") from error
    if get_token() is None:
        raise InputError(
            "--push_to_hub needs a Hugging Face token with write access: run `hf auth login`, or set HF_TOKEN "
            "(tokens are made at https://huggingface.co/settings/tokens)"
        )


def push(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Upload ``folder`` to ``repository`` (OWNER/NAME), made if it does not exist, and return its address.

    Raises:
        PushError: the hub cannot be reached or refuses.
    """
    disable_progress_bars()
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message=message)
    except (HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PushError(f"{folder} is complete, but pushing it to {repository} failed: {reason}") from error
    return str(url)
