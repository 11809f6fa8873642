"""Read the head of a teacher, apart from its model: the loss of a distillation needs it in the student's head."""

from typing import Any

import torch

from fabric_train.cli.errors import InputError
from fabric_train.model.divergence_loss import TeacherHead
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.load_weights import MetaModel, build_on_meta


def check_head(shape: ModelShape, option: str, objective: str = "distill") -> None:
    """Raise an InputError that names a model's option if its logits are not the output of its head.

    ``objective`` is the value of ``--objective`` that needs this.
    """
    if not compute_loss_in_head(build_on_meta(shape, torch.float32)):
        raise InputError(
            f"{option}: --objective {objective} computes the loss in the head, but a {shape.config.model_type} changes "
            "the head's output, for example by a cap on the logits; give another model"
        )


def read_head(meta_model: MetaModel, device: torch.device, dtype: torch.dtype) -> TeacherHead:
    """Read the head's weight, all of it, in the dtype of its matrix product."""
    model: Any = meta_model.model
    head = model.get_output_embeddings()
    names = {parameter: name for name, parameter in model.named_parameters()}  # a tied weight has one name
    weight = meta_model.read_rows(names[head.weight], 0, len(head.weight)).to(device, dtype)
    bias = None
    if head.bias is not None:
        bias = _read_vector(meta_model, names[head.bias]).to(device, dtype)
    return TeacherHead(weight, bias)


def _read_vector(meta_model: MetaModel, name: str) -> torch.Tensor:
    parameter = meta_model.model.get_parameter(name)
    if meta_model.weights is None:
        return parameter.detach()
    return meta_model.weights.read_block(name, (0,), parameter.shape)
