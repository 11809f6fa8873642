"""The demo's own parts: stages that report, and a loss curve that can be seen."""

from pathlib import Path

import pytest

from demo import stages
from demo.loss_curve import draw_loss_curve


def test_a_failing_stage_hands_on_its_exit_code_and_its_name() -> None:
    with pytest.raises(stages.StageError, match="tokenization failed with exit code 3") as raised:
        stages.run_stage("tokenization", "python", "-c", "raise SystemExit(3)")
    assert raised.value.exit_code == 3


def test_a_stage_killed_by_a_signal_has_the_shells_exit_code() -> None:
    with pytest.raises(stages.StageError) as raised:
        stages.run_stage("training", "python", "-c", "import os; os.kill(os.getpid(), 9)")
    assert raised.value.exit_code == 137


def test_a_stage_shows_its_command_its_output_and_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(stages, "_SILENCE_SECONDS", 0.2)
    stages.run_stage("training", "python", "-c", "import time; print('first'); time.sleep(1); print('last')")
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines[1].startswith("$ python -c ")
    assert lines.index("first") < lines.index("last")
    assert any(line.startswith("  … training") for line in lines[lines.index("first") : lines.index("last")])


def test_the_loss_curve_is_a_picture_with_both_losses(tmp_path: Path) -> None:
    from matplotlib.image import imread

    metrics = tmp_path / "metrics.csv"
    metrics.write_text("step,train_loss,val_loss\n1,4.0,\n2,3.8,3.9\n3,3.5,\n4,3.4,3.6\n")
    draw_loss_curve(metrics, tmp_path / "loss.png", "a title", loss_before=4.1)
    picture = imread(tmp_path / "loss.png")[..., :3]
    for red, green, blue in ((0x7E, 0xA3, 0xD4), (0xD9, 0x78, 0x2D)):
        near = abs(picture * 255 - (red, green, blue)).max(axis=-1) < 2
        assert near.sum() > 200
