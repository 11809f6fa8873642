"""Names of sources, datasets and runs as strangers may see them: without folders, hosts, users and secrets."""

import re
from itertools import count
from pathlib import Path
from typing import Any

from fabric_train.cli.redaction import redact
from fabric_train.tokenization.manifest import Manifest, SourceRecord

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def last_part(place: str) -> str:
    """Return the last part of a path or URL, in printable characters."""
    _, is_url, after = redact(place).partition("://")
    path = after.partition("?")[0].partition("/")[2] if is_url else place
    return "".join(part if part.isprintable() else "?" for part in Path(path).name) or "unnamed"


def public_value(value: Any) -> str:
    """Return the value of an argument. A text that looks like a name on the hub stays, of another one the last part."""
    if isinstance(value, list | tuple):
        return ", ".join(map(public_value, value))
    if not isinstance(value, str):
        return f"{value}"
    return value if _HUB_NAME.fullmatch(value) and not Path(value).exists() else last_part(value)


def public_source(source: SourceRecord) -> str:
    """Return the name that a source was given, else that of its dataset on the hub, else the last part of its path."""
    if source.kind == "hub" and source.place in (None, source.name):
        return source.hub_name
    return last_part(source.name)


class PublicNames:
    """The public name of each source; two sources never have the same."""

    def __init__(self, manifest: Manifest | None) -> None:
        """Name the sources of a manifest first."""
        self._names: dict[str, str] = {}
        for source in manifest.sources if manifest else ():
            self._add(source.name, public_source(source))

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            self._add(name, last_part(name))
        return self._names[name]

    def _add(self, name: str, public: str) -> None:
        if name not in self._names:
            names = (f"{public} ({number})" if number > 1 else public for number in count(1))
            self._names[name] = next(one for one in names if one not in self._names.values())
