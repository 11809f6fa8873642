"""Model or tokenizer on the hub → a folder that is complete or absent, for machines that cannot reach the hub."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
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

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.atomic_folder import give_name, refuse_if_taken
from fabric_train.model.weight_files import refuse_unreadable_weights, shard_names

_TEXTS = re.compile(r"[^/]+\.(json|jinja|txt|md|model|tiktoken)|LICENSE[^/]*|NOTICE[^/]*|USE_POLICY[^/]*", re.ASCII)
_INDEX = re.compile(r".*\.index(\.[^/]*)?\.json")


@dataclass(frozen=True)
class Wanted:
    """What is to be downloaded: a hub name, at a branch, tag or commit, and which of its files."""

    name: str
    revision: str
    tokenizer_only: bool
    pickles: bool


@dataclass(frozen=True)
class Downloaded:
    """The commit that was downloaded, and the names and sizes in bytes of its files."""

    commit: str
    sizes: dict[str, int]


def download(wanted: Wanted, folder: Path) -> Downloaded:
    """Download into ``folder``. What an interrupted download has left beside it is not fetched again.

    Raises:
        InputError: the name, the revision or the weights are not there, the hub cannot be reached, or ``folder`` is
            taken.
    """
    refuse_if_taken(folder)
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.unfinished")
    asked = f"--model_name {wanted.name}"
    try:
        info = HfApi().model_info(wanted.name, revision=wanted.revision)
        there = {file.rfilename for file in info.siblings or ()}
        assert info.sha is not None  # the hub says it of every revision
        names = sorted(_texts(there))
        if not wanted.tokenizer_only:
            names += _weights(wanted, there, info.sha, unfinished)
        snapshot_download(wanted.name, revision=info.sha, allow_patterns=names, local_dir=unfinished)
    except GatedRepoError as error:
        raise InputError(
            f"{asked}: its owner asks for an agreement: accept it on the hub, then hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"--revision {wanted.revision}: {wanted.name} has no such branch, tag or commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(f"{asked}: the hub has no such model; a private one needs hf auth login") from error
    except (OSError, HTTPError) as error:
        raise InputError(f"{asked}: cannot be downloaded: {first_line(error).rstrip('.')}; start again") from error
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)  # the hub's notes on the download
    if not wanted.tokenizer_only:
        refuse_unreadable_weights(unfinished)
    if folder.is_dir():
        folder.rmdir()
    give_name(unfinished, folder.absolute())
    return Downloaded(info.sha, {name: (folder / name).stat().st_size for name in names})


def _texts(there: Iterable[str]) -> list[str]:
    """The configuration, tokenizer, template and licence; an index belongs to the weights."""
    return [name for name in there if _TEXTS.fullmatch(name) and not _INDEX.fullmatch(name)]


def _weights(wanted: Wanted, there: set[str], commit: str, unfinished: Path) -> list[str]:
    """The files that hold the weights once: safetensors, or pickles where they are asked for."""
    kinds = [(SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)]
    kinds += [(WEIGHTS_INDEX_NAME, WEIGHTS_NAME)] if wanted.pickles else []
    for index, single in kinds:
        if index in there:
            file = hf_hub_download(wanted.name, index, revision=commit, local_dir=unfinished)
            return [index, *shard_names(Path(file))]
        if single in there:
            return [single]
    if {WEIGHTS_NAME, WEIGHTS_INDEX_NAME} & there:
        raise InputError(
            f"--model_name {wanted.name}: its weights are pickles, not safetensors; take them with --pickles true "
            "(they are read without running what is in them), or take another model"
        )
    raise InputError(
        f"--model_name {wanted.name}: no weights in it; a tokenizer alone is had with --tokenizer_only true"
    )
