"""evaluate.py --tasks with the real lm_eval: local tasks in two languages, a full and a sharded checkpoint, RULER."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoint_examples import run_with_two_checkpoints
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import ROOT
from tests.support.stand_in_hub import StandInHub

pytestmark = pytest.mark.downstream

QUIZ = """
task: quiz_es
dataset_path: json
dataset_kwargs: {data_files: {test: quiz.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
TEXT = """
task: text_ca
dataset_path: json
dataset_kwargs: {data_files: {test: text.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
"""
TASKS = "languages:\n  es: [{task: quiz.yaml, num_fewshot: 1, limit: 6}]\n  ca: [text.yaml]\n"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Path:
    """A folder with a run of two checkpoints, its base model and the tasks."""
    run = run_with_two_checkpoints(tmp_path.parent, tiny_model_dir, forked_runs)
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(tiny_model_dir, tmp_path / "base")
    questions = [{"question": f"Es {n}?", "choices": [" sí", " no", " tal vez"], "answer": n % 3} for n in range(9)]
    texts = [{"text": f"En un lloc de la Manxa, número {n}, no fa gaire."} for n in range(3)]
    for name, rows in (("quiz", questions), ("text", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, content in (("quiz", QUIZ), ("text", TEXT), ("tasks", TASKS)):
        (tmp_path / f"{name}.yaml").write_text(content, encoding="utf-8")
    return tmp_path


@pytest.fixture
def start(folder: Path, lm_eval_python: Path) -> Start:
    def start_program(*argv: str) -> "subprocess.Popen[str]":
        command = [str(lm_eval_python), str(ROOT / "evaluate.py"), "--watch", "run", "--tasks", "tasks.yaml", *argv]
        environment = {**os.environ, "HF_HOME": str(folder / "cache")}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    return start_program


def finish(program: "subprocess.Popen[str]") -> tuple[int, str]:
    _, stderr = program.communicate(timeout=900)
    return program.returncode, stderr


def scores(folder: Path) -> dict[tuple[str, str], float]:
    """Return the values by model and metric."""
    with (folder / "run" / "evaluation" / "scores.csv").open(encoding="utf-8") as lines:
        return {(row["model"], row["metric"]): float(row["value"]) for row in csv.DictReader(lines)}


def test_two_watchers_evaluate_each_model_once_and_a_third_nothing(folder: Path, start: Start) -> None:
    argv = ("--models", "base", "--wait", "false")
    both = [start(*argv), start(*argv)]
    results = [finish(program) for program in both]
    assert [code for code, _ in results] == [0, 0], results
    evaluated = [line for _, stderr in results for line in stderr.splitlines() if ": evaluating 2 of 2 tasks" in line]
    assert sorted(line.partition(":")[0] for line in evaluated) == ["base", "step-00000001", "step-00000002"]
    found = scores(folder)
    assert {metric for _, metric in found} == {"acc", "acc_norm", "word_perplexity", "bits_per_byte", "accuracy"}
    for metric in ("acc", "bits_per_byte"):
        assert found["step-00000001", metric] == found["step-00000002", metric]  # the same weights, full and sharded
    assert found["base", "bits_per_byte"] != found["step-00000001", "bits_per_byte"]
    assert (folder / "run" / "evaluation" / "scores.png").stat().st_size > 10_000
    code, stderr = finish(start(*argv))
    assert code == 0
    assert "evaluating" not in stderr


def test_a_task_that_imports_hugging_faces_evaluate_runs_in_the_checkout(folder: Path, lm_eval_python: Path) -> None:
    """The functions of lm_eval's French tasks are in a module that imports it."""
    row = {"activity_label": "Lire", "ctx_a": "Il ouvre", "ctx_b": "le livre", "endings": ["et lit.", "et dort."]}
    lines = "".join(json.dumps(row | {"label": str(number % 2)}) + "\n" for number in range(6))
    (folder / "tasks.yaml").write_text("languages:\n  fr: [french_bench_hellaswag]\n", encoding="utf-8")
    run, tasks = (os.path.relpath(folder / name, ROOT) for name in ("run", "tasks.yaml"))
    words = ["evaluate.py", "--watch", run, "--tasks", tasks, "--wait", "false"]
    with StandInHub() as hub:
        hub.add("datasets/manu/french_bench_hellaswag", {"validation.jsonl": lines.encode()})
        online = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "cache")}
        command = [str(lm_eval_python), *words]
        environment = {**os.environ, **online}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900
        )
    assert ended.returncode == 0, ended.stderr
    assert 0 <= scores(folder)["step-00000001", "acc"] <= 1


def test_scores_are_those_of_lm_evals_own_program(folder: Path, start: Start, lm_eval_python: Path) -> None:
    code, stderr = finish(start("--wait", "false"))
    assert code == 0, stderr
    checkpoint = folder / "run" / "checkpoints" / "step-00000001"
    model = f"pretrained={checkpoint},tokenizer={checkpoint / 'tokenizer'},dtype=float32"
    own: dict[str, float] = {}
    for name, task, options in (("quiz", "quiz_es", ["--num_fewshot", "1", "--limit", "6"]), ("text", "text_ca", [])):
        command = [
            str(lm_eval_python),
            "-m",
            "lm_eval",
            "run",
            "--model",
            "hf",
            "--model_args",
            model,
            "--device",
            "cpu",
        ]
        command += ["--tasks", f"{name}.yaml", "--output_path", str(folder / "own" / name), *options]
        environment = {**os.environ, "HF_HOME": str(folder / "cache")}
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=900)
        (result,) = (folder / "own" / name).rglob("results_*.json")
        own |= json.loads(result.read_text(encoding="utf-8"))["results"][task]
    found = scores(folder)
    for metric in ("acc", "acc_norm", "word_perplexity", "bits_per_byte"):
        assert found["step-00000001", metric] == pytest.approx(own[f"{metric},none"], rel=1e-6)


