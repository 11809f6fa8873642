"""Evaluate a model in a separate process:  python -m fabric_train.evaluation.lm_eval_worker  < REQUEST

A model's memory is then free after its evaluation. A request is the JSON of a :class:`WorkerRequest`.
"""

import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.commands import project_first
from fabric_train.cli.errors import InputError, first_line, run_program
from fabric_train.cli.parent_process import end_with_parent
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.scores import MetricScore, ModelScores, TaskScore, add_score, finite, mean_score
from fabric_train.evaluation.task_file import TaskSettings, is_task_file
from fabric_train.files.typed_json import parse_json

_OFFLINE = (
    "; its data is on the hub; with internet access, download it once into the cache that this machine uses (HF_HOME)"
)
_NO_TEXTS = -1
"""The value of a length that was not requested: RULER's metrics are lengths of texts."""
_PYTHON_SEED = 0  # of random, as in lm_eval's own program
_SEED = 1234  # of torch and the examples in prompts, as there


@dataclass(frozen=True)
class RequestedTask:
    """A task to run."""

    settings: TaskSettings
    source: str
    """lm_eval's name of the task, or a task file."""
    metric: str | None = None
    """A metric that the task must have."""


@dataclass(frozen=True)
class WorkerRequest:
    """A worker's request: to evaluate a model on texts, to evaluate it on tasks, or to check tasks."""

    tasks: list[RequestedTask] = field(default_factory=list)
    source: str = ""
    """The model to evaluate on the tasks, for ``load_for_inference``."""
    file: str = ""
    """The file of the scores."""
    scores: ModelScores | None = None
    """The scores so far; if None, the tasks are only checked."""
    batch_size: int = 1
    words: list[str] = field(default_factory=list)
    """The words of a command line that evaluates a model on texts, for a request without tasks."""


def evaluate_in_worker(request: WorkerRequest) -> int:
    """Run a request in a separate process, and return its exit code; Ctrl-C ends that process too."""
    worker = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **project_first()},
        start_new_session=True,  # Ctrl-C reaches only this process, which waits for it
    )
    try:
        worker.communicate(json.dumps(asdict(request)).encode())
    finally:
        worker.kill()
        worker.wait()
    return worker.returncode


def main() -> None:
    """Run the request on standard input: check tasks, evaluate a model on them, or evaluate it on texts."""
    end_with_parent()  # a killed watcher leaves no process behind that writes scores
    request = parse_json(sys.stdin.buffer.read(), WorkerRequest)

    # texts
    if request.words:
        from fabric_train.cli.parser import parse_arguments

        arguments = parse_arguments(EvaluateArguments, request.words)
        from fabric_train.evaluation.compare_models import compare_models  # slow

        compare_models(arguments)
        return

    # tasks; lm_eval and datasets would print bars and warnings for each
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if request.scores is not None:
        _evaluate(request, request.scores)
        return
    tokenizer = None
    if request.source and any(task.settings.metadata for task in request.tasks):
        from fabric_train.evaluation.models import find_model  # slow

        tokenizer = find_model(request.source).tokenizer
    _load_tasks(request.tasks, tokenizer)


def check_lengths(name: str, max_positions: int | None, settings: Sequence[TaskSettings]) -> None:
    """Raise an InputError if a task generates longer texts than a model has positions: lm_eval would cut them.

    Args:
        name: The name of the model, for the message.
        max_positions: The longest sequence of the model in tokens; None without a limit.
        settings: The settings of the tasks.
    """
    if max_positions is None:
        return
    faults = []
    for task in settings:
        longest = max(task.max_seq_lengths, default=0)
        if longest > max_positions:
            faults.append(
                f"--tasks: {task.task}: max_seq_lengths goes up to {longest:,} tokens, but {name} has "
                f"{max_positions:,} positions; give {max_positions} or less, or train the model on longer rows first"
            )
    if faults:
        raise InputError(*faults)


