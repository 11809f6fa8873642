"""Compute with a model that is in training as if it were not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode, with uncompiled layers; afterwards into training mode if it was in it.

    Layers that are compiled for the rows of training would be compiled again for rows of each other length.
    """
    was_training = model.training
    model.eval()  # no dropout
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
