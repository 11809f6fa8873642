"""Find the models of an evaluation before any is loaded, load each, and compute the loss of every predicted token.

Finished chunks of a text are kept on disk, so that a stopped evaluation can be resumed.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PretrainedConfig

from fabric_train.checkpoint import (
    checkpoints_of_all,
    describe_choice,
    find_checkpoint,
    is_short_name,
    means_all,
)
from fabric_train.checkpoint.adapter_base import find_base
from fabric_train.checkpoint.adapter_folder import (
    check_keeps_documents_apart,
    is_adapter,
    is_exported_adapter,
    read_base_name,
    trained_adapter,
)
from fabric_train.cli.errors import InputError, RunError, naming_option
from fabric_train.cli.output import open_console
from fabric_train.cli.progress import ThrottledLog
from fabric_train.data.batch import Batch
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.evaluation.texts import NUM_DIGITS, EncodedText, TextChunk, device_kind, full_digest
from fabric_train.inference.models_in_turn import ModelsInTurn
from fabric_train.inference.peft_adapter import check_adapter
from fabric_train.model.hf_model import check_readable, load_hf_tokenizer, read_shape
from fabric_train.model.rope_frequencies import choose_frequencies, identify_frequencies
from fabric_train.tokenization.tokenizers.tokenizer_comparison import compare_tokenizers
from fabric_train.training.objective import CrossEntropy

FOLDER = "token_losses"
ShowScored = Callable[[str, int], None]
"""A function that shows progress: the model, and the number of tokens scored since the last call."""


@dataclass(frozen=True)
class ComparedModel:
    """A model in ``--models``, with its name there."""

    name: str
    source: str
    """Its folder, or its name on the hub."""
    checkpoint: bool
    """Whether it is a checkpoint of a run."""
    identity: str
    """A text that changes when the weights change."""
    tokenizer: Any
    """A tokenizer of transformers."""
    tokenizer_id: str
    """A hash that is equal for tokenizers that give the same ids."""
    max_positions: int | None
    """None without a limit."""
    vocab_size: int
    """The number of rows of the embedding."""
    base: str
    """The location of the weights; for an adapter, of its base's weights."""
    config: PretrainedConfig

    @property
    def weights(self) -> str:
        """The hash that identifies the weights in ``documents.jsonl``."""
        return full_digest(self.identity)[:NUM_DIGITS]


def find_models(names: Sequence[str]) -> tuple[list[ComparedModel], list[str]]:
    """Find the models in ``--models``, where RUN/all means all checkpoints; also return the names of damaged ones."""
    models: dict[str, ComparedModel] = {}
    damaged_names: list[str] = []
    for name in names:
        model_names = [name]
        if means_all(Path(name)):
            run = Path(name).parent
            checkpoints, damaged_checkpoints = checkpoints_of_all(Path(name))
            model_names = [str(run / checkpoint.name) for checkpoint in checkpoints]
            damaged_names += [str(run / checkpoint.name) for checkpoint in damaged_checkpoints]
        for model_name in model_names:
            if model_name not in models:
                models[model_name] = find_model(model_name)
    return list(models.values()), damaged_names


def check_all_evaluated(damaged: Sequence[str]) -> None:
    """Raise a RunError if ``RUN/all`` has damaged checkpoints, after the others have been evaluated."""
    if damaged:
        names = ", ".join(damaged)
        raise RunError(f"not evaluated because they are damaged: {names}; remove them, or restore their files")


def find_model(name: str, tokenizer_dir: Path | None = None) -> ComparedModel:
    """Find a model: a checkpoint, a run (see ``find_checkpoint``), a Hugging Face folder, an adapter or a hub name.

    ``tokenizer_dir`` has the tokenizer of an adapter on this model, which then needs no tokenizer.
    """
    folder = Path(name)
    with naming_option("--models"):
        if not is_exported_adapter(folder):
            return _find_whole_model(name, tokenizer_dir)
        check_keeps_documents_apart(folder)
        check_adapter(folder)
        if tokenizer_dir is None and (folder / "tokenizer_config.json").is_file():
            tokenizer_dir = folder
        base = find_model(read_base_name(folder), tokenizer_dir)
        identity = f"{identity_of_files(folder)}\n{base.identity}"
        return replace(base, name=name, source=name, checkpoint=False, identity=identity)


