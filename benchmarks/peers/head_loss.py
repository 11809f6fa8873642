"""One way from hidden states to the gradients of a summed cross entropy; prints its times and its memory as JSON."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fabric_train.model.chunked_cross_entropy import summed_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Compute loss and gradients ``--repetitions`` times, after one that is not timed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--form", choices=FORMS, required=True)
    for name in ("--tokens", "--supervised", "--vocabulary", "--width", "--repetitions"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(arguments.tokens, arguments.width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(arguments.vocabulary, arguments.width, device=device) / arguments.width**0.5).to(dtype)
    weight.requires_grad_()
    positions = torch.randperm(arguments.tokens, device=device)[: arguments.supervised].sort().values
    targets = torch.randint(arguments.vocabulary, (arguments.supervised,), device=device)
    before, seconds = peak_bytes(device), []
    for _ in range(1 + arguments.repetitions):
        started = time.perf_counter()
        loss = FORMS[arguments.form](hidden, weight, positions, targets)
        (loss / len(targets)).backward()
        norm = weight.grad.norm().item()
        seconds.append(time.perf_counter() - started)
        hidden.grad = weight.grad = None
    told = {"seconds": seconds[1:], "peak_bytes": peak_bytes(device) - before}
    print(json.dumps(told | {"loss": loss.item() / len(targets), "gradient_norm": norm}))


def peak_bytes(device: torch.device) -> int:
    """The most memory there ever was: the device's that tensors have held, or what the process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def of_all_positions(loss: Loss) -> Loss:
    """The same over all positions, where those not asked for are ignored."""

    def over_all(
        hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        labels = targets.new_full((len(hidden),), -100).index_copy(0, positions, targets)
        return loss(hidden, weight, positions, labels)

    return over_all


def from_logits(
    hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Sum over the losses of logits, as transformers computes them."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def of_torch(reduction: str) -> Loss:
    """Torch's own in chunks, as large as ours: left to itself it takes 4 tokens at SmolLM2's shape on a CPU, and
    several times as long. By ``none`` it gives each token's loss and computes the gradients in the backward pass.
    """

    def chunked(
        hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=128)
        return F.linear_cross_entropy(hidden, weight, labels, reduction=reduction, options=options).sum()

    return chunked


def ours(hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What ``fabric_train`` computes, of the supervised positions alone."""
    return summed_cross_entropy(hidden, weight, None, positions, targets)


FORMS: dict[str, Loss] = {
    "logits": of_all_positions(from_logits),
    "torch_sum": of_all_positions(of_torch("sum")),
    "torch_none": of_all_positions(of_torch("none")),
    "ours": ours,
}

if __name__ == "__main__":
    main()
