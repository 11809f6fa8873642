"""The loggers that keep many runs: Weights & Biases, Trackio and MLflow.

A run folder has one run in each tracker, however often it is resumed. metrics.csv is complete up to the checkpoint, so
a resumed run logs the steps that a tracker lacks. Steps that a tracker has after the checkpoint are kept, and are not
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
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import psutil

from fabric_train.cli.errors import InputError
from fabric_train.cli.tables import LOGGERS
from fabric_train.files.regular_file import check_no_link, check_no_links_in, write_atomically
from fabric_train.files.requirements import check_package
from fabric_train.training.logger import GuardedLogger, LoggedRun, Logger, Sample
from fabric_train.training.metrics import Metrics, measured_values, read_metrics
from fabric_train.training.run_log import note, warn
from fabric_train.training.sample_file import read_samples

_SECONDS_TO_FINISH = 300.0
_COMPLETE_FILE = "told_up_to"
"""The file in ``RUN/wandb`` with the last step that was logged to W&B, after a run has ended."""
_MLFLOW_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_ALLOW_FILE_STORE": "true",  # mlflow-skinny has no other store on disk
}
_REFUSED_CHARACTER = re.compile(r"[^\w.\- :/]")  # in names of metrics of MLflow
# limits of a request to MLflow
_MAX_METRICS = 1000
_MAX_PARAMETERS = 100
_MAX_PARAMETER_LENGTH = 6000


def check_trackers(names: Sequence[str]) -> None:
    """Raise an InputError if the package of one of ``--loggers`` is missing."""
    for name in ("trackio", "mlflow"):
        if name in names:
            check_package(name, f"--loggers {name}")


def _read_logged_steps(run: LoggedRun) -> Iterator[tuple[list[Sample], Metrics]]:
    """Yield the samples and metrics of each step up to the checkpoint."""
    samples_by_step: dict[int, list[Sample]] = {}
    for sample in read_samples(run.folder / "samples.jsonl", run.last_step):
        samples_by_step.setdefault(sample.step, []).append(sample)
    for metrics in read_metrics(run.folder / "metrics.csv", run.last_step):
        yield samples_by_step.get(metrics.step, []), metrics


class Tracker(Logger):
    """A logger that keeps many runs. It sends each step once, with its samples, including steps before a resume.

    A subclass has the methods ``_open``, ``_send``, ``_upload`` and ``close``. Each may raise, see ``GuardedLogger``.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._samples: Sequence[Sample] = ()
        self._last_step = -1
        logged_steps = list(_read_logged_steps(run))  # before a run is opened: a file may be damaged
        self._steps_in_tracker = self._open(run)
        for samples, metrics in logged_steps:
            self.log_samples(samples)
            self.log(metrics)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def log(self, metrics: Metrics) -> None:
        samples = self._samples
        self._samples = ()
        self._last_step = metrics.step
        if metrics.step not in self._steps_in_tracker:
            self._send(metrics.step, measured_values(metrics), samples)

    def log_model(self, checkpoint: Path) -> None:
        """Upload a checkpoint without its optimizer."""
        files = []
        for path in sorted(checkpoint.rglob("*")):
            name = path.relative_to(checkpoint)
            if path.is_file() and name.parts[0] != "optimizer":
                files.append((path, name.as_posix()))
        self._upload("model", files, checkpoint.name)

    def log_report(self, page: Path, markdown: str) -> None:
        self._upload("report", [(page, page.name)])

    def _open(self, run: LoggedRun) -> Container[int]:
        """Open the run folder's run in the tracker, or create it; return the steps that it has."""
        raise NotImplementedError

    def _send(self, step: int, values: dict[str, float], samples: Sequence[Sample]) -> None:
        """Send a step's values by their names in loggers, and its samples."""
        raise NotImplementedError

    def _upload(self, kind: str, files: Sequence[tuple[Path, str]], checkpoint: str = "") -> None:
        """Upload files with their names: a "report", or a "model" with the name of its checkpoint."""
        raise NotImplementedError


class _WandbApi(Tracker):
    """A tracker with W&B's functions, which Trackio also has: a ``_library``, and its ``_run``."""

    _library: Any
    _run: Any
    _id: str

    def _send(self, step: int, values: dict[str, float], samples: Sequence[Sample]) -> None:
        content: dict[str, Any] = dict(values)
        if samples:
            rows = [[sample.prompt, sample.text] for sample in samples]
            content["samples"] = self._library.Table(columns=["prompt", "text"], data=rows)
        self._run.log(content, step=step)

    def _upload(self, kind: str, files: Sequence[tuple[Path, str]], checkpoint: str = "") -> None:
        metadata = {"checkpoint": checkpoint} if checkpoint else {}
        artifact = self._library.Artifact(f"{kind}-{self._id}", type=kind, metadata=metadata)
        for path, name in files:
            artifact.add_file(str(path), name=name)
        self._run.log_artifact(artifact)


