"""The programs as Python functions: ``tokenize``, ``train``, ``convert``, ``evaluate``, ``generate``; and ``load_run``.

Each function takes the arguments of its command line as keywords, returns a result, raises exceptions and never exits
the process. The command lines call functions that take parsed arguments, such as ``run_train``, and print the result.
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
"""The class with each function's arguments, which are those of its command line."""


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore what a program changes in this process: environment, import path, warnings, garbage collection."""
    environment = dict(os.environ)
    import_path = list(sys.path)
    collects_garbage = gc.isenabled()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = import_path
        if collects_garbage:
            gc.enable()


# ---------------------------------------------------------------------------------------------------- token datasets


@dataclass(frozen=True)
class TokenizeResult:
    """The token dataset that was written. With ``shard``, it is a slice of one, which has no manifest yet."""

    path: Path
    manifest: "Manifest | None"
    """The content of ``manifest.json``: sources, tokenizer, settings, ledger."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as how many documents were lost; for a slice, its summary."""
    url: str | None = None
    """The page on the hub, with ``push_to_hub``."""

    @property
    def ledger(self) -> "Ledger":
        """The number of documents and tokens that were read, left out and packed; nothing is unaccounted for."""
        if self.manifest is None:
            raise InputError(f"{self.path} is a slice, which has no ledger; merge the slices to get one")
        return self.manifest.ledger


def tokenize(**arguments: Any) -> TokenizeResult:
    """Turn documents, chats or preference pairs into a token dataset, as ``tokenize_dataset.py`` does.

    ``dataset`` may also be an iterable of mappings, such as ``{"text": ...}`` or ``{"messages": [...]}``. It is read
    once and written to ``OUTPUT_DIR.jsonl``, which becomes the source: the manifest has its name and hash, and
    documents are traced to its lines. If the tokenization fails, the file is removed.

    Raises:
        InputError: the arguments or the input cannot be used; nothing is written.
        RunError: the push to the hub failed; the token dataset is complete.
    """
    dataset = arguments.get("dataset")
    # None and bytes too: the check of the arguments says what is wrong with them
    has_one_name = dataset is None or isinstance(dataset, str | bytes | os.PathLike)
    if has_one_name or _is_sequence_of_names(dataset):
        return run_tokenize(build_arguments(TokenizeArguments, arguments))
    if isinstance(dataset, Mapping | Set) or not isinstance(dataset, Iterable):
        raise InputError(f"--dataset: expected names or an iterable of documents, got {reprlib.repr(dataset)}")
    return _tokenize_documents(dataset, arguments)


def _is_sequence_of_names(dataset: object) -> bool:
    return isinstance(dataset, Sequence) and all(isinstance(name, str | os.PathLike) for name in dataset)


def _tokenize_documents(documents: Iterable[Any], arguments: Mapping[str, Any]) -> TokenizeResult:
    """Write documents to a file next to the token dataset, and tokenize that file."""
    output_dir = arguments.get("output_dir")
    if not isinstance(output_dir, str | os.PathLike) or not os.fspath(output_dir):
        build_arguments(TokenizeArguments, {**arguments, "dataset": ["documents"]})  # says what is wrong with it
        raise InputError(f"--output_dir: expected text, got {output_dir!r}")
    # absolute: the documents may come from a generator that changes the working folder
    dataset_dir = os.path.abspath(os.path.expanduser(os.fspath(output_dir)))
    file = f"{dataset_dir}.jsonl"
    source_name = os.path.basename(file).replace("=", "_")  # what comes before the first = names the source
    tokenize_arguments = build_arguments(
        TokenizeArguments, {**arguments, "dataset": [f"{source_name}={file}"], "output_dir": dataset_dir}
    )
    with tokenize_dataset.written_documents(documents, Path(file), dataset_dir):
        return run_tokenize(tokenize_arguments)