def test_models_without_a_run_have_scores_and_are_found_again(folder: Path, lm_eval_python: Path) -> None:
    words = ["--models", "base", "run", "--tasks", "tasks.yaml", "--output_dir", "out"]
    command = [str(lm_eval_python), str(ROOT / "evaluate.py"), *words]
    environment = {**os.environ, "HF_HOME": str(folder / "cache")}
    for evaluated in (["base", "run"], []):
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert re.findall(r"^(\S+): evaluating 2 of 2 tasks$", ended.stderr, re.MULTILINE) == evaluated
    table = (folder / "out" / "scores.md").read_text(encoding="utf-8")
    assert "| base |" in table
    assert "| run |" in table


def test_facts_in_texts_that_ruler_generates_are_counted(folder: Path, smollm2_dir: Path, lm_eval_python: Path) -> None:
    tasks = "languages: {4k: [{task: niah_single_1, metadata: {max_seq_lengths: [4096]}, limit: 1}]}"
    (folder / "ruler.yaml").write_text(tasks, encoding="utf-8")
    words = ["--models", str(smollm2_dir), "--tasks", "ruler.yaml", "--output_dir", "out", "--batch_size", "1"]
    command = [str(lm_eval_python), str(ROOT / "evaluate.py"), *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with (folder / "out" / "scores.csv").open(encoding="utf-8") as lines:
        scores_by_metric = {row["metric"]: float(row["value"]) for row in csv.DictReader(lines)}
    assert set(scores_by_metric) == {"4096"}  # and none of the lengths that were not asked for
    assert scores_by_metric["4096"] in (0.0, 1.0)


def test_interrupted_program_leaves_no_process_and_goes_on_later(folder: Path, start: Start) -> None:
    program = start()  # it waits for checkpoints, since the run has not ended
    assert program.stderr is not None
    for line in program.stderr:
        if ": evaluating" in line:
            break
    program.send_signal(signal.SIGINT)
    code, _ = finish(program)
    assert code == 130
    deadline = time.monotonic() + 60
    while (left := _workers(program.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    code, stderr = finish(start("--wait", "false"))
    assert code == 0, stderr
    assert not list((folder / "run" / "evaluation").glob("*.lock"))


def _workers(parent: int) -> list[str]:
    """Return the ids of processes that ``parent`` has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], text=True, capture_output=True, check=False)
    return listed.stdout.split()


def test_tasks_that_cannot_be_run_are_refused_before_anything_runs(folder: Path, start: Start) -> None:
    tasks = "languages: {es: [xnli_ess, xnli_es, {task: quiz.yaml, metric: accuracy}]}"
    (folder / "tasks.yaml").write_text(tasks, encoding="utf-8")
    code, stderr = finish(start("--wait", "false"))
    assert code == 2
    unknown, offline, metric = stderr.splitlines()[-3:]
    assert unknown == "error: --tasks: xnli_ess: lm_eval 0.4.13 has no such task; did you mean xnli_es?"
    assert "xnli_es: cannot be loaded: " in offline
    assert "; its data is on the hub; " in offline
    assert metric.endswith("quiz.yaml: it has no metric accuracy; it has acc, acc_norm")
    assert not (folder / "run" / "evaluation").exists()
