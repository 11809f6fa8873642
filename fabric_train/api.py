"""The programs as functions: ``tokenize``, ``train``, ``convert``, ``evaluate`` and ``generate``; and ``load_run``.

They take the arguments of the command lines by name, return results, raise exceptions and never exit the process. The
command lines parse, call the functions here that take an object of arguments, and print what these return.
"""

import csv
import dataclasses
import gc
import inspect
import json
import math
import os
import reprlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from fabric_train.__main__ import run_ranks, run_training
from fabric_train.arguments import TrainArguments
from fabric_train.cli.argument_types import default_of, groups_of, is_required
from fabric_train.cli.errors import InputError, RunError
from fabric_train.cli.launcher import find_launcher, launcher_arguments
from fabric_train.cli.parser import build_arguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.programs import convert_to_hf, tokenize_dataset
from fabric_train.tokenization.arguments import TokenizeArguments

if TYPE_CHECKING:
    from fabric_train.export.verification_report import VerificationReport
    from fabric_train.token_dataset.manifest import Ledger, Manifest

ARGUMENTS: dict[str, type] = {
    "tokenize": TokenizeArguments,
    "train": TrainArguments,
    "convert": convert_to_hf.ConvertArguments,
    "evaluate": EvaluateArguments,
    "generate": GenerateArguments,
}
"""The arguments of each function: its command line's."""


@contextmanager
def _called() -> Iterator[None]:
    """Give the caller back what a program changes in its process: environment, path, warnings, garbage collection."""
    before = dict(os.environ)
    path = list(sys.path)
    collects = gc.isenabled()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        sys.path[:] = path
        if collects:
            gc.enable()


# ---------------------------------------------------------------------------------------------------- token datasets


@dataclass(frozen=True)
class TokenizeResult:
    """A token dataset, or with ``shard`` a slice of one, which has no manifest yet."""

    path: Path
    manifest: "Manifest | None"
    """What ``manifest.json`` has: sources, tokenizer, settings, ledger."""
    notes: tuple[str, ...] = ()
    """What the user should read, such as losses of documents; of a slice, its summary."""
    url: str | None = None
    """With ``push_to_hub``: the page there."""

    @property
    def ledger(self) -> "Ledger":
        """The documents and tokens that were read, left out and packed, which balance."""
        if self.manifest is None:
            raise InputError(f"{self.path} is a slice: the merged slices have a ledger")
        return self.manifest.ledger


def tokenize(**given: Any) -> TokenizeResult:
    """Turn documents, chats or preference pairs into a token dataset, as ``tokenize_dataset.py`` does.

    ``dataset`` may also be an iterable of mappings, such as ``{"text": ...}`` or ``{"messages": [...]}``. It is read
    once, into the file ``OUTPUT_DIR.jsonl``, which is then the source: it is in the manifest by name and hash, and
    documents are traced to its lines. If the tokenization fails, the file is removed.

    Raises:
        InputError: the arguments or the input cannot be used; nothing is written.
        RunError: the push to the hub failed; the token dataset is complete.
    """
    documents = given.get("dataset")
    are_names = isinstance(documents, Sequence) and all(isinstance(one, str | os.PathLike) for one in documents)
    if documents is None or isinstance(documents, str | bytes | os.PathLike) or are_names:
        return run_tokenize(build_arguments(TokenizeArguments, given))
    if isinstance(documents, Mapping | Set) or not isinstance(documents, Iterable):
        raise InputError(f"--dataset: expected names or an iterable of documents, got {reprlib.repr(documents)}")
    output_dir = given.get("output_dir")
    if not isinstance(output_dir, str | os.PathLike) or not os.fspath(output_dir):
        build_arguments(TokenizeArguments, {**given, "dataset": ["documents"]})  # says what is wrong with it
        raise InputError(f"--output_dir: expected text, got {output_dir!r}")
    # absolute: the documents may come from a generator that changes the working folder
    folder = os.path.abspath(os.path.expanduser(os.fspath(output_dir)))
    file = f"{folder}.jsonl"
    name = os.path.basename(file).replace("=", "_")  # what comes before the first = is the name of the source
    arguments = build_arguments(TokenizeArguments, {**given, "dataset": [f"{name}={file}"], "output_dir": folder})
    with tokenize_dataset.written_documents(documents, Path(file), folder):
        return run_tokenize(arguments)


