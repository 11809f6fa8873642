"""Use a model in other software, each in an environment of its own: the same text and question everywhere."""

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
class ModelOutputs:
    """What software computes with a model.

    Attributes:
        version: of the software.
        ids: token ids of TEXT, T of them.
        logits: at each token of TEXT, fp32 [T, vocab].
        text: the NUM_TOKENS tokens after TEXT, decoded greedily.
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


def use_in_transformers(python: Path | str, folder: Path, text: str = TEXT) -> ModelOutputs:
    """Use a Hugging Face folder through ``pipeline``, with ``text`` in place of TEXT."""
    return _use(python, "in_transformers.py", folder, text)


def use_in_llama_cpp(python: Path, file: Path, *adapter: Path, text: str = TEXT) -> ModelOutputs:
    """Use a GGUF file, with the GGUF file of an adapter if there is one, and ``text`` in place of TEXT."""
    return _use(python, "in_llama_cpp.py", file, text, *adapter)


def use_in_vllm(python: Path, folder: Path, *adapter: Path, text: str = TEXT) -> ModelOutputs:
    """Use a Hugging Face folder in vLLM, with an adapter if there is one.

    vLLM gives no logits: ``logits`` has what :func:`text_log_probabilities` returns for other software.
    """
    return _use(python, "in_vllm.py", folder, text, *adapter)


def text_log_probabilities(outputs: ModelOutputs) -> np.ndarray:
    """Return the log-probability of each token of the text but the first, from the logits: float64 [T - 1]."""
    logits = outputs.logits[:-1].astype(np.float64)
    # less the largest logit, so that exp does not overflow
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    positions = np.arange(len(logits))
    next_ids = outputs.ids[1:]
    selected: np.ndarray = log_probabilities[positions, next_ids]
    return selected


def assert_same(outputs: ModelOutputs, expected: ModelOutputs, tolerance: float) -> None:
    """Check that two kinds of software compute the same with a model; ``tolerance`` is for a logit."""
    assert outputs.ids == expected.ids
    np.testing.assert_allclose(outputs.logits, expected.logits, rtol=0, atol=tolerance)
    assert outputs.text == expected.text
    assert outputs.reply == expected.reply
    assert outputs.ended == expected.ended
    assert outputs.template == expected.template


def _use(python: Path | str, program: str, model: Path, text: str, *adapter: Path) -> ModelOutputs:
    # logits are many numbers, so the program writes them into a file
    logits_file = model.parent / f"{model.name}-{program}.npy"
    printed = run_inside(python, program, model, text, QUESTION, NUM_TOKENS, logits_file, *adapter)
    return ModelOutputs(logits=np.load(logits_file), **printed)