def _find_whole_model(name: str, tokenizer_dir: Path | None) -> ComparedModel:
    """Find a model that is not an adapter for peft; see :func:`find_model`."""
    # a run's folder or short name means one of its checkpoints
    folder = Path(name)
    source = name
    if is_short_name(folder) or (folder.is_dir() and not (folder / "config.json").is_file()):
        checkpoint = find_checkpoint(folder)
        note = describe_choice(folder, checkpoint)
        if note and folder.name != checkpoint.name:
            print(f"note: {note}", file=sys.stderr)
        source = str(checkpoint)
    is_checkpoint = (Path(source) / "trainer.json").is_file()

    # refuse what cannot be evaluated
    shape = read_shape(source)
    if not is_checkpoint:
        check_readable(source)
    own_tokenizer = Path(source, "tokenizer") if is_checkpoint else source
    tokenizer = load_hf_tokenizer(tokenizer_dir or own_tokenizer)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError(f"--models {name}: its tokenizer has neither BOS nor EOS to begin a text with; add one")
    saved_base = None
    if is_checkpoint and is_adapter(Path(source)):
        trained_adapter(Path(source))  # reports packages that it needs
        saved_base = find_base(None, Path(source))

    if Path(source).is_dir():
        base = os.path.realpath(source)
        identity = identity_of_files(Path(source))
    else:  # a name on the hub
        base = source
        identity = f"{source} {shape.config._commit_hash}"
    if saved_base:
        base = saved_base.location
    return ComparedModel(
        name=name,
        source=source,
        checkpoint=is_checkpoint,
        identity=identity,
        tokenizer=tokenizer,
        tokenizer_id=_tokenizer_id(tokenizer),
        max_positions=shape.max_positions,
        vocab_size=shape.vocab_size,
        base=base,
        config=shape.config,
    )


def check_tokenizer(model: ComparedModel, dataset: TokenDataset) -> None:
    """Raise an InputError if the ids of a token dataset's tokenizer differ from the model's."""
    dataset_tokenizer = dataset.folder / "tokenizer" / "tokenizer.json"
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if dataset.manifest is None or not dataset_tokenizer.is_file() or backend is None:
        return
    record = dataset.manifest.tokenizer
    border_tokens = " ".join(token for token in (record.bos_token, record.eos_token) if token)
    with TemporaryDirectory() as folder:
        model_tokenizer = Path(folder, "tokenizer.json")
        backend.save(str(model_tokenizer))
        fault, _ = compare_tokenizers(dataset_tokenizer, model_tokenizer, border_tokens)
    if fault:
        raise InputError(
            f"{dataset.folder}: not tokenized with the tokenizer of {model.name}: {fault} (here: the token "
            "dataset's, there: the model's); give the original documents to --texts"
        )


def identity_of_files(folder: Path) -> str:
    """Return the checksums of a checkpoint, or the names, sizes and times of all files in any other folder."""
    checksums = folder / "checksums.json"
    if checksums.is_file():
        return checksums.read_text(encoding="utf-8")
    lines = [os.path.realpath(folder)]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = path.stat()
        lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(lines)


