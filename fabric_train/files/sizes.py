"""Parse and format numbers of bytes."""

import re

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_size(text: str) -> int | None:
    """Return the number of bytes of 80GB (1e9 each), 80GiB (2**30 each) or 25GB/s; None if ``text`` is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B(?:/s)?", text.strip())
    num_bytes = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    return round(num_bytes) if 1 <= num_bytes < 2**63 else None


def show_size(num_bytes: float) -> str:
    """Return bytes as GB, or as MB below one GB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
