"""Use a model folder in other software: the same text and question everywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.environments import run_inside

Checked = Callable[[str, str, str], None]
OPTIONS = {"max_step": 2, "lr": 1e-4, "micro_batch_size": 1, "total_batch_size": 2, "eval_iters": 2}
"""Of the run whose export is used."""
TEXT = "To be, or not to be: that is the question."
QUESTION = "Hi, how are you?"
NUM_TOKENS = 40


@dataclass(frozen=True)
class Used:
    """What software makes of a model.

    Attributes:
        version: of the software.
        ids: of TEXT.
        logits: [T, V], fp32.
        text: the NUM_TOKENS tokens after TEXT, taken greedily.
        reply: the answer to QUESTION through the chat template.
        ended: whether the reply has an end before NUM_TOKENS tokens.
        template: the chat template.
    """

    version: str
    ids: list[int]
    logits: np.ndarray
    text: str
    reply: str
    ended: bool
    template: str | None


def use_in_transformers(python: Path | str, folder: Path, text: str = TEXT) -> Used:
    """Use a Hugging Face folder through ``pipeline``, with ``text`` in place of TEXT."""
    return _use(python, "in_transformers.py", folder, text)


def use_in_llama_cpp(python: Path, file: Path, *adapter: Path, text: str = TEXT) -> Used:
    """Use a GGUF file, with an adapter's on it if there is one, and ``text`` in place of TEXT."""
    return _use(python, "in_llama_cpp.py", file, text, *adapter)


def use_in_vllm(python: Path, folder: Path, *adapter: Path, text: str = TEXT) -> Used:
    """Use a Hugging Face folder in vLLM, with an adapter if there is one; ``logits`` has :func:`of_the_text` of it."""
    return _use(python, "in_vllm.py", folder, text, *adapter)


def of_the_text(used: Used) -> np.ndarray:
    """Return the log-probability of each token of the text but the first, from the logits: float [T - 1]."""
    logits = used.logits[:-1].astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    picked: np.ndarray = log_probabilities[np.arange(len(logits)), used.ids[1:]]
    return picked


def assert_same(found: Used, expected: Used, tolerance: float) -> None:
    """Check that two kinds of software make the same of a model; ``tolerance`` is for a logit."""
    assert found.ids == expected.ids
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=tolerance)
    assert (found.text, found.reply, found.ended) == (expected.text, expected.reply, expected.ended)
    assert found.template == expected.template


def _use(python: Path | str, program: str, model: Path, text: str, *more: Path) -> Used:
    logits = model.parent / f"{model.name}-{program}.npy"
    found = run_inside(python, program, model, text, QUESTION, NUM_TOKENS, logits, *more)
    return Used(logits=np.load(logits), **found)
