"""``--self_check``: check on the user's model and devices that a loss does not depend on how rows are split.

The rows are the first ones of the first window, shortened to the size of the user's micro-batch. Every second row keeps
a quarter of its supervised tokens, so a loop that gives micro-batches or ranks equal weight is found.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL, Batch, pad_rows
from fabric_train.data.step_sampler import Window, positions
from fabric_train.data.token_dataset import IndexedRows
from fabric_train.distributed.gradients import clip_grad_norm
from fabric_train.distributed.ranks import data_ranks, gather_over_ranks
from fabric_train.distributed.sharded_parameters import local_part, original_name
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.objective import Objective, answers_of, counts_pieces
from fabric_train.training.step import accumulate

TOLERANCES = {"32-true": 1e-5, "16-mixed": 2**-10, "bf16-mixed": 2**-8, "bf16-true": 2**-7}
"""Relative. In fp32 the order of additions changes the sixth digit. In 16 bits, kernels for different shapes round each
value by up to half a unit in the last place (2^-11 of it in fp16, 2^-8 in bf16), bf16-true also each sum of gradients.
"""

_ROWS_OF_RANK = 4
_TOKENS_OF_RANK = {"cuda": 8192, "cpu": 1024}
_SHORTEST = 64
_LISTED = 3


@dataclass(frozen=True)
class Figure:
    """The result of one split: loss in nats per token, or of a preference pair, and the global gradient norm."""

    cut: str
    loss: float
    grad_norm: float

    def differences(self, other: "Figure") -> tuple[float, float]:
        """Return the relative differences of loss and gradient norm from another result."""
        pairs = ((self.loss, other.loss), (self.grad_norm, other.grad_norm))
        loss, norm = (0.0 if here == there else abs(here - there) / max(abs(there), 1e-30) for here, there in pairs)
        return loss, norm


@dataclass(frozen=True)
class SelfCheck:
    """The results on ``tokens_per_row`` tokens of each of ``rows``, compared with the first one, and the faults."""

    rows: list[int]
    tokens_per_row: int
    num_supervised: int
    world_size: int
    precision: str
    tolerance: float
    figures: list[Figure]
    faults: list[str]
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class _Row:
    """Ids and labels, int64 [T], the positions at which its documents begin, and fp64 [pairs, 2] of its pairs."""

    input_ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    reference: np.ndarray | None = None

    def part(self, begin: int, end: int) -> "_Row":
        starts = self.starts[(self.starts > begin) & (self.starts < end)] - begin
        reference = None
        if self.reference is not None:  # of whole pairs
            first = int(np.searchsorted(self.starts, begin)) // 2
            reference = self.reference[first : first + (len(starts) + 1) // 2]
        return _Row(self.input_ids[begin:end], self.labels[begin:end], np.insert(starts, 0, 0), reference)

    def documents(self, together: int) -> list["_Row"]:
        """Return the documents, so many of them together: the two of a pair."""
        begins = self.starts[::together]
        return [self.part(*ends) for ends in zip(begins, [*begins[1:], len(self.labels)], strict=True)]

    def thinned(self) -> "_Row":
        labels = self.labels.copy()
        supervised = np.flatnonzero(self.labels[1:] != IGNORED_LABEL) + 1
        labels[supervised[math.ceil(len(supervised) / 4) :]] = IGNORED_LABEL
        return _Row(self.input_ids, labels, self.starts)

    @property
    def num_supervised(self) -> int:
        return int((self.labels[1:] != IGNORED_LABEL).sum())


def check_cuts(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    objective: Objective,
    rows: IndexedRows,
    indices: list[int],
    micro_batch_size: int,
    precision: str,
) -> SelfCheck:
    """Compute loss and gradient of every split, without taking a step. All ranks call this together.

    ``indices`` are the rows of the first window, over all ranks. An InputError if none of them has a label.
    """
    started = time.monotonic()
    indices = indices[: _ROWS_OF_RANK * data_ranks(fabric).size]
    # all rows of a rank are no larger than one micro-batch of the user
    at_once = min(_TOKENS_OF_RANK.get(fabric.device.type, _TOKENS_OF_RANK["cuda"]), rows.longest() * micro_batch_size)
    length = min(rows.longest(), max(_SHORTEST, at_once // _ROWS_OF_RANK))
    if counts_pieces(objective):
        whole = [_read_pairs(rows, index, 1 + number % 2) for number, index in enumerate(indices)]
        whole = _with_reference(fabric, model, whole)
        length = max(len(row.labels) for row in whole)
    else:
        whole = [_read(rows, index, length) for index in indices]
        whole[1::2] = [row.thinned() for row in whole[1::2]]
    num_supervised = sum(row.num_supervised for row in whole)
    if num_supervised == 0:
        listed = ", ".join(map(str, indices))
        raise InputError(f"--self_check true: no token of rows {listed} is supervised; another --seed takes other rows")
    model.eval()
    figures = []
    faults = []
    together = 2 if counts_pieces(objective) else 1
    for name, parts, size in _cuts(whole, micro_batch_size, rows.isolates, together):
        figures.append(_compute(fabric, model, optimizer, objective, name, _share(parts, size, fabric)))
        if len(figures) == 1:
            faults += _faults_of_parameters(fabric, model)
        optimizer.zero_grad()
    buffers = [(original_name(name), buffer) for name, buffer in model.named_buffers() if "inv_freq" in name]
    wrong = [f"{name} ({buffer.dtype})" for name, buffer in buffers if buffer.dtype != torch.float32]
    if wrong:  # see ``distributed.precision``
        faults.append(f"{len(wrong)} of {len(buffers)} rotary frequencies are not fp32: {_listed(wrong)}")
    faults += _disagreements(figures, TOLERANCES[precision])
    return SelfCheck(
        rows=indices,
        tokens_per_row=length,
        num_supervised=num_supervised,
        world_size=fabric.world_size,
        precision=precision,
        tolerance=TOLERANCES[precision],
        figures=figures,
        faults=faults,
        seconds=time.monotonic() - started,
    )


def _read(rows: IndexedRows, index: int, length: int) -> _Row:
    """Return ``length`` tokens of a row, around its first document border or from its first label."""
    batch = rows.__getitems__([index])
    starts = np.array([0])
    if batch.documents is not None:
        starts = np.flatnonzero(batch.documents.position_ids[0].numpy() == 0)
    row = _Row(batch.input_ids[0].numpy(), batch.labels[0].numpy(), starts)
    supervised = np.flatnonzero(row.labels[1:] != IGNORED_LABEL)
    middle = starts[1] if len(starts) > 1 else (supervised[0] if len(supervised) else 0) + length // 2
    begin = max(min(int(middle) - length // 2, len(row.labels) - length), 0)
    return row.part(begin, begin + length)


def _read_pairs(rows: IndexedRows, index: int, num_pairs: int) -> _Row:
    batch = rows.__getitems__([index])
    assert batch.documents is not None  # a pair is two documents
    starts = np.flatnonzero(batch.documents.position_ids[0].numpy() == 0)
    row = _Row(batch.input_ids[0].numpy(), batch.labels[0].numpy(), starts)
    return row.part(0, int([*starts, len(row.labels)][min(2 * num_pairs, len(starts))]))


@torch.no_grad()
def _with_reference(fabric: Fabric, model: Any, rows: list[_Row]) -> list[_Row]:
    """Return the rows with the log-probabilities that the model itself gives their pairs; all ranks compute all."""
    found = []
    for row in rows:
        batch = pad_rows([row.input_ids], [row.labels], [row.starts])
        found.append(replace(row, reference=answers_of(model, place_batch(fabric, batch))[0].cpu().numpy()))
    return found


def _cuts(rows: list[_Row], micro_batch_size: int, isolates: bool, together: int) -> list[tuple[str, list[_Row], int]]:
    """Return the name of every split, its rows in the order in which ranks take them, and its micro-batch size.

    Of documents alone, so many are ``together``.
    """
    most = _ROWS_OF_RANK
    sizes = sorted({1, 2, min(micro_batch_size, most), most})
    cuts = [(f"{size} row{'s' if size > 1 else ''} a micro-batch", rows, size) for size in sizes]
    richest = sorted(rows, key=lambda row: -row.num_supervised)
    cuts.append((f"{most} rows, dealt by their labels", richest, most))
    documents = [document for row in rows for document in row.documents(together)]
    if isolates and len(documents) > len(rows):
        alone = sorted(documents, key=lambda document: len(document.labels))
        cuts.append((f"{len(documents)} {'documents' if together == 1 else 'pairs'} alone", alone, most))
    return cuts


def _share(rows: list[_Row], size: int, fabric: Fabric) -> list[Batch]:
    """Return this rank's micro-batches; every rank has the same number."""
    batches = []
    ranks = data_ranks(fabric)
    for number in range(math.ceil(len(rows) / (size * ranks.size))):
        place = positions(number, size, ranks.size, ranks.rank)
        part = rows[place.start : place.stop]
        batch = pad_rows([row.input_ids for row in part], [row.labels for row in part], [row.starts for row in part])
        of_pairs = [row.reference for row in part if row.reference is not None]
        reference = torch.from_numpy(np.concatenate(of_pairs)) if of_pairs else None
        batches.append(replace(batch, reference=reference))
    return batches


