"""Run a model on packed rows, with attention within documents.

On a GPU ``sdpa`` is replaced by torch's variable-length kernel where that works; others get masks from transformers.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch, Documents, isolate
from fabric_train.distributed.decoder_layers import check_compiler
from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.context_parallel import CONTEXT, CONTEXT_VARLEN
from fabric_train.model.rope_frequencies import choose_frequencies

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # the torch of torch-xla is too old; only GPUs take this kernel
    varlen_attn: Any = None  # type: ignore[no-redef]

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.model.hf_model import ModelShape

VARLEN = "sdpa_varlen"
"""transformers' name of ``model.attention``. It has "sdpa" in it: both need the same of a model family."""
_find_borders = masking_utils.find_packed_sequence_indices
_has_borders: bool | None = None
"""Whether rows of the current forward pass hold several documents; None outside of :func:`forward`."""
_MIN_CAPABILITY = (8, 0)  # Ampere, the first GPU of torch's flash kernels
_LARGEST_HEAD = 256
_NOT_ON_ALL_GPUS = range(193, 225)  # head sizes whose backward pass torch has only for some GPUs
_OTHER_TERMS = ("softcap", "s_aux", "position_bias")  # of attention scores, which the kernel does not add


def forward(model: Any, input_ids: torch.Tensor, documents: Documents | None, **more: Any) -> Any:
    """Return the model's output for packed rows [B, T] int64: a token sees what precedes it in its document, or row."""
    global _has_borders
    # with a cache, transformers treats restarting positions as one sequence, and documents see each other
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
    assert "row_slice" not in more or model.config._attn_implementation in (CONTEXT, CONTEXT_VARLEN)
    if documents is not None:
        arguments["position_ids"] = documents.position_ids
    if _needs_borders(model.config, input_ids, documents):  # documents, or rows, are kept apart by their borders
        if documents is not None:
            borders = documents.borders
            longest = documents.longest
        else:
            num_rows, longest = input_ids.shape
            borders = torch.arange(num_rows + 1, dtype=torch.int32, device=input_ids.device) * longest
        arguments |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    _has_borders = documents is not None
    try:
        return model(**arguments)
    finally:
        _has_borders = None


def forward_batch(model: Any, batch: Batch, **more: Any) -> Any:
    """Return the model's output for the rows of a batch, or for this rank's slice of them."""
    part = batch.row_slice
    if part is None:
        return forward(model, batch.input_ids, batch.documents, **more)
    return forward(model, part.input_ids, None, position_ids=part.position_ids, row_slice=part, **more)


def _needs_borders(config: Any, input_ids: torch.Tensor, documents: Documents | None) -> bool:
    if config._attn_implementation != VARLEN:
        return "flash" in config._attn_implementation
    window = getattr(config.get_text_config(), "sliding_window", None)
    return documents is not None or (window is not None and window < input_ids.shape[1])


def _known_borders(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's document in its row, int64 [B, T]; None if every row is one document.

    A document begins where a position is not one more than the previous one. This does not wait for the device. Outside
    of :func:`forward`, transformers' own search runs.
    """
    if _has_borders is None:
        return _find_borders(position_ids)
    if not _has_borders:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


masking_utils.find_packed_sequence_indices = _known_borders


def grouped_heads(kernel: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments with which ``varlen_attn`` takes fewer heads of keys and values: none before torch 2.12."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


_GROUPED_HEADS: Any = {} if varlen_attn is None else grouped_heads(varlen_attn)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents, as transformers calls it.

    ``query`` is [B, H, T, D] of any float dtype, ``key`` and ``value`` are [B, K, T, D]. ``attention_mask`` is None,
    because transformers makes none for this implementation. ``scaling`` is the factor of the scores, by default D **
    -0.5. With a ``sliding_window`` a token sees at most so many, itself included. ``cu_seq_lens_q`` and
    ``max_length_q`` are ``borders`` and ``longest`` of ``Documents``, None if every row is one document, and the layer
    has no window. Returns [B, T, H, D] in autocast's dtype, or the query's, and None instead of the attention weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **more)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    queries, keys, values = (heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value))
    borders = (cu_seq_lens_q, cu_seq_lens_q)
    longest = (max_length_q, max_length_q)
    output = causal_varlen(queries, keys, values, borders, longest, scaling, sliding_window)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def causal_varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    borders: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Return [N, H, D] of torch's kernel; ``borders`` and ``longest`` are of the documents' queries and of their keys.

    The last query of a document sees its last key.
    """
    window = (sliding_window or 0) - 1
    given: dict[str, Any] = {"scale": scaling, "window_size": (window, 0), **_GROUPED_HEADS}
    output: Any = varlen_attn(queries, keys, values, *borders, *longest, **given)
    return output


def choose_attention(shape: "ModelShape", arguments: "TrainArguments", accelerator: str) -> str | None:
    """Replace a model's ``sdpa`` on a GPU by :func:`attend`; return why not, None if it is or need not be.

    For slices of rows it is replaced on every device, and an InputError says why a model's attention cannot take them.
    """
    size = arguments.fsdp.context_parallel_size
    given = arguments.model.attention
    if size > 1:
        reason = why_model_cannot(shape) if given == "sdpa" else f"--attention {given} does not take a part of a row"
        if reason:
            raise InputError(f"--context_parallel_size {size}: {reason}; leave it out")
    reason = _why_no_kernel(shape, arguments) if accelerator == "cuda" and given == "sdpa" else None
    has_kernel = reason is None and accelerator == "cuda" and given == "sdpa"
    if size > 1:
        shape.config._attn_implementation = CONTEXT_VARLEN if has_kernel else CONTEXT
        return None
    if has_kernel:
        shape.config._attn_implementation = VARLEN
    return reason


def _why_no_kernel(shape: "ModelShape", arguments: "TrainArguments") -> str | None:
    """Return why torch's kernel for documents cannot be used; None if it can."""
    if not arguments.planning.plans_for_others:
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of torch has no flash attention"
        if min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) < _MIN_CAPABILITY:
            return "torch's kernel for documents needs an Ampere GPU or a newer one"
    return why_model_cannot(shape, compute_dtype(arguments.model.precision))


