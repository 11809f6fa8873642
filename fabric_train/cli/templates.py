"""Open Jinja templates, for pages and cards."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def open_templates(folder: Path, **options: Any) -> Environment:
    """Return the templates of a folder. Values are escaped, and a value that is missing is an error.

    ``options`` are further ones of jinja2's ``Environment``.
    """
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, **options}
    return Environment(loader=FileSystemLoader(folder), **options)
