"""Evaluate a model in a process of its own:  python -m fabric_train.evaluation.lm_eval_worker  < REQUEST

So the memory of a model is free after its evaluation. A request is the JSON of a :class:`WorkerRequest`.
"""

import ctypes
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import InputError, first_line, run_program
from fabric_train.cli.fabric_command import project_first
from fabric_train.evaluation.arguments import EvaluateArguments, TaskSettings, is_task_file
from fabric_train.evaluation.scores import MetricScore, ModelScores, TaskScore, add_score, finite, mean_score
from fabric_train.files.regular_file import parse_json

_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_OFFLINE = "; its data is on the hub: load it once on a machine with internet, into the cache (HF_HOME) of this one"
_SEEDS = (0, 1234)  # of random, and of numpy, torch and the examples in prompts, as in lm_eval's own program


@dataclass(frozen=True)
class RequestedTask:
    """A task to run; ``source`` is a name of lm_eval or a task file, ``metric`` one that it must have, or None."""

    settings: TaskSettings
    source: str
    metric: str | None = None


@dataclass(frozen=True)
class WorkerRequest:
    """Words of a command line for losses on texts, or tasks to evaluate a model on, or without ``scores`` to check."""

    tasks: list[RequestedTask] = field(default_factory=list)
    source: str = ""  # the model for ``load_for_inference``
    file: str = ""  # of the scores
    scores: ModelScores | None = None  # those so far
    batch_size: int = 1
    words: list[str] = field(default_factory=list)


def evaluate_in_worker(request: WorkerRequest) -> int:
    """Do what a request asks for in a process of its own, and return its exit code; Ctrl-C ends that process too."""
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
    """Check tasks, evaluate a model on them, or evaluate it on texts, as standard input asks."""
    if sys.platform == "linux":  # a killed watcher leaves no process behind that writes scores
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = parse_json(sys.stdin.buffer.read(), WorkerRequest)
    if request.words:
        from fabric_train.cli.parser import parse_arguments

        arguments = parse_arguments(EvaluateArguments, request.words)
        from fabric_train.evaluation.compare_models import compare_models  # slow

        compare_models(arguments)
        return
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks = _load_tasks(request.tasks)
    if request.scores is not None:
        _evaluate(request, request.scores, tasks)


def _load_tasks(requested: Sequence[RequestedTask]) -> dict[TaskSettings, Any]:
    """Return lm_eval's tasks and groups, with their data; raise an InputError with every fault at once."""
    from lm_eval.tasks import TaskManager  # slow

    has_names = any(not is_task_file(one.source) for one in requested)
    manager = TaskManager(include_defaults=has_names)  # lm_eval's own tasks are 14,000 files
    loaded = {}
    faults = []
    for one in requested:
        name = one.source
        if not is_task_file(name) and name not in manager.task_index:
            hint = nearest_name(name, manager.all_tasks)
            faults.append(f"--tasks: {name}: lm_eval {version('lm_eval')} has no such task{hint}")
            continue
        try:
            loaded[one.settings] = manager.load([name])
        except Exception as error:  # noqa: BLE001 - a task's own code, and the hub's and datasets' many errors
            is_offline = isinstance(error, ConnectionError) or "Hub" in str(error)
            faults.append(f"--tasks: {name}: cannot be loaded: {first_line(error)}{_OFFLINE if is_offline else ''}")
            continue
        tasks = list(loaded[one.settings]["tasks"].values())  # a group has several
        if any(getattr(task, "UNSAFE_CODE", False) for task in tasks):
            faults.append(f"--tasks: {name}: it executes code that the model writes; leave it out")
        metrics = {metric for task in tasks for metric in task.aggregation()}
        if one.metric is not None and one.metric.split(",")[0] not in metrics:
            faults.append(f"--tasks: {name}: it has no metric {one.metric}; it has {', '.join(sorted(metrics))}")
    if faults:
        raise InputError(*faults)
    return loaded


def _evaluate(request: WorkerRequest, scores: ModelScores, tasks: Mapping[TaskSettings, Any]) -> None:
    """Evaluate the model on one task after the other; write the scores after each."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from fabric_train.inference.load_model import load_for_inference

    model, tokenizer = load_for_inference(request.source)
    lm: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request.batch_size)
    for settings, loaded in tasks.items():
        started = time.monotonic()
        random.seed(_SEEDS[0])
        torch.manual_seed(_SEEDS[1])
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):  # lm_eval's bars would fill a log
            results = _run(lm, loaded, settings)
        seconds = time.monotonic() - started
        score = _task_score(settings, list(loaded["tasks"]), list(loaded["groups"]), results, seconds)
        scores = add_score(Path(request.file), scores, score)
        shown = ", ".join(f"{name.removesuffix(',none')} {metric}" for name, metric in score.metrics.items())
        counted = f"{score.num_documents} documents, {score.num_fewshot}-shot"
        print(f"{scores.name}: {settings.task}: {shown} ({counted}), {seconds:.0f} s", file=sys.stderr, flush=True)


def _run(lm: Any, loaded: Any, settings: TaskSettings) -> Any:
    """Return the results of lm_eval's ``evaluate``; its ``simple_evaluate`` also calls git for each task."""
    from lm_eval import evaluate

    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own != 0:  # as lm_eval: a task that has 0 is meant without examples
            task.set_config(key="num_fewshot", value=own or 0 if settings.num_fewshot is None else settings.num_fewshot)
        task.set_fewshot_seed(seed=_SEEDS[1])
    return evaluate(lm=lm, task_dict=loaded, limit=settings.limit, log_samples=False)


def _task_score(
    settings: TaskSettings, tasks: Sequence[str], groups: Sequence[str], results: Any, seconds: float
) -> TaskScore:
    """Return the scores of a task, of a group that lm_eval aggregates, or the means over the tasks of another."""
    whole = _metrics(results, groups[0]) if groups else {}  # of the group that was asked for, not of those in it
    parts = [whole] if whole else [_metrics(results, name) for name in tasks]
    metrics = {key: mean_score([part[key] for part in parts]) for key in parts[0] if all(key in part for part in parts)}
    return TaskScore(
        settings,
        metrics,
        sum(results["n-samples"][task]["effective"] for task in tasks),
        max(results["n-shot"][task] for task in tasks),
        round(seconds, 2),
        version("lm_eval"),
    )


def _metrics(results: Any, name: str) -> dict[str, MetricScore]:
    """Return the metrics of a task or group; a group without an aggregation has none."""
    found = results["results"].get(name, {})
    higher = results["higher_is_better"].get(name, {})
    scores = {}
    for key, value in found.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            stderr = found.get(f"{metric}_stderr,{filter_name}")
            error = finite(float(stderr)) if isinstance(stderr, int | float) else None
            scores[key] = MetricScore(finite(float(value)), error, bool(higher.get(metric, True)))
    return scores


if __name__ == "__main__":
    run_program(main)
