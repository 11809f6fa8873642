"""The loggers of a run that keep many runs side by side: Weights & Biases, Trackio and MLflow.

A run folder has one run in each of them, however often it is resumed. metrics.csv is complete up to the checkpoint, so
a resumed run logs the steps again that a tracker lacks. Steps that a tracker has after the checkpoint stay, and are not
logged twice: a resumed run repeats them exactly.
"""

import io
import json
import netrc
import os
import posixpath
import re
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link, check_no_links_in, write_atomically
from fabric_train.training.loggers import GuardedLogger, LoggedRun, Logger, Sample, SampleFile
from fabric_train.training.metrics import Metrics, measured, read_metrics
from fabric_train.training.run_log import note, warn

_SECONDS_TO_FINISH = 300.0
_MLFLOW_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_ALLOW_FILE_STORE": "true",  # mlflow-skinny has no other store on disk
}
_REFUSED = re.compile(r"[^\w.\- :/]")  # in names of metrics of MLflow
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 6000  # in a request to MLflow


def check_trackers(names: Sequence[str]) -> None:
    """Raise an InputError if the package of one of ``--loggers`` is missing."""
    for name in ("trackio", "mlflow"):
        if name in names and find_spec(name) is None:
            raise InputError(f"--loggers {name} needs {name}: pip install 'fabric-train[{name}]'")


def _past(run: LoggedRun) -> Iterator[tuple[list[Sample], Metrics]]:
    """Yield the samples and metrics of each step up to the checkpoint."""
    samples: dict[int, list[Sample]] = {}
    for sample in SampleFile(run.folder / "samples.jsonl", run.last_step).past:
        samples.setdefault(sample.step, []).append(sample)
    for metrics in read_metrics(run.folder / "metrics.csv", run.last_step):
        yield samples.get(metrics.step, []), metrics


def _model_files(checkpoint: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a checkpoint with its name in it; the optimizer's are left out."""
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        if path.is_file() and name.parts[0] != "optimizer":
            yield path, name.as_posix()


class WandbLogger(Logger):
    """Weights & Biases. Without an account it works offline, in ``RUN/wandb``. It never asks on the terminal.

    Offline, each start makes a folder, and ``wandb sync`` lets the last one replace the others. So it gets all steps,
    and the others go to ``RUN/wandb/replaced``.
    """

    def __init__(self, run: LoggedRun) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # the settings below come too late for its login
        import wandb  # a slow import, needed only here

        folder, past = run.folder, list(_past(run))
        self._told = folder / "wandb" / "told_up_to"
        for path in (folder / "wandb_run_id", folder / "wandb", self._told):
            check_no_link(path)
        run_id = _saved_id(folder / "wandb_run_id", lambda: uuid.uuid4().hex[:8])
        self.mode = wandb_mode()
        earlier_folders = (folder / "wandb").glob(f"offline-run-*-{run_id}") if self.mode == "offline" else ()
        for earlier in earlier_folders:  # to a place that ``wandb sync`` does not read
            (folder / "wandb" / "replaced").mkdir(exist_ok=True)
            earlier.rename(folder / "wandb" / "replaced" / earlier.name)
        self._run = wandb.init(
            project=run.config["project"],
            entity=run.config["entity"],
            dir=str(folder),
            id=run_id,
            resume="allow",
            mode=self.mode,  # type: ignore[arg-type]
            config=run.config,
            name=run.config["run_name"],
            tags=run.config["tags"],
            group=run.config["group"],
            notes=run.config["notes"],
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                # a dead network holds up the end of the run no longer; a model may take its time
                finish_timeout=_SECONDS_TO_FINISH if run.config["log_model"] == "none" else 0,
                finish_timeout_raises=True,
            ),
        )
        self._wandb = wandb
        self._last_step = past[-1][1].step if past else -1
        for samples, metrics in past:
            if metrics.step >= self._run.starting_step:  # 0 offline, otherwise the first step that the server lacks
                self.log_samples(samples)
                self.log(metrics)

    def log(self, metrics: Metrics) -> None:
        self._run.log(measured(metrics), step=metrics.step)
        self._last_step = metrics.step

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Log the samples of a step, whose metrics follow, as a table."""
        if samples:
            rows = [[sample.prompt, sample.text] for sample in samples]
            self._run.log({"samples": self._wandb.Table(columns=["prompt", "text"], data=rows)}, step=samples[0].step)

    def log_model(self, checkpoint: Path) -> None:
        """Upload a checkpoint without its optimizer as an artifact."""
        artifact = self._wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"checkpoint": checkpoint.name})
        for path, name in _model_files(checkpoint):
            artifact.add_file(str(path), name=name)
        self._run.log_artifact(artifact)

    def log_report(self, page: Path, markdown: str) -> None:
        artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(page), name=page.name)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()
        if self.mode == "offline":  # its process tells only its log that it could not write
            for line in Path(self._run.settings.log_internal).read_text().splitlines():
                if '"level":"ERROR","msg":"writer: ' in line:
                    raise RuntimeError(json.loads(line)["msg"])
        write_atomically(self._told, f"{self._last_step}\n")


def open_wandb(run: LoggedRun) -> Logger:
    """Open the logger of W&B, unless ``WANDB_MODE`` is disabled."""
    if wandb_mode() == "disabled":
        note("WANDB_MODE=disabled: nothing is logged to Weights & Biases")
        return Logger()
    return WandbLogger(run)


def wandb_mode() -> str:
    """Return online, offline or disabled; offline without a key in the environment or in the user's netrc."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    with suppress(FileNotFoundError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(host) is not None:
            return "online"
    return "offline"


