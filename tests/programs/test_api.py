"""``import fabric_train``: the functions do what the command lines do, return results and raise exceptions."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fabric_train
from fabric_train import InputError, api, arguments
from fabric_train.cli.argument_types import types_of
from fabric_train.cli.parser import build_arguments, parse_arguments
from tests.api_stub import STUB, written_stub
from tests.support import api_examples, short_runs
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import ROOT

FAILED_STOPPED_AND_RESUMED = """
import os, signal
import fabric_train
from fabric_train import OBJECTIVES
from fabric_train.training.objective import CrossEntropy
from fabric_train.distributed.signals import Heartbeat

original_enter = Heartbeat.enter
{stop}
given = {given}
handlers, environment = [signal.getsignal(one) for one in (2, 10, 15)], dict(os.environ)

class Broken(CrossEntropy):
    def loss(self, *_):
        raise ZeroDivisionError

OBJECTIVES["broken"] = lambda arguments: Broken()
try:
    changed = {"output_dir": given["output_dir"] + "-failed", "parallelism": "fsdp2", "objective": "broken"}
    fabric_train.train(**{**given, **changed})
    raise AssertionError
except ZeroDivisionError:
    pass
first = fabric_train.train(**given)
assert first.state == "stopped" and first.step in (3, 4), first  # before or after its step
assert first.checkpoint == first.folder / f"checkpoints/step-{first.step:08d}", first
assert ([signal.getsignal(one) for one in (2, 10, 15)], dict(os.environ)) == (handlers, environment)
Heartbeat.enter = original_enter
second = fabric_train.train(**given, resume=True)
assert (second.state, second.step) == ("done", 8), second
"""


def tree(source: str) -> str:
    return ast.dump(ast.parse(source))


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path, shakespeare_jsonl: Path) -> Path:
    """A folder with what the examples need."""
    (tmp_path / "model").symlink_to(tiny_model_dir)
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    texts = (json.dumps({"text": text[start : start + 900]}) + "\n" for start in range(0, 18_000, 900))
    (tmp_path / "texts.jsonl").write_text("".join(texts), encoding="utf-8")
    return tmp_path


def python(folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def run(runs: ForkedRuns, folder: Path, *examples: str) -> ForkedRun:
    started = runs.start(examples, 1, cwd=folder, program="tests.support.api_examples")
    started.finish()
    return started


def test_the_stub_has_the_arguments_of_the_command_lines() -> None:
    assert STUB.read_text(encoding="utf-8") == written_stub(), "run python -m tests.api_stub"


def test_functions_show_the_names_and_defaults_of_their_arguments() -> None:
    parameters = inspect.signature(fabric_train.train).parameters
    assert (parameters["lr"].default, parameters["config"].default) == (2e-5, None)
    required = [
        one.name for one in inspect.signature(fabric_train.tokenize).parameters.values() if one.default is one.empty
    ]
    assert required == ["dataset", "tokenizer_name", "output_dir"]


def test_the_import_is_light_and_a_file_of_the_user_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "arguments.py").write_text("raise RuntimeError('the file of a user')")
    code = (
        "import sys; before = list(sys.path); import fabric_train; assert 'fabric_train.api' not in sys.modules;"
        "fabric_train.train; assert not {'torch', 'numpy', 'lightning'} & set(sys.modules);"
        "assert sys.path == before; print(fabric_train.__version__)"
    )
    ended = python(tmp_path, code)
    assert (ended.stdout, ended.stderr) == (f"{fabric_train.__version__}\n", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rate": 1e-3, "lr": "high"}, ["--learning_rate", "0.001", "--lr", "high"]),
        ({"precision": "bf16", "max_step": "0"}, ["--precision", "bf16", "--max_step", "0"]),
        ({"min_lr": 1.0, "no_lr_decay": True}, ["--min_lr", "1.0", "--no_lr_decay", "true"]),
    ],
)
def test_faults_are_the_lines_of_the_command_line(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as of_line:
        parse_arguments(arguments.TrainArguments, words)
    with pytest.raises(InputError) as raised:
        fabric_train.train(**given)  # type: ignore[arg-type]
    assert raised.value.faults == of_line.value.faults


def test_values_of_python_are_shown_as_they_are_and_paths_and_tuples_serve(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        fabric_train.train(lr=True, train_data_dir=[1, 2], tags=object())  # type: ignore[arg-type, list-item]
    assert "--lr: expected a number above 0, got True" in raised.value.faults
    (tmp_path / "run.yaml").write_text("lr: 0.5\nmax_step: 3\n")
    given = {"train_data_dir": (tmp_path / "a", "b"), "lr": 0.25, "max_length": "8k", "config": tmp_path / "run.yaml"}
    built = api.build_arguments(arguments.TrainArguments, given)
    assert built.data.train_data_dir == [str(tmp_path / "a"), "b"]
    assert (built.training.lr, built.training.max_step, built.data.max_length) == (0.25, 3, 8192)


def test_documents_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise OSError("the source is gone")

    given = {"tokenizer_name": "model", "output_dir": tmp_path / "tokens"}
    with pytest.raises(OSError, match="the source is gone"):
        fabric_train.tokenize(dataset=broken(), **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="document 2: expected a mapping such as"):
        fabric_train.tokenize(dataset=[{"text": "one"}, 2], **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"document 1: .* not JSON serializable"):
        fabric_train.tokenize(dataset=[{"text": b"one"}], **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected names or an iterable of documents, got 3"):
        fabric_train.tokenize(dataset=3, **given)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tokens.jsonl").write_text("mine")
    with pytest.raises(InputError, match=r"cannot write the documents to .*tokens\.jsonl, which exists already"):
        fabric_train.tokenize(dataset=[{"text": "one"}], **given)  # type: ignore[arg-type]
    assert (tmp_path / "tokens.jsonl").read_text() == "mine"


def test_documentation_has_the_examples_that_run_here() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = [tree(block) for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    functions = [api_examples.three_lines, api_examples.results, api_examples.errors]
    functions += [api_examples.own_documents, api_examples.own_metric]
    bodies = [inspect.cleandoc(inspect.getsource(one).partition("\n")[2]) for one in functions]
    bodies[0] = f"import fabric_train\n{bodies[0]}"
    assert shown == [tree(body) for body in bodies]
    assert all(len(body.splitlines()) <= 10 for body in bodies)


def test_three_lines_go_from_texts_to_a_text(forked_runs: ForkedRuns, folder: Path) -> None:
    lines = run(forked_runs, folder, "three_lines", "errors").lines()
    _, loss, text = next(line for line in lines if line.startswith("done ")).split(maxsplit=2)
    loaded = fabric_train.load_run(folder / "run" / "best")
    assert float(loss) == loaded.metrics["val_loss"][-1]
    assert len(ast.literal_eval(text)) == 1
    assert lines[-2:] == ["--lr: expected a number above 0, got -1", "--warmup_steps 10 is more than --max_step 5"]
    assert (loaded.metrics["step"], list(loaded.checkpoints)) == ([0, 1, 2, 3, 4], [4])
    assert (loaded.best, loaded.report) == (loaded.checkpoints[4], None)  # runs of tests write no report
    assert loaded.arguments["max_step"] == 4


@pytest.mark.launchers
def test_results_are_exports_losses_and_runs(forked_runs: ForkedRuns, folder: Path) -> None:
    lines = run(forked_runs, folder, "three_lines", "results").lines()
    losses = json.loads((folder / "losses" / "evaluation.json").read_text())
    assert f"export 20 {losses['run/best']['ours']['loss']}" in lines
    assert lines[-1].endswith(" run/checkpoints/step-00000004 None")


def test_own_documents_are_an_ordinary_source_and_an_own_metric_is_a_column(
    forked_runs: ForkedRuns, folder: Path
) -> None:
    run(forked_runs, folder, "own_documents")
    manifest = json.loads((folder / "upper" / "manifest.json").read_text())
    written = [json.loads(line) for line in (folder / "upper.jsonl").read_text().splitlines()]
    given = [json.loads(line)["text"].upper() for line in (folder / "texts.jsonl").read_text().splitlines()]
    assert written == [{"text": text} for text in given]
    assert [one["name"] for one in manifest["sources"]] == ["upper.jsonl"]
    (folder / "upper").rename(folder / "data")
    lines = run(forked_runs, folder, "own_metric").lines()
    values = fabric_train.load_run(folder / "own").metrics["val_above_one_nat"]
    assert lines[-1] == str(values)
    assert [value is None for value in values] == [False, True, False]


def test_after_a_failure_and_a_stop_in_this_process_the_next_call_is_exact(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    given = {"model_name": str(tiny_model_dir), "train_data_dir": str(tiny_tokens_dir), **short_runs.SETTINGS}
    given |= {"eval_at_start": False, "report": False, "output_dir": str(tmp_path / "stopped"), "num_workers": 1}
    stop = short_runs.at_point("os.kill(os.getpid(), signal.SIGINT)", 4, "COMPUTING", 1, ranks=(0,))
    code = FAILED_STOPPED_AND_RESUMED.replace("{stop}", stop).replace("{given}", repr(given))
    ended = forked_runs.start([], 1, before=code, program="tests.support.api_examples")
    line = short_runs.argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "whole", num_workers=1)
    forked_runs.start(line, 1).finish()
    ended.finish()
    assert short_runs.metrics(tmp_path / "stopped") == short_runs.metrics(tmp_path / "whole")
    assert "stopped by SIGINT" in ended.stdout()


def test_the_notebook_runs_and_shows_what_its_cells_print(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    ended = forked_runs.start([], 1, cwd=tmp_path, program="tests.notebook")
    ended.finish()
    assert not ended.stdout().strip(), "python -m tests.notebook --write, in an empty folder"


@pytest.mark.launchers
def test_several_devices_train_as_the_program_does(folder: Path) -> None:
    given = {"train_data_dir": "tokens", "model_name": "model", "max_step": 2, "total_batch_size": 4, "report": False}
    code = (
        "import fabric_train\n"
        "fabric_train.tokenize(dataset='texts.jsonl', tokenizer_name='model', max_length=64, output_dir='tokens')\n"
        f"given = {given!r}\n"
        "run = fabric_train.train(devices=2, accelerator='cpu', output_dir='two', precision='32-true', **given)\n"
        "one = fabric_train.train(devices=1, accelerator='cpu', output_dir='one', precision='32-true', **given)\n"
        "assert abs(run.train_loss - one.train_loss) < 1e-5, (run, one)\n"
        "try: fabric_train.train(devices=2, accelerator='cpu', output_dir='two', **given)\n"
        "except fabric_train.InputError as error: print(error.faults)\n"
    )
    ended = python(folder, code)
    assert ended.returncode == 0, ended.stderr
    assert "2 × fsdp" in ended.stdout
    assert "two" in ended.stdout.splitlines()[-1]


WRONG: list[Any] = [None, b"x", {1}, 5, object(), [b"x"], [[]], {"a": {1}}, np.zeros(2), np.int64(3), iter([]), type]


@pytest.mark.parametrize("function", api.ARGUMENTS)
def test_value_of_any_type_is_taken_or_is_wrong_input(function: str) -> None:
    kind = api.ARGUMENTS[function]
    for name in [*types_of(kind), "config"]:
        for value in WRONG:
            with suppress(InputError):
                build_arguments(kind, {name: value})


@pytest.mark.parametrize("path", [5, None, b"run", ["run"]])
def test_run_that_is_no_path_is_wrong_input(path: Any) -> None:
    with pytest.raises(InputError, match="expected the path of a run folder"):
        fabric_train.load_run(path)


@pytest.mark.parametrize("output_dir", [None, 5, b"tokens", ""])
def test_documents_need_a_folder_that_is_a_path(output_dir: Any) -> None:
    with pytest.raises(InputError, match="--output_dir: expected text"):
        fabric_train.tokenize(dataset=[{"text": "one"}], tokenizer_name="model", output_dir=output_dir)


@pytest.mark.parametrize("documents", [b"texts", {"a", "b"}, {"text": "one"}])
def test_documents_that_are_no_list_are_wrong_input(documents: Any) -> None:
    with pytest.raises(InputError, match="--dataset: expected"):
        fabric_train.tokenize(dataset=documents, tokenizer_name="model", output_dir="tokens")


def test_documents_stay_where_they_were_written_when_the_folder_changes(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def documents() -> Iterator[dict[str, str]]:
        yield {"text": "one two three " * 40}
        os.chdir(tmp_path / "elsewhere")
        yield {"text": "four five six"}

    given: dict[str, Any] = {"tokenizer_name": str(tiny_model_dir), "max_length": 64, "validation_split": 0}
    result = fabric_train.tokenize(dataset=documents(), output_dir="tokens", **given)
    assert result.path == tmp_path / "tokens"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "tokens", "tokens.jsonl"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