def _tokenizer_id(tokenizer: Any) -> str:
    """Return a hash of everything that decides the ids of a text and the tokens around it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        backend_content = json.loads(backend.to_str())
        content = [backend_content[name] for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
    content += [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return full_digest(json.dumps(content, sort_keys=True))


@contextmanager
def scoring_progress(total: int) -> Iterator[ShowScored]:
    """Yield a function that shows progress, as a bar on a terminal; ``total`` is the number of tokens to score."""
    log = ThrottledLog()
    started = time.monotonic()
    num_scored = 0

    def print_line(model: str, num_tokens: int) -> None:
        nonlocal num_scored
        num_scored += num_tokens
        seconds_left = 0.0
        if num_scored:
            seconds_per_token = (time.monotonic() - started) / num_scored
            seconds_left = max(seconds_per_token * (total - num_scored), 0)
        log(f"scoring {model}: {num_scored:,} of {total:,} tokens, about {seconds_left:.0f} s left")

    if not sys.stderr.isatty():
        yield print_line
        return

    # a bar
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=open_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda model, num_tokens: bar.update(task, advance=num_tokens, description=model)


class LossCache:
    """The finished chunks in ``folder``, as one file of fp32 losses for each chunk of a text and model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device = device_kind()

    def has(self, model: ComparedModel, chunk: TextChunk) -> bool:
        return self._file(model, chunk).is_file()

    def read(self, model: ComparedModel, chunk: TextChunk) -> np.ndarray | None:
        """Return the losses of a chunk, fp32 [its tokens]; None if it is not finished."""
        try:
            losses = np.load(self._file(model, chunk), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if not isinstance(losses, np.ndarray) or losses.dtype != np.float32 or losses.shape != (len(chunk.tokens),):
            return None  # damaged
        return losses

    def write(self, model: ComparedModel, chunk: TextChunk, losses: np.ndarray) -> None:
        """Store the losses of a chunk; the file is complete or absent."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(model, chunk)
        # another process may write the same chunk
        unfinished = file.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as opened:
            np.save(opened, losses, allow_pickle=False)
        unfinished.replace(file)

    def _file(self, model: ComparedModel, chunk: TextChunk) -> Path:
        key = f"{model.identity}\n{chunk.content}\n{self._device}"
        frequencies = identify_frequencies(model.config, chunk.longest_input)
        if frequencies:
            key += f"\n{frequencies}"
        return self._folder / f"{full_digest(key)[:32]}.npy"


def count_unscored_tokens(
    models: Sequence[ComparedModel], texts: Mapping[str, Sequence[EncodedText]], cache: LossCache
) -> int:
    """Return the number of tokens whose loss is not in the cache; ``texts`` are by the model's name."""
    num_tokens = 0
    for model in models:
        for text in texts[model.name]:
            num_tokens += sum(len(chunk.tokens) for chunk in text.chunks() if not cache.has(model, chunk))
    return num_tokens


def score_models(
    models: Sequence[ComparedModel],
    texts: Mapping[str, Sequence[EncodedText]],
    cache: LossCache,
    batch_tokens: int,
    num_tokens: int,
) -> dict[str, list[np.ndarray]]:
    """Return the losses of each model as :func:`score_texts` does, by the model's name; ``texts`` are by name too.

    Models with the same base are evaluated one after the other, since the base stays in memory. Progress is shown;
    ``num_tokens`` is the result of :func:`count_unscored_tokens`.
    """
    bases = [model.base for model in models]
    models_by_base = sorted(models, key=lambda model: bases.index(model.base))
    losses: dict[str, list[np.ndarray]] = {}
    models_in_turn = ModelsInTurn()
    with scoring_progress(num_tokens) as show:
        for model in models_by_base:
            losses[model.name] = score_texts(
                model, texts[model.name], cache, batch_tokens=batch_tokens, show=show, models_in_turn=models_in_turn
            )
    return losses


def score_texts(
    model: ComparedModel,
    texts: Sequence[EncodedText],
    cache: LossCache,
    batch_tokens: int,
    show: ShowScored,
    models_in_turn: ModelsInTurn,
) -> list[np.ndarray]:
    """Return the loss of each predicted token of texts in nats, fp32 [N] for each text.

    The model is loaded before the first chunk that is not in the cache.

    Args:
        model: The model.
        texts: The texts, as tokens of the model's tokenizer.
        cache: The finished chunks, to which new ones are added.
        batch_tokens: The tokens of a forward pass.
        show: Called after each forward pass.
        models_in_turn: The object that loads the model.

    Raises:
        RunError: a loss is not finite.
    """
    loaded_model = None
    losses_of_texts = []
    for text in texts:
        losses_of_chunks = [np.zeros(0, dtype=np.float32)]
        for chunk in text.chunks():
            losses = cache.read(model, chunk)
            if losses is None:
                if loaded_model is None:
                    loaded_model = models_in_turn.load(model.source)
                # by the whole text, so that the batch size does not change the losses
                choose_frequencies(loaded_model, text.input_tokens)
                losses = score_chunk(loaded_model, text, chunk, batch_tokens, partial(show, model.name))
                _check_finite(losses, model, text, chunk)
                cache.write(model, chunk, losses)
            losses_of_chunks.append(losses)
        losses_of_texts.append(np.concatenate(losses_of_chunks))
    return losses_of_texts


def _check_finite(losses: np.ndarray, model: ComparedModel, text: EncodedText, chunk: TextChunk) -> None:
    """Raise a RunError that names the document of the first loss that is not finite."""
    is_finite = np.isfinite(losses)
    if is_finite.all():
        return
    token = chunk.tokens.start + int(np.argmin(is_finite))
    document = text.location(int(text.owners[token]))
    fault = f"the loss of a token of {document} is not finite; the model's weights are damaged or overflow"
    raise RunError(f"--models {model.name}: {fault}")


@torch.no_grad()
def score_chunk(
    model: Any, text: EncodedText, chunk: TextChunk, batch_tokens: int, advance: Callable[[int], None]
) -> np.ndarray:
    """Return the loss of each predicted token of a chunk in nats, fp32 [its tokens], by a model of ``ModelsInTurn``."""
    losses = np.zeros(len(chunk.tokens), dtype=np.float32)
    for predicted in text.batches(chunk, batch_tokens):
        input_ids = predicted.input_ids.to(model.device)
        batch = Batch(
            input_ids=input_ids,
            labels=input_ids,  # not read, since the targets are given
            documents=predicted.documents.to(model.device) if predicted.documents else None,
            targets=predicted.targets.to(model.device),
        )
        token_losses = CrossEntropy().loss(model, batch).token_losses
        assert token_losses is not None
        losses[predicted.token_indices - chunk.tokens.start] = token_losses.float().cpu().numpy()
        advance(len(predicted.token_indices))
    return losses
