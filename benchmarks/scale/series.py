"""Describe what grows, and by how much."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """One value at one size."""

    size: int
    value: float


@dataclass(frozen=True)
class Series:
    """One quantity at growing sizes.

    Attributes:
        part: of the program, such as "watch".
        quantity: such as "until all ranks know that one was killed".
        unit: of the values: "s", "MB", "files".
        sizes_of: what the sizes count: "ranks".
        limit: that the last value must not exceed; None if there is none.
        simulated: the parts of this measurement that stand for something else.
        real: the parts that are the program's own.
    """

    part: str
    quantity: str
    unit: str
    sizes_of: str
    points: tuple[Point, ...]
    simulated: str
    real: str
    limit: float | None = None


def series_of(content: dict[str, Any]) -> Series:
    """Return the series that ``dataclasses.asdict`` made into ``content``."""
    return Series(**{**content, "points": tuple(Point(**point) for point in content["points"])})