def _saved_id(file: Path, create: Callable[[], str]) -> str:
    """Return the id of the run folder's run in a tracker; create it on first use. An InputError if it is damaged."""
    check_no_link(file)
    if not file.is_file():
        write_atomically(file, create())
    run_id = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        name = file.name.removesuffix("_run_id")
        raise InputError(f"{file}: damaged; write the id of the run's {name} run into it, or remove it for a new one")
    return run_id


class TrackioLogger(Logger):
    """Trackio, in its own folder, or where its environment variables say (``TRACKIO_SPACE_ID``)."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._trackio, self._has_warned, self._samples = trackio, False, list[list[str]]()
        self._id = _saved_id(run.folder / "trackio_run_id", lambda: uuid.uuid4().hex[:8])
        self._show_warning, warnings.showwarning = warnings.showwarning, self._warn  # type: ignore[assignment]
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=run.config["project"],
                name=f"{run.config['run_name'] or run.folder.name}-{self._id}",  # which says which run is resumed
                group=run.config["group"],
                config=run.config,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self._first_step = self._last_step = self._run._next_step  # that it lacks
        for samples, metrics in _past(run):
            self.log_samples(samples)
            self.log(metrics)

    def _warn(self, message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        """Say its first warning in one line: it has a thread that writes, and that gives none of its errors to us."""
        if "trackio" not in Path(filename).parts:
            self._show_warning(message, category, filename, *rest)
        elif not self._has_warned:
            self._has_warned = True
            warn(f"--loggers trackio: {str(message).splitlines()[0]}; metrics.csv has every step")

    def log(self, metrics: Metrics) -> None:
        samples, self._samples = self._samples, []
        if metrics.step >= self._first_step:
            table = {"samples": self._trackio.Table(columns=["prompt", "text"], data=samples)} if samples else {}
            self._run.log({**measured(metrics), **table}, step=metrics.step)
            self._last_step = metrics.step

    def log_samples(self, samples: Sequence[Sample]) -> None:
        self._samples = [[sample.prompt, sample.text] for sample in samples]

    def log_model(self, checkpoint: Path) -> None:
        self._log_files(f"model-{self._id}", "model", _model_files(checkpoint))

    def log_report(self, page: Path, markdown: str) -> None:
        self._run.log({"report": self._trackio.Markdown(markdown)}, step=self._last_step)
        self._log_files(f"report-{self._id}", "report", [(page, page.name)])

    def _log_files(self, name: str, kind: str, files: Iterable[tuple[Path, str]]) -> None:
        if self._has_warned:  # the same would fail, after a minute
            return
        artifact = self._trackio.Artifact(name, type=kind)
        for path, inside in files:
            artifact.add_file(str(path), name=inside)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()
        warnings.showwarning = self._show_warning


class MlflowLogger(Logger):
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, or files in ``RUN/mlruns``. A thread sends one batch at a time."""

    def __init__(self, run: LoggedRun) -> None:
        for name, value in _MLFLOW_SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        check_no_links_in(run.folder / "mlruns")
        place = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").absolute().as_uri()
        self._client, self._metric = MlflowClient(place), Metric
        self._id = _saved_id(run.folder / "mlflow_run_id", lambda: _create_mlflow_run(self._client, run))
        self._client.update_run(self._id, status="RUNNING")
        self._known = {metric.step for metric in self._client.get_metric_history(self._id, "train/epoch")}
        self._thread, self._unsent = ThreadPoolExecutor(1, "mlflow"), list[Any]()
        self._sending = deque[Future[None]]()
        for samples, metrics in _past(run):
            self.log_samples(samples)
            self.log(metrics)

    def log(self, metrics: Metrics) -> None:
        if metrics.step not in self._known:
            now = round(time.time() * 1000)
            named = {posixpath.normpath(_REFUSED.sub("_", name)): value for name, value in measured(metrics).items()}
            self._unsent += [self._metric(name, value, now, metrics.step) for name, value in named.items()]
        while self._sending and self._sending[0].done():
            self._sending.popleft().result()  # raises what failed
        if self._unsent and not self._sending:
            self._sending.append(self._thread.submit(self._send, self._unsent))
            self._unsent = []

    def _send(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics[start : start + _MOST_METRICS])

    def log_samples(self, samples: Sequence[Sample]) -> None:
        if samples and samples[0].step not in self._known:
            text = "\n\n".join(f"{sample.prompt}▸{sample.text}" for sample in samples)
            file = f"samples/step-{samples[0].step:08d}.txt"
            self._sending.append(self._thread.submit(self._client.log_text, self._id, text, file))

    def log_model(self, checkpoint: Path) -> None:
        for path, name in _model_files(checkpoint):
            self._client.log_artifact(self._id, str(path), posixpath.dirname(f"{checkpoint.name}/{name}"))

    def log_report(self, page: Path, markdown: str) -> None:
        self._client.log_artifact(self._id, str(page))

    def close(self) -> None:
        for sent in self._sending:
            sent.result()
        self._send(self._unsent)
        self._client.set_terminated(self._id)


