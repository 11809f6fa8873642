"""Evaluate models, and a run's checkpoints while it trains or afterwards, on lm_eval's tasks and on texts.

Any number of watchers may share the output folder: a lock for each model keeps them apart.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.checkpoint import saved_checkpoints
from fabric_train.cli.errors import InputError, RunError, missing_folder
from fabric_train.cli.output import open_console
from fabric_train.evaluation import loss_table, scores
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import check_output
from fabric_train.evaluation.lm_eval_worker import RequestedTask, WorkerRequest, check_lengths, evaluate_in_worker
from fabric_train.evaluation.models import FOLDER, check_all_evaluated, find_models, identity_of_files
from fabric_train.evaluation.scores import ModelScores, ScoreTable
from fabric_train.evaluation.task_file import LanguageTask, TaskSettings, read_tasks
from fabric_train.evaluation.texts import NUM_DIGITS, DocumentTexts, full_digest, identity_of, open_texts
from fabric_train.files.atomic_folder import hold_lock, wait_for_lock
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.requirements import check_package
from fabric_train.run_folder.run_folder import RunFolder

_SECONDS_BETWEEN_LOOKS = 10.0

Evaluate = Callable[[WorkerRequest], int]
"""A function that evaluates a model on the tasks of a request, writes its scores, and returns an exit code."""


@dataclass(frozen=True)
class WatchedModel:
    """A checkpoint of the run, or a model to compare it with, which has no step."""

    name: str
    source: str
    """The argument of ``load_for_inference``."""
    step: int | None
    identity: str
    """A text that changes when the weights change."""

    @property
    def weights(self) -> str:
        """The hash that identifies the weights in ``documents.jsonl``."""
        return self.identity[:NUM_DIGITS]

    @property
    def unscored(self) -> ModelScores:
        """The scores of a model that has not been evaluated."""
        return ModelScores(self.name, self.step, self.identity, [])

    @property
    def file_name(self) -> str:
        """The name of the file with its scores."""
        if self.step is not None:
            return f"{self.name}.json"
        # a name on the hub or a path, shortened; the digest keeps different names apart
        plain_name = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")[-60:]
        return f"model-{plain_name}-{full_digest(self.name)[:8]}.json"


@dataclass(frozen=True)
class WatchedTexts:
    """The texts of ``--texts``."""

    identities: frozenset[str]
    """The identity of each text, see ``texts.identity_of``."""
    words: tuple[str, ...]
    """The words of a command line that evaluates a model on them."""

    @classmethod
    def open(cls, arguments: EvaluateArguments, output_dir: Path) -> "WatchedTexts":
        """Read the texts, and check that an earlier evaluation in ``output_dir`` used the same texts."""
        assert arguments.texts is not None
        texts = open_texts(arguments.texts, arguments.text_column, output_dir / FOLDER / "downloads")
        identities = [identity_of(text, arguments.max_length, arguments.overlap) for text in texts]
        documents: dict[str, list[str]] = {}
        for text, identity in zip(texts, identities, strict=True):
            if isinstance(text, DocumentTexts):  # the documents of rows are known to the worker only
                documents.setdefault(text.name, []).extend([identity] * len(text.texts))
        loss_table.check_same_documents(loss_table.read_evaluated(output_dir), {}, documents, output_dir)

        words = ["--texts", *arguments.texts, "--output_dir", str(output_dir)]
        for name in ("text_column", "max_length", "overlap", "batch_tokens", "seed"):
            words += [f"--{name}", str(getattr(arguments, name))]
        return cls(frozenset(identities), tuple(words))

    def has_all(self, evaluated: loss_table.Evaluated, model: WatchedModel, name: str) -> bool:
        """Return whether a model with this name and these weights has been evaluated on each text."""
        evaluated_texts = set()
        for lines in evaluated.get(name, {}).values():
            evaluated_texts |= {line.text for line in lines if line.weights == model.weights}
        return self.identities <= evaluated_texts


@dataclass
class Watch:
    """Evaluates models and the checkpoints of a run, each once."""

    run: Path | None
    """None if only ``models`` are evaluated."""
    output: Path
    tasks: list[LanguageTask]
    models: list[WatchedModel]
    """The models in ``--models``."""
    batch_size: int
    evaluate: Evaluate
    texts: WatchedTexts | None = None
    """None without ``--texts``."""
    failed: dict[str, str] = field(default_factory=dict)
    """The names of models whose evaluation failed, by identity; these models are not tried again."""
    _expected: dict[str, Path] = field(default_factory=dict)
    """The pending checkpoints by name. A note is printed if the run removes one before its evaluation."""

    def pending(self) -> list[WatchedModel]:
        """Return the models to evaluate: first the other models, then the checkpoints by step."""
        evaluated = loss_table.read_evaluated(self.output) if self.texts else {}
        pending = []
        for model in self._all_models():
            if model.identity in self.failed:
                continue
            if self._lacks_texts(model, evaluated) or self._missing_tasks(model):
                pending.append(model)
        return pending

    def evaluate_next(self) -> bool:
        """Evaluate the first pending model that no other process is evaluating; return False if there is none."""
        # checkpoints that the run has removed since the last look
        pending = self.pending()
        for name, checkpoint in self._expected.items():
            if not checkpoint.exists():
                _print_line(
                    f"{name}: the run removed this checkpoint before it was evaluated; --keep_checkpoints keeps more"
                )
        self._expected = {model.name: Path(model.source) for model in pending if model.step is not None}

        # the first model whose lock is free; other watchers evaluate the others
        for model in pending:
            lock_file = self._file(model).with_suffix(".lock")
            with ExitStack() as lock:
                # an InputError of the evaluation itself does not mean that the lock is held
                try:
                    lock.enter_context(hold_lock(lock_file, "it is being evaluated", ""))
                except InputError:
                    continue
                self._evaluate(model)
            return True
        return False

    def write_table(self) -> ScoreTable:
        """Write the scores of all models as csv, Markdown and a picture; return the table."""
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
            table = scores.build_table(self.tasks, self._all_scores())
            open_console().print(scores.to_rich(table))

    def _missing_tasks(self, model: WatchedModel) -> list[TaskSettings]:
        """Return the tasks on which a model has not been evaluated."""
        if not self.tasks:
            return []
        model_scores = scores.read_scores(self._file(model), model.unscored)
        return model_scores.missing([task.settings for task in self.tasks])

    def _lacks_texts(self, model: WatchedModel, evaluated: loss_table.Evaluated) -> bool:
        return self.texts is not None and not self.texts.has_all(evaluated, model, self._name_on_texts(model))

    def _name_on_texts(self, model: WatchedModel) -> str:
        """Return the name of a model in ``evaluation.json``; a checkpoint has the name that RUN/all gives it."""
        if model.step is None:
            return model.name
        assert self.run is not None  # only its checkpoints have a step
        return str(self.run / model.name)

    def _evaluate(self, model: WatchedModel) -> None:
        """Evaluate a model on texts and then on the tasks that it lacks; if this fails, print why."""
        # texts
        exit_code = 0
        if self.texts is not None and self._lacks_texts(model, loss_table.read_evaluated(self.output)):
            _print_line(f"{model.name}: evaluating on texts")
            words = ["--models", self._name_on_texts(model), *self.texts.words]
            exit_code = self.evaluate(WorkerRequest(words=words))

        # tasks: looked for again, since another process may have added to the scores
        missing_tasks = [] if exit_code else self._missing_tasks(model)
        if missing_tasks:
            _print_line(f"{model.name}: evaluating {len(missing_tasks)} of {len(self.tasks)} tasks")
            exit_code = self.evaluate(self._task_request(model, missing_tasks))

        # the model counts as evaluated, as removed or as failed
        self._expected.pop(model.name, None)
        if exit_code and model.step is not None and not Path(model.source).exists():
            _print_line(
                f"{model.name}: the run removed this checkpoint while it was being loaded; --keep_checkpoints keeps "
                "more"
            )
        elif exit_code:
            reason = f"exit code {exit_code}, see above"
            if exit_code < 0:
                reason = f"signal {-exit_code}; memory may have run out"
            _print_line(f"{model.name}: not evaluated ({reason}); the next start tries again")
            self.failed[model.identity] = model.name

    def _task_request(self, model: WatchedModel, missing_tasks: list[TaskSettings]) -> WorkerRequest:
        sources = {task.settings: task.source for task in self.tasks}
        file = self._file(model)
        return WorkerRequest(
            tasks=[RequestedTask(settings, sources[settings]) for settings in missing_tasks],
            source=model.source,
            file=str(file),
            scores=scores.read_scores(file, model.unscored),
            batch_size=self.batch_size,
        )

    def _all_models(self) -> Iterator[WatchedModel]:
        """Yield the models in ``--models``, then the checkpoints of the run by step."""
        yield from self.models
        if self.run is None:
            return
        for step, checkpoint in saved_checkpoints(self.run).items():
            with suppress(FileNotFoundError):
                identity = full_digest(identity_of_files(checkpoint))
                if checkpoint.is_dir():  # else the run has just removed it
                    yield WatchedModel(checkpoint.name, str(checkpoint), step, identity)

    def _all_scores(self) -> list[ModelScores]:
        """Return the scores of all models, beginning with ``models``, and including checkpoints that were removed."""
        models_by_file = {self._file(model): model for model in self._all_models()}
        all_scores = [scores.read_scores(file, model.unscored) for file, model in models_by_file.items()]
        for pattern in ("model-*.json", "step-*.json"):
            for file in sorted(self.output.glob(pattern)):
                if file not in models_by_file:
                    all_scores.append(scores.read_score_file(file))
        return [model_scores for model_scores in all_scores if model_scores.scores]

    def _file(self, model: WatchedModel) -> Path:
        return self.output / model.file_name


def watch_run(arguments: EvaluateArguments, evaluate: Evaluate = evaluate_in_worker, *, prints: bool = True) -> None:
    """Evaluate the models in ``--models`` and the checkpoints of ``--watch`` until nothing is left to evaluate.

    With ``--watch`` and ``--wait true``, wait for more checkpoints until the run has ended.

    Args:
        arguments: The arguments of ``evaluate.py``.
        evaluate: The function that evaluates a model.
        prints: Whether to print tables.

    Raises:
        InputError: an argument, a text or a model is wrong; nothing has been written.
        RunError: a model could not be evaluated; the others have been evaluated.
    """
    # check everything before anything is evaluated
    run = None
    if arguments.watch is not None:
        run = Path(arguments.watch)
        if not run.is_dir():
            raise InputError(f"--watch {run}: {missing_folder(run)}; give the folder of a run")
        if not arguments.wait and not saved_checkpoints(run):
            raise InputError(f"--watch {run}: it has no checkpoint yet; --wait true waits for the first one")
    tasks = read_tasks(arguments.tasks) if arguments.tasks is not None else []
    if tasks:
        check_package("lm_eval", "--tasks")

    # the models to evaluate beside the run's checkpoints
    compared_models, damaged = find_models(arguments.models or [])
    models = []
    for model in compared_models:
        check_lengths(f"--models {model.name}", model.max_positions, [task.settings for task in tasks])
        models.append(WatchedModel(model.name, model.source, step=None, identity=full_digest(model.identity)))

    # the folder of the results, and the texts
    if arguments.output_dir is not None:
        output_dir = Path(arguments.output_dir)
    else:
        assert run is not None  # EvaluateArguments.faults
        output_dir = run / "evaluation"
    adds_to_evaluation = run is None or arguments.texts is not None
    if adds_to_evaluation:
        check_output(output_dir)
    texts = WatchedTexts.open(arguments, output_dir) if arguments.texts is not None else None
    watch = Watch(
        run=run,
        output=output_dir,
        tasks=tasks,
        models=models,
        batch_size=arguments.batch_size,
        evaluate=evaluate,
        texts=texts,
    )

    # load the tasks once, if a model is to be evaluated on them now or later
    pending = watch.pending()
    may_follow = run is not None and arguments.wait and not RunFolder(run).has_ended
    if tasks and (pending or may_follow):
        model_source = pending[0].source if pending else ""
        _check_tasks(tasks, model_source, prints=prints)

    # evaluate
    if adds_to_evaluation:
        # marks an evaluation, which the workers and the next start may add to
        (output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    _evaluate_all(watch, arguments, prints=prints)

    # write and print the results
    watch.write_table()
    if prints:
        watch.print_tables(arguments.seed)
    _print_line(f"written to {output_dir}")
    if watch.failed:
        raise RunError(f"not evaluated (see above): {', '.join(watch.failed.values())}")
    check_all_evaluated(damaged)


def _check_tasks(tasks: list[LanguageTask], model_source: str, *, prints: bool) -> None:
    """Load the tasks in a separate process, which prints their faults.

    Tasks that generate their texts need the tokenizer of a model, ``model_source``. If that is empty, there is no model
    yet, and the process that evaluates the next checkpoint loads these tasks.

    Raises:
        RunError: a task cannot be loaded, and this program does not print.
        SystemExit: a task cannot be loaded; it has the exit code of that process.
    """
    _print_line("loading the tasks")
    requested = [RequestedTask(task.settings, task.source, task.metric) for task in tasks]
    exit_code = evaluate_in_worker(WorkerRequest(requested, model_source))
    if exit_code and not prints:
        raise RunError("lm_eval cannot load the tasks; standard error shows why")
    if exit_code:
        raise SystemExit(exit_code)


def _evaluate_all(watch: Watch, arguments: EvaluateArguments, *, prints: bool) -> None:
    """Evaluate all pending models; with ``--wait true``, also checkpoints that the run saves until it ends."""
    is_waiting = False
    while True:
        # looked at before the checkpoints: one that is saved in between is found in the next round
        has_ended = watch.run is None or RunFolder(watch.run).has_ended
        if watch.evaluate_next():
            is_waiting = False
            watch.write_table()
            if prints and sys.stdout.isatty():
                watch.print_tables(arguments.seed)
            continue
        if has_ended or not arguments.wait:
            return
        if not is_waiting:
            _print_line(f"waiting for the next checkpoint of {watch.run}; --wait false or Ctrl-C stops waiting")
        is_waiting = True
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