def run_tokenize(arguments: TokenizeArguments) -> TokenizeResult:
    """Write the token dataset or the slice that ``arguments`` describe; a finished token dataset is only pushed."""
    path = Path(arguments.output_dir)
    with _restored_process():
        if arguments.shard is not None:
            slice_notes = tokenize_dataset.build_slice(arguments) or ()
            return TokenizeResult(path, manifest=None, notes=tuple(slice_notes))
        manifest = tokenize_dataset.find_finished_to_push(arguments)
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
    """The run folder, ``output_dir``."""
    state: Literal["done", "stopped", "checked"]
    """"stopped": a signal ended the run after saving; ``resume=True`` continues it. "checked": ``plan`` was given."""
    step: int
    """The optimizer step after which the newest checkpoint was saved."""
    train_loss: float | None = None
    """The training loss of ``step``, in nats per token."""
    val_loss: float | None = None
    """The validation loss after ``step``, or the result of ``eval_only``; None if that step was not evaluated."""
    val_reward: float | None = None
    """The mean reward of ``validation_prompts`` after ``step``; None if that step was not evaluated on prompts."""
    checkpoint: Path | None = None
    """The newest checkpoint."""
    best: Path | None = None
    """The checkpoint with the lowest validation loss, or the highest validation reward."""


def train(**arguments: Any) -> TrainResult:
    """Train a Hugging Face causal language model on a token dataset or texts, as ``fabric run fabric_train`` does.

    On one device, or in a rank that a launcher has started, the training runs in this process. On several devices, this
    process starts a process of ``python -m fabric_train`` for each rank. The ranks import the modules that have
    registered objectives, optimizers, metrics and loggers here. A part that the script itself has registered cannot be
    imported, so it is refused.

    The log is printed and written to ``RUN/run.log``. A stop signal, such as Ctrl-C, saves a checkpoint and ends the
    run, and the ``state`` of the result is "stopped". If there is nothing to save, Ctrl-C raises KeyboardInterrupt.

    Raises:
        InputError: the arguments, the data and the model do not fit together; nothing is written.
        RunError: the training failed; checkpoints that were saved before are kept.
    """
    try:
        values_of_launcher = launcher_arguments()  # such as the number of devices
    except ValueError as error:  # wrong variables of the launcher, a message each
        raise InputError(*error.args) from error
    return run_train(build_arguments(TrainArguments, arguments, values_of_launcher))


def run_train(arguments: TrainArguments) -> TrainResult:
    """Train in this process, or in ranks that it starts, and return how the training ended."""
    from fabric_train.distributed import strategy
    from fabric_train.distributed.signals import stop_signals
    from fabric_train.training.rank_extensions import arguments_for_ranks, folders_for_ranks
    from fabric_train.training.run_log import end_log, start_log

    device = arguments.device
    with _restored_process():
        # Several devices without a launcher: other processes train. A plan needs only this one.
        if not arguments.planning.plan and find_launcher() is None:
            accelerator = strategy.resolve_accelerator(device.accelerator)
            if strategy.count_devices(device.devices, accelerator) > 1:
                arguments = arguments_for_ranks(arguments)
                exit_code = run_ranks(arguments, folders_for_ranks(arguments))
                return _read_train_result(arguments, exit_code)
        # One device, a rank of a launcher, or a plan.
        console = start_log()
        try:
            exit_code = run_training(arguments, console)
            return _read_train_result(arguments, exit_code)
        finally:
            stop_signals.release()
            end_log()
            if find_launcher() is None:
                _forget_process_group()


def _forget_process_group() -> None:
    """Destroy the process group of one rank that a failed run has left behind."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _read_train_result(arguments: TrainArguments, exit_code: int) -> TrainResult:
    """Read how a training ended from the files that it has written."""
    from fabric_train import checkpoint as checkpoints

    run_dir = Path(arguments.save.output_dir)
    evaluation = arguments.evaluation
    if arguments.planning.plan:
        return TrainResult(run_dir, "checked", step=0)
    if evaluation.eval_only:
        result = json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))
        return TrainResult(run_dir, "done", step=result["step"], val_loss=result["loss"])
    if evaluation.self_check:
        if exit_code:
            raise RunError(f"the ways to split a window disagree; see {run_dir / 'self_check.json'}")
        return TrainResult(run_dir, "done", step=0)
    ending: Literal["done", "stopped"] = "stopped" if exit_code else "done"
    newest = checkpoints.newest_checkpoint(run_dir)
    if newest is None:  # a signal came before the first step
        return TrainResult(run_dir, ending, step=0)
    state = checkpoints.read_trainer_json(newest).state
    val_reward = None
    if state.evaluation is not None and state.evaluation.whole.of_completions:
        val_reward = state.evaluation.loss_of("all")
    return TrainResult(
        folder=run_dir,
        state=ending,
        step=state.step,
        train_loss=state.train_loss,
        val_loss=state.val_loss,
        val_reward=val_reward,
        checkpoint=newest,
        best=checkpoints.best_checkpoint(run_dir),
    )


@dataclass(frozen=True)
class Run:
    """The files of a run."""

    folder: Path
    arguments: dict[str, Any]
    """The arguments in ``config.yaml``."""
    metrics: dict[str, list[float | None]]
    """The columns of ``metrics.csv``, after the steps of runs that it branched off: ``pandas.DataFrame(run.metrics)``.

    Rows are in the order of steps; an empty cell is None.
    """
    checkpoints: dict[int, Path]
    """The checkpoint folders by step, the oldest first."""
    best: Path | None
    """The checkpoint with the lowest validation loss, or the highest validation reward."""
    report: Path | None
    """The run's ``report.html``, if it has been written."""


