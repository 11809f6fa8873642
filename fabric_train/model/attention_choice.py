"""Choose a model's attention: torch's variable-length kernel or not; and check what ``--attention`` asks for."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import isolate
from fabric_train.distributed.decoder_layers import check_compiler
from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.attention import VARLEN, attend, forward, register_attention
from fabric_train.model.context_parallel import CONTEXT, CONTEXT_VARLEN
from fabric_train.model.rope_frequencies import choose_frequencies

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.model.hf_model import ModelShape

_MIN_CAPABILITY = (8, 0)  # Ampere, the first GPU of torch's flash kernels
_LARGEST_HEAD = 256
_NOT_ON_ALL_GPUS = range(193, 225)  # head sizes whose backward pass torch has only for some GPUs
_SCORE_TERMS = ("softcap", "s_aux", "position_bias")
"""Arguments that change attention scores in a way that the kernel does not support: a cap, attention sinks, a bias."""


def choose_attention(shape: "ModelShape", arguments: "TrainArguments", accelerator: str) -> str | None:
    """Replace a model's ``sdpa`` on a GPU by ``attention.attend``, in its configuration.

    For slices of rows (context parallelism), it is replaced on every device.

    Returns:
        why ``sdpa`` stays on a GPU; None if it is replaced or need not be.

    Raises:
        InputError: the model's attention does not support slices of rows.
    """
    register_attention()
    requested = arguments.model.attention
    num_slices = arguments.fsdp.context_parallel_size
    if num_slices > 1:
        if requested == "sdpa":
            slice_fault = why_not_sliced(shape)
        else:
            slice_fault = f"--attention {requested} does not support parts of rows"
        if slice_fault:
            raise InputError(f"--context_parallel_size {num_slices}: {slice_fault}; leave out --context_parallel_size")

    # torch's kernel for documents takes the place of sdpa on a GPU
    has_kernel = False
    kernel_fault = None
    if accelerator == "cuda" and requested == "sdpa":
        dtype = compute_dtype(arguments.model.precision)
        kernel_fault = why_no_kernel(shape, dtype, plans_for_others=arguments.planning.plans_for_others)
        has_kernel = kernel_fault is None
    if num_slices > 1:
        shape.config._attn_implementation = CONTEXT_VARLEN if has_kernel else CONTEXT
        return None
    if has_kernel:
        shape.config._attn_implementation = VARLEN
    return kernel_fault


def why_no_kernel(shape: "ModelShape", dtype: torch.dtype, *, plans_for_others: bool = False) -> str | None:
    """Return why torch's kernel for documents cannot be used on GPUs, in products of ``dtype``; None if it can.

    With ``plans_for_others``, the GPUs are not this machine's, and taken to be new enough.
    """
    if not plans_for_others:
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention"
        capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        if min(capabilities) < _MIN_CAPABILITY:
            return "torch's kernel for documents needs an Ampere or newer GPU"
    return why_not_varlen(shape, dtype)


def why_not_varlen(shape: "ModelShape", dtype: torch.dtype) -> str | None:
    """Return why the variable-length kernel does not compute a model's attention in ``dtype``; None if it does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "torch's kernel for documents computes in 16 bits only"
    return _find_fault_of_attention(shape, dtype, takes_slices=False)


def why_not_sliced(shape: "ModelShape") -> str | None:
    """Return why a model's attention cannot be computed for slices of rows; None if it can."""
    return _find_fault_of_attention(shape, dtype=None, takes_slices=True)


def _find_fault_of_attention(shape: "ModelShape", dtype: torch.dtype | None, *, takes_slices: bool) -> str | None:
    """Return why a model's attention cannot be replaced by ours; None if it can.

    The model runs on the meta device with two documents in a row, and each call of its attention is checked.

    Args:
        shape: The model.
        dtype: The dtype of its weights; None: the configuration's.
        takes_slices: Whether attention for slices of rows replaces it, instead of torch's kernel for documents.
    """
    call_faults: list[str | None] = []  # of each call of the attention

    def check_call(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_mask: Any, **arguments: Any
    ) -> Any:
        call_faults.append(_fault_of_call(module, query, key, value, arguments, takes_slices=takes_slices))
        batch_size, num_heads, length, _ = query.shape
        return value.new_empty(batch_size, length, num_heads, value.shape[3]), None

    # For this pass, the check takes the place of the kernel: under its name, the model gets the borders of documents.
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, check_call)
    implementation = shape.config._attn_implementation
    shape.config._attn_implementation = VARLEN
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(shape.config, dtype=dtype).train()
        if shape.longest_row is not None:
            choose_frequencies(model, shape.longest_row)  # to choose by the batch, transformers reads its positions
        if not model._supports_flash_attn:
            return "the masks of this model family contain more than document borders"
        rows = np.ones((1, 4), dtype=np.int64)
        batch = isolate(rows, rows.copy(), [np.array([0, 2])]).to(torch.device("meta"))
        forward(model, batch.input_ids, batch.documents)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        pass  # later operations may need real tensors, such as a router of experts; the calls so far were checked
    finally:
        shape.config._attn_implementation = implementation
        ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)
    if not call_faults:
        return "the attention of this model family cannot be replaced"
    for fault in call_faults:
        if fault:
            return fault
    return None


