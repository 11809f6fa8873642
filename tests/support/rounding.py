"""How far correct results may lie apart that add the same terms in another order.

The order of a sum follows from the processor's vectors, the number of threads, and the rows that a matrix product takes
at once. Tests that compare two programs allow what such sums differ by on any processor, not the digits seen on one.
"""

import math
from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

NUM_DEVIATIONS = 6
"""Standard deviations that a rounding error may reach: 1 of 500 million is larger."""


def rounding_tolerance(num_sums: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the difference of two correct results relative to the largest of their tensor.

    A sum of n terms is rounded n times, each time by at most half an eps. The errors are independent, so that they grow
    as √n (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). Two results differ by at
    most twice the error of each: 2 · NUM_DEVIATIONS · √n · eps / 2.

    Args:
        num_sums: terms that are added on the way from the inputs to the result: 64 for a product with a matrix of
            64 rows, 128 for two of them in turn. Errors of products in turn add up in their squares.
        dtype: type in which the sums are kept.
    """
    return NUM_DEVIATIONS * num_sums**0.5 * torch.finfo(dtype).eps


def num_sums_of_loss(config: PretrainedConfig, row_length: int) -> int:
    """Return how many terms are added on the way from a token to its loss, in a decoder such as Llama."""
    width = config.hidden_size
    head_width = width // config.num_attention_heads
    # norm, projection of queries, scores, softmax, mean of values, projection of outputs
    attention = width + width + head_width + row_length + row_length + width
    # norm, up projection, down projection
    mlp = width + width + config.intermediate_size
    # norm, head, log-sum-exp
    loss = width + width + config.vocab_size
    return config.num_hidden_layers * (attention + mlp) + loss


def num_sums_of_gradient(config: PretrainedConfig, row_length: int, num_tokens: int) -> int:
    """Return how many terms are added on the way from a batch of ``num_tokens`` to the gradient of a weight.

    The way leads to the loss and back, and a weight's gradient is the sum over tokens.
    """
    return 2 * num_sums_of_loss(config, row_length) + num_tokens


def assert_equal_up_to_rounding(tensor: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Assert that no element differs by more than ``tolerance`` times the largest element of ``expected``."""
    torch.testing.assert_close(tensor, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def assert_same_training(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    lr: float,
    num_steps: int,
    tolerance: float,
) -> None:
    """Assert that AdamW has trained the same tensors in two programs, whose gradients differ by ``tolerance``.

    AdamW divides a gradient by its size: an element moves by ``lr`` in a step, however small its gradient is. If that
    is t times smaller than the tensor's others, its relative error is t times as large, and it moves elsewhere by
    t · ``tolerance`` · ``lr``, up to 2 · ``lr`` if rounding changes its sign. As 1 of t elements is so small, the
    largest difference is a matter of chance, but not the mean one: the sum over all t is ``lr`` · ``tolerance`` · (1 +
    log(1 / ``tolerance``)) in each step. A tensor that trains in another way differs by ``lr`` throughout.
    """
    assert tensors.keys() == expected.keys()
    differences = torch.cat([(tensors[name] - expected[name]).abs().flatten() for name in expected])
    allowed_mean = num_steps * lr * tolerance * (1 + math.log(1 / tolerance))
    assert float(differences.mean()) <= allowed_mean


def assert_same_checkpoint(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    lr: float,
    num_steps: int,
    tolerance: float,
) -> None:
    """Do as :func:`assert_same_training` does for the weights among tensors, and compare AdamW's moments by element.

    The moments are means of gradients and of their squares, whose relative error is twice as large.
    """
    assert tensors.keys() == expected.keys()
    weights = {}
    expected_weights = {}
    for name, expected_tensor in expected.items():
        tensor = tensors[name]
        kind = name.rpartition(".")[2]
        if kind == "step":
            assert torch.equal(tensor, expected_tensor)
        elif kind == "exp_avg":
            assert_equal_up_to_rounding(tensor, expected_tensor, tolerance)
        elif kind == "exp_avg_sq":
            assert_equal_up_to_rounding(tensor, expected_tensor, 2 * tolerance)
        else:
            weights[name] = tensor
            expected_weights[name] = expected_tensor
    assert_same_training(weights, expected_weights, lr, num_steps, tolerance)
