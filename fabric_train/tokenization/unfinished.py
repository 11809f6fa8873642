"""The hidden folder of finished shards and downloads beside a token dataset that is not there yet; a second start goes
on with it.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.lock import hold_lock
from fabric_train.tokenization.reading.url_download import PART

DOWNLOADS = "downloads"
"""Where in it files lie that were fetched."""

_WORTH_KEEPING_BYTES = 1 << 20  # less is made again in a moment, and would only lie about


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Yield ``.NAME.unfinished`` beside ``target``, for this process alone; it goes when the block has ended well.

    Where an exception leaves the block, the folder stays if what is finished in it is worth it, and the user is told.

    Raises:
        InputError: another process is at work for the same target, or the place cannot be written to.
    """
    target = Path(os.path.abspath(target))
    folder = target.parent / f".{target.name}.unfinished"
    with ExitStack() as stack:
        try:
            taken = f"{target}: another process is tokenizing into it"
            stack.enter_context(hold_lock(folder / "lock", taken, "wait for it or stop it"))
        except OSError as error:
            raise InputError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from None
        try:
            yield folder
        except BaseException:
            num_finished = len(list(folder.glob("*.npz")))
            downloads = [file for file in (folder / DOWNLOADS).glob("*") if file.suffix != PART]
            if _is_worth_keeping(folder, num_finished, downloads):
                kept = f"{num_finished:,} finished shards" + (f" and {len(downloads):,} downloads" if downloads else "")
                print(f"{kept} are kept in {folder}: the same command goes on with them", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _is_worth_keeping(folder: Path, num_finished: int, downloads: list[Path]) -> bool:
    parts = folder.rglob("*") if num_finished else downloads
    return sum(file.stat().st_size for file in parts) > _WORTH_KEEPING_BYTES
