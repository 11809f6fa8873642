"""Recognize names on the Hugging Face hub, and describe why the hub does not give a dataset or model."""

import re
from pathlib import Path

from fabric_train.cli.errors import InputError


def is_hub_name(value: str) -> bool:
    """Return whether ``value`` has the form NAME or OWNER/NAME and is not an existing path."""
    name = r"\w(?:[\w.-]*\w)?"
    return re.fullmatch(f"(?:{name}/)?{name}", value) is not None and not Path(value).exists()


def hub_fault(option: str, value: str, error: Exception) -> InputError:
    """Return the one-line error for ``value`` of ``option``, which is neither a path nor available on the hub.

    The messages of ``datasets`` and ``huggingface_hub`` are long, so the reason is taken from the class of ``error``.
    """
    classes = {base.__name__ for base in type(error).__mro__}
    if "GatedRepoError" in classes:
        why = "it is gated on the hub: accept its terms there and log in with `hf auth login`"
    elif classes & {"RepositoryNotFoundError", "DatasetNotFoundError"} and "reach" not in str(error):
        why = "the hub has nothing of this name that this login may read"
    elif classes & {"LocalEntryNotFoundError", "ConnectionError", "OfflineModeIsEnabled", "DatasetNotFoundError"}:
        why = "the hub cannot be reached to look for it (no network, or HF_HUB_OFFLINE is set)"
    else:
        why = f"the hub answers: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return InputError(f"{option} {value}: no such file or folder here, and {why}")