def run_tokenize(arguments: TokenizeArguments) -> TokenizeResult:
    """Write the token dataset or the slice that ``arguments`` describe, unless it is finished and only pushed."""
    path = Path(arguments.output_dir)
    with _called():
        if arguments.shard is not None:
            return TokenizeResult(path, None, tuple(tokenize_dataset.build_slice(arguments) or ()))
        manifest = tokenize_dataset.find_pushed(arguments)
        notes: tuple[str, ...] = ()
        if manifest is None:
            outcome = tokenize_dataset.build_dataset(arguments)
            manifest = outcome.manifest
            notes = (*outcome.notes, *outcome.manifest.losses())
        url = None
        if arguments.push_to_hub:
            from fabric_train.export.publish import publish  # slow

            url = publish(arguments, path.expanduser(), manifest)
    return TokenizeResult(path, manifest, notes, url)


# ---------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class TrainResult:
    """How a training ended."""

    folder: Path
    """The run: ``output_dir``."""
    state: Literal["done", "stopped", "checked"]
    """"stopped" by a signal, after saving: ``resume=True`` continues. "checked" if ``plan`` was given."""
    step: int
    """The optimizer step that the newest checkpoint was saved after."""
    train_loss: float | None = None
    """Of that step, in nats per token."""
    val_loss: float | None = None
    """After that step, or with ``eval_only`` the result; None if it was not evaluated then."""
    checkpoint: Path | None = None
    """The newest one."""
    best: Path | None = None
    """The one with the lowest validation loss."""


def train(**given: Any) -> TrainResult:
    """Train a Hugging Face causal language model on a token dataset or texts, as ``fabric run fabric_train`` does.

    One device trains in this process, as does a rank that a launcher has started. For several devices, the ranks are
    processes of ``python -m fabric_train``: they import the modules that have registered objectives, optimizers,
    metrics and loggers here. What the script itself has registered cannot be imported, and is refused.
    Lines of the run are printed, and are in ``RUN/run.log``. A stop signal, such as Ctrl-C, ends the run after it has
    saved, and the result says so; where nothing is to be saved, Ctrl-C raises KeyboardInterrupt.

    Raises:
        InputError: the arguments, the data and the model do not fit together; nothing is written.
        RunError: the training failed; checkpoints saved before stay.
    """
    try:
        launcher = launcher_arguments()
    except ValueError as error:
        raise InputError(*error.args) from error
    return run_train(build_arguments(TrainArguments, given, launcher))


def run_train(arguments: TrainArguments) -> TrainResult:
    """Train in this process, or in ranks that it starts, and return how it ended."""
    from fabric_train.distributed import strategy
    from fabric_train.distributed.signals import stop_signals
    from fabric_train.training.rank_extensions import arguments_for_ranks, folders_for_ranks
    from fabric_train.training.run_log import end_log, start_log

    device = arguments.device
    with _called():
        if not arguments.planning.plan and find_launcher() is None:
            accelerator = strategy.resolve_accelerator(device.accelerator)
            if strategy.count_devices(device.devices, accelerator) > 1:
                arguments = arguments_for_ranks(arguments)
                return _train_result(arguments, run_ranks(arguments, folders_for_ranks(arguments)))
        console = start_log()
        try:
            return _train_result(arguments, run_training(arguments, console))
        finally:
            stop_signals.release()
            end_log()
            if find_launcher() is None:
                _forget_process_group()


