"""Find the teacher of ``fabric-train teach``, load it, and compute its values for the targets of a batch.

Shapes: B rows, T tokens per row, N targets, H the teacher's hidden size, C targets in a chunk, k likeliest tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fabric_train.checkpoint.adapter_base import find_base, hold_in_4_bits
from fabric_train.checkpoint.adapter_folder import is_adapter, read_adapter, read_base_name, trained_adapter
from fabric_train.checkpoint.model_files import hash_model, list_model_files, resolve_name
from fabric_train.checkpoint.teacher_origin import find_teacher_origin
from fabric_train.cli.argument_types import TeacherWeights
from fabric_train.cli.errors import InputError, RunError, naming_option
from fabric_train.data.batch import Batch, find_targets, make_batch
from fabric_train.data.teacher_states import HiddenStates, TeacherStates, TopStates
from fabric_train.inference.devices import load_onto_devices
from fabric_train.inference.load_model import DescribedModel
from fabric_train.model.attention import VARLEN, forward_batch, register_attention
from fabric_train.model.attention_choice import check_counted_from_rows, why_no_kernel
from fabric_train.model.divergence_loss import ABSENT_LOGIT, NamedIds, TeacherHead
from fabric_train.model.hf_model import ModelShape, check_readable, read_shape
from fabric_train.model.load_weights import MetaModel
from fabric_train.model.origin import AdapterBase, TeacherModel
from fabric_train.model.teacher_head import check_head, read_head

_CHUNK_BYTES = 256 << 20
"""The most bytes of a chunk's logits and log-probabilities."""
_MIN_CHECKED_LENGTH = 4
_MAX_CHECKED_LENGTH = 512
"""The lengths of a row that is checked for documents that are not kept apart."""
_BYTES_PER_LOGIT = 12  # the logits in their own dtype, and two copies in fp32


@dataclass(frozen=True)
class DescribedTeacher:
    """A teacher whose weights have not been read yet."""

    location: str
    """Its absolute path, or its name on the hub."""
    model: DescribedModel
    weights: TeacherWeights = "16bit"
    """How its decoder layers are held."""

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def tokenizer(self) -> str:
        """The location of its tokenizer: its own, or that of an adapter's base."""
        folder = Path(self.location)
        has_tokenizer = (folder / "tokenizer").is_dir() or (folder / "tokenizer_config.json").is_file()
        if self.model.adapter is None or has_tokenizer:
            return self.location
        return self.model.base.location

    def identify(self) -> TeacherModel:
        """Return the teacher with the hash of its weights, which are read for it."""
        base = self.model.base if self.model.adapter is not None else None
        origin = find_teacher_origin(self.location)
        return TeacherModel(self.location, hash_model(list_model_files(self.location, base)), origin)


def describe_teacher(
    name: str,
    *,
    dtype: torch.dtype,
    attention: str,
    longest_row: int,
    isolates: bool,
    weights: TeacherWeights = "16bit",
) -> DescribedTeacher:
    """Find the model that ``--teacher`` names, and check that it can read the rows.

    Args:
        name: A hub name, a folder, a checkpoint, RUN or RUN/best; also of an adapter.
        dtype: The dtype of its weights.
        attention: The value of ``--attention``.
        longest_row: The number of tokens of the longest row.
        isolates: Whether the documents of a row are kept apart.
        weights: The value of ``--teacher_weights``.

    Raises:
        InputError: There is no such model, it has too few positions, its logits are not the output of its head, or it
            is an adapter whose base should be held in 4 bits.
    """
    option = f"--teacher {name}"
    location = resolve_name(name)
    if location.startswith(("/", ".")) and not Path(location).is_dir():
        raise InputError(f"{option}: no such folder; give a hub name, folder, checkpoint or run")
    with naming_option("--teacher ", instead_of="--model_name "):
        described = _describe(location, dtype, attention)
    if described.adapter is not None:
        check_adapted_teacher(weights, location)
    shape = replace(described.shape, longest_row=longest_row)
    if shape.max_positions is not None and shape.max_positions < longest_row:
        raise InputError(
            f"{option}: it has {shape.max_positions} positions, but the rows have {longest_row} tokens; give another "
            "model, or tokenize with a smaller --max_length"
        )
    check_head(shape, option)
    if isolates:
        check_counted_from_rows(shape, longest_row)
    if torch.cuda.is_available() and attention == "sdpa":
        register_attention()
        if why_no_kernel(shape, dtype) is None:
            shape.config._attn_implementation = VARLEN
    return DescribedTeacher(location, replace(described, shape=shape), weights)