def _load_tasks(requested_tasks: Sequence[RequestedTask], tokenizer: Any) -> dict[TaskSettings, Any]:
    """Return lm_eval's tasks and groups, with their data; raise an InputError that lists all faults.

    Tasks with metadata generate their texts with ``tokenizer``; if that is None, they are left out.
    """
    plain_tasks = [task for task in requested_tasks if task.settings.metadata is None]
    if tokenizer is None or len(plain_tasks) == len(requested_tasks):
        return _load_tasks_with(plain_tasks, tokenizer_dir="")
    # lm_eval opens the tokenizer of such tasks again, by its folder
    with TemporaryDirectory(prefix="fabric-train-tokenizer-") as tokenizer_dir:
        _save_without_code(tokenizer, Path(tokenizer_dir))
        return _load_tasks_with(requested_tasks, tokenizer_dir)


def _save_without_code(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer without the names of its Python code, which RULER's tasks would run without asking."""
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    config_file.write_text(json.dumps(config), encoding="utf-8")


def _load_tasks_with(requested_tasks: Sequence[RequestedTask], tokenizer_dir: str) -> dict[TaskSettings, Any]:
    """Load tasks, those with metadata with the tokenizer in a folder; see ``_load_tasks``."""
    from lm_eval.tasks import TaskManager  # slow

    has_names = any(not is_task_file(task.source) for task in requested_tasks)
    managers: dict[str | None, Any] = {}  # by metadata; with names, each reads lm_eval's own tasks, 14,000 files
    loaded_tasks: dict[TaskSettings, Any] = {}
    faults = []
    for task in requested_tasks:
        # load
        name = task.source
        metadata = task.settings.metadata
        if metadata not in managers:
            values = None
            if metadata is not None:
                values = json.loads(metadata) | {"tokenizer": tokenizer_dir}
            managers[metadata] = TaskManager(include_defaults=has_names, metadata=values)
        manager = managers[metadata]
        if not is_task_file(name) and name not in manager.task_index:
            hint = nearest_name(name, manager.all_tasks)
            faults.append(f"--tasks: {name}: lm_eval {version('lm_eval')} has no such task{hint}")
            continue
        random.seed(_PYTHON_SEED)  # of the texts that a task generates
        try:
            with _without_progress_bars():
                loaded = manager.load([name])
        except Exception as error:  # noqa: BLE001 - a task's own code, and the hub's and datasets' many errors
            is_offline = isinstance(error, ConnectionError) or "Hub" in str(error)
            faults.append(f"--tasks: {name}: cannot be loaded: {first_line(error)}{_OFFLINE if is_offline else ''}")
            continue
        loaded_tasks[task.settings] = loaded

        # refuse what must not or cannot be evaluated
        lm_eval_tasks = list(loaded["tasks"].values())  # a group has several
        if any(getattr(lm_eval_task, "UNSAFE_CODE", False) for lm_eval_task in lm_eval_tasks):
            faults.append(f"--tasks: {name}: it executes code written by the model; leave out this task")
        metrics: set[str] = set()
        for lm_eval_task in lm_eval_tasks:
            metrics |= set(lm_eval_task.aggregation())
        unknown_lengths = [str(length) for length in task.settings.max_seq_lengths if str(length) not in metrics]
        if unknown_lengths:
            known_lengths = ", ".join(sorted((metric for metric in metrics if metric.isdigit()), key=int))
            faults.append(
                f"--tasks: {name}: it has no score for texts of {', '.join(unknown_lengths)} tokens; "
                f"give {known_lengths}"
            )
        if task.metric is not None and task.metric.split(",")[0] not in metrics:
            faults.append(f"--tasks: {name}: it has no metric {task.metric}; it has {', '.join(sorted(metrics))}")
    if faults:
        raise InputError(*faults)
    return loaded_tasks


def _evaluate(request: WorkerRequest, scores: ModelScores) -> None:
    """Evaluate the model on one task after the other; write the scores after each."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from fabric_train.inference.load_model import load_for_inference

    model, tokenizer = load_for_inference(request.source)
    lm: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request.batch_size)
    check_lengths(scores.name, lm.max_length, [task.settings for task in request.tasks])
    tasks = _load_tasks(request.tasks, tokenizer)
    for settings, loaded in tasks.items():
        # each task is seeded, so that its score does not depend on the tasks before it
        started = time.monotonic()
        random.seed(_PYTHON_SEED)
        torch.manual_seed(_SEED)
        with _without_progress_bars():
            results = _run_lm_eval(lm, loaded, settings)
        seconds = time.monotonic() - started

        # write and print the score
        score = _task_score(settings, list(loaded["tasks"]), list(loaded["groups"]), results, seconds)
        scores = add_score(Path(request.file), scores, score)
        metrics = ", ".join(f"{name.removesuffix(',none')} {metric}" for name, metric in score.metrics.items())
        counts = f"{score.num_documents} documents, {score.num_fewshot}-shot"
        print(f"{scores.name}: {settings.task}: {metrics} ({counts}), {seconds:.0f} s", file=sys.stderr, flush=True)


def _without_progress_bars() -> AbstractContextManager[object]:
    """Keep lm_eval's progress bars out of logs."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO())


def _run_lm_eval(lm: Any, loaded: Any, settings: TaskSettings) -> Any:
    """Return the results of lm_eval's ``evaluate``; its ``simple_evaluate`` also calls git for each task."""
    from lm_eval import evaluate

    for task in loaded["tasks"].values():
        task_num_fewshot = task.get_config("num_fewshot")
        if task_num_fewshot != 0:  # as in lm_eval: a task with 0 never gets examples
            num_fewshot = settings.num_fewshot
            if num_fewshot is None:
                num_fewshot = task_num_fewshot or 0
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=_SEED)
    return evaluate(lm=lm, task_dict=loaded, limit=settings.limit, log_samples=False)


