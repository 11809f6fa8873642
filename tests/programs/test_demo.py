"""Test the parts of the demo: its stages and its loss curve."""

from pathlib import Path

import pytest

from demo import stages
from demo.loss_curve import draw_loss_curve, draw_source_losses


def test_failing_stage_reports_its_name_and_exit_code() -> None:
    with pytest.raises(stages.StageError, match="tokenization failed with exit code 3") as raised:
        stages.run_stage("tokenization", "python", "-c", "raise SystemExit(3)")
    assert raised.value.exit_code == 3


def test_stage_killed_by_a_signal_has_the_exit_code_of_a_shell() -> None:
    with pytest.raises(stages.StageError) as raised:
        stages.run_stage("training", "python", "-c", "import os; os.kill(os.getpid(), 9)")
    assert raised.value.exit_code == 137


def test_stage_shows_its_command_and_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    stages.run_stage("training", "python", "-c", "print('first'); print('last')")
    command, first, last = capfdbinary.readouterr().out.decode().splitlines()[1:]
    assert command.startswith("$ python -c ")
    assert (first, last) == ("first", "last")


def test_loss_curve_shows_both_losses(tmp_path: Path) -> None:
    from matplotlib.image import imread

    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,train_loss,val_loss\n1,4.0,\n2,3.8,3.9\n3,3.5,\n4,3.4,3.6\n")
    draw_loss_curve(metrics, tmp_path / "loss.png", "a title", loss_before=4.1)
    picture = imread(tmp_path / "loss.png")[..., :3]
    for red, green, blue in ((0x7E, 0xA3, 0xD4), (0xD9, 0x78, 0x2D)):
        near = abs(picture * 255 - (red, green, blue)).max(axis=-1) < 2
        assert near.sum() > 200


def test_curves_of_sources_go_on_in_a_branch(tmp_path: Path) -> None:
    from matplotlib.image import imread

    head = "step,val_bits_per_byte/es,val_bits_per_byte/en\n"
    trunk, branch = tmp_path / "trunk.csv", tmp_path / "branch.csv"
    trunk.write_text(f"{head}0,2.0,1.5\n1,,\n2,1.8,1.6\n")
    branch.write_text(f"{head}3,1.6,1.7\n")
    draw_source_losses([trunk, branch], ["es", "en"], tmp_path / "whole.png", "a title")
    draw_source_losses([trunk], ["es", "en"], tmp_path / "trunk.png", "a title")
    pictures = [imread(tmp_path / name)[..., :3] for name in ("trunk.png", "whole.png")]
    for colour in ((0x7E, 0xA3, 0xD4), (0xD9, 0x78, 0x2D)):
        of_trunk, of_whole = (abs(picture * 255 - colour).max(axis=-1) < 2 for picture in pictures)
        assert of_trunk.sum() > 200
        assert (of_trunk != of_whole).any()
