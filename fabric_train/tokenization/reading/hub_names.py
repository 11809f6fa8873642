"""What is a hub name, and what to say when the hub does not give what it names."""

import re
from pathlib import Path

from fabric_train.cli.errors import InputError


def is_hub_name(value: str) -> bool:
    """Return whether ``value`` could be NAME or OWNER/NAME on the hub, and not a file's or a folder's path."""
    name = r"\w(?:[\w.-]*\w)?"
    return re.fullmatch(f"(?:{name}/)?{name}", value) is not None and not Path(value).exists()


def hub_fault(option: str, value: str, error: Exception) -> InputError:
    """Return the one line for ``value`` of ``option``, no path here, which the hub did not give because of ``error``.

    Authors of ``datasets`` and ``huggingface_hub`` name the trouble by the class of the error and write pages into it.
    """
    classes = {base.__name__ for base in type(error).__mro__}
    if "GatedRepoError" in classes:
        why = "it is gated on the hub: accept its terms there and log in with `hf auth login`"
    elif classes & {"RepositoryNotFoundError", "DatasetNotFoundError"} and "reach" not in str(error):
        why = "the hub has none of that name that this login may read"
    elif classes & {"LocalEntryNotFoundError", "ConnectionError", "OfflineModeIsEnabled", "DatasetNotFoundError"}:
        why = "the hub cannot be reached to look for one of that name (no network, or HF_HUB_OFFLINE is set)"
    else:
        why = f"the hub answers: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return InputError(f"{option} {value}: no such file or folder here, and {why}")
