"""Help, and completion by the shell: the program's own name, examples first, and no slow import."""

import dataclasses
import inspect
import os
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import groups_of, shown_name, title_of
from fabric_train.cli.commands import PROGRAMS as MODULES
from fabric_train.cli.commands import script_of
from fabric_train.cli.errors import InputError
from fabric_train.cli.help import PROGRAM, examples_of
from tests.support.program_arguments import PROGRAM_ARGUMENTS as PROGRAMS
from tests.support.programs import ROOT

SLOW = ("torch", "transformers", "datasets", "lightning", "huggingface_hub", "wandb", "vl_convert", "pandas")


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python on words, with every import on standard error."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LT_")} | {"COLUMNS": "100"}
    command = [sys.executable, "-X", "importtime", *words]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=100, check=False)


def help_of(program: Any, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(program, ["--lr", "nonsense", "--help", *words])
    assert end.value.code == 0
    return capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- whole processes


@pytest.mark.parametrize("words", [*PROGRAMS, "fabric_train"])
def test_help_names_the_program_and_imports_nothing_slow(words: str) -> None:
    finished = run(*words.split(), "--help")
    assert finished.returncode == 0
    name = "fabric run fabric_train" if words == "fabric_train" else f"python {words}"
    assert finished.stdout.startswith(f"usage: {name} ")
    assert f"\n  {name} " in finished.stdout  # an example
    imported = set(re.findall(r"\| +(\w+)$", finished.stderr, re.MULTILINE))
    assert "argparse" in imported
    assert imported.isdisjoint(SLOW)


WITH_MISSING_PATH = {
    "fabric_train.programs.convert_to_hf": "--checkpoint nowhere --output_dir nowhere/out",
    "fabric_train.programs.generate": "--model_name ./nowhere --prompt Hello",
    "fabric_train.trace": "nowhere --step 1",
    "fabric_train.rollouts": "nowhere --step 1",
}


@pytest.mark.parametrize("module", WITH_MISSING_PATH)
def test_a_missing_path_is_reported_before_slow_imports(module: str) -> None:
    finished = run("-m", module, *WITH_MISSING_PATH[module].split())
    assert finished.returncode == 2
    assert "nowhere: no such folder" in finished.stderr
    imported = set(re.findall(r"\| +(\w+)$", finished.stderr, re.MULTILINE))
    assert imported.isdisjoint(SLOW)


# a child for each program, as a new Python would start it
WITH_WRONG_ARGUMENT = """
import os, runpy, sys
for words in sys.argv[1:]:
    print(f"program {words}", file=sys.stderr, flush=True)
    if not (child := os.fork()):
        (name, *command), is_module = words.removeprefix("-m ").split(), words.startswith("-m ")
        sys.argv = [name, *command, "--no_such_argument", "1"]
        runpy.run_module(name, None, "__main__", True) if is_module else runpy.run_path(name, None, "__main__")
    print("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


def test_a_wrong_argument_is_reported_before_slow_imports() -> None:
    finished = run("-c", WITH_WRONG_ARGUMENT, *PROGRAMS)
    before, *outputs = finished.stderr.split("program ")
    assert [output.partition("\n")[0] for output in outputs] == list(PROGRAMS)
    for output in outputs:
        assert output.endswith("code 2\n"), output
        assert "error: --no_such_argument: no such argument; --help lists them\n" in output
        assert "fabric_train.cli" in output  # an import, as these are on standard error
        assert set(re.findall(r"\| +(\w+)$", before + output, re.MULTILINE)).isdisjoint(SLOW)


# ----------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("program", PROGRAMS.values())
def test_help_describes_every_argument_in_its_group(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(program, capsys).split())
    position = 0
    bases = (kind.__mro__ for kind in groups_of(program).values())
    for group in filter(dataclasses.is_dataclass, chain.from_iterable(bases)):
        position = text.index("Arguments: --" if group is program else f"{title_of(group)}: --", position)
        for name in inspect.get_annotations(group):
            position = text.index(f"--{shown_name(name)} ", position)
            source = Path(inspect.getfile(group)).read_text()
            described = re.split(rf"class {group.__name__}\b.*:\n", source)[1].split(f"    {name}: ")[1]
            wanted = " ".join(described.split('"""')[1].split()).replace("- ", "-")  # a line may end at a hyphen
            assert 0 < text[position:].replace("- ", "-").find(wanted) < 150, name


@pytest.mark.parametrize("program", PROGRAMS.values())
def test_help_begins_with_three_examples_that_parse(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    examples = examples_of(program)
    assert len(examples) == 3
    for example in examples:
        name, *words = shlex.split(example)
        assert name == PROGRAM
        config = ["--train_data_dir", "tokens"] if "--config" in words else []
        existing = [word for word in words if not word.endswith("/config.yaml") and word != "--config"]
        parse(program, [*(existing if any(word.endswith("/config.yaml") for word in words) else words), *config])
    text = help_of(program, capsys)
    assert text.index("usage: ") < text.index("examples:") < text.index("--config FILE.yaml", text.index("\n"))


@pytest.mark.parametrize("program", PROGRAMS.values())
def test_help_says_types_and_defaults_once(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(program, capsys)
    assert "(type:" not in text
    assert "PositiveInt" not in text
    assert "None" not in text


def test_help_shows_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(TrainArguments, capsys).split())
    assert "--precision auto|bf16-true|bf16-mixed|32-true|16-mixed bf16-true keeps" in text
    assert "Passes over the rows. A stream is read until --max_step instead. (default: 2)" in text
    assert "trackio and mlflow need pip install" in text
    assert "Default: csv, tensorboard and the loggers registered" in text
    assert "(default: false)" in text


def test_help_with_a_word_shows_only_the_arguments_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(TrainArguments, capsys, "shard")
    named = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    assert {"sharding_strategy", "state_dict_type", "auto_wrap_policy"} <= set(named)
    assert len(named) < 10
    assert "examples:" not in text
    assert "--warmup_steps" in help_of(TrainArguments, capsys, "warmup-steps")
    assert "--warmup_steps" in help_of(TrainArguments, capsys, "learning", "RATE")
    of_wandb = re.findall(r"^  --(\w+)", help_of(TrainArguments, capsys, "wandb"), re.MULTILINE)
    assert of_wandb == ["loggers", "entity", "project", "run_name", "tags", "group", "notes", "log_model"]
    assert "--sharding_strategy" in help_of(TrainArguments, capsys, "shard_grad_op")  # a choice


def test_help_without_a_match_says_so() -> None:
    with pytest.raises(InputError) as refusal:
        parse(TrainArguments, ["--help", "xyzzy"])
    assert refusal.value.faults == (
        "--help xyzzy: no argument's name or help text contains it; --help lists all arguments",
    )


# -------------------------------------------------------------------------------------------------------- completion


BASH = """
eval "$(activate-global-python-argcomplete --dest=-)"
for line; do
  COMP_LINE="$line" COMP_POINT=${#line} COMP_WORDS=($line) && [[ "$line" == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _python_argcomplete_global "${COMP_WORDS[0]}" "${COMP_WORDS[COMP_CWORD]}"
  echo "$line: ${COMPREPLY[*]}"
done
"""
COMPLETIONS = {
    "python tokenize_dataset.py --max_": {"--max_length", "--max_documents", "--max_tokens"},
    "python tokenize_dataset.py --dataset a b --packing ": {"concat", "best_fit", "none"},
    "python -m fabric_train --sharding_strategy H": {"HYBRID_SHARD"},
    "python -m fabric_train --resume ": {"true", "false"},
    "python -m fabric_train.tokenization.merge --dataset": {"--dataset_dirs"},
    "fabric run --devices 2 fabric_train --log_": {"--log_step_interval", "--log_model"},
    "fabric-train con": {"convert"},
    "fabric-train convert --checkp": {"--checkpoint"},
    "python -m fabric_train.vocabulary ex": {"extend"},
    "python -m fabric_train.vocabulary extend --num_": {"--num_tokens"},
    "fabric-train vocabulary ": {"report", "extend"},
    "fabric-train vocabulary report --tok": {"--tokenizer"},
}


def test_bash_completes_names_and_values() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", BASH, "bash", *COMPLETIONS]
    finished = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=100, check=True)
    shown = dict(line.rsplit(": ", 1) for line in finished.stdout.splitlines())
    for line, expected in COMPLETIONS.items():
        assert expected <= set(shown[line].split()), line


@pytest.mark.parametrize("words", PROGRAMS)
def test_every_program_has_the_mark_that_the_shell_looks_for(words: str) -> None:
    name = words.removeprefix("-m ").split()[0].replace(".", "/") if words.startswith("-m") else words
    file = next(path for path in (ROOT / name, ROOT / name / "__main__.py", ROOT / f"{name}.py") if path.is_file())
    assert "PYTHON_ARGCOMPLETE_OK" in file.read_text()[:1024]


def test_every_program_is_tested() -> None:
    every = {script_of(name) or f"-m {module}" for name, module in MODULES.items()}
    assert every == {" ".join(words.split()[:2]) for words in PROGRAMS}  # without the command after a module
    assert all(get_type_hints(kind) for kind in PROGRAMS.values())
