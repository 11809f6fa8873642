"""``--self_check``: check on the user's model and devices that a loss does not depend on how rows are split.

The rows are the first ones of the first window, shortened to the size of the user's micro-batch. Every second row keeps
a quarter of its supervised tokens, so a loop that gives micro-batches or ranks equal weight is found.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL, Batch, pad_rows
from fabric_train.data.step_sampler import Window, positions
from fabric_train.data.token_dataset import IndexedRows
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.ranks import data_ranks, gather_over_ranks
from fabric_train.distributed.sharded_parameters import local_part, original_name
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.objective import Objective, counts_pieces
from fabric_train.training.preference import answer_logps
from fabric_train.training.step import accumulate

TOLERANCES = {"32-true": 1e-5, "16-mixed": 2**-10, "bf16-mixed": 2**-8, "bf16-true": 2**-7}
"""Relative. In fp32 the order of additions changes the sixth digit. In 16 bits, kernels for different shapes round each
value by up to half a unit in the last place (2^-11 of it in fp16, 2^-8 in bf16), bf16-true also each sum of gradients.
"""

_ROWS_PER_RANK = 4
_MAX_TOKENS_PER_RANK = {"cuda": 8192, "cpu": 1024}
_MIN_ROW_LENGTH = 64
_MAX_LISTED_NAMES = 3


@dataclass(frozen=True)
class SplitResult:
    """The result of one split of the rows into micro-batches."""

    cut: str
    """The name of the split, which says how the rows are cut."""
    loss: float
    """The loss in nats per token, or per preference pair."""
    grad_norm: float
    """The global gradient norm."""

    def differences(self, reference: "SplitResult") -> tuple[float, float]:
        """Return the relative differences of loss and gradient norm from a reference."""
        loss_difference = _relative_difference(self.loss, reference.loss)
        norm_difference = _relative_difference(self.grad_norm, reference.grad_norm)
        return loss_difference, norm_difference


def _relative_difference(value: float, reference: float) -> float:
    if value == reference:  # also two infinite values
        return 0.0
    return abs(value - reference) / max(abs(reference), 1e-30)


@dataclass(frozen=True)
class SelfCheck:
    """The results of a self-check, which are the content of ``RUN/self_check.json``."""

    rows: list[int]
    """The indices of the rows."""
    tokens_per_row: int
    num_supervised: int
    world_size: int
    precision: str
    tolerance: float
    """The largest allowed relative difference from the first result."""
    figures: list[SplitResult]
    faults: list[str]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether there are no faults."""
        return not self.faults


