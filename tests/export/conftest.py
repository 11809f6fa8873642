"""Fixtures of the tests that push to a stand-in for the hub."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.support.stand_in_hub import TOKEN, StandInHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with StandInHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that huggingface_hub would wait before it sends a request again."""
    waited: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=waited.append))
    return waited
