"""Check that attention can run on this device and keeps the documents of a packed row apart."""

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


def check_attention(arguments: "TrainArguments", accelerator: str) -> None:
    """Check that ``--attention`` works on this accelerator and in this precision.

    Raises:
        InputError: It does not. The message names an implementation that does.
    """
    chosen = arguments.model.attention
    if chosen == "flash_attention_2" and accelerator != "cuda":
        raise InputError("--attention flash_attention_2 needs a GPU; use --attention sdpa without one")
    if chosen == "flash_attention_2" and arguments.model.precision == "32-true":
        raise InputError(
            "--attention flash_attention_2 computes in 16 bits only, not in --precision 32-true; "
            "use --precision bf16-mixed or --attention sdpa"
        )
    if chosen == "flex_attention" and accelerator != "cuda" and not arguments.evaluation.eval_only:
        raise InputError(
            "--attention flex_attention cannot train without a GPU: torch has no backward pass for it there; "
            "use --attention sdpa"
        )
    if chosen == "flex_attention":
        check_compiler("--attention flex_attention", "use --attention sdpa")


@torch.no_grad()
def check_isolation(fabric: Fabric, model: Any, source: str) -> None:
    """Check that documents of one row do not see each other when their positions restart. All ranks call it.

    Some model families ignore positions when they build masks, and recurrent layers have no mask. So this runs two rows
    that differ only in their first document. The logits of the second document must be the same.

    Args:
        fabric: The Fabric that set up the model.
        model: The model in training mode; it stays in training mode.
        source: The model's name, for the message.

    Raises:
        InputError: The documents see each other.
    """
    takes_positions = "position_ids" in inspect.signature(model.module.forward).parameters
    if not takes_positions or _second_document_changes(fabric, model):
        raise InputError(
            f"--isolate_documents true: {source} ({model.config.model_type}) cannot keep the documents of a row apart; "
            "give --isolate_documents false"
        )


def _second_document_changes(fabric: Fabric, model: Any) -> bool:
    input_ids = np.array([[1, 2, 3, 4], [5, 6, 3, 4]])
    batch = isolate(input_ids, input_ids.copy(), [np.array([0, 2])] * 2).to(fabric.device)
    model.eval()
    # flex attention is not compiled for these four tokens, and warns about it
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = forward(model, batch.input_ids, batch.documents).logits[:, 2:].float()
    model.train()
    return bool((first - second).abs().max() > 0.01 * first.abs().max())