@dataclass(frozen=True)
class _Row:
    """A row of T tokens."""

    input_ids: np.ndarray
    """int64 [T]."""
    labels: np.ndarray
    """int64 [T]."""
    starts: np.ndarray
    """The positions at which documents start."""
    reference: np.ndarray | None = None
    """The reference log-probabilities of both answers of preference pairs or unpaired answers, fp64 [pairs, 2]."""
    is_desirable: np.ndarray | None = None
    """The labels of unpaired answers, bool [pairs]."""

    def slice(self, begin: int, end: int) -> "_Row":
        """Return the tokens ``begin`` to ``end``."""
        inner_starts = self.starts[(self.starts > begin) & (self.starts < end)] - begin
        # of whole pairs, which are two documents each
        first_pair = int(np.searchsorted(self.starts, begin)) // 2
        num_pairs = (len(inner_starts) + 1) // 2
        pairs = slice(first_pair, first_pair + num_pairs)
        return _Row(
            input_ids=self.input_ids[begin:end],
            labels=self.labels[begin:end],
            starts=np.insert(inner_starts, 0, 0),
            reference=None if self.reference is None else self.reference[pairs],
            is_desirable=None if self.is_desirable is None else self.is_desirable[pairs],
        )

    def documents(self, group_size: int) -> list["_Row"]:
        """Return the documents in groups of ``group_size``, such as the two of a pair."""
        begins = self.starts[::group_size]
        ends = [*begins[1:], len(self.labels)]
        return [self.slice(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def thinned(self) -> "_Row":
        """Return the row with the first quarter of its supervised tokens."""
        supervised = np.flatnonzero(self.labels[1:] != IGNORED_LABEL) + 1
        num_kept = math.ceil(len(supervised) / 4)
        dropped = supervised[num_kept:]
        labels = self.labels.copy()
        labels[dropped] = IGNORED_LABEL
        return _Row(self.input_ids, labels, self.starts)

    @property
    def num_supervised(self) -> int:
        """The number of targets; the first token of a row is not a target."""
        return int((self.labels[1:] != IGNORED_LABEL).sum())


@dataclass(frozen=True)
class _Split:
    """A way to split the rows into micro-batches."""

    name: str
    rows: list[_Row]
    """The rows in the order in which ranks take them."""
    micro_batch_size: int


def check_splits(
    fabric: Fabric,
    model: _FabricModule,
    optimizer: _FabricOptimizer,
    objective: Objective,
    rows: IndexedRows,
    indices: list[int],
    micro_batch_size: int,
    precision: str,
) -> SelfCheck:
    """Compute loss and gradient of every split, without taking a step. All ranks call this together.

    Args:
        fabric: The run's Fabric, whose ranks compute together.
        model: The model that ``setup_model`` returned; it is in evaluation mode afterwards.
        optimizer: The optimizer, whose gradients are set to zero.
        objective: The loss.
        rows: The training rows.
        indices: The rows of the first window, over all ranks.
        micro_batch_size: The user's ``--micro_batch_size``.
        precision: ``--precision``, which decides the tolerance.

    Raises:
        InputError: None of the rows has a label.
    """
    started = time.monotonic()
    device_type = fabric.device.type

    # Read the rows. All rows of a rank together are no larger than one micro-batch of the user.
    indices = indices[: _ROWS_PER_RANK * data_ranks(fabric).size]
    max_tokens = _MAX_TOKENS_PER_RANK.get(device_type, _MAX_TOKENS_PER_RANK["cuda"])
    max_tokens = min(max_tokens, rows.longest() * micro_batch_size)
    row_length = min(rows.longest(), max(_MIN_ROW_LENGTH, max_tokens // _ROWS_PER_RANK))
    has_pairs = counts_pieces(objective)
    if has_pairs:
        # One pair and two pairs by turns, so that rows count differently.
        checked_rows = [_read_pairs(rows, row, num_pairs=1 + position % 2) for position, row in enumerate(indices)]
        checked_rows = _with_reference(fabric, model, checked_rows)
        row_length = max(len(row.labels) for row in checked_rows)
    else:
        checked_rows = [_read_row(rows, index, row_length) for index in indices]
        checked_rows[1::2] = [row.thinned() for row in checked_rows[1::2]]
    num_supervised = sum(row.num_supervised for row in checked_rows)
    if num_supervised == 0:
        row_numbers = ", ".join(str(index) for index in indices)
        raise InputError(
            f"--self_check true: no token of rows {row_numbers} is supervised; give another --seed to check other rows"
        )

    # Compute the splits, without dropout.
    model.eval()
    results: list[SplitResult] = []
    faults: list[str] = []
    for split in _list_splits(checked_rows, micro_batch_size, isolates=rows.isolates, has_pairs=has_pairs):
        batches = _local_batches(split, fabric)
        results.append(_compute(fabric, model, optimizer, objective, name=split.name, batches=batches))
        if len(results) == 1:
            faults += _find_parameter_faults(fabric, model)
        optimizer.zero_grad()

    faults += _find_frequency_faults(model)
    faults += _disagreements(results, TOLERANCES[precision])
    return SelfCheck(
        rows=indices,
        tokens_per_row=row_length,
        num_supervised=num_supervised,
        world_size=fabric.world_size,
        precision=precision,
        tolerance=TOLERANCES[precision],
        figures=results,
        faults=faults,
        seconds=time.monotonic() - started,
    )


def _read_whole_row(rows: IndexedRows, index: int) -> _Row:
    batch = rows.__getitems__([index])
    starts = np.array([0])
    if batch.documents is not None:
        starts = np.flatnonzero(batch.documents.position_ids[0].numpy() == 0)
    return _Row(
        input_ids=batch.input_ids[0].numpy(),
        labels=batch.labels[0].numpy(),
        starts=starts,
        is_desirable=None if batch.is_desirable is None else batch.is_desirable.numpy(),
    )


def _read_row(rows: IndexedRows, index: int, length: int) -> _Row:
    """Return ``length`` tokens of a row, around its first document border or from its first label."""
    row = _read_whole_row(rows, index)
    supervised = np.flatnonzero(row.labels[1:] != IGNORED_LABEL)
    if len(row.starts) > 1:
        begin = int(row.starts[1]) - length // 2
    elif len(supervised):
        begin = int(supervised[0])
    else:
        begin = 0
    begin = max(min(begin, len(row.labels) - length), 0)
    return row.slice(begin, begin + length)


def _read_pairs(rows: IndexedRows, index: int, num_pairs: int) -> _Row:
    """Return the first ``num_pairs`` pairs of a row, or all of them if it has fewer; a pair is two documents."""
    row = _read_whole_row(rows, index)
    ends = [*row.starts[1:], len(row.labels)]
    num_documents = min(2 * num_pairs, len(ends))
    return row.slice(0, int(ends[num_documents - 1]))


@torch.no_grad()
def _with_reference(fabric: Fabric, model: _FabricModule, rows: list[_Row]) -> list[_Row]:
    """Return the rows with the model's own log-probabilities for their pairs; all ranks compute all rows."""
    rows_with_reference = []
    for row in rows:
        batch = pad_rows([row.input_ids], [row.labels], [row.starts])
        logps, _ = answer_logps(model, place_batch(fabric, batch))
        rows_with_reference.append(replace(row, reference=logps.cpu().numpy()))
    return rows_with_reference


def _list_splits(rows: list[_Row], micro_batch_size: int, *, isolates: bool, has_pairs: bool) -> Iterator[_Split]:
    """Yield the splits to compare: other sizes, an order that gives ranks unequal labels, and single documents."""
    max_size = _ROWS_PER_RANK
    sizes = {1, 2, min(micro_batch_size, max_size), max_size}
    for size in sorted(sizes):
        plural = "s" if size > 1 else ""
        yield _Split(f"{size} row{plural} per micro-batch", rows, size)

    # The first ranks get the rows with the most labels.
    by_num_labels = sorted(rows, key=lambda row: -row.num_supervised)
    yield _Split(f"{max_size} rows, dealt by their labels", by_num_labels, max_size)

    # Documents that are isolated have the same losses in rows of their own.
    documents: list[_Row] = []
    for row in rows:
        documents.extend(row.documents(group_size=2 if has_pairs else 1))
    if isolates and len(documents) > len(rows):
        by_length = sorted(documents, key=lambda document: len(document.labels))
        noun = "documents"
        if has_pairs:
            noun = "pairs" if rows[0].is_desirable is None else "answers"
        yield _Split(f"{len(documents)} {noun} alone", by_length, max_size)


def _local_batches(split: _Split, fabric: Fabric) -> list[Batch]:
    """Return this rank's micro-batches of a split; every rank has the same number."""
    batches = []
    ranks = data_ranks(fabric)
    num_batches = math.ceil(len(split.rows) / (split.micro_batch_size * ranks.size))
    for batch_index in range(num_batches):
        row_range = positions(batch_index, split.micro_batch_size, ranks.size, ranks.rank)
        rows = split.rows[row_range.start : row_range.stop]
        batch = pad_rows([row.input_ids for row in rows], [row.labels for row in rows], [row.starts for row in rows])
        references = [row.reference for row in rows if row.reference is not None]
        reference = torch.from_numpy(np.concatenate(references)) if references else None
        labels = [row.is_desirable for row in rows if row.is_desirable is not None]
        is_desirable = torch.from_numpy(np.concatenate(labels)) if labels else None
        batches.append(replace(batch, reference=reference, is_desirable=is_desirable))
    return batches


def _compute(
    fabric: Fabric,
    model: _FabricModule,
    optimizer: _FabricOptimizer,
    objective: Objective,
    name: str,
    batches: list[Batch],
) -> SplitResult:
    """Compute loss and gradient norm of a split; the gradient stays in the parameters."""
    window = Window(1, 0, ends_epoch=False, rows=np.arange(0), micro_batch_size=1, batches=batches)
    scaler: Any = getattr(fabric.strategy.precision, "scaler", None)  # of 16-mixed
    while True:
        loss = accumulate(fabric, model, window, objective).mean
        norm = clip_grad_norm(fabric, model, optimizer, max_norm=0)
        if scaler is None:
            break
        scaler.update()  # halves an fp16 scale if the gradient overflows
        overflows = loss.isfinite() and not norm.isfinite()
        if not overflows or scaler.get_scale() < 1:
            break
        optimizer.zero_grad()
    return SplitResult(name, loss.item(), norm.item())


def _find_parameter_faults(fabric: Fabric, model: _FabricModule) -> list[str]:
    """Report parameters that are not finite on some rank, or whose gradient is missing or not finite there."""
    parameters: dict[str, nn.Parameter] = {}
    for wrapped_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[original_name(wrapped_name)] = parameter

    has_bad_value = torch.zeros(len(parameters), dtype=torch.int64)
    has_gradient = torch.zeros_like(has_bad_value)
    has_bad_gradient = torch.zeros_like(has_bad_value)
    for index, (name, parameter) in enumerate(parameters.items()):
        gradient = local_part(parameter.grad)
        has_bad_value[index] = not local_part(parameter).isfinite().all()
        is_nonzero = gradient is not None and bool(gradient.any())
        has_gradient[index] = is_nonzero or _waits_for_second_matrix(name, parameters)
        has_bad_gradient[index] = gradient is not None and not gradient.isfinite().all()

    marks = torch.stack([has_bad_value, has_gradient, has_bad_gradient])  # [3, parameters]
    is_marked = gather_over_ranks(fabric, marks).sum(dim=0) > 0  # on any rank
    has_bad_value, has_gradient, has_bad_gradient = is_marked.cpu()

    names = list(parameters)
    faults = []
    for description, is_wrong in (
        ("hold values that are not finite", has_bad_value),
        ("get no gradient from these rows", ~has_gradient),
        ("get a gradient that is not finite", has_bad_gradient),
    ):
        wrong_names = [names[index] for index in is_wrong.nonzero().flatten().tolist()]
        if wrong_names:
            faults.append(f"{len(wrong_names)} of {len(names)} parameters {description}: {_list_names(wrong_names)}")
    return faults


def _waits_for_second_matrix(name: str, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Return whether a parameter is the first matrix of a new adapter.

    The second matrix is zero at the start, so the first one gets no gradient yet.
    """
    second_name = name.replace("lora_A", "lora_B")
    if second_name == name or second_name not in parameters:
        return False
    return not local_part(parameters[second_name]).any()


def _find_frequency_faults(model: _FabricModule) -> list[str]:
    """Report rotary frequencies that are not fp32, see ``distributed.precision``."""
    num_frequencies = 0
    wrong = []
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            num_frequencies += 1
            if buffer.dtype != torch.float32:
                wrong.append(f"{original_name(name)} ({buffer.dtype})")
    if not wrong:
        return []
    return [f"{len(wrong)} of {num_frequencies} rotary frequencies are not fp32: {_list_names(wrong)}"]


def _disagreements(results: list[SplitResult], tolerance: float) -> list[str]:
    """Return a line for each loss and gradient norm that differs from the first result's."""
    faults = []
    reference = results[0]
    for result in results:
        loss_difference, norm_difference = result.differences(reference)
        if not loss_difference <= tolerance:  # NaN does not agree with anything
            faults.append(f"{result.cut}: loss {result.loss:.8g}, but {reference.cut} gives {reference.loss:.8g}")
        if not norm_difference <= tolerance:
            faults.append(
                f"{result.cut}: gradient norm {result.grad_norm:.8g}, but {reference.cut} gives "
                f"{reference.grad_norm:.8g}"
            )
    return faults


def _list_names(names: list[str]) -> str:
    """Return the first three names and the number of others, as text."""
    listed = ", ".join(names[:_MAX_LISTED_NAMES])
    num_left = len(names) - _MAX_LISTED_NAMES
    return f"{listed} and {num_left} more" if num_left > 0 else listed
