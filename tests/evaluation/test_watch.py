"""evaluate.py --watch: the tasks file, which checkpoints are evaluated and when, the table and the picture.

Here the evaluation itself is a function that writes given scores; tests/downstream/test_watch_with_lm_eval.py has the
real one.
"""

import csv
import json
import math
import shutil
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fabric_train.cli.errors import INPUT_ERROR, InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation import lm_eval_worker
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.lm_eval_worker import WorkerRequest, check_lengths, evaluate_in_worker
from fabric_train.evaluation.scores import (
    MetricScore,
    TaskScore,
    add_score,
    levels_of,
    main_metric,
    points_of,
    read_score_file,
)
from fabric_train.evaluation.task_file import LanguageTask, TaskSettings, read_tasks
from fabric_train.evaluation.watch import Evaluate, Watch, WatchedModel, watch_run
from fabric_train.files.atomic_folder import hold_lock
from fabric_train.run_folder.run_folder import RunFolder
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.forked_runs import ForkedRuns
from tests.support.token_datasets import write_jsonl

TASKS = [
    LanguageTask("es", "quiz_es", TaskSettings("quiz_es")),
    LanguageTask("es", "xnli_es", TaskSettings("xnli_es", num_fewshot=5)),
    LanguageTask("ca", "text_ca", TaskSettings("text_ca")),
]
TASK_NAMES = ["quiz_es", "xnli_es", "text_ca"]
BASE = WatchedModel("models/base", "models/base", step=None, identity="base")