class WandbLogger(_WandbApi):
    """Weights & Biases. Without an account it works offline, in ``RUN/wandb``. It never asks on the terminal."""

    def _open(self, run: LoggedRun) -> Container[int]:
        os.environ.setdefault("WANDB_SILENT", "true")  # the settings below come too late for its login
        import wandb  # a slow import, needed only here

        self._library = wandb
        self.mode = wandb_mode()
        self._complete_file = run.folder / "wandb" / _COMPLETE_FILE
        for path in (run.folder / "wandb", self._complete_file):
            check_no_link(path)
        self._id = _read_run_id(run.folder / "wandb_run_id")
        if self.mode == "offline":
            _set_offline_runs_aside(run.folder / "wandb", self._id)
        finish_timeout = 0.0  # no limit: the upload of a model may take its time
        if run.config["log_model"] == "none":
            finish_timeout = _SECONDS_TO_FINISH  # so long may a dead network hold up the end of the run
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            finish_timeout=finish_timeout,
            finish_timeout_raises=True,
        )
        config = run.config
        self._run = wandb.init(
            dir=str(run.folder),
            id=self._id,
            resume="allow",
            project=config["project"],
            entity=config["entity"],
            tags=config["tags"],
            group=config["group"],
            notes=config["notes"],
            name=config["run_name"],
            config=config,
            mode=cast("Literal['online', 'offline', 'disabled', 'shared']", self.mode),
            settings=settings,
        )
        return range(self._run.starting_step)  # 0 offline

    def close(self) -> None:
        self._run.finish()
        if self.mode == "offline":
            # W&B's process writes the file; if it could not, only its own log says so
            for line in Path(self._run.settings.log_internal).read_text().splitlines():
                if '"level":"ERROR","msg":"writer: ' in line:
                    raise RuntimeError(json.loads(line)["msg"])
        write_atomically(self._complete_file, f"{self._last_step}\n")

    def abandon(self) -> None:
        if self.mode != "offline":
            _end_sending_process(self._library)


def _end_sending_process(wandb: Any) -> None:
    """End the sending process: Python would wait for it at exit, for hours if the network is down."""
    for process in psutil.Process().children():
        if process.name() == "wandb-core":
            process.kill()
            process.wait()
    with suppress(Exception, SystemExit):  # the process is gone; now Python does not wait for it any more
        wandb.teardown()


def _set_offline_runs_aside(wandb_dir: Path, run_id: str) -> None:
    """Move the offline folders of earlier starts to ``replaced``.

    ``wandb sync`` lets the last folder of a run replace the others, so the last one gets all steps.
    """
    for offline_run in wandb_dir.glob(f"offline-run-*-{run_id}"):
        (wandb_dir / "replaced").mkdir(exist_ok=True)
        offline_run.rename(wandb_dir / "replaced" / offline_run.name)


def open_wandb(run: LoggedRun) -> Logger:
    """Open the logger of W&B, unless ``WANDB_MODE`` is disabled."""
    if wandb_mode() == "disabled":
        note("WANDB_MODE=disabled: nothing is logged to Weights & Biases")
        return Logger()
    return WandbLogger(run)


def wandb_mode() -> str:
    """Return "online", "offline" or "disabled"; "offline" without a key in the environment or in the user's netrc."""
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = url.split("//")[-1].split("/")[0]
    with suppress(FileNotFoundError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(host) is not None:
            return "online"
    return "offline"


def _random_id() -> str:
    return uuid.uuid4().hex[:8]


def _read_run_id(file: Path, create: Callable[[], str] = _random_id) -> str:
    """Return the id of the run folder's run in a tracker, creating it on first use; an InputError if it is damaged."""
    check_no_link(file)
    if not file.is_file():
        write_atomically(file, create())
    run_id = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        name = file.name.removesuffix("_run_id")
        raise InputError(
            f"{file}: damaged; write the id of this run's {name} run into it, or remove it to create a new run"
        )
    return run_id


class TrackioLogger(_WandbApi):
    """Trackio, in its own folder or as its environment variables say (``TRACKIO_SPACE_ID``)."""

    def _open(self, run: LoggedRun) -> Container[int]:
        import trackio

        self._library = trackio
        self._has_warned = False
        self._id = _read_run_id(run.folder / "trackio_run_id")
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._warn  # type: ignore[assignment]
        config = run.config
        run_name = config["run_name"] or run.folder.name
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                name=f"{run_name}-{self._id}",  # Trackio resumes the run of this name
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
                project=config["project"],
                group=config["group"],
                config=config,
            )
        return range(self._run._next_step)

    def _warn(self, message: Warning | str, category: type[Warning], filename: str, *details: Any) -> None:
        """Show Trackio's first warning in one line, because errors of its writing thread are not raised here."""
        if "trackio" not in Path(filename).parts:
            self._show_warning(message, category, filename, *details)
        elif not self._has_warned:
            self._has_warned = True
            warn(f"--loggers trackio: {str(message).splitlines()[0]}; metrics.csv has every step")

    def log_report(self, page: Path, markdown: str) -> None:
        self._run.log({"report": self._library.Markdown(markdown)}, step=self._last_step)
        super().log_report(page, markdown)

    def _upload(self, kind: str, files: Sequence[tuple[Path, str]], checkpoint: str = "") -> None:
        if not self._has_warned:  # else the same would fail, after a minute
            super()._upload(kind, files, checkpoint)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()
        warnings.showwarning = self._show_warning