def load_run(path: "str | os.PathLike[str]") -> Run:
    """Read a run folder: also a copy, an old run, or one that is still training. A checkpoint, RUN/best, means its run.

    Raises:
        InputError: the folder is not a run, or one of its files is damaged.
    """
    from fabric_train.checkpoint import best_checkpoint
    from fabric_train.report.write import PAGE
    from fabric_train.run_folder.run_folder import RunFolder, find_run_folders

    if not isinstance(path, str | os.PathLike):
        raise InputError(f"load_run: expected the path of a run folder, got {reprlib.repr(path)}")
    (run_dir,) = find_run_folders([os.fsdecode(path)])
    files = RunFolder(run_dir)
    metrics: dict[str, list[float | None]] = {}
    if files.has_metrics:
        metrics["step"] = files.metrics.steps.tolist()
        for name, values in files.metrics.columns.items():
            if name != "step":
                metrics[name] = [None if math.isnan(value) else value for value in values.tolist()]
    report = run_dir / PAGE
    return Run(
        folder=run_dir,
        arguments=files.config if files.has_config else {},
        metrics=metrics,
        checkpoints=files.checkpoints,
        best=best_checkpoint(run_dir),
        report=report if report.is_file() else None,
    )


# ------------------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Export:
    """A verified Hugging Face folder of one checkpoint, or of the average of several."""

    path: Path
    source: str
    """A description of the checkpoint."""
    verification: "VerificationReport"
    """The differences that a separate process found between the export and the checkpoint."""
    is_new: bool
    """False if an earlier call has written it."""
    url: str | None = None
    """The page on the hub, with ``push_to_hub``."""


@dataclass(frozen=True)
class ConvertResult:
    """The exports of one conversion; ``path`` is ``output_dir``."""

    path: Path
    exports: list[Export]

    @property
    def verification(self) -> "VerificationReport":
        """The verification of the only export."""
        (export,) = self.exports
        return export.verification


def convert(**arguments: Any) -> ConvertResult:
    """Convert checkpoints to verified Hugging Face folders, as ``convert_to_hf.py`` does.

    Raises:
        InputError: the arguments or the checkpoints cannot be used.
        RunError: an export does not match its checkpoint, or a push failed. Other exports are finished.
    """
    convert_arguments = build_arguments(convert_to_hf.ConvertArguments, arguments)
    with _restored_process():
        plan = convert_to_hf.plan_exports(convert_arguments)
        # A fault in one of several checkpoints leaves the others to be exported.
        exports: list[Export] = []
        faults = [f"{name}: damaged" for name in plan.damaged]
        for target, source in plan.sources.items():
            try:
                report, is_new = convert_to_hf.export(source, target, convert_arguments)
                url = None
                if plan.push_request:
                    url = convert_to_hf.publish(source, target, plan.push_request, convert_arguments)
            except (RunError, InputError, OSError) as error:
                if len(plan.sources) == 1 and not plan.damaged:
                    raise
                faults.append(f"{target.name}: {error}")
            else:
                exports.append(Export(target, source.describe(), report, is_new, url))
    if faults:
        raise RunError(f"not exported or not pushed: {'; '.join(faults)}")
    return ConvertResult(Path(convert_arguments.output_dir), exports)