def check_adapted_teacher(weights: TeacherWeights, location: str) -> None:
    """Raise an InputError if a teacher that is an adapter should be held in 4 bits."""
    if weights != "16bit":
        raise InputError(
            f"--teacher_weights {weights} does not work with the adapter --teacher {location}; merge it first"
        )


def _describe(location: str, dtype: torch.dtype, attention: str) -> DescribedModel:
    folder = Path(location)
    if not (folder.is_dir() and is_adapter(folder)):
        shape = read_shape(location, attention=attention)
        if not (folder / "trainer.json").is_file():
            check_readable(location)
        return DescribedModel(shape, AdapterBase(location), dtype)

    # an adapter on a base of its own
    if (folder / "trainer.json").is_file():
        base = find_base(None, folder)
        adapter = trained_adapter(folder)
    else:
        base = find_base(read_base_name(folder), None)
        adapter = read_adapter(folder)
    return DescribedModel(read_shape(base.location, attention=attention, adapter=adapter), base, dtype, folder)


class LoadedTeacher:
    """A teacher on one device, or spread over several, without its head."""

    def __init__(self, teacher: DescribedTeacher, named_ids: NamedIds) -> None:
        """Read the weights.

        Args:
            teacher: The teacher.
            named_ids: The ids that have a token, on the CPU.
        """
        meta_model = teacher.model.open()
        model: Any = meta_model.model
        self.head = read_head(meta_model, torch.device("cpu"), teacher.model.dtype)
        meta_model = hold_teacher(meta_model, teacher.shape, teacher.model.dtype, teacher.weights)
        model.set_output_embeddings(nn.Identity())  # the model then returns the inputs of its head
        self._model = load_onto_devices(meta_model)
        self._device = next(self._model.parameters()).device
        self._named_ids = NamedIds(named_ids.end, named_ids.gaps.to(self._device))
        self._head_on_device: TeacherHead | None = None

    @torch.no_grad()
    def check_isolation(self, longest_row: int, name: str) -> None:
        """Raise an InputError that names the teacher unless it keeps the documents of a row apart.

        A document is read before another one, after it, and after a third one. Its hidden states must be the same, up
        to half of the digits: at another position in the row, the same sums have another order in many layers.
        """
        if longest_row < _MIN_CHECKED_LENGTH:
            return
        length = min(longest_row, _MAX_CHECKED_LENGTH) // 2
        generator = np.random.default_rng(0)
        document, second, third = generator.integers(0, self._named_ids.end, (3, length))
        before = self._hidden(_join_documents(document, second))[: length - 1]
        after_second = self._hidden(_join_documents(second, document))[length - 1 :]
        after_third = self._hidden(_join_documents(third, document))[length - 1 :]
        scale = float(before.abs().max())
        for other in (after_second, after_third):
            difference = float((other - before).abs().max()) / scale
            if difference > torch.finfo(before.dtype).eps ** 0.5:
                raise InputError(
                    f"--isolate_documents true: --teacher {name} ({self._model.config.model_type}) cannot isolate the "
                    "documents of a row: the hidden states of a document depend on its position in the row; give "
                    "--isolate_documents false"
                )

    @torch.no_grad()
    def compute_hidden(self, batch: Batch) -> HiddenStates:
        """Return the hidden states for the targets of a batch on the CPU, rounded to bfloat16."""
        hidden = self._hidden(batch)
        return HiddenStates(hidden.to(torch.bfloat16).view(torch.int16).cpu())

    @torch.no_grad()
    def compute_top(self, batch: Batch, top_k: int, temperature: float) -> TopStates:
        """Return the likeliest tokens for the targets of a batch on the CPU, at a temperature."""
        hidden = self._hidden(batch)
        if self._head_on_device is None:
            self._head_on_device = _move(self.head, hidden.device)
        head = self._head_on_device
        num_rows = len(head.weight)
        chunk_length = max(1, _CHUNK_BYTES // (_BYTES_PER_LOGIT * num_rows))
        chunks = [top_states(hidden[:0], head, self._named_ids, top_k, temperature)]
        for chunk in hidden.split(chunk_length):
            chunks.append(top_states(chunk, head, self._named_ids, top_k, temperature))
        ids = torch.cat([chunk.ids.cpu() for chunk in chunks])
        return TopStates(ids, torch.cat([chunk.log_probabilities.cpu() for chunk in chunks]))

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """Return the inputs of the head for the targets of a batch [N, H]."""
        targets = batch.targets or find_targets(batch.labels)
        hidden = forward_batch(self._model, batch.to(self._device)).logits.flatten(0, 1)  # [B * T, H]
        at_targets = hidden.index_select(0, targets.positions.to(hidden.device))
        if not at_targets.isfinite().all():
            raise RunError("the teacher's hidden states are not finite; its weights are damaged or overflow")
        return at_targets


def hold_teacher(meta_model: MetaModel, shape: ModelShape, dtype: torch.dtype, weights: TeacherWeights) -> MetaModel:
    """Hold the decoder layers of a teacher as ``--teacher_weights`` says; ``dtype`` is that of its other weights."""
    if weights == "16bit":
        return meta_model
    subject = f"--teacher_weights {weights}: the weights of {shape.source}"
    return hold_in_4_bits(meta_model, shape, dtype, weights, subject)


def _join_documents(first: np.ndarray, second: np.ndarray) -> Batch:
    """Return a row of two documents, whose tokens are all targets."""
    row = np.concatenate([first, second])[None]  # [1, T]
    return make_batch(row, row.copy(), [np.array([0, len(first)])], [row.size])


def top_states(
    hidden: torch.Tensor, head: TeacherHead, named_ids: NamedIds, top_k: int, temperature: float
) -> TopStates:
    """Return the k likeliest of the named ids, and the mass of the others, from hidden states [C, H] of a teacher.

    The others are summed without the k tokens: 1 minus the sum of the k would lose its digits.
    """
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias)  # [C, rows]
    log_probabilities = named_ids.log_probabilities(logits, temperature)  # fp32 [C, end]
    _, ids = log_probabilities.topk(top_k, dim=1)
    # equal values in the order of their ids, so that the first one is that of argmax
    ids, _ = ids.sort(dim=1)
    top, order = log_probabilities.gather(1, ids).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    others = log_probabilities.scatter(1, ids, -torch.inf)
    rest = others.logsumexp(dim=1, keepdim=True).clamp(min=ABSENT_LOGIT)  # without others, -inf would give NaN
    return TopStates(ids.int(), torch.cat([top, rest], dim=1))


def _move(head: TeacherHead, device: torch.device) -> TeacherHead:
    bias = None if head.bias is None else head.bias.to(device)
    return TeacherHead(head.weight.to(device), bias)


def compute_states(teacher: LoadedTeacher, batch: Batch, top_k: int | None, temperature: float) -> TeacherStates:
    """Return the values for the targets of a batch, of the ``top_k`` likeliest tokens or else hidden states."""
    if top_k is None:
        return teacher.compute_hidden(batch)
    return teacher.compute_top(batch, top_k, temperature)