class Evaluator:
    """Writes a score for each requested task, and remembers the requests by model."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[str]]] = []

    def __call__(self, request: WorkerRequest) -> int:
        """Score a task of a model by the model's step and the task's place in the request."""
        scores = request.scores
        assert scores is not None
        self.requests.append((scores.name, [task.settings.task for task in request.tasks]))
        step = scores.step or 0
        for index, task in enumerate(request.tasks):
            task_score = score(task.settings, value=step / 100 + index / 10)
            scores = add_score(Path(request.file), scores, task_score)
        return 0


def score(settings: TaskSettings, value: float) -> TaskScore:
    """Return a score whose main metric has this value: an accuracy, or for a task text_… bits per byte."""
    if settings.task.startswith("text"):
        metrics = {
            "word_perplexity,none": MetricScore(0.0, stderr=0.0, higher_is_better=False),
            "bits_per_byte,none": MetricScore(value, stderr=None, higher_is_better=False),
        }
    else:
        metrics = {
            "acc,none": MetricScore(0.0, stderr=0.0, higher_is_better=True),
            "acc_norm,none": MetricScore(value, stderr=0.03, higher_is_better=True),
        }
    return TaskScore(settings, metrics, num_documents=20, num_fewshot=0, seconds=1.5, lm_eval="0.4.13")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def save(run: Path, step: int, content: str = "{}") -> None:
    """Save a checkpoint, which has nothing but a checksums.json that identifies its weights."""
    checkpoint = run / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "checksums.json").write_text(content + str(step), encoding="utf-8")


def watch(run: Path | None, output: Path, evaluate: Evaluate, tasks: list[LanguageTask] = TASKS) -> Watch:
    return Watch(run, output, tasks, [BASE], batch_size=8, evaluate=evaluate)


def evaluate_all(run: Path, tasks: list[LanguageTask] = TASKS) -> list[tuple[str, list[str]]]:
    """Evaluate all that is pending, and return the requests."""
    evaluator = Evaluator()
    watcher = watch(run, run / "evaluation", evaluator, tasks)
    while watcher.evaluate_next():
        pass
    return evaluator.requests


def test_base_and_then_each_new_checkpoint_are_evaluated_once(run: Path) -> None:
    names = ["models/base", "step-00000010", "step-00000020"]
    assert evaluate_all(run) == [(name, TASK_NAMES) for name in names]
    assert evaluate_all(run) == []
    save(run, 30)
    assert evaluate_all(run) == [("step-00000030", TASK_NAMES)]


def test_models_are_evaluated_without_a_run(tmp_path: Path) -> None:
    evaluator = Evaluator()
    watcher = watch(None, tmp_path, evaluator)
    watcher.models.append(WatchedModel("models/rival", "models/rival", step=None, identity="rival"))
    while watcher.evaluate_next():
        pass
    assert evaluator.requests == [("models/base", TASK_NAMES), ("models/rival", TASK_NAMES)]
    assert [model.name for model in watcher.write_table().models] == ["models/base", "models/rival"]


def test_only_tasks_with_new_settings_are_evaluated_again(run: Path) -> None:
    evaluate_all(run)
    quiz, *other_tasks = TASKS
    limited_quiz = replace(quiz, settings=replace(quiz.settings, limit=5))
    names = ["models/base", "step-00000010", "step-00000020"]
    assert evaluate_all(run, [limited_quiz, *other_tasks]) == [(name, ["quiz_es"]) for name in names]
    assert evaluate_all(run) == []  # the former scores are still there


def test_a_checkpoint_with_other_weights_is_evaluated_again(run: Path) -> None:
    evaluate_all(run)
    save(run, 20, "another run")
    assert evaluate_all(run) == [("step-00000020", TASK_NAMES)]


def test_after_a_crash_only_the_tasks_that_are_missing_follow(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(request: WorkerRequest) -> int:
        assert request.scores is not None
        add_score(Path(request.file), request.scores, score(request.tasks[0].settings, 0.5))
        return -9

    watcher = watch(run, run / "evaluation", crash)
    assert [watcher.evaluate_next() for _ in range(4)] == [True, True, True, False]
    assert list(watcher.failed.values()) == ["models/base", "step-00000010", "step-00000020"]
    assert "step-00000010: not evaluated (signal 9; memory may have run out)" in capsys.readouterr().err
    assert {tuple(tasks) for _, tasks in evaluate_all(run)} == {("xnli_es", "text_ca")}


def test_a_checkpoint_that_another_process_evaluates_is_left_to_it(run: Path) -> None:
    with hold_lock(run / "evaluation" / "step-00000010.lock", "", ""):
        assert [name for name, _ in evaluate_all(run)] == ["models/base", "step-00000020"]
    assert [name for name, _ in evaluate_all(run)] == ["step-00000010"]


def test_a_checkpoint_that_the_run_removes_is_noted_and_no_fault(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def remove(request: WorkerRequest) -> int:
        shutil.rmtree(run / "checkpoints")
        return 1

    watcher = watch(run, run / "evaluation", remove)
    watcher.models = []
    assert watcher.evaluate_next()
    assert not watcher.evaluate_next()
    assert not watcher.failed
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("step-00000010: the run removed this checkpoint while it was being loaded; ")
    assert lines[2].startswith("step-00000020: the run removed this checkpoint before it was evaluated; ")


def test_a_damaged_file_of_scores_is_one_line(run: Path) -> None:
    evaluate_all(run)
    file = run / "evaluation" / "step-00000010.json"
    file.write_text(file.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.raises(InputError, match=r"step-00000010\.json: damaged .*; remove it to evaluate the model again"):
        watch(run, run / "evaluation", Evaluator()).pending()


def test_means_and_errors_of_a_language_are_those_of_the_formula(run: Path) -> None:
    evaluate_all(run)
    table = watch(run, run / "evaluation", Evaluator()).write_table()
    es, ca = table.columns
    assert (es.title, es.higher_is_better) == ("es accuracy", True)
    assert (ca.title, ca.higher_is_better) == ("ca bits_per_byte", False)

    # the mean of the two Spanish tasks for step 10, see ``Evaluator``
    mean = table.cell(table.models[1], es)
    assert mean is not None
    assert mean.value == pytest.approx((0.1 + 0.2) / 2)
    assert mean.stderr == pytest.approx(math.sqrt(0.03**2 + 0.03**2) / 2)

    # scores.csv has two metrics of each task and a mean of each language, scores.md the means
    rows = list(csv.DictReader((run / "evaluation" / "scores.csv").open(encoding="utf-8")))
    assert {row["model"] for row in rows} == {"models/base", "step-00000010", "step-00000020"}
    assert len(rows) == 3 * (3 * 2 + 2)
    lines = (run / "evaluation" / "scores.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "| model | es accuracy | ca bits_per_byte |"
    assert lines[3] == "| step-00000010 | 0.1500 ± 0.0212 | 0.3000 |"


def test_a_language_has_no_mean_before_all_its_tasks_are_done(run: Path) -> None:
    evaluate_all(run)
    file = run / "evaluation" / "step-00000020.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"scores": content["scores"][1:]}), encoding="utf-8")
    table = watch(run, run / "evaluation", Evaluator()).write_table()
    lines = (run / "evaluation" / "scores.md").read_text(encoding="utf-8").splitlines()
    assert lines[4].startswith("| step-00000020 | – | ")
    es, ca = table.columns
    assert [step for step, _, _ in points_of(table, es)] == [10]
    assert [step for step, _, _ in points_of(table, ca)] == [10, 20]


def test_the_picture_has_steps_and_base_and_keeps_removed_checkpoints(run: Path) -> None:
    evaluate_all(run)
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    table = watch(run, run / "evaluation", Evaluator()).write_table()
    es = table.columns[0]
    assert points_of(table, es) == [
        pytest.approx((10, 0.15, 0.0212), abs=1e-4),
        pytest.approx((20, 0.25, 0.0212), abs=1e-4),
    ]
    assert {model.name: value for model, value in levels_of(table, es)} == pytest.approx({"models/base": 0.05})
    assert (run / "evaluation" / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert not list((run / "evaluation").glob(".*"))


def test_the_wanted_metric_is_shown_with_or_without_its_filter() -> None:
    metric = MetricScore(0.5, stderr=None, higher_is_better=True)
    metrics = {"em,strict": metric, "em,flexible": metric, "acc,none": metric}
    task_score = replace(score(TASKS[0].settings, 0.5), metrics=metrics)
    assert main_metric(task_score) == "acc,none"
    assert main_metric(task_score, "em") == "em,strict"
    assert main_metric(task_score, "em,flexible") == "em,flexible"


def test_a_score_that_is_not_finite_is_kept_and_shown(run: Path) -> None:
    settings = TASKS[2].settings

    def infinite(request: WorkerRequest) -> int:
        assert request.scores is not None
        metrics = {"bits_per_byte,none": MetricScore(None, stderr=None, higher_is_better=False)}
        add_score(Path(request.file), request.scores, replace(score(settings, 0), metrics=metrics))
        return 0

    watcher = watch(run, run / "evaluation", infinite, TASKS[2:])
    assert watcher.evaluate_next()
    watcher.write_table()
    assert read_score_file(run / "evaluation" / BASE.file_name).missing([settings]) == []
    assert "| models/base | not finite |" in (run / "evaluation" / "scores.md").read_text(encoding="utf-8")


def write_tasks(folder: Path, text: str) -> str:
    (folder / "tasks.yaml").write_text(text, encoding="utf-8")
    return str(folder / "tasks.yaml")


def test_tasks_take_the_general_settings_unless_they_have_their_own(tmp_path: Path) -> None:
    (tmp_path / "quiz.yaml").write_text("task: quiz\n", encoding="utf-8")
    content = "limit: 50\nlanguages:\n  es: [xnli_es, {task: quiz.yaml, limit: 5, num_fewshot: 2, metric: acc}]\n"
    named_task, file_task = read_tasks(write_tasks(tmp_path, content))
    assert named_task == LanguageTask("es", "xnli_es", TaskSettings("xnli_es", num_fewshot=None, limit=50))
    assert file_task.source == str(tmp_path / "quiz.yaml")
    assert file_task.metric == "acc"
    assert file_task.settings.task == "quiz.yaml"
    assert file_task.settings.limit == 5
    assert file_task.settings.num_fewshot == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("languages: {es: [a]}\nnum_fewshots: 3", "'num_fewshots': unknown name; did you mean num_fewshot?"),
        ("languages: {es: [{task: a, limits: 3}]}", "'limits': unknown name; did you mean limit?"),
        ("languages: {es: [{task: a, limit: 0}]}", "es: task 1: limit: expected a whole number above 0, got 0"),
        ("languages: {es: [{limit: 3}]}", "es: task 1: expected a name or {task: NAME, ...}, got {'limit': 3}"),
        ("languages: {es: a}", "es: expected a list of tasks"),
        ("languages: {es: [a, a]}", "es: a is given twice; give it once"),
        ("languages: {es: [none.yaml]}", "none.yaml: No such file or directory; give a task file of lm_eval"),
        ("languages: {es: [{task: a, metadata: 3}]}", "es: task 1: metadata: expected a mapping"),
        ("languages: {es: [{task: a, metadata: {max_seq_lengths: 4096}}]}", "max_seq_lengths: expected a list"),
        ("es: [a]", "expected 'languages:' with tasks"),
        ("languages: [", "not a YAML file"),
    ],
)
def test_each_fault_of_the_tasks_file_is_one_line(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        read_tasks(write_tasks(tmp_path, text))
    (line,) = refused.value.faults
    assert line.startswith(f"--tasks {tmp_path}/tasks.yaml: ")
    assert fault in line


def test_generated_texts_must_fit_the_models_positions(tmp_path: Path) -> None:
    content = "languages: {4k: [{task: niah, metadata: {max_seq_lengths: [4096, 8192], other: a}}]}"
    (task,) = read_tasks(write_tasks(tmp_path, content))
    assert task.settings.max_seq_lengths == [4096, 8192]
    assert task.settings != replace(task.settings, metadata=None)  # evaluated apart
    check_lengths("a model", 8192, [task.settings])
    check_lengths("a model without a limit", None, [task.settings])
    with pytest.raises(InputError, match=r"max_seq_lengths goes up to 8,192 tokens, but a model has 8,191 positions"):
        check_lengths("a model", 8191, [task.settings])


def test_a_task_file_is_another_one_when_its_data_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # data is relative to the working directory, as in lm_eval
    files = {
        "tasks/quiz.yaml": "include: common.yaml\ndataset_kwargs: {data_files: {test: quiz.jsonl}}\n",
        "tasks/common.yaml": "process_docs: !function functions.shuffle\n",
        "tasks/functions.py": "def shuffle(): ...\n",
        "quiz.jsonl": "{}\n",
    }
    (tmp_path / "tasks").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    # the settings are others after a change of each file
    tasks_file = write_tasks(tmp_path, "languages: {es: [tasks/quiz.yaml]}")
    distinct_settings = {read_tasks(tasks_file)[0].settings}
    for name in files:
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        distinct_settings.add(read_tasks(tasks_file)[0].settings)
    assert len(distinct_settings) == 1 + len(files)


@pytest.mark.parametrize(
    ("arguments", "progress", "has_ended"),
    [
        ({"max_step": 3}, None, True),
        ({"max_step": 4}, None, False),
        (
            {"max_step": 4, "early_stopping": "es:2"},
            {"source": "es", "best": 1.0, "best_step": 1, "num_since": 2},
            True,
        ),
        ({"max_step": 4, "early_stopping": "es"}, {"source": "es", "best": 1.0, "best_step": 1, "num_since": 2}, False),
        ({"max_step": 4}, {"source": "es", "best": 1.0, "best_step": 1, "num_since": 9}, False),
    ],
)
def test_a_run_has_ended_at_its_last_step_or_by_early_stopping(
    tmp_path: Path, tiny_model_dir: Path, arguments: dict[str, object], progress: object, has_ended: bool
) -> None:
    assert not RunFolder(tmp_path).has_ended
    checkpoint = write_full(tmp_path / "checkpoints" / "step-00000003", tiny_model_dir, {}, step=3)
    file = checkpoint / "trainer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["arguments"] |= arguments
    file.write_text(json.dumps(content | {"progress": progress}), encoding="utf-8")
    assert RunFolder(tmp_path).has_ended == has_ended


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--watch", "run"], "--watch needs --tasks or --texts; give at least one of them"),
        (["--tasks", "c", "--output_dir", "b"], "--models is required"),
        (["--tasks", "c", "--models", "b"], "--output_dir is required"),
        (["--texts", "es=b", "--output_dir", "c"], "--models is required"),
        (["--texts", "es=b", "--models", "c"], "--output_dir is required"),
    ],
)
def test_arguments_of_one_mode_are_refused_in_the_other(argv: list[str], fault: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_arguments(EvaluateArguments, argv)
    assert refused.value.faults == (fault,)


def test_a_worker_is_a_process_that_reads_its_request(capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate_in_worker(WorkerRequest(words=["--seed", "x"])) == INPUT_ERROR
    assert "error: --seed: expected " in capfd.readouterr().err


def test_checkpoints_are_evaluated_on_texts_once_and_added_to_the_others(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], forked_runs: ForkedRuns
) -> None:
    run = tmp_path / "run"
    weights = trained_weights(tiny_model_dir)
    texts = write_jsonl(tmp_path / "es.jsonl", [f"Número {number}, una línea de prueba." for number in range(12)])
    words = ["--watch", run, "--texts", f"es={texts}", "--wait", "false", "--max_length", 64]

    def evaluate_in_a_fork(request: WorkerRequest) -> int:  # a worker without the imports of a start
        content = json.dumps(asdict(request)).encode()
        stdin = f"import io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO({content!r}))"
        (code,) = forked_runs.start([], 1, before=stdin, program=lm_eval_worker.__name__).wait()
        return code

    def watch_once() -> str:
        arguments = parse_arguments(EvaluateArguments, list(map(str, words)))
        watch_run(arguments, evaluate_in_a_fork)
        return capsys.readouterr().err

    # each checkpoint once
    write_full(run / "checkpoints" / "step-00000010", tiny_model_dir, weights, step=10)
    assert "step-00000010: evaluating on texts" in watch_once()
    write_full(run / "checkpoints" / "step-00000020", tiny_model_dir, weights, step=20)
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    assert watch_once().count("evaluating on texts") == 1
    assert "evaluating on texts" not in watch_once()

    # the removed one stays the first model; the weights, and so the losses, are the same
    figures_by_model = json.loads((run / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    first = str(run / "step-00000010")
    second = str(run / "step-00000020")
    assert list(figures_by_model) == [first, second]
    assert figures_by_model[second]["es"]["difference"]["to"] == first
    assert figures_by_model[second]["es"]["loss"] == figures_by_model[first]["es"]["loss"]

    # other texts under the same name
    write_jsonl(texts, ["Another text."])
    with pytest.raises(InputError, match="for this name on different documents"):
        watch_once()


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed here")
def test_without_lm_eval_the_program_names_the_extra_and_writes_nothing(
    run: Path, tmp_path: Path, forked_runs: ForkedRuns
) -> None:
    tasks = write_tasks(tmp_path, "languages: {es: [xnli_es]}")
    program = forked_runs.start(["--watch", run, "--tasks", tasks], 1, program="fabric_train.programs.evaluate")
    assert program.wait() == [2]
    assert program.stderr() == "error: --tasks needs lm_eval; run pip install 'fabric-train[eval]'\n"
    assert not (run / "evaluation").exists()


def test_a_group_has_the_means_of_each_length_of_its_texts() -> None:
    def task_results(short: float, long: float) -> dict[str, object]:
        return {"alias": "a", "4096,none": short, "32768,none": long, "8192,none": -1.0}  # -1: no text has this length

    results = {
        "results": {
            "ruler": {"4096,none": 0.75},
            "niah": task_results(short=1.0, long=0.5),
            "vt": task_results(short=0.5, long=0.25),
        },
        "higher_is_better": {},
        "n-samples": {"niah": {"effective": 4}, "vt": {"effective": 4}},
        "n-shot": {"niah": 0, "vt": 0},
    }
    settings = TaskSettings("ruler", metadata='{"max_seq_lengths": [4096, 32768]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_worker, "version", lambda name: "0.4.13")  # lm_eval need not be installed
        task_score = lm_eval_worker._task_score(settings, ["niah", "vt"], ["ruler"], results, 1.0)
    values = {name: metric.value for name, metric in task_score.metrics.items()}
    assert values == {"4096,none": 0.75, "32768,none": 0.375}
