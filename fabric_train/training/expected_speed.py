"""Expect how fast a run trains: the share of the peak FLOP/s that steps of its kind reached when they were measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


@dataclass(frozen=True)
class PeakShare:
    """A range of the share of the peak FLOP/s (MFU) that was measured on one H200.

    The runs are in benchmarks/results/gpu-*-nvidia-h200.json, all in bf16-true.
    """

    lowest: float
    highest: float
    kind: str
    """The kind of steps, for messages."""

    def __str__(self) -> str:
        shares = f"{self.lowest:.0%} to {self.highest:.0%} of the peak"
        return f"{shares}, as measured on one H200 for {self.kind}"


COMPILED = PeakShare(0.56, 0.61, "all weights in compiled layers")
UNCOMPILED = PeakShare(0.45, 0.46, "all weights, not compiled")
ADAPTER = PeakShare(0.43, 0.45, "LoRA and QLoRA, not compiled")
PAIRS = PeakShare(0.40, 0.43, "DPO, not compiled")
ANY_KIND = PeakShare(0.40, 0.61, "steps of other kinds")
"""All of the above, for kinds of steps that were not measured."""


def measured_peak_share(arguments: "TrainArguments", *, is_partly_frozen: bool) -> PeakShare:
    """Return the share of the peak that steps like those of a run reached.

    Args:
        arguments: of the run, with "auto" resolved.
        is_partly_frozen: whether only some of the model's parameters train.
    """
    compiles = arguments.fsdp.compile is True
    if arguments.model.precision != "bf16-true" or arguments.model.float8:
        return ANY_KIND
    if arguments.preference.compares_answers:
        return ANY_KIND if compiles else PAIRS
    if arguments.preference.objective != "sft":
        return ANY_KIND
    if arguments.adapter.is_given:
        return ANY_KIND if compiles else ADAPTER
    if is_partly_frozen:
        return ANY_KIND
    return COMPILED if compiles else UNCOMPILED


def show_duration(seconds: float) -> str:
    """Return a duration in minutes, hours or days, such as ``16.4 h``."""
    hours = seconds / 3600
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{seconds / 60:,.1f} min"
