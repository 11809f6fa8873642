"""Mark a model card as written by this program, so that a push may renew it, unless a user has edited it."""

import hashlib
import re
from pathlib import Path

from fabric_train.export.model_card import CardFacts, draw_card_picture, write_model_card
from fabric_train.export.source import ExportSource
from fabric_train.files.regular_file import write_atomically

_MARK = re.compile(r"\n<!-- written by Fabric Train; SHA-256 of the text above: ([0-9a-f]{64}) -->\n\Z")


def write_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the model card ``README.md`` into the export ``folder``, with its picture and a hidden last line.

    Raises:
        InputError: trainer.json or manifest.json of the checkpoint is damaged.
    """
    draw_card_picture(source.checkpoint, folder, facts)
    write_model_card(source.checkpoint, folder, facts, source.parts)
    text = (folder / "README.md").read_text(encoding="utf-8")
    mark = f"\n<!-- written by Fabric Train; SHA-256 of the text above: {_sha256(text)} -->\n"
    write_atomically(folder / "README.md", text + mark)


def renew_card(source: ExportSource, folder: Path, facts: CardFacts) -> None:
    """Write the card of a finished export again with ``facts``, which may name another repository.

    A card that a user has edited, or that an older version wrote, stays.
    """
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = _MARK.search(text)
    if found and found[1] == _sha256(text[: found.start()]):
        write_card(source, folder, facts)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
