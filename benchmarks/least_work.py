"""The least time in which an H100 can do a step of a Llama-3-8B with an adapter, from its sizes alone.

Products and attention take their FLOPs at the peak. Between them, each operation reads its inputs and writes its
outputs once, and operations that follow one another are one kernel. Nothing is recomputed, cast or copied.
"""

from dataclasses import dataclass

import torch

from benchmarks.kernels import BANDWIDTH, GPU
from fabric_train.model.flops import peak_flops

BF16_BYTES = 2
NF4_BYTES = 4.5 / 8
"""The bytes of a weight: 4 bits, and an fp32 scale for 64 of them."""
ADAMW_BYTES = 28
"""The bytes of AdamW for a parameter in fp32: reads it, its gradient and two moments, writes it and the moments."""


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a step of Llama-3-8B."""

    rank: int
    """The rank of the adapter, which all linear layers have except the head."""
    tokens: int
    """The tokens of the step's only micro-batch."""
    document: int
    """The tokens of a document."""
    layers: int = 32
    width: int = 4096
    kv_width: int = 1024
    mlp_width: int = 14336
    vocabulary: int = 128_256

    @property
    def matrices(self) -> int:
        """The weights of the matrices of all layers."""
        attention = 2 * self.width * (self.width + self.kv_width)
        mlp = 3 * self.width * self.mlp_width
        return self.layers * (attention + mlp)

    @property
    def adapter(self) -> int:
        """The weights of the adapter: rank × (in + out) of each matrix."""
        attention = 4 * self.width + 2 * (self.width + self.kv_width)
        mlp = 3 * (self.width + self.mlp_width)
        return self.layers * self.rank * (attention + mlp)


def least_seconds_of_step(sizes: LlamaSizes, *, in_4_bits: bool, has_norms: bool) -> dict[str, float]:
    """Return the least seconds of a step, by the groups of ``adapter_steps``.

    Args:
        sizes: of the step.
        in_4_bits: whether the layers' matrices are in NF4.
        has_norms: whether the adapter is DoRA, whose norms need each matrix once a step.
    """
    peak = peak_flops(GPU, torch.bfloat16)
    assert peak is not None
    tokens = sizes.tokens
    # a frozen matrix has a product in the forward pass, and one in the backward pass for the gradient of its input
    frozen_flops = 4.0 * tokens
    # causal: a token sees half a document, so the forward pass has 4 × width × (document / 2) for each token and layer;
    # with the backward pass, which has 2.5 times as much, this is 3.5 × 2 × width × document
    attention_flops = 3.5 * 2.0 * sizes.layers * sizes.width * sizes.document * tokens
    seconds = {
        "matrix products": frozen_flops * sizes.matrices / peak,
        "attention": attention_flops / peak,
        "head and loss": frozen_flops * sizes.vocabulary * sizes.width / peak,
        "element-wise operations of the layers": _element_wise_bytes(sizes) * tokens / BANDWIDTH,
        "adapter": 6.0 * sizes.adapter * tokens / peak,
        "embedding, clip, optimizer, others": ADAMW_BYTES * sizes.adapter / BANDWIDTH,
    }
    weight_bytes = NF4_BYTES if in_4_bits else BF16_BYTES
    if in_4_bits:
        # each pass reads the weights once; counted in full, although a product may hide a part of it
        seconds["dequantization"] = 2 * weight_bytes * sizes.matrices / BANDWIDTH
    if has_norms:
        seconds["norms of DoRA"] = weight_bytes * sizes.matrices / BANDWIDTH
    return seconds


def _element_wise_bytes(sizes: LlamaSizes) -> int:
    """Return the bytes of a token between the products of all layers, in both passes."""
    # forward, twice: read the residual stream and what is added to it, write their sum and its norm
    # backward, twice: read the gradients of the norm and of the stream, and the stream; write the stream's gradient
    norms = 2 * (4 + 4) * sizes.width
    # read and write queries and keys, in both passes
    rotary = 4 * (sizes.width + sizes.kv_width)
    # forward: read gate and up, write their product; backward: read its gradient and both, write two gradients
    mlp = (3 + 5) * sizes.mlp_width
    return sizes.layers * (norms + rotary + mlp) * BF16_BYTES