class MlflowLogger(Tracker):
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, or files in ``RUN/mlruns``. A thread sends one batch at a time."""

    def _open(self, run: LoggedRun) -> Container[int]:
        self._client = _open_mlflow(run.folder)
        self._id = _read_run_id(run.folder / "mlflow_run_id", create=lambda: _create_mlflow_run(self._client, run))
        self._client.update_run(self._id, status="RUNNING")
        self._thread = ThreadPoolExecutor(1)
        self._unsent = list[Any]()  # metrics of MLflow
        self._requests = deque[Future[None]]()
        return {metric.step for metric in self._client.get_metric_history(self._id, "train/epoch")}

    def _send(self, step: int, values: dict[str, float], samples: Sequence[Sample]) -> None:
        if samples:
            text = "\n\n".join(f"{sample.prompt}▸{sample.text}" for sample in samples)
            file_name = f"samples/step-{step:08d}.txt"
            self._requests.append(self._thread.submit(self._client.log_text, self._id, text, file_name))
        self._unsent += _mlflow_metrics(step, values)
        while self._requests and self._requests[0].done():
            self._requests.popleft().result()  # raises what failed
        # Steps that are logged while a request is on its way are sent together, in the next one.
        if not self._requests:
            self._requests.append(self._thread.submit(self._send_batch, self._unsent))
            self._unsent = []

    def _send_batch(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics[start : start + _MAX_METRICS])

    def _upload(self, kind: str, files: Sequence[tuple[Path, str]], checkpoint: str = "") -> None:
        for path, name in files:
            artifact_dir = posixpath.dirname(posixpath.join(checkpoint, name))
            self._client.log_artifact(self._id, str(path), artifact_dir or None)

    def close(self) -> None:
        for request in self._requests:
            request.result()
        self._send_batch(self._unsent)
        self._client.set_terminated(self._id)

    def abandon(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)  # else Python sends all of them before it ends


def _open_mlflow(run_dir: Path) -> Any:
    """Return a client of the server of ``MLFLOW_TRACKING_URI``, or of files in ``RUN/mlruns``."""
    for name, value in _MLFLOW_SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    store_dir = run_dir / "mlruns"
    check_no_links_in(store_dir)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or store_dir.absolute().as_uri()
    return MlflowClient(uri)


def _mlflow_metrics(step: int, values: dict[str, float]) -> list[Any]:
    """Return metrics for MLflow, with names that it accepts."""
    from mlflow.entities import Metric

    timestamp = round(time.time() * 1000)  # milliseconds
    values_by_allowed_name = {}
    for name, value in values.items():
        allowed_name = posixpath.normpath(_REFUSED_CHARACTER.sub("_", name))
        values_by_allowed_name[allowed_name] = value
    return [Metric(name, value, timestamp, step) for name, value in values_by_allowed_name.items()]


def _create_mlflow_run(client: Any, run: LoggedRun) -> str:
    """Create a run in the experiment of ``--project``, with the arguments as parameters; return its id."""
    from mlflow.entities import Param

    config = run.config
    experiment = client.get_experiment_by_name(config["project"])
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(config["project"])
    tags = dict.fromkeys(config["tags"] or (), "true")
    if config["group"]:
        tags["group"] = config["group"]
    if config["notes"]:
        tags["mlflow.note.content"] = config["notes"]
    mlflow_run = client.create_run(experiment_id, run_name=config["run_name"] or run.folder.name, tags=tags)
    run_id = mlflow_run.info.run_id
    # Parameters are limited in length and number for each request.
    parameters = [Param(name, str(value)[:_MAX_PARAMETER_LENGTH]) for name, value in config.items()]
    for start in range(0, len(parameters), _MAX_PARAMETERS):
        client.log_batch(run_id, params=parameters[start : start + _MAX_PARAMETERS])
    return run_id


_TRACKERS = ("wandb", "trackio", "mlflow")


def complete_trackers(names: Sequence[str], run: LoggedRun) -> None:
    """Log to trackers the steps of a finished run that they lack because the run was killed after its last save."""
    rows = read_metrics(run.folder / "metrics.csv", run.last_step)
    if not rows:
        return
    for name in _TRACKERS:
        if name not in names:
            continue
        if name == "wandb" and _lacks_nothing_in_wandb(run, rows[-1].step):
            continue
        GuardedLogger(f"--loggers {name}", partial(LOGGERS[name], run)).close()


def _lacks_nothing_in_wandb(run: LoggedRun, last_step: int) -> bool:
    """Return whether W&B has all steps of a run or is disabled, so that the run, which is slow, need not be opened."""
    if wandb_mode() == "disabled":
        return True
    file = run.folder / "wandb" / _COMPLETE_FILE
    return file.is_file() and file.read_bytes().strip() == str(last_step).encode()
