"""Download a model from the Hugging Face hub to a folder that is complete or absent."""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.atomic_folder import check_not_taken, sync_and_rename
from fabric_train.files.regular_file import check_no_links_in, write_atomically
from fabric_train.files.requirements import check_room
from fabric_train.model.origin import HUB_SOURCE, HubSource
from fabric_train.model.weight_files import check_weight_files, shard_names

_TEXTS = re.compile(r"[^/]+\.(json|jinja|txt|md|model|tiktoken)|LICENSE[^/]*|NOTICE[^/]*|USE_POLICY[^/]*", re.ASCII)
_INDEX = re.compile(r".*\.index(\.[^/]*)?\.json")


@dataclass(frozen=True)
class DownloadedModel:
    """A model that :func:`download` has fetched."""

    commit: str
    file_sizes: dict[str, int]
    """The bytes of each file."""


def download(
    name: str, folder: Path, revision: str = "main", *, tokenizer_only: bool = False, pickles: bool = False
) -> DownloadedModel:
    """Download a model to ``folder``, which is complete or absent.

    ``hub_source.json`` in the folder names the repository and commit. Files that an interrupted download has left are
    not fetched again.

    Args:
        name: The model's repository.
        folder: The folder to write, absent or empty.
        revision: A branch, tag or commit.
        tokenizer_only: Whether to leave out the weights.
        pickles: Whether weights that are not safetensors are allowed.

    Raises:
        InputError: the model cannot be downloaded.
    """
    check_not_taken(folder)
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.unfinished")
    check_no_links_in(unfinished)
    option = f"--model_name {name}"

    # choose and fetch the files
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        assert info.sha is not None  # the hub sends it for every revision
        hub_files = info.siblings or []
        hub_names = {file.rfilename for file in hub_files}
        names = sorted(text_files(hub_names))
        if not tokenizer_only:
            names += _choose_weights(name, hub_names, info.sha, unfinished, pickles=pickles)
        num_bytes = sum(file.size or 0 for file in hub_files if file.rfilename in names)
        check_room(folder, num_bytes, name)
        snapshot_download(name, revision=info.sha, allow_patterns=names, local_dir=unfinished)
    except errors.GatedRepoError as error:
        raise InputError(
            f"{option}: the owner requires you to accept the model's terms; do so on the hub, then run hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"--revision {revision}: {name} has no such branch, tag or commit") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(f"{option}: the hub has no such model; for a private one, run hf auth login") from error
    except (OSError, errors.HTTPError) as error:
        raise InputError(
            f"{option}: cannot be downloaded: {first_line(error).rstrip('.')}; run the command again"
        ) from error

    # complete the folder, and only then give it its name
    shutil.rmtree(unfinished / ".cache", ignore_errors=True)  # huggingface_hub's; it does not name the repository
    source = HubSource(name, info.sha)
    write_atomically(unfinished / HUB_SOURCE, json.dumps(asdict(source), indent=2) + "\n")
    if not tokenizer_only:
        check_weight_files(unfinished)
    if folder.is_dir():
        folder.rmdir()
    sync_and_rename(unfinished, folder.absolute())
    return DownloadedModel(info.sha, {file: (folder / file).stat().st_size for file in names})


def text_files(names: Iterable[str]) -> list[str]:
    """Return the files of configuration, tokenizer, template and licence; an index of weights is not among them."""
    return [name for name in names if _TEXTS.fullmatch(name) and not _INDEX.fullmatch(name)]


def _choose_weights(name: str, hub_names: set[str], commit: str, unfinished: Path, *, pickles: bool) -> list[str]:
    """Return the files of the weights: safetensors, or pickles if they are requested and nothing else exists.

    The index, which lists the files, is downloaded to ``unfinished``.
    """
    formats = [(SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)]
    if pickles:
        formats.append((WEIGHTS_INDEX_NAME, WEIGHTS_NAME))
    for index_name, single_name in formats:
        if index_name in hub_names:
            index_file = hf_hub_download(name, index_name, revision=commit, local_dir=unfinished)
            return [index_name, *shard_names(Path(index_file))]
        if single_name in hub_names:
            return [single_name]
    if {WEIGHTS_NAME, WEIGHTS_INDEX_NAME} & hub_names:
        raise InputError(
            f"--model_name {name}: its weights are pickles, not safetensors; use --pickles true "
            "(they are loaded without running code), or another model"
        )
    raise InputError(f"--model_name {name}: it has no weights; use --tokenizer_only true for its tokenizer")