def _fault_of_call(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: dict[str, Any],
    *,
    takes_slices: bool,
) -> str | None:
    """Return what is wrong with a call of the attention with two documents in a row; None if nothing is.

    ``query`` is [B, H, T, D], ``key`` and ``value`` are [B, K, T, D]; ``arguments`` are the model's other arguments.
    With ``takes_slices``, the call is checked for attention of slices of rows, and otherwise for torch's kernel.
    """
    if arguments.get("cu_seq_lens_q") is None:
        return "the model does not pass document borders to its attention"
    if arguments.get("dropout"):
        subject = "attention of a part of a row" if takes_slices else "torch's kernel for documents"
        return f"{subject} does not support dropout, but the model's attention has dropout {arguments['dropout']:g}"
    has_score_terms = any(arguments.get(name) is not None for name in _SCORE_TERMS)
    if has_score_terms or not getattr(module, "is_causal", True):
        return "the model's attention is not plain causal attention"
    if takes_slices:
        if arguments.get("sliding_window") is not None:
            return "the model's attention has a sliding window, which makes it cheap"
        return None
    head_sizes = sorted({heads.shape[3] for heads in (query, key, value)})
    has_unsupported = any(size % 8 or size > _LARGEST_HEAD or size in _NOT_ON_ALL_GPUS for size in head_sizes)
    if len(head_sizes) > 1 or has_unsupported:
        return f"torch's kernel for documents does not support heads of size {' and '.join(map(str, head_sizes))}"
    return None


def check_attention(arguments: "TrainArguments", accelerator: str) -> None:
    """Check that ``--attention`` works on this accelerator and in this precision."""
    requested = arguments.model.attention
    if requested == "flash_attention_2" and accelerator != "cuda":
        raise InputError("--attention flash_attention_2 needs a GPU; use --attention sdpa without one")
    if requested == "flash_attention_2" and arguments.model.precision == "32-true":
        raise InputError(
            "--attention flash_attention_2 only computes in 16 bits, not in --precision 32-true; use --precision "
            "bf16-mixed or --attention sdpa"
        )
    if requested == "flex_attention" and accelerator != "cuda" and not arguments.evaluation.eval_only:
        raise InputError(
            "--attention flex_attention cannot train without a GPU: torch has no backward pass for it there; "
            "use --attention sdpa"
        )
    if requested == "flex_attention":
        check_compiler("--attention flex_attention", "use --attention sdpa")


def check_counted_from_rows(shape: "ModelShape", longest_row: int) -> None:
    """Raise an InputError if a model counts tokens from the start of a row instead of the start of a document.

    Llama 4 scales queries by the index in the row, in the layers without positions, and cuts rows into chunks of
    attention. Neither restarts with a document. It makes a difference in rows that are longer than ``floor_scale`` or a
    chunk.
    """
    text_config: Any = shape.config.get_text_config()
    model_type = text_config.model_type
    limits: dict[str, int] = {}
    has_layers_without_rope = 0 in (getattr(text_config, "no_rope_layers", None) or ())
    if has_layers_without_rope and getattr(text_config, "attn_temperature_tuning", False):
        limits["floor_scale"] = int(text_config.floor_scale)
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        limits["attention_chunk_size"] = int(text_config.attention_chunk_size)
    for name, limit in limits.items():
        if longest_row > limit:
            raise InputError(
                f"--isolate_documents true: rows have {longest_row:,} tokens, and {shape.source} ({model_type}) "
                f"counts its {name} of {limit:,} from the start of the row, not of the document; tokenize with "
                f"--max_length {limit}, or give --isolate_documents false"
            )
