"""Open Jinja templates, for pages and cards."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def open_templates(folder: Path, **options: Any) -> Environment:
    """Return a folder's templates: values are escaped, missing ones errors; ``options`` are further ones of jinja2."""
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, **options}
    return Environment(loader=FileSystemLoader(folder), **options)