def _create_mlflow_run(client: Any, run: LoggedRun) -> str:
    """Create a run in the experiment of ``--project``, with the arguments as parameters; return its id."""
    from mlflow.entities import Param

    given = run.config
    experiment = client.get_experiment_by_name(given["project"])
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(given["project"])
    tags = dict.fromkeys(given["tags"] or (), "true")
    tags |= {"group": given["group"]} if given["group"] else {}
    tags |= {"mlflow.note.content": given["notes"]} if given["notes"] else {}
    created = client.create_run(experiment_id, run_name=given["run_name"] or run.folder.name, tags=tags)
    parameters = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in given.items()]
    for start in range(0, len(parameters), _MOST_PARAMETERS):
        client.log_batch(created.info.run_id, params=parameters[start : start + _MOST_PARAMETERS])
    return created.info.run_id


TRACKERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "wandb": open_wandb,
    "trackio": TrackioLogger,
    "mlflow": MlflowLogger,
}
"""How each is opened."""


def complete_trackers(names: Sequence[str], run: LoggedRun) -> None:
    """Log to trackers the steps of a finished run that they lack because it was killed after its last save."""
    told = run.folder / "wandb" / "told_up_to"
    past = read_metrics(run.folder / "metrics.csv", run.last_step)
    if not past:
        return
    has_all = told.is_file() and told.read_bytes().strip() == str(past[-1].step).encode()
    complete = {"wandb"} if has_all or wandb_mode() == "disabled" else set[str]()
    for name in (TRACKERS.keys() & set(names)) - complete:
        GuardedLogger(f"--loggers {name}", partial(TRACKERS[name], run)).close()
