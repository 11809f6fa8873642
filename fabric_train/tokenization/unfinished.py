"""The hidden folder that keeps finished shards and downloads next to an unfinished token dataset, for a restart."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError, raise_reached_limit
from fabric_train.cli.output import redact
from fabric_train.files.atomic_folder import hold_lock
from fabric_train.files.regular_file import check_no_links_in
from fabric_train.tokenization.manifest import Manifest, read_manifest
from fabric_train.tokenization.reading.opening import PART, split_names

if TYPE_CHECKING:
    from fabric_train.tokenization.arguments import TokenizeArguments

DOWNLOADS = "downloads"
"""The subfolder of downloaded files."""
_MIN_BYTES_TO_KEEP = 1 << 20  # less is quickly made again


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Yield the locked folder ``.NAME.unfinished`` next to ``target``, and remove it when the block succeeds.

    If an exception leaves the block and the folder holds more than a MiB of finished work, the folder stays and a line
    on standard error names it.

    Raises:
        InputError: another process is tokenizing into ``target``, its parent folder cannot be written to, or a link is
            in the way.
    """
    target = Path(os.path.abspath(target))
    folder = target.parent / f".{target.name}.unfinished"
    check_no_links_in(folder)
    with ExitStack() as stack:
        try:
            taken = f"{target}: another process is tokenizing into it"
            stack.enter_context(hold_lock(folder / "lock", taken, "wait for it or stop it"))
        except OSError as error:
            raise_reached_limit(error)
            raise InputError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from None
        try:
            yield folder
        except BaseException:
            num_finished = sum(file.suffix in (".npz", ".lines") for file in folder.glob("*"))
            downloads = [file for file in (folder / DOWNLOADS).glob("*") if file.suffix != PART]
            if _is_worth_keeping(folder, num_finished, downloads):
                kept = f"{num_finished:,} finished shards" + (f" and {len(downloads):,} downloads" if downloads else "")
                print(f"{kept} are kept in {folder}: the same command continues with them", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _is_worth_keeping(folder: Path, num_finished: int, downloads: list[Path]) -> bool:
    parts = folder.rglob("*") if num_finished else downloads
    return sum(file.stat().st_size for file in parts) > _MIN_BYTES_TO_KEEP


def find_finished(arguments: "TokenizeArguments") -> Manifest | None:
    """Return the manifest of the token dataset in --output_dir, or None if nothing is there.

    Only arguments are compared, not the content of the sources, which takes as long as reading them.

    Raises:
        InputError: the folder has something else, or a token dataset that was made with other arguments.
    """
    folder = Path(arguments.output_dir).expanduser()
    if not any(folder.glob("*")):
        return None
    manifest = read_manifest(folder)
    if manifest is None or manifest.parts:
        raise InputError(f"{folder} already exists and is not a token dataset of this program; choose another folder")
    differences = [f"--{name} {made}, not {asked}" for name, made, asked in _differences(manifest, arguments)]
    if differences:
        raise InputError(f"{folder} was made with other arguments: {', '.join(differences)}; choose another folder")
    return manifest


def _differences(manifest: Manifest, arguments: "TokenizeArguments") -> Iterator[tuple[str, object, object]]:
    """Yield the arguments that differ: the name, the value that the dataset was made with, and the given one."""
    if manifest.tokenizer.name != arguments.tokenizer_name:
        yield "tokenizer_name", manifest.tokenizer.name, arguments.tokenizer_name
    made = [(source.name, source.place) for source in manifest.sources]
    given = [
        (name, redact(place))
        for option in ("--dataset", "--validation_dataset")
        for name, place in split_names(getattr(arguments, option[2:]) or [], option)
    ]
    if made != given:
        yield "dataset", [place for _, place in made], [place for _, place in given]
    for name, value in asdict(manifest.settings).items():
        asked = getattr(arguments, name)
        # without --packing, it was chosen by the rows; the sources of validation are compared above
        if asked != value and (name, asked) != ("packing", None) and name != "validation_dataset":
            yield name, value, asked
