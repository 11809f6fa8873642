"""Evaluate each checkpoint of a run on lm_eval's tasks and on texts, beside its training or afterwards.

Any number of watchers may share the output folder: a lock for each model keeps them apart.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.checkpoint import read_trainer_json, saved_checkpoints
from fabric_train.cli.errors import InputError, RunError, missing_folder
from fabric_train.cli.output import open_console
from fabric_train.evaluation import loss_table, scores
from fabric_train.evaluation.arguments import EvaluateArguments, LanguageTask, TaskSettings, read_tasks
from fabric_train.evaluation.compare_models import check_output
from fabric_train.evaluation.lm_eval_worker import RequestedTask, WorkerRequest, evaluate_in_worker
from fabric_train.evaluation.models import FOLDER, check_all_evaluated, find_models, identity_of_files
from fabric_train.evaluation.scores import ModelScores, ScoreTable
from fabric_train.evaluation.texts import NUM_DIGITS, DocumentTexts, full_digest, identity_of, open_texts
from fabric_train.files.atomic_folder import hold_lock, wait_for_lock
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.requirements import check_package
from fabric_train.training.evaluation import parse_early_stopping

_SECONDS_BETWEEN_LOOKS = 10.0

Evaluate = Callable[[WorkerRequest], int]
"""Evaluates a model on the tasks of a request, writes its scores, and returns an exit code."""


@dataclass(frozen=True)
class WatchedModel:
    """A checkpoint of the run, or a model to compare it with, which has no step."""

    name: str
    source: str  # for ``load_for_inference``
    step: int | None
    identity: str  # changes with the weights

    @property
    def weights(self) -> str:
        return self.identity[:NUM_DIGITS]

    @property
    def unscored(self) -> ModelScores:
        return ModelScores(self.name, self.step, self.identity, [])

    @property
    def file_name(self) -> str:  # of its scores
        if self.step is not None:
            return f"{self.name}.json"
        plain = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")[-60:]
        return f"model-{plain}-{full_digest(self.name)[:8]}.json"


@dataclass(frozen=True)
class WatchedTexts:
    """The texts of ``--texts``: what tells them from others, and the words of a command line that evaluates on them."""

    identities: frozenset[str]
    words: tuple[str, ...]

    @classmethod
    def open(cls, arguments: EvaluateArguments, output: Path) -> "WatchedTexts":
        """Read the texts, and check that models can be evaluated on them and ``output`` can be added to."""
        assert arguments.texts is not None
        check_output(output)
        texts = open_texts(arguments.texts, arguments.text_column, output / FOLDER / "downloads")
        identities = [identity_of(text, arguments.max_length, arguments.overlap) for text in texts]
        documents: dict[str, list[str]] = {}
        for text, own in zip(texts, identities, strict=True):
            if isinstance(text, DocumentTexts):  # of rows, the worker knows the documents
                documents.setdefault(text.name, []).extend([own] * len(text.texts))
        loss_table.check_same_documents(loss_table.read_evaluated(output), {}, documents, output)
        names = ("text_column", "max_length", "overlap", "batch_tokens", "seed")
        options = (word for name in names for word in (f"--{name}", str(getattr(arguments, name))))
        return cls(frozenset(identities), ("--texts", *arguments.texts, "--output_dir", str(output), *options))

    def has_all(self, evaluated: loss_table.Evaluated, model: WatchedModel, name: str) -> bool:
        """Return whether a model with these weights has been evaluated on each text, under a name."""
        lines = [line for lines in evaluated.get(name, {}).values() for line in lines]
        return self.identities <= {line.text for line in lines if line.weights == model.weights}


@dataclass
class Watch:
    """The evaluation of a run's checkpoints, and of other models, each of them once."""

    run: Path
    output: Path
    tasks: list[LanguageTask]
    models: list[WatchedModel]
    batch_size: int
    evaluate: Evaluate
    texts: WatchedTexts | None = None  # None without --texts
    failed: dict[str, str] = field(default_factory=dict)
    """The names of models whose evaluation has failed, by identity; they are not tried again."""
    _expected: dict[str, Path] = field(default_factory=dict)

    def pending(self) -> list[WatchedModel]:
        """Return the models to evaluate: first the other models, then the checkpoints by step."""
        models = [model for model in self._known() if model.identity not in self.failed]
        evaluated = loss_table.read_evaluated(self.output) if self.texts else {}
        return [model for model in models if self._lacks_texts(model, evaluated) or self._missing(model)]

    def evaluate_next(self) -> bool:
        """Evaluate the first pending model that no other process evaluates; return False if there is none."""
        pending = self.pending()
        for name, folder in self._expected.items():
            if not folder.exists():
                _say(f"{name}: the run removed it before it was evaluated; --keep_checkpoints keeps more")
        self._expected = {model.name: Path(model.source) for model in pending if model.step is not None}
        for model in pending:
            with ExitStack() as lock:
                try:
                    lock.enter_context(hold_lock(self._file(model).with_suffix(".lock"), "it is being evaluated", ""))
                except InputError:
                    continue
                self._evaluate(model)
            return True
        return False

    def write_table(self) -> ScoreTable:
        if not self.tasks:
            return scores.build_table([], [])
        with wait_for_lock(self.output / "scores.lock"):
            table = scores.build_table(self.tasks, self._all_scores())
            write_atomically(self.output / "scores.csv", scores.to_csv(table, self.tasks))
            write_atomically(self.output / "scores.md", scores.to_markdown(table))
            if table.columns:
                scores.write_picture(table, self.output / "scores.png")
        return table

    def print_tables(self, seed: int) -> None:
        """Print the losses on texts and the scores on tasks; ``seed`` is for the bootstrap."""
        if self.texts and (self.output / loss_table.DOCUMENTS).exists():
            evaluated = loss_table.read_evaluated(self.output)
            results = loss_table.compare_evaluated(evaluated, seed)
            loss_table.print_table(results, loss_table.have_same_tokens(evaluated))
        if self.tasks:
            open_console().print(scores.to_rich(scores.build_table(self.tasks, self._all_scores())))

    def _missing(self, model: WatchedModel) -> list[TaskSettings]:
        settings = [task.settings for task in self.tasks]
        return scores.read_scores(self._file(model), model.unscored).missing(settings) if settings else []

    def _lacks_texts(self, model: WatchedModel, evaluated: loss_table.Evaluated) -> bool:
        return self.texts is not None and not self.texts.has_all(evaluated, model, self._name_on_texts(model))

    def _name_on_texts(self, model: WatchedModel) -> str:
        """Return the name of a model in ``evaluation.json``; a checkpoint's is as with RUN/all of --models."""
        return model.name if model.step is None else str(self.run / model.name)

    def _evaluate(self, model: WatchedModel) -> None:
        code = 0
        if self.texts is not None and self._lacks_texts(model, loss_table.read_evaluated(self.output)):
            _say(f"{model.name}: evaluating on texts")
            code = self.evaluate(WorkerRequest(words=["--models", self._name_on_texts(model), *self.texts.words]))
        if not code and (missing := self._missing(model)):  # another process may have added to the scores
            _say(f"{model.name}: evaluating {len(missing)} of {len(self.tasks)} tasks")
            tasks = {task.settings: task for task in self.tasks}
            requested = [RequestedTask(settings, tasks[settings].source) for settings in missing]
            file = self._file(model)
            so_far = scores.read_scores(file, model.unscored)
            code = self.evaluate(WorkerRequest(requested, model.source, str(file), so_far, self.batch_size))
        self._expected.pop(model.name, None)
        if code and model.step is not None and not Path(model.source).exists():
            _say(f"{model.name}: the run removed it while it was being loaded; --keep_checkpoints keeps more")
        elif code:
            reason = f"signal {-code}; memory may have run out" if code < 0 else f"exit code {code}, see above"
            _say(f"{model.name}: not evaluated ({reason}); the next start tries again")
            self.failed[model.identity] = model.name

    def _known(self) -> Iterator[WatchedModel]:
        yield from self.models
        for step, checkpoint in saved_checkpoints(self.run).items():
            with suppress(FileNotFoundError):
                identity = full_digest(identity_of_files(checkpoint))
                if checkpoint.is_dir():  # else the run has just removed it
                    yield WatchedModel(checkpoint.name, str(checkpoint), step, identity)

    def _all_scores(self) -> list[ModelScores]:
        """Return the scores of all models, of ``models`` first; removed checkpoints are among them."""
        known = {self._file(model): model for model in self._known()}
        others = [file for pattern in ("model-*.json", "step-*.json") for file in sorted(self.output.glob(pattern))]
        found = [scores.read_scores(file, model.unscored) for file, model in known.items()]
        found += [scores.read_score_file(file) for file in others if file not in known]
        return [one for one in found if one.scores]

    def _file(self, model: WatchedModel) -> Path:
        return self.output / model.file_name


