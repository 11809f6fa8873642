"""Recognize names on the Hugging Face hub, and describe why the hub does not give a dataset or model."""

import re
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError, first_line


@dataclass(frozen=True)
class DatasetName:
    """A dataset as ``NAME:SUBSET:SPLIT@REVISION``, of which everything except the name may be left out.

    ``NAME@REVISION`` and ``NAME::SPLIT`` are such names too. Several splits are joined by +. None is the default.
    """

    name: str
    subset: str | None
    split: str | None
    revision: str | None

    def found(self) -> str:
        """Return subset and revision for messages."""
        return f"subset {self.subset}, commit {self.revision}"


def parse_dataset_name(value: str) -> DatasetName | None:
    """Return the parts of a dataset's name, None if it cannot be one."""
    subset, split, revision = r"(?::([^:@]*))?", r"(?::([\w.+-]+))?", r"(?:@([\w./-]+))?"
    parts = re.fullmatch(f"([^:@]+){subset}{split}{revision}", value)
    return DatasetName(parts[1], parts[2] or None, parts[3], parts[4]) if parts else None


def is_hub_name(value: str) -> bool:
    """Return whether ``value`` has the form NAME or OWNER/NAME and is not an existing path."""
    name = r"\w(?:[\w.-]*\w)?"
    return re.fullmatch(f"(?:{name}/)?{name}", value) is not None and not Path(value).exists()


def errors_of_datasets() -> tuple[type[Exception], ...]:
    """Return what ``datasets`` raises when there is no network or dataset, or a dataset's files or README are wrong."""
    import httpx
    import yaml
    from datasets.exceptions import DatasetsError

    wrong_content = (ValueError, KeyError, TypeError, AttributeError, IndexError, yaml.YAMLError)
    return (OSError, httpx.HTTPError, DatasetsError, RuntimeError, *wrong_content)


def hub_fault(option: str, value: str, error: Exception, is_folder: bool = False) -> InputError:
    """Return the one-line error for ``value`` of ``option``, which cannot be loaded from the hub, or from a folder.

    The messages of ``datasets`` and ``huggingface_hub`` are long, so the reason is taken from the class of ``error``.
    """
    classes = {base.__name__ for base in type(error).__mro__}
    message = first_line(error)
    cause = error.__cause__ if "DatasetGenerationError" in classes and error.__cause__ else error
    if message == "Config name is missing.":
        subsets = ", ".join(re.findall(r"'([^']+)'", str(error).splitlines()[1]))
        return InputError(f"{option} {value}: it has several subsets; give one of them as NAME:SUBSET: {subsets}")
    if is_folder:
        return InputError(f"{option} {value}: {first_line(cause)}")
    if "GatedRepoError" in classes or "is a gated dataset" in message:
        why = "it is gated on the hub: accept its terms there and log in with `hf auth login`"
    elif message.startswith("Revision "):
        why = f"the hub answers: {message}"
    elif classes & {"RepositoryNotFoundError", "DatasetNotFoundError"} and "reach" not in message:
        why = "the hub has nothing of this name that this login may read"
    elif classes & {"LocalEntryNotFoundError", "ConnectionError", "OfflineModeIsEnabled", "DatasetNotFoundError"}:
        why = "the hub cannot be reached to look for it (no network, or HF_HUB_OFFLINE is set)"
    else:
        why = f"the hub answers: {first_line(cause)}"
    return InputError(f"{option} {value}: no such file or folder here, and {why}")
