"""As a program, on several ranks: a matrix whose gradient is as large as that of a real vocabulary's embedding; prints
its norm, and the exact one.
"""

import json
import sys

import torch
from torch import nn

from arguments import TrainArguments, parse
from fabric_train.distributed.grad_norm import clip
from fabric_train.distributed.strategy import LayerClasses, build_fabric
from fabric_train.model.parallelize import setup_model

SHAPE = (20_001, 512)  # uneven, so that the ranks' parts differ


class Product(nn.Module):
    """The sum of a matrix [rows, columns] weighed by a constant one, which is its gradient."""

    gradient: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(*SHAPE)
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        self.register_buffer("gradient", gradient * (torch.arange(SHAPE[0]) % 20 == 0)[:, None] + 0.01 * gradient)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    get_output_embeddings = get_input_embeddings  # as of a model whose embeddings are tied

    def forward(self) -> torch.Tensor:
        return (self.table.weight * self.gradient).sum()


def main() -> None:
    """Take the norm of the gradient."""
    arguments = parse(TrainArguments, sys.argv[1:])
    units: LayerClasses = frozenset([nn.Linear])  # there is none: all is the root's
    fabric = build_fabric(arguments, units)
    product = Product()
    exact = float(product.gradient.double().norm())
    model = setup_model(fabric, product, units, arguments)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(model())
    before = float(clip(fabric, model, optimizer, 1.0))
    clipped = float(clip(fabric, model, optimizer, 0))
    if fabric.is_global_zero:
        print(json.dumps({"exact": exact, "before": before, "clipped": clipped}))
