"""fabric-train rollouts shows steps, groups and completions; no text of them reaches a terminal or a page raw."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError, RunError
from fabric_train.rollouts.__main__ import main
from tests.support.stored_completions import Answer, write_step

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e [bold]red[/bold]"
QUESTION = "Hola <b>mundo</b>"


@pytest.fixture
def run(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """Two steps; the second has a group with a hostile text, and one without variance."""
    run = tmp_path / "rl"
    prompt = AutoTokenizer.from_pretrained(tiny_model_dir)(QUESTION)["input_ids"]
    write_step(run, 1, {"math:1": [Answer("uno", exact=1.0), Answer("dos")]}, prompt)
    groups = {
        "math:7": [
            Answer(HOSTILE, error=f"reward exact: {HOSTILE}", tokens=10, is_cut=True),
            Answer("2\n\n4", 1.0, 1.0),
        ],
        "math:8": [Answer("same"), Answer("same")],
    }
    write_step(run, 12, groups, prompt, sampling_seconds=3.5)
    shutil.copytree(tiny_model_dir, run / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    return run


def test_the_table_of_steps_has_their_means(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run)])
    output = capsys.readouterr().out
    columns = "step completions reward exact brief tokens cut flat replaced errors sampling s rewards s"
    assert columns.split() in [line.split() for line in output.splitlines()]
    # 4 completions of 10, 4, 4 and 4 tokens; one has the reward 1 + 0.5 × 1, one is cut, one of two groups is flat
    cells = "12 4 0.375 0.25 0.25 5.5 25.0% 50.0% 0 1 3.5 0.2"
    assert cells.split() in [line.split() for line in output.splitlines()]
    main([str(run), "--json"])
    steps = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in steps] == [1, 12]
    assert steps[1]["rewards"] == {"exact": 0.25, "brief": 0.25}
    assert (steps[1]["share_cut"], steps[1]["share_without_variance"], steps[1]["reward_errors"]) == (0.25, 0.5, 1)


def test_a_step_lists_its_groups(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), "--step", "12"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"0 math:7 <|begin_of_text|>{QUESTION} 0.75 0 1.5 7.0" in lines
    assert f"1 math:8 <|begin_of_text|>{QUESTION} 0 0 0 4.0" in lines


def test_a_group_shows_its_prompt_and_completions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), "--step", "12", "--group", "0"])
    output = capsys.readouterr().out
    assert "reward 1.5 (exact 1, brief 1), advantage +0.75, 4 tokens, ended" in output
    assert "reward 0 (exact 0, brief 0), advantage -0.75, 10 tokens, cut" in output
    assert "  2\n" in re.sub(" +\n", "\n", output)  # the completion has its line breaks
    assert "<b>mundo</b>" in output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "⟨U+001B⟩[31m⟨U+202E⟩ [bold]red[/bold]" in output
    main([str(run), "--step", "12", "--group", "1"])
    assert "the step learns nothing from this group" in capsys.readouterr().out


def test_json_of_a_step_has_all_completions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), "--step", "12", "--json"])
    step = json.loads(capsys.readouterr().out)
    assert (step["step"], step["reward"]) == (12, 0.375)
    first = step["groups"][0]
    assert (first["prompt_id"], first["source"], first["lacks_variance"]) == ("math:7", "math", False)
    assert first["completions"][0]["text"] == HOSTILE
    assert first["completions"][1] == {
        "text": "2\n\n4",
        "reward": 1.5,
        "rewards": {"exact": 1.0, "brief": 1.0},
        "reward_error": None,
        "advantage": 0.75,
        "tokens": 4,
        "finish_reason": "stop",
    }


def test_the_page_escapes_all_texts(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    main([str(run), "--step", "12", "--html", str(page)])
    content = page.read_text(encoding="utf-8")
    assert "<img" not in content
    assert "<b>mundo" not in content
    assert "&lt;img src=x onerror=alert(1)&gt;⟨U+001B⟩[31m" in content
    assert content.count('<div class="completion ') + content.count('<div class="completion"') == 4
    main([str(run), "--step", "12", "--group", "1", "--html", str(page)])
    assert "math:7" not in page.read_text(encoding="utf-8")


def test_tokens_are_shown_as_ids_without_a_tokenizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "tokenizer")
    write_step(run, 13, {"math:1": [Answer("uno", exact=1.0), Answer("dos")]}, [0, 5])
    main([str(run), "--step", "13"])
    assert "⟨0⟩⟨5⟩" in capsys.readouterr().out


def test_what_is_not_stored_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--step 3: its completions are not stored; the run has steps 1, 12"):
        main([str(run), "--step", "3"])
    with pytest.raises(InputError, match=r"--group 2: step 12 has no such group; it has 0–1"):
        main([str(run), "--step", "12", "--group", "2"])
    with pytest.raises(InputError, match="--group needs --step"):
        main([str(run), "--group", "2"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no completions in rollouts/; give the --output_dir of a run with --prompts"):
        main([str(tmp_path / "empty")])
    with pytest.raises(InputError, match="nowhere: no such folder; give a run folder"):
        main([str(tmp_path / "nowhere")])
    (file,) = (run / "rollouts" / "step-000012").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match="has changed since it was written"):
        main([str(run)])
