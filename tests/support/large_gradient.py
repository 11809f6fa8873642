"""Compute the gradient norm of a matrix as large as a real embedding on several ranks; print it with the exact norm."""

import json
import sys

import torch
from torch import nn

from fabric_train.arguments import TrainArguments, parse
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.strategy import LayerClasses, build_fabric
from fabric_train.model.parallelize import setup_model

SHAPE = (20_001, 512)  # uneven, so that the ranks' shards differ


class Product(nn.Module):
    """A model that returns the sum of a matrix [rows, columns] times a constant one, which is the matrix's gradient."""

    gradient: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(*SHAPE)
        noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        # as of an embedding: the rows of the few tokens in a batch have large gradients
        is_large = (torch.arange(SHAPE[0]) % 20 == 0)[:, None]
        self.register_buffer("gradient", noise * is_large + 0.01 * noise)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    get_output_embeddings = get_input_embeddings  # as in a model with tied embeddings

    def forward(self) -> torch.Tensor:
        return (self.table.weight * self.gradient).sum()


def main() -> None:
    """Print the norm of the gradient: exact, before clipping and after clipping to 1."""
    arguments = parse(TrainArguments, sys.argv[1:])
    layer_classes: LayerClasses = frozenset([nn.Linear])  # the model has none, so the root unit has all parameters
    fabric = build_fabric(arguments, layer_classes)
    product = Product()
    exact_norm = float(product.gradient.double().norm())
    model = setup_model(fabric, product, layer_classes, arguments)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(model())
    norm_before = float(clip_grad_norm(fabric, model, optimizer, 1.0))
    clipped_norm = float(clip_grad_norm(fabric, model, optimizer, 0))  # 0 does not clip
    if fabric.is_global_zero:
        print(json.dumps({"exact": exact_norm, "before": norm_before, "clipped": clipped_norm}))
