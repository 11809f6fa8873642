"""Names of sources: ``--dataset es=corpus/es/`` reads ``corpus/es/`` and calls it es."""

import glob
import os
import re
from collections.abc import Sequence

from fabric_train.cli.errors import InputError
from fabric_train.cli.redaction import redact

_NAMED = re.compile(r"(\w[\w.-]*)=(.+)", re.DOTALL)


def split_names(given: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Return the name and the place (path, pattern, URL or hub name) of each source that ``option`` gives.

    What is before the first ``=`` is a name if it consists of letters, digits and ``_.-``. So a path that begins like a
    name is written with ``./`` before it. Without a name, the place without its secrets is the name. Sources of one
    name are one source.

    Raises:
        InputError: what is given as a whole is a path that exists, so that it is not known what is meant; or the name
            is ``all``, which is that of the whole wherever losses are shown by source.
    """
    faults = []
    named = []
    for value in given:
        found = _NAMED.fullmatch(value)
        if found and (os.path.lexists(value) or (glob.has_magic(value) and next(glob.iglob(value), None))):
            faults.append(f"{option} {value}: a path, and also {found[2]} with the name {found[1]}; give ./{value}")
        name, place = (found[1], found[2]) if found else (redact(value), value)
        if name == "all":
            faults.append(f"{option} {value}: losses of all sources together have the name all; give NAME={place}")
        named.append((name, place))
    if faults:
        raise InputError(*faults)
    return named


def place_of(value: str) -> str:
    """Return the place of a source that was accepted by :func:`split_names`."""
    found = _NAMED.fullmatch(value)
    return found[2] if found else value
