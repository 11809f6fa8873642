"""Which implementation of attention can run here, and whether it keeps the documents of a row apart."""

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import isolate
from fabric_train.distributed.compile import check_compiler
from fabric_train.model.packed_forward import forward

if TYPE_CHECKING:
    from arguments import TrainArguments


def refuse_unusable(arguments: "TrainArguments", accelerator: str) -> None:
    """Refuse an implementation that cannot compute on this device, or not in this precision.

    Raises:
        InputError: naming another that can.
    """
    chosen = arguments.model.attention
    if chosen == "flash_attention_2" and accelerator == "cpu":
        raise InputError("--attention flash_attention_2 needs a GPU; use --attention sdpa on CPU")
    if chosen == "flash_attention_2" and arguments.model.precision == "32-true":
        raise InputError(
            "--attention flash_attention_2 computes in 16 bits only, not in --precision 32-true: "
            "use --precision bf16-mixed, or --attention sdpa"
        )
    if chosen == "flex_attention" and accelerator == "cpu" and not arguments.evaluation.eval_only:
        raise InputError(
            "--attention flex_attention cannot train on CPU: torch has no backward pass for it there; "
            "use --attention sdpa"
        )
    if chosen == "flex_attention":
        check_compiler("--attention flex_attention", "use --attention sdpa")


@torch.no_grad()
def refuse_leaking(fabric: Fabric, model: Any, source: str) -> None:
    """Refuse a model in which a document sees another of its row whatever its positions say; all ranks call it.

    Families differ in that, and say nothing: some build their masks without the positions, and recurrent layers have
    no mask at all. So two rows are tried that differ in their first document alone; the second one's logits must not.

    Args:
        fabric: that the model was set up by.
        model: in training mode, and left in it.
        source: the model's name, for the message.

    Raises:
        InputError: where they do differ.
    """
    takes_positions = "position_ids" in inspect.signature(model.module.forward).parameters
    if not takes_positions or _second_document_changes(fabric, model):
        raise InputError(
            f"--isolate_documents true: in {source}, a {model.config.model_type}, documents of a row see each other "
            "whatever their positions are; give --isolate_documents false"
        )


def _second_document_changes(fabric: Fabric, model: Any) -> bool:
    input_ids = np.array([[1, 2, 3, 4], [5, 6, 3, 4]])
    batch = isolate(input_ids, input_ids.copy(), [np.array([0, 2])] * 2).to(fabric.device)
    model.eval()
    # flex attention would be compiled for these four tokens; left as it is, it warns
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = forward(model, batch.input_ids, batch.documents).logits[:, 2:].float()
    model.train()
    return bool((first - second).abs().max() > 0.01 * first.abs().max())