def _forget_process_group() -> None:
    """Destroy what a run that failed has left of its process group of one rank."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _train_result(arguments: TrainArguments, code: int) -> TrainResult:
    from fabric_train import checkpoint as checkpoints

    folder = Path(arguments.save.output_dir)
    evaluation = arguments.evaluation
    if arguments.planning.plan:
        return TrainResult(folder, "checked", 0)
    if evaluation.eval_only:
        found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        return TrainResult(folder, "done", found["step"], None, found["loss"])
    if evaluation.self_check:
        if code:
            raise RunError(f"the ways to split a window do not agree: see {folder / 'self_check.json'}")
        return TrainResult(folder, "done", 0)
    state: Literal["done", "stopped"] = "stopped" if code else "done"
    newest = checkpoints.newest_checkpoint(folder)
    if newest is None:  # a signal came before the first step
        return TrainResult(folder, state, 0)
    saved = checkpoints.read_trainer_json(newest).state
    best = checkpoints.best_checkpoint(folder)
    return TrainResult(folder, state, saved.step, saved.train_loss, saved.val_loss, newest, best)


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path
    arguments: dict[str, Any]
    """As in ``config.yaml``."""
    metrics: dict[str, list[float | None]]
    """The columns of ``metrics.csv``, also of the runs that it branched off: ``pandas.DataFrame(run.metrics)``.

    Rows have rising steps; None is an empty cell.
    """
    checkpoints: dict[int, Path]
    """By step, the oldest first."""
    best: Path | None
    """The checkpoint with the lowest validation loss."""
    report: Path | None
    """Its ``report.html``, if it has been written."""


def load_run(path: "str | os.PathLike[str]") -> Run:
    """Read a run folder: also a copy, an old run, or one that still trains. A checkpoint, RUN/best, means its run.

    Raises:
        InputError: the folder is no run, or a file of it is damaged.
    """
    from fabric_train.checkpoint import best_checkpoint
    from fabric_train.report.run_files import open_runs
    from fabric_train.report.write import PAGE

    if not isinstance(path, str | os.PathLike):
        raise InputError(f"load_run: expected the path of a run folder, got {reprlib.repr(path)}")
    (files,) = open_runs([os.fsdecode(path)])
    folder = files.folder
    metrics: dict[str, list[float | None]] = {}
    if (folder / "metrics.csv").is_file():
        table = files.metrics
        of_columns = {name: column.tolist() for name, column in table.columns.items() if name != "step"}
        metrics = {name: [None if math.isnan(one) else one for one in of] for name, of in of_columns.items()}
        metrics = {"step": table.steps.tolist(), **metrics}
    report = folder / PAGE
    return Run(
        folder,
        files.config if (folder / "config.yaml").is_file() else {},
        metrics,
        files.checkpoints,
        best_checkpoint(folder),
        report if report.is_file() else None,
    )


# ------------------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Export:
    """A verified Hugging Face folder of one checkpoint, or of the average of several."""

    path: Path
    source: str
    """The checkpoint in words."""
    verification: "VerificationReport"
    """What a process of its own has compared with the checkpoint, and the differences that it found."""
    is_new: bool
    """False if an earlier call has made it."""
    url: str | None = None
    """With ``push_to_hub``: the page there."""


@dataclass(frozen=True)
class ConvertResult:
    """The exports of a conversion; ``path`` is ``output_dir``."""

    path: Path
    exports: list[Export]

    @property
    def verification(self) -> "VerificationReport":
        """Of the only export."""
        (export,) = self.exports
        return export.verification


def convert(**given: Any) -> ConvertResult:
    """Convert checkpoints to verified Hugging Face folders, as ``convert_to_hf.py`` does.

    Raises:
        InputError: the arguments or the checkpoints cannot be used.
        RunError: an export does not match its checkpoint, or a push failed. Of several, the others are finished.
    """
    arguments = build_arguments(convert_to_hf.ConvertArguments, given)
    with _called():
        targets, damaged, request = convert_to_hf.plan_exports(arguments)
        exports: list[Export] = []
        faults = [f"{name}: damaged" for name in damaged]
        for target, source in targets.items():
            try:
                report, is_new = convert_to_hf.export(source, target, arguments)
                url = convert_to_hf.publish(source, target, request, arguments) if request else None
            except (RunError, InputError, OSError) as error:
                if len(targets) == 1 and not damaged:
                    raise
                faults.append(f"{target.name}: {error}")
            else:
                exports.append(Export(target, source.describe(), report, is_new, url))
    if faults:
        raise RunError(f"not exported or not pushed: {'; '.join(faults)}")
    return ConvertResult(Path(arguments.output_dir), exports)


def evaluate(**given: Any) -> dict[str, Any]:
    """Compare models by their loss on texts, or evaluate each checkpoint of a run, as ``evaluate.py`` does.

    Return what ``OUTPUT_DIR/evaluation.json`` has: figures by model and source; with ``pairs`` or ``needle``, what
    ``pairs.json`` or ``needle.json`` has. With ``watch`` and ``tasks``, the rows of ``scores.csv`` are under "scores".

    Raises:
        InputError: the arguments, the models and the texts do not fit together; nothing is written.
        RunError: a model's loss is not finite, or a checkpoint cannot be evaluated; the others are.
    """
    arguments = build_arguments(EvaluateArguments, given)
    folder = Path(arguments.output_dir or Path(arguments.watch or "", "evaluation"))
    found: dict[str, Any] = {}
    with _called():
        if arguments.watch is None:
            from fabric_train.evaluation.compare_models import compare_models

            compare_models(arguments, prints=False)
        else:
            from fabric_train.evaluation.watch import watch_run

            watch_run(arguments, prints=False)
    if arguments.watch is None or arguments.texts is not None:
        kind = next((name for name in ("pairs", "needle") if getattr(arguments, name) is not None), "evaluation")
        found |= json.loads((folder / f"{kind}.json").read_text(encoding="utf-8"))
    if arguments.tasks is not None:
        with (folder / "scores.csv").open(encoding="utf-8", newline="") as rows:
            found["scores"] = list(csv.DictReader(rows))
    return found


def generate(**given: Any) -> list[str]:
    """Continue a prompt, answer it as a chat, or write texts for many prompts, as ``generate.py`` does.

    Return the new text after each prompt. ``prompts`` may also be a list: each one a text, or a mapping with
    ``messages``. Then, as with a file, ``output`` may be left out.

    Raises:
        InputError: the arguments, the prompts and the model do not fit together.
    """
    listed = given.get("prompts")
    is_listed = isinstance(listed, Iterable) and not isinstance(listed, str | bytes | os.PathLike | Mapping)
    with TemporaryDirectory() as folder, _called():
        file = Path(folder, "prompts.jsonl")
        output = given.get("output") or Path(folder, "texts.jsonl")
        if is_listed:
            file.write_text("".join(_prompt_lines(listed or ())), encoding="utf-8")
            given = {**given, "prompts": file}
        if listed is not None:
            given = {**given, "output": output}
        arguments = build_arguments(GenerateArguments, given)
        from fabric_train.inference.conversation import continue_prompt
        from fabric_train.inference.text_file import write_texts

        if arguments.prompts is None:
            if arguments.prompt is None:
                raise InputError(
                    "--prompt is required, or --prompts: a chat in the terminal is of fabric-train generate"
                )
            return [continue_prompt(arguments)[1].text]
        write_texts(arguments)
        return [json.loads(line)["text"] for line in Path(output).read_text(encoding="utf-8").splitlines()]


def _prompt_lines(prompts: Iterable[Any]) -> Iterator[str]:
    """Yield the lines of a file of prompts."""
    for number, prompt in enumerate(prompts, 1):
        row = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        try:
            yield json.dumps(row) + "\n"
        except (TypeError, ValueError) as error:
            expected = "expected a text, or a mapping with messages"
            raise InputError(f"--prompts: prompt {number}: {expected}; {error}") from error


def _set_signatures(functions: Mapping[str, Any]) -> None:
    """Give the functions the names and defaults of their arguments, for ``help`` and the completion in notebooks."""
    for name, kind in ARGUMENTS.items():
        fields = [field for group in groups_of(kind).values() for field in dataclasses.fields(group)]
        none = inspect.Parameter.empty
        defaults = {field.name: none if is_required(field) else default_of(field) for field in fields}
        named = {**defaults, "config": None}.items()
        parameters = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=default) for one, default in named]
        functions[name].__signature__ = inspect.Signature(parameters)


_set_signatures(globals())
