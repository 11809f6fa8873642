"""Download a model or a tokenizer from the hub into a folder that is complete or absent."""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fabric_train.checkpoint.manager import free_bytes
from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.atomic_folder import check_not_taken, sync_and_rename
from fabric_train.files.regular_file import check_no_links_in, write_atomically
from fabric_train.model.origin import HUB_SOURCE, HubSource
from fabric_train.model.weight_files import check_weight_files, shard_names

_TEXTS = re.compile(r"[^/]+\.(json|jinja|txt|md|model|tiktoken)|LICENSE[^/]*|NOTICE[^/]*|USE_POLICY[^/]*", re.ASCII)
_INDEX = re.compile(r".*\.index(\.[^/]*)?\.json")


@dataclass(frozen=True)
class DownloadRequest:
    """What to download: a hub name, its revision (branch, tag or commit), and which of its files."""

    name: str
    revision: str
    tokenizer_only: bool
    pickles: bool


@dataclass(frozen=True)
class DownloadResult:
    """The downloaded commit, and its files' sizes in bytes by name."""

    commit: str
    sizes: dict[str, int]


def download(request: DownloadRequest, folder: Path) -> DownloadResult:
    """Download into ``folder``; files that an interrupted download has left are not fetched again.

    ``hub_source.json`` there says which repository and commit they are.

    Raises:
        InputError: the name, the revision or the weights do not exist, the hub cannot be reached, or ``folder`` is
            taken.
    """
    check_not_taken(folder)
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.unfinished")
    check_no_links_in(unfinished)
    asked = f"--model_name {request.name}"
    try:
        info = HfApi().model_info(request.name, revision=request.revision, files_metadata=True)
        there = {file.rfilename for file in info.siblings or ()}
        assert info.sha is not None  # the hub sends it for every revision
        names = sorted(text_files(there))
        if not request.tokenizer_only:
            names += _weights(request, there, info.sha, unfinished)
        _check_room(
            request.name, sum(file.size or 0 for file in info.siblings or () if file.rfilename in names), folder
        )
        snapshot_download(request.name, revision=info.sha, allow_patterns=names, local_dir=unfinished)
    except GatedRepoError as error:
        raise InputError(
            f"{asked}: its owner asks you to accept its terms: do so on the hub, then run hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"--revision {request.revision}: {request.name} has no such branch, tag or commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(f"{asked}: the hub has no such model; for a private one, run hf auth login") from error
    except (OSError, HTTPError) as error:
        raise InputError(f"{asked}: cannot be downloaded: {first_line(error).rstrip('.')}; start again") from error
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)  # of huggingface_hub; it does not name the repository
    source = HubSource(request.name, info.sha)
    write_atomically(unfinished / HUB_SOURCE, json.dumps(asdict(source), indent=2) + "\n")
    if not request.tokenizer_only:
        check_weight_files(unfinished)
    if folder.is_dir():
        folder.rmdir()
    sync_and_rename(unfinished, folder.absolute())
    return DownloadResult(info.sha, {name: (folder / name).stat().st_size for name in names})


def _check_room(name: str, num_bytes: int, folder: Path) -> None:
    """Check that the disk has room for a model, of which an interrupted download may have left a part."""
    free = free_bytes(next(parent for parent in folder.absolute().parents if parent.exists()))
    if free < num_bytes:
        raise InputError(
            f"{name} takes {show_size(num_bytes)}, and {folder} has {show_size(free)} left; choose another disk"
        )


def text_files(there: Iterable[str]) -> list[str]:
    """Return the files of configuration, tokenizer, template and licence; an index belongs to the weights."""
    return [name for name in there if _TEXTS.fullmatch(name) and not _INDEX.fullmatch(name)]


def _weights(request: DownloadRequest, there: set[str], commit: str, unfinished: Path) -> list[str]:
    """Return the files of the weights: safetensors, or pickles if they are requested and nothing else exists."""
    kinds = [(SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)]
    kinds += [(WEIGHTS_INDEX_NAME, WEIGHTS_NAME)] if request.pickles else []
    for index, single in kinds:
        if index in there:
            file = hf_hub_download(request.name, index, revision=commit, local_dir=unfinished)
            return [index, *shard_names(Path(file))]
        if single in there:
            return [single]
    if {WEIGHTS_NAME, WEIGHTS_INDEX_NAME} & there:
        raise InputError(
            f"--model_name {request.name}: its weights are pickles, not safetensors; use --pickles true "
            "(they are loaded without running code), or another model"
        )
    raise InputError(f"--model_name {request.name}: it has no weights; use --tokenizer_only true for its tokenizer")
