"""The hidden folder of finished shards beside a token dataset that is not there yet; a second start goes on with it."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric_train.errors import InputError

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
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"cannot write to {target.parent}: {error.strerror}; choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{target}: another process is tokenizing into it; wait for it or stop it") from None
        try:
            yield folder
        except BaseException:
            num_finished = len(list(folder.glob("*.npz")))
            if num_finished and sum(file.stat().st_size for file in folder.rglob("*")) > _WORTH_KEEPING_BYTES:
                kept = f"{num_finished:,} finished shards are kept in {folder}"
                print(f"{kept}: the same command goes on with them", file=sys.stderr)
            else:
                _remove(folder, new_parents)
            raise
        _remove(folder, [])


def _remove(folder: Path, parents: list[Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for parent in parents:
        with suppress(OSError):  # something else lies in it by now
            parent.rmdir()
