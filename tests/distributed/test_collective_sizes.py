"""What the ranks tell each other in a step and in a save does not grow with ranks times sources or texts."""

from pathlib import Path

from benchmarks.scale.collectives import measure


def test_messages_grow_by_two_numbers_a_rank_at_most(tmp_path: Path) -> None:
    of_step, of_save = (
        {point.size: point.value for point in series.points}
        for series in measure(tmp_path)
        if series.quantity in ("bytes of these collectives", "bytes of a save's messages")
    )
    fewest = min(of_step)
    most = max(of_step)
    assert of_step[most] - of_step[fewest] == 16 * (most - fewest)
    assert of_step[fewest] < 2000
    assert set(of_save.values()) == {48}