def watch_run(arguments: EvaluateArguments, evaluate: Evaluate = evaluate_in_worker, *, prints: bool = True) -> None:
    """Evaluate the checkpoints of ``--watch`` and the models of ``--models`` until nothing is left to evaluate.

    With ``--wait true``, wait for further checkpoints until the run has ended. An InputError comes before anything is
    written, a RunError at the end if a checkpoint could not be evaluated.
    """
    assert arguments.watch is not None
    run = Path(arguments.watch)
    if not run.is_dir():
        raise InputError(f"--watch {run}: {missing_folder(run)}; give the folder of a run")
    if not arguments.wait and not saved_checkpoints(run):
        raise InputError(f"--watch {run}: it has no checkpoint yet; --wait true waits for the first one")
    tasks = read_tasks(arguments.tasks) if arguments.tasks is not None else []
    if tasks:
        check_package("lm_eval", "--tasks")
    found, damaged = find_models(arguments.models or [])
    models = [WatchedModel(model.name, model.source, None, full_digest(model.identity)) for model in found]
    output = Path(arguments.output_dir or run / "evaluation")
    texts = WatchedTexts.open(arguments, output) if arguments.texts is not None else None
    watch = Watch(run, output, tasks, models, arguments.batch_size, evaluate, texts)
    if tasks and (watch.pending() or (arguments.wait and not run_has_ended(run))):
        _say("loading the tasks")  # the worker prints their faults
        to_load = [RequestedTask(one.settings, one.source, one.metric) for one in tasks]
        if code := evaluate_in_worker(WorkerRequest(to_load)):
            if not prints:
                raise RunError("lm_eval cannot load the tasks: the lines on standard error say why")
            raise SystemExit(code)
    if texts:
        (output / FOLDER).mkdir(parents=True, exist_ok=True)  # the mark of an evaluation, for the workers
    waits = False
    while True:
        has_ended = run_has_ended(run)  # before the look: a checkpoint that is saved meanwhile is not the last look's
        if watch.evaluate_next():
            waits = False
            watch.write_table()
            if prints and sys.stdout.isatty():
                watch.print_tables(arguments.seed)
        elif has_ended or not arguments.wait:
            break
        else:
            if not waits:
                _say(f"waiting for the next checkpoint of {run}; --wait false or Ctrl-C ends this")
            waits = True
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    watch.write_table()
    if prints:
        watch.print_tables(arguments.seed)
    if tasks:
        _say(f"written: {output}/scores.csv, scores.md and scores.png")
    if texts:
        _say(f"written: {output}/evaluation.json, evaluation.png and {loss_table.DOCUMENTS}")
    if watch.failed:
        raise RunError(f"not evaluated, see above: {', '.join(watch.failed.values())}")
    check_all_evaluated(damaged)


def run_has_ended(run: Path) -> bool:
    """Whether the newest checkpoint of a run is of its last step, or of the step at which early stopping ended it."""
    checkpoints = list(saved_checkpoints(run).values())
    if not checkpoints:
        return False
    try:
        newest = read_trainer_json(checkpoints[-1])
    except InputError:  # damaged: a resumed run writes it again
        return False
    state = newest.state
    given = newest.arguments.get("early_stopping")
    sources = [state.progress.source] if state.progress else []
    return state.step >= newest.num_steps or (given is not None and parse_early_stopping(given, sources).ends(state))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
