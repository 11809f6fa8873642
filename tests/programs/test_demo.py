"""Test the stages of the demo, and what the demo of distillation adds to them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from demo import distillation, stages


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


def test_interrupted_demo_waits_until_its_program_has_saved(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    program = f"""
import pathlib, signal, time
def save(*_):
    time.sleep(1)  # a parent that does not wait ends the program after a quarter of a second
    pathlib.Path({str(saved)!r}).touch()
    raise SystemExit(75)
signal.signal(signal.SIGINT, save)
print("started", flush=True)
time.sleep(60)
"""
    demo = f"""
from demo import stages
with stages.exit_on_failure():
    stages.run_stage("training", "python", "-c", {program!r})
"""
    with subprocess.Popen(
        [sys.executable, "-c", demo],
        cwd=stages.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "started\n":
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "\nerror: demo: interrupted\n"
    assert saved.exists()


def test_held_out_documents_are_not_in_the_training_texts(tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    texts = [f"{number} " + "x" * distillation.HELD_OUT_CHARACTERS for number in range(7)]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    language = distillation.Language("Spanish", lambda: documents, held_out_every=3)

    distillation.hold_out_documents(language, tmp_path / "train" / "es.jsonl", tmp_path / "held-out" / "es.jsonl")

    assert read_texts(tmp_path / "train" / "es.jsonl") == [texts[index] for index in (0, 1, 3, 4, 6)]
    beginnings = [texts[index][: distillation.HELD_OUT_CHARACTERS] for index in (2, 5)]
    assert read_texts(tmp_path / "held-out" / "es.jsonl") == beginnings


def test_program_whose_output_is_complete_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distillation, "ROOT", tmp_path)
    (tmp_path / "student").mkdir()
    distillation.run_unless_found("removing layers", Path("student"), "python", "-c", "raise SystemExit(3)")
    assert capsys.readouterr().out == "found student\n"
    with pytest.raises(stages.StageError, match="removing layers failed with exit code 3"):
        distillation.run_unless_found("removing layers", Path("other"), "python", "-c", "raise SystemExit(3)")


def test_table_of_distillation_has_a_row_for_each_model() -> None:
    evaluation = {
        "demo_run/distillation/sft": {
            "es": {"bits_per_byte": 2.3046},
            "ca": {"bits_per_byte": 2.0},
            "en": {"bits_per_byte": 1.25},
        },
        ".cache/smollm2-135m": {
            "es": {"bits_per_byte": 2.5},
            "ca": {"bits_per_byte": 3.0},
            "en": {"bits_per_byte": 1.0},
        },
    }
    console = Console(width=100)
    with console.capture() as output:
        console.print(distillation.results_table(evaluation, {"demo_run/distillation/sft": 1234.4}))
    rows = []
    for line in output.get().splitlines():
        if line.startswith("│"):
            rows.append([cell.strip() for cell in line.strip("│").split("│")])
    assert rows == [["sft", "2.305", "2.000", "1.250", "1,234"], ["smollm2-135m", "2.500", "3.000", "1.000", ""]]


def read_texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]