def why_model_cannot(shape: "ModelShape", dtype: torch.dtype | None = None) -> str | None:
    """Return why the variable-length kernel does not compute a model's attention in ``dtype``; None if it does.

    Without a ``dtype``, return why the attention does not take slices of rows. The model runs on the meta device with
    two documents in a row, and each call of its attention is checked.
    """
    if dtype not in (None, torch.bfloat16, torch.float16):
        return "torch's kernel for documents computes in 16 bits only"
    faults: list[str | None] = []
    longest_row = shape.longest_row

    def probe(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **given: Any) -> Any:
        faults.append(_fault_of_call(module, query, key, value, given, of_slices=dtype is None))
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    ALL_ATTENTION_FUNCTIONS.register(VARLEN, probe)
    chosen = shape.config._attn_implementation
    shape.config._attn_implementation = VARLEN
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(shape.config, dtype=dtype).train()
        if longest_row is not None:
            choose_frequencies(model, longest_row)  # to choose by the batch, transformers reads its positions
        if not model._supports_flash_attn:
            return "the masks of this model family have more in them than documents"
        documents = isolate(np.ones((1, 4), dtype=np.int64), np.ones((1, 4), dtype=np.int64), [np.array([0, 2])])
        batch = documents.to(torch.device("meta"))
        forward(model, batch.input_ids, batch.documents)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        pass  # what follows the first attention may need real tensors, such as a router of experts
    finally:
        shape.config._attn_implementation = chosen
        ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)
    return next(filter(None, faults), None) if faults else "the attention of this model family cannot be replaced"


def _fault_of_call(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    given: dict[str, Any],
    of_slices: bool,
) -> str | None:
    """Return what the kernel, or attention ``of_slices``, does not take in a call with two documents; or None."""
    sizes = {heads.shape[3] for heads in (query, key, value)}
    if given.get("cu_seq_lens_q") is None:
        return "the model does not pass document borders to its attention"
    if given.get("dropout"):
        what = "attention of a part of a row" if of_slices else "torch's kernel for documents"
        return f"{what} has no dropout, and the model's attention has {given['dropout']:g}"
    if not getattr(module, "is_causal", True) or any(given.get(name) is not None for name in _OTHER_TERMS):
        return "the model's attention is not plain causal attention"
    if of_slices:
        slides = given.get("sliding_window") is not None
        return "the model's attention has a sliding window, which makes it cheap" if slides else None
    if len(sizes) > 1 or any(size % 8 or size > _LARGEST_HEAD or size in _NOT_ON_ALL_GPUS for size in sizes):
        return f"torch's kernel for documents does not take heads of size {' and '.join(map(str, sorted(sizes)))}"
    return None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)


def check_attention(arguments: "TrainArguments", accelerator: str) -> None:
    """Check that ``--attention`` works on this accelerator and in this precision."""
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


def check_counted_from_rows(shape: "ModelShape", longest_row: int) -> None:
    """Raise an InputError if a model counts tokens from the start of a row where it has to from the document's start.

    Llama 4 scales queries by the index in the row, in the layers without positions, and cuts rows into chunks of
    attention. Neither restarts with a document, which counts in rows that are longer than ``floor_scale`` or a chunk.
    """
    text: Any = shape.config.get_text_config()
    limits: dict[str, int] = {}
    has_no_rope = 0 in (getattr(text, "no_rope_layers", None) or ())
    if has_no_rope and getattr(text, "attn_temperature_tuning", False):
        limits["floor_scale"] = int(text.floor_scale)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        limits["attention_chunk_size"] = int(text.attention_chunk_size)
    for name, limit in limits.items():
        if longest_row > limit:
            raise InputError(
                f"--isolate_documents true: rows have {longest_row:,} tokens, and {shape.source} "
                f"({text.model_type}) counts its {name} of {limit:,} from the start of a row, not of a document; "
                f"tokenize with --max_length {limit}, or give --isolate_documents false"
            )