def _compute(
    fabric: Fabric, model: Any, optimizer: Any, objective: Objective, name: str, batches: list[Batch]
) -> Figure:
    window = Window(1, 0, ends_epoch=False, rows=np.arange(0), micro_batch_size=1, batches=batches)
    scaler: Any = getattr(fabric.strategy.precision, "scaler", None)
    while True:
        loss = accumulate(fabric, model, window, objective).mean
        norm = clip_grad_norm(fabric, model, optimizer, max_norm=0)
        if scaler is not None:
            scaler.update()  # halves an fp16 scale if the gradient overflows
            if loss.isfinite() and not norm.isfinite() and scaler.get_scale() >= 1:
                optimizer.zero_grad()
                continue
        return Figure(name, loss.item(), norm.item())


def _faults_of_parameters(fabric: Fabric, model: Any) -> list[str]:
    """Name parameters that on any rank are not finite, or whose gradient is missing or not finite."""
    parameters = [(original_name(name), weight) for name, weight in model.named_parameters() if weight.requires_grad]
    by_name = dict(parameters)
    found = torch.zeros(len(parameters), 3, dtype=torch.int64)
    for index, (name, parameter) in enumerate(parameters):
        weight = local_part(parameter)
        gradient = local_part(parameter.grad)
        found[index, 0] = not weight.isfinite().all()
        # the second matrix of a new adapter is zero, so the first one gets no gradient yet
        second = by_name.get(name.replace("lora_A", "lora_B"), parameter)
        is_new = second is not parameter and not local_part(second).any()
        found[index, 1] = is_new or (gradient is not None and bool(gradient.any()))
        found[index, 2] = gradient is not None and not gradient.isfinite().all()
    infinite, has_gradient, bad_gradient = (gather_over_ranks(fabric, found).sum(dim=0) > 0).T.tolist()
    wrong = {
        "hold values that are not finite": infinite,
        "get no gradient from these rows": [not there for there in has_gradient],
        "get a gradient that is not finite": bad_gradient,
    }
    faults = []
    for what, marks in wrong.items():
        names = [name for (name, _), mark in zip(parameters, marks, strict=True) if mark]
        if names:
            faults.append(f"{len(names)} of {len(parameters)} parameters {what}: {_listed(names)}")
    return faults


def _disagreements(figures: list[Figure], tolerance: float) -> list[str]:
    faults = []
    first = figures[0]
    for figure in figures:
        loss, norm = figure.differences(first)
        if not loss <= tolerance:  # NaN does not agree either
            faults.append(f"{figure.cut}: loss {figure.loss:.8g}, where {first.cut} give {first.loss:.8g}")
        if not norm <= tolerance:
            faults.append(f"{figure.cut}: gradient norm {figure.grad_norm:.8g}, {first.cut}: {first.grad_norm:.8g}")
    return faults


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
