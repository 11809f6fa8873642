"""Check that an engine for inference computes with the weights of the model in training.

After each transfer, both compute the log-probabilities of a text, which stays the same for the whole run, and of a
completion that the engine samples from it. So the check covers weights, temperature and the way tokens are drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.model.attention import forward
from fabric_train.model.evaluation_mode import evaluation_mode

_UNIT_ROUNDOFFS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
_TF32_UNIT_ROUNDOFF = 2.0**-12
_ROUNDINGS_PER_LAYER = 8
"""Results that a decoder layer rounds one after the other: two norms, four products or groups of them, two sums."""
_SAFETY = 2.0
"""Both sides round, so differences are √2 times as large; the rest is room for errors that are not independent."""


@dataclass(frozen=True)
class ProbeAnswer:
    """What one side computes for the probe."""

    text: np.ndarray
    """The log-probability of each token of the text after the first one, at temperature 1, fp32 [tokens - 1]."""
    sampled: np.ndarray
    """The log-probability of each token of the completion at the temperature of the run, fp32 [new tokens]."""


@dataclass(frozen=True)
class EngineAnswer(ProbeAnswer):
    """What the engine computes."""

    sampled_ids: list[int]
    """The token ids of the completion, at least one."""


@dataclass(frozen=True)
class TrainerAnswer(ProbeAnswer):
    """What the model in training computes."""

    logit_deviation: float
    """The standard deviation of the logits over the vocabulary, averaged over the text."""


@torch.no_grad()
def compute_answer(
    fabric: Fabric, model: Any, text_ids: Sequence[int], sampled_ids: Sequence[int], temperature: float
) -> TrainerAnswer:
    """Compute the probe with the model in training. All ranks call this together, and get the same answer.

    Args:
        fabric: The run's Fabric.
        model: The model that ``setup_model`` returned.
        text_ids: The token ids of the text.
        sampled_ids: The token ids of the completion, at least one.
        temperature: The temperature of the completion.
    """
    token_ids = torch.tensor([[*text_ids, *sampled_ids]], device=fabric.device)  # [1, T]
    with evaluation_mode(model):
        logits = forward(model, token_ids, None).logits[0, :-1].float()  # fp32 [T - 1, V]

    num_before = len(text_ids) - 1
    next_ids = token_ids[0, 1:, None]  # [T - 1, 1]
    text = torch.log_softmax(logits[:num_before], dim=1).gather(1, next_ids[:num_before])[:, 0]
    sampled_log_probabilities = torch.log_softmax(logits[num_before:] / temperature, dim=1)
    sampled = sampled_log_probabilities.gather(1, next_ids[num_before:])[:, 0]
    return TrainerAnswer(
        text=text.cpu().numpy(),
        sampled=sampled.cpu().numpy(),
        logit_deviation=logits.std(dim=1).mean().item(),
    )


def log_probability_tolerance(dtype: torch.dtype, num_layers: int, width: int, logit_deviation: float) -> float:
    """Return how far the root mean square of differences of log-probabilities may be from 0.

    Two programs round the same sums in different places. A layer adds to the residual stream what it has rounded
    ``_ROUNDINGS_PER_LAYER`` times, each with a relative error of at most the unit roundoff u of the dtype. Independent
    errors add up like a random walk, so that of the last hidden state is about u √(8 L). A logit is its product with a
    row of the head, so its error is this share of the deviation of the logits, and so is that of a log-probability.
    Products are summed in fp32: a sum of K terms has a relative error of about 2⁻²⁴ √K, which counts if u is smaller.

    Args:
        dtype: The dtype of the matrix products.
        num_layers: The number L of decoder layers.
        width: The number K of terms in the longest sum, the width of the layers' feed-forward part.
        logit_deviation: The standard deviation of the logits over the vocabulary.
    """
    unit_roundoff = _UNIT_ROUNDOFFS[dtype]
    if dtype == torch.float32 and torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32:
        unit_roundoff = _TF32_UNIT_ROUNDOFF
    unit_roundoff = max(unit_roundoff, _UNIT_ROUNDOFFS[torch.float32] * math.sqrt(width))
    return _SAFETY * unit_roundoff * math.sqrt(_ROUNDINGS_PER_LAYER * num_layers) * logit_deviation


class TransferCheck:
    """Compares the answers of both sides after each transfer."""

    def __init__(self, dtype: torch.dtype, num_layers: int, width: int, temperature: float) -> None:
        """Set up the check; for the arguments see :func:`log_probability_tolerance`."""
        self._dtype = dtype
        self._num_layers = num_layers
        self._width = width
        self._temperature = temperature
        self._last_engine: ProbeAnswer | None = None
        self._last_trainer: ProbeAnswer | None = None

    def find_fault(self, engine: ProbeAnswer, trainer: TrainerAnswer) -> str | None:
        """Return why the engine does not compute with the weights of the model, or None."""
        tolerance = log_probability_tolerance(self._dtype, self._num_layers, self._width, trainer.logit_deviation)
        sampled_tolerance = tolerance / self._temperature  # the logits are divided by it
        text_difference = _root_mean_square(engine.text - trainer.text)
        sampled_difference = _root_mean_square(engine.sampled - trainer.sampled)
        if not text_difference <= tolerance:  # also if it is not a number
            return (
                f"its log-probabilities of a text differ from those of the model in training by {text_difference:.3g} "
                f"(root mean square); rounding explains {tolerance:.3g}"
            )
        if not sampled_difference <= sampled_tolerance:
            return (
                f"its log-probabilities of what it sampled differ from those of the model in training at temperature "
                f"{self._temperature:g} by {sampled_difference:.3g} (root mean square); rounding explains "
                f"{sampled_tolerance:.3g}"
            )

        # the same bits as before, although the weights have changed: smaller changes than rounding are noticed, too
        last_engine = self._last_engine
        last_trainer = self._last_trainer
        self._last_engine = engine
        self._last_trainer = trainer
        if last_engine is None or last_trainer is None:
            return None
        share_changed = float(np.mean(trainer.text != last_trainer.text))
        if share_changed > 0.5 and np.array_equal(engine.text, last_engine.text):
            return "it still has the weights from before the last step"
        return None


def _root_mean_square(differences: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(differences, dtype=np.float64))))
