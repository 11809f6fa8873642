"""What one rank has to say, told to all: errors that are raised by every rank or by none."""

import torch
from lightning import Fabric

from fabric_train.training.loss import gather_over_ranks

_MAX_BYTES = 2000  # longer texts are cut


def first_text(fabric: Fabric, text: str | None) -> str | None:
    """Return the text of the first rank that has one, the same on all ranks; None where none has. All call it
    together.
    """
    encoded = (text or "").encode()[:_MAX_BYTES]
    line = torch.zeros(_MAX_BYTES, dtype=torch.uint8, device=fabric.device)
    line[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else 0
    lines = gather_over_ranks(fabric, line).tolist()
    said = (bytes(line).rstrip(b"\0").decode(errors="ignore") for line in lines)
    return next(filter(None, said), None)