def _task_score(
    settings: TaskSettings, tasks: Sequence[str], groups: Sequence[str], results: Any, seconds: float
) -> TaskScore:
    """Return the scores of a task or a group.

    Args:
        settings: The settings of the task.
        tasks: The names of lm_eval's tasks that were run; a group has several.
        groups: The names of lm_eval's groups, the requested one first.
        results: What lm_eval's ``evaluate`` returned.
        seconds: The duration.
    """
    # a group that lm_eval does not aggregate gets the means over its tasks; for RULER, it aggregates only 4,096 tokens
    metrics = {}
    if groups and not settings.max_seq_lengths:
        metrics = _read_metrics(results, groups[0])
    if not metrics:
        metrics_of_tasks = [_read_metrics(results, name) for name in tasks]
        for key in metrics_of_tasks[0]:
            if all(key in task_metrics for task_metrics in metrics_of_tasks):
                metrics[key] = mean_score([task_metrics[key] for task_metrics in metrics_of_tasks])
    return TaskScore(
        settings=settings,
        metrics=metrics,
        num_documents=sum(results["n-samples"][task]["effective"] for task in tasks),
        num_fewshot=max(results["n-shot"][task] for task in tasks),
        seconds=round(seconds, 2),
        lm_eval=version("lm_eval"),
    )


def _read_metrics(results: Any, name: str) -> dict[str, MetricScore]:
    """Return the metrics of a task or group; a group without an aggregation has none."""
    values = results["results"].get(name, {})
    higher_is_better = results["higher_is_better"].get(name, {})
    scores = {}
    for key, value in values.items():
        # keys are METRIC,FILTER and METRIC_stderr,FILTER, beside names such as alias
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        if metric.isdigit() and value == _NO_TEXTS:
            continue
        stderr = values.get(f"{metric}_stderr,{filter_name}")
        scores[key] = MetricScore(
            value=finite(float(value)),
            stderr=finite(float(stderr)) if isinstance(stderr, int | float) else None,
            higher_is_better=bool(higher_is_better.get(metric, True)),
        )
    return scores


if __name__ == "__main__":
    run_program(main)
