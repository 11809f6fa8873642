"""The hidden folder that keeps finished shards and downloads next to an unfinished token dataset, for a restart."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fabric_train.cli.errors import InputError, raise_reached_limit
from fabric_train.files.lock import hold_lock
from fabric_train.files.regular_file import check_no_links_in
from fabric_train.tokenization.reading.url_download import PART

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
