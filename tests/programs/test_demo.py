"""Test the stages of the demo."""

import pytest

from demo import stages


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