def evaluate(**arguments: Any) -> dict[str, Any]:
    """Compare models by their loss on texts, or run tasks on models or a run's checkpoints, as ``evaluate.py`` does.

    Return the content of ``OUTPUT_DIR/evaluation.json``, which has figures by model and source. With ``pairs``, return
    the content of ``pairs.json`` instead; with ``tasks``, the rows of ``scores.csv`` under the key "scores".

    Raises:
        InputError: the arguments, the models and the texts do not fit together; nothing is written.
        RunError: a model's loss is not finite, or a checkpoint cannot be evaluated. The others are evaluated.
    """
    evaluate_arguments = build_arguments(EvaluateArguments, arguments)
    if evaluate_arguments.output_dir:
        output_dir = Path(evaluate_arguments.output_dir)
    else:
        output_dir = Path(evaluate_arguments.watch or "", "evaluation")
    compares_losses = evaluate_arguments.watch is None and evaluate_arguments.tasks is None
    with _restored_process():
        if compares_losses:
            from fabric_train.evaluation.compare_models import compare_models

            compare_models(evaluate_arguments, prints=False)
        else:
            from fabric_train.evaluation.watch import watch_run

            watch_run(evaluate_arguments, prints=False)

    results: dict[str, Any] = {}
    if compares_losses or evaluate_arguments.texts is not None:  # ``watch_run`` compares losses too if it has texts
        file_name = "evaluation.json" if evaluate_arguments.pairs is None else "pairs.json"
        results |= json.loads((output_dir / file_name).read_text(encoding="utf-8"))
    if evaluate_arguments.tasks is not None:
        with (output_dir / "scores.csv").open(encoding="utf-8", newline="") as file:
            results["scores"] = list(csv.DictReader(file))
    return results


def generate(**arguments: Any) -> list[str]:
    """Continue a prompt, answer it as a chat, or write texts for many prompts, as ``generate.py`` does.

    Return the new text after each prompt. ``prompts`` may also be a list of texts, or of mappings with ``messages``.
    With ``prompts``, ``output`` may be left out.

    Raises:
        InputError: the arguments, the prompts and the model do not fit together.
    """
    prompts = arguments.get("prompts")
    with TemporaryDirectory() as temporary_dir, _restored_process():
        output = arguments.get("output") or Path(temporary_dir, "texts.jsonl")
        if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | os.PathLike | Mapping):
            prompts_file = Path(temporary_dir, "prompts.jsonl")
            prompts_file.write_text("".join(_prompt_lines(prompts)), encoding="utf-8")
            arguments = {**arguments, "prompts": prompts_file}
        if prompts is not None:
            arguments = {**arguments, "output": output}
        generate_arguments = build_arguments(GenerateArguments, arguments)
        from fabric_train.inference.conversation import continue_prompt
        from fabric_train.inference.text_file import write_texts

        if generate_arguments.prompts is not None:
            write_texts(generate_arguments)
            lines = Path(output).read_text(encoding="utf-8").splitlines()
            return [json.loads(line)["text"] for line in lines]
        if generate_arguments.prompt is None:
            raise InputError("--prompt or --prompts is required; only fabric-train generate can chat in the terminal")
        return [continue_prompt(generate_arguments)[1].text]


def _prompt_lines(prompts: Iterable[Any]) -> Iterator[str]:
    """Yield prompts as the lines of a file for ``--prompts``."""
    for number, prompt in enumerate(prompts, 1):
        row = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        try:
            yield json.dumps(row) + "\n"
        except (TypeError, ValueError) as error:
            expected = "expected a text, or a mapping with messages"
            raise InputError(f"--prompts: prompt {number}: {expected}; {error}") from error


def _set_signatures(functions: Mapping[str, Any]) -> None:
    """Give the functions the names and defaults of their arguments, for ``help`` and the completion in notebooks."""
    for name, arguments_class in ARGUMENTS.items():
        defaults: dict[str, Any] = {}
        for group in groups_of(arguments_class).values():
            for field in dataclasses.fields(group):
                defaults[field.name] = inspect.Parameter.empty if is_required(field) else default_of(field)
        defaults["config"] = None
        parameters = []
        for argument, default in defaults.items():
            parameters.append(inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY, default=default))
        functions[name].__signature__ = inspect.Signature(parameters)


_set_signatures(globals())
