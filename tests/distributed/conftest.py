"""Fixtures of the tests of compiled layers."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def settings_as_they_were() -> Iterator[None]:
    """Restore the compiler settings that compiled layers change, and forget the compiled code."""
    sources: Any = importlib.import_module("torch.compiler.config")
    budget = torch._functorch.config.patch(activation_memory_budget=1.0)
    with budget, sources.patch(dynamic_sources=""), torch._dynamo.config.patch(optimize_ddp=True):
        yield
    torch.compiler.reset()
