"""Compute a summed cross entropy and its gradients from hidden states; print time and memory as JSON."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fabric_train.model.lm_head_loss import summed_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Compute loss and gradients ``--repetitions`` times, after one untimed repetition."""
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
    before = peak_bytes(device)
    seconds = []
    for _ in range(1 + arguments.repetitions):
        started = time.perf_counter()
        loss = FORMS[arguments.form](hidden, weight, positions, targets)
        (loss / len(targets)).backward()
        norm = weight.grad.norm().item()
        seconds.append(time.perf_counter() - started)
        hidden.grad = weight.grad = None
    costs = {"seconds": seconds[1:], "peak_bytes": peak_bytes(device) - before}
    print(json.dumps(costs | {"loss": loss.item() / len(targets), "gradient_norm": norm}))


def peak_bytes(device: torch.device) -> int:
    """Return the peak of the memory allocated on the GPU, or of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def over_all_positions(loss: Loss) -> Loss:
    """Return ``loss`` computed over all positions, with the label -100 at those that are not supervised."""

    def computed(
        hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        labels = targets.new_full((len(hidden),), -100).index_copy(0, positions, targets)
        return loss(hidden, weight, positions, labels)

    return computed


def from_logits(
    hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross entropy of the whole logits, as transformers computes it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def torch_chunked(reduction: str) -> Loss:
    """Return ``F.linear_cross_entropy`` with chunks as large as ours.

    Its default at SmolLM2's shape on a CPU is chunks of 4 tokens, which take several times as long. With the reduction
    ``none`` it returns each token's loss and computes the gradients in the backward pass.
    """

    def chunked(
        hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=128)
        return F.linear_cross_entropy(hidden, weight, labels, reduction=reduction, options=options).sum()

    return chunked


def ours(hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss as ``fabric_train`` computes it, over the supervised positions only."""
    return summed_cross_entropy(hidden, weight, None, positions, targets)[0]


FORMS: dict[str, Loss] = {
    "logits": over_all_positions(from_logits),
    "torch_sum": over_all_positions(torch_chunked("sum")),
    "torch_none": over_all_positions(torch_chunked("none")),
    "ours": ours,
}

if __name__ == "__main__":
    main()
