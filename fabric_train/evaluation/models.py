"""The models of an evaluation: find each before any is loaded, load it, and compute the loss of every predicted token.

Finished parts of a text stay on the disk, so that a stopped evaluation goes on.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fabric_train.checkpoint import (
    checkpoints_of_all,
    describe_choice,
    find_checkpoint,
    is_short_name,
    means_all,
)
from fabric_train.checkpoint.adapter_folder import (
    check_keeps_documents_apart,
    find_base,
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
from fabric_train.evaluation.texts import NUM_DIGITS, EncodedText, ScoredPart, device_kind, full_digest
from fabric_train.inference.load_model import ModelsInTurn, check_adapter
from fabric_train.model.hf_model import check_readable, load_hf_tokenizer, read_shape
from fabric_train.model.rope_frequencies import choose_frequencies, identify_frequencies
from fabric_train.tokenization.tokenizers.tokenizer_comparison import compare_tokenizers
from fabric_train.training.objective import CrossEntropy

FOLDER = "token_losses"
ShowScored = Callable[[str, int], None]  # the model, and further tokens scored


@dataclass(frozen=True)
class ComparedModel:
    """A model of ``--models``, with the name that was given there."""

    name: str
    source: str  # its folder, or its name on the hub
    checkpoint: bool
    identity: str  # changes when the weights change
    tokenizer: Any  # of transformers
    tokenizer_id: str  # the same for tokenizers that give the same ids
    max_positions: int | None  # None without a limit
    vocab_size: int  # rows of its embedding
    base: str  # the place of its weights, or of those that its adapter is put on
    config: Any  # of transformers

    @property
    def weights(self) -> str:
        return full_digest(self.identity)[:NUM_DIGITS]


def find_models(names: Sequence[str]) -> tuple[list[ComparedModel], list[str]]:
    """Find the models of ``--models``, RUN/step-00000500 … for RUN/all, and the names of damaged checkpoints in it."""
    found: dict[str, ComparedModel] = {}
    damaged: list[str] = []
    for name in names:
        own = [name]
        if means_all(Path(name)):
            checkpoints, left_out = checkpoints_of_all(Path(name))
            own = [str(Path(name).parent / checkpoint.name) for checkpoint in checkpoints]
            damaged += [str(Path(name).parent / checkpoint.name) for checkpoint in left_out]
        found |= {each: find_model(each) for each in own if each not in found}
    return list(found.values()), damaged


def check_all_evaluated(damaged: Sequence[str]) -> None:
    """Raise a RunError if ``RUN/all`` had damaged checkpoints; the others have been evaluated."""
    if damaged:
        names = ", ".join(damaged)
        raise RunError(f"not evaluated, since damaged: {names}; remove them, or restore their files")


def find_model(name: str, tokenizer_dir: Path | None = None) -> ComparedModel:
    """Find a model: a checkpoint, a run (see ``find_checkpoint``), a Hugging Face folder, an adapter or a hub name.

    ``tokenizer_dir`` has the tokenizer of an adapter on this model, which need not have one itself.
    """
    folder = Path(name)
    with naming_option("--models"):
        if not is_exported_adapter(folder):
            return _find_whole(name, tokenizer_dir)
        check_keeps_documents_apart(folder)
        check_adapter(folder)
        if tokenizer_dir is None and (folder / "tokenizer_config.json").is_file():
            tokenizer_dir = folder
        base = find_model(read_base_name(folder), tokenizer_dir)
        identity = f"{identity_of_files(folder)}\n{base.identity}"
        return replace(base, name=name, source=name, checkpoint=False, identity=identity)


def _find_whole(name: str, tokenizer_dir: Path | None) -> ComparedModel:
    folder = Path(name)
    source = name
    if is_short_name(folder) or (folder.is_dir() and not (folder / "config.json").is_file()):
        checkpoint = find_checkpoint(folder)
        note = describe_choice(folder, checkpoint)
        if note and folder.name != checkpoint.name:
            print(f"note: {note}", file=sys.stderr)
        source = str(checkpoint)
    is_checkpoint = (Path(source) / "trainer.json").is_file()
    shape = read_shape(source)
    if not is_checkpoint:
        check_readable(source)
    tokenizer = load_hf_tokenizer(tokenizer_dir or (Path(source, "tokenizer") if is_checkpoint else source))
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError(f"--models {name}: its tokenizer has neither BOS nor EOS, which begins a text; add one")
    identity = identity_of_files(Path(source)) if Path(source).is_dir() else f"{source} {shape.config._commit_hash}"
    of_tokenizer = (tokenizer, _tokenizer_id(tokenizer))
    saved = None
    if is_checkpoint and is_adapter(Path(source)):
        trained_adapter(Path(source))  # reports what it needs
        saved = find_base(None, Path(source))
    base = saved.place if saved else os.path.realpath(source) if Path(source).is_dir() else source
    sizes = (shape.max_positions, shape.vocab_size)
    return ComparedModel(name, source, is_checkpoint, identity, *of_tokenizer, *sizes, base, shape.config)


def check_tokenizer(model: ComparedModel, dataset: TokenDataset) -> None:
    """Raise an InputError if a token dataset says that its tokenizer has other ids than the model's."""
    ours = dataset.folder / "tokenizer" / "tokenizer.json"
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if dataset.manifest is None or not ours.is_file() or backend is None:
        return
    record = dataset.manifest.tokenizer
    with TemporaryDirectory() as folder:
        theirs = Path(folder, "tokenizer.json")
        backend.save(str(theirs))
        fault, _ = compare_tokenizers(ours, theirs, " ".join(filter(None, (record.bos_token, record.eos_token))))
    if fault:
        raise InputError(
            f"{dataset.folder}: not made with the tokenizer of {model.name}: {fault} (here: the token "
            "dataset's, there: the model's); give the documents themselves to --texts"
        )


def identity_of_files(folder: Path) -> str:
    """Return the checksums of a checkpoint, or the names, sizes and times of all files of another folder."""
    checksums = folder / "checksums.json"
    if checksums.is_file():
        return checksums.read_text(encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = [f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return "\n".join([os.path.realpath(folder), *listed])


def _tokenizer_id(tokenizer: Any) -> str:
    """Return a hash of all that decides the ids of a text, and of the tokens around it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        deciding = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        content = json.loads(backend.to_str())
        deciding = [content[name] for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
    deciding += [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return full_digest(json.dumps(deciding, sort_keys=True))


@contextmanager
def scoring_progress(total: int) -> Iterator[ShowScored]:
    """Yield the function that shows the progress, on a terminal as a bar; ``total`` are the tokens to score."""
    log = ThrottledLog()
    started = time.monotonic()
    scored = 0

    def print_line(model: str, tokens: int) -> None:
        nonlocal scored
        scored += tokens
        left = (time.monotonic() - started) * (total - scored) / scored if scored else 0
        log(f"scoring {model}: {scored:,} of {total:,} tokens, about {max(left, 0):.0f} s left")

    if not sys.stderr.isatty():
        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=open_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda model, tokens: bar.update(task, advance=tokens, description=model)


class LossCache:
    """Finished parts in ``folder``: one file of fp32 losses for each part of a text and model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device = device_kind()

    def has(self, model: ComparedModel, part: ScoredPart) -> bool:
        return self._file(model, part).is_file()

    def read(self, model: ComparedModel, part: ScoredPart) -> np.ndarray | None:
        """Return the losses of a part, fp32 [its tokens]; None if it is not finished."""
        try:
            losses = np.load(self._file(model, part), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        is_whole = isinstance(losses, np.ndarray) and losses.dtype == np.float32 and losses.shape == (len(part.tokens),)
        return losses if is_whole else None

    def write(self, model: ComparedModel, part: ScoredPart, losses: np.ndarray) -> None:
        """Keep the losses of a part; the file is complete or absent."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(model, part)
        unfinished = file.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as opened:
            np.save(opened, losses, allow_pickle=False)
        unfinished.replace(file)

    def _file(self, model: ComparedModel, part: ScoredPart) -> Path:
        key = f"{model.identity}\n{part.content}\n{self._device}"
        if frequencies := identify_frequencies(model.config, part.longest_input):
            key += f"\n{frequencies}"
        return self._folder / f"{full_digest(key)[:32]}.npy"


def score_texts(
    model: ComparedModel,
    texts: Sequence[EncodedText],
    cache: LossCache,
    batch_tokens: int,
    show: ShowScored,
    in_turn: ModelsInTurn,
) -> list[np.ndarray]:
    """Return the loss of each predicted token of texts in nats, fp32 [N] for each; a RunError if one is not finite.

    The model is loaded when the first part comes that is not finished. ``show`` is called after each forward pass, of
    ``batch_tokens`` tokens.
    """
    loaded = None
    of_texts = []
    for text in texts:
        of_parts = [np.zeros(0, dtype=np.float32)]
        for part in text.parts():
            losses = cache.read(model, part)
            if losses is None:
                loaded = loaded or in_turn.load(model.source)
                choose_frequencies(loaded, text.input_tokens)  # by the text, so that the batch size changes nothing
                losses = score_part(loaded, text, part, batch_tokens, partial(show, model.name))
                if not (is_finite := np.isfinite(losses)).all():
                    place = text.place(int(text.owners[part.tokens.start + int(np.argmin(is_finite))]))
                    fault = f"the loss of a token of {place} is not finite; its weights are damaged or overflow"
                    raise RunError(f"--models {model.name}: {fault}")
                cache.write(model, part, losses)
            of_parts.append(losses)
        of_texts.append(np.concatenate(of_parts))
    return of_texts


@torch.no_grad()
def score_part(
    model: Any, text: EncodedText, part: ScoredPart, batch_tokens: int, advance: Callable[[int], None]
) -> np.ndarray:
    """Return the loss of each predicted token of a part in nats, fp32 [its tokens], by a model of ``ModelsInTurn``."""
    losses = np.zeros(len(part.tokens), dtype=np.float32)
    for batch in text.batches(part, batch_tokens):
        input_ids = batch.input_ids.to(model.device)
        documents = batch.documents and batch.documents.to(model.device)
        # labels are not read where the targets are given
        there = Batch(input_ids, input_ids, documents, batch.targets.to(model.device))
        of_tokens = CrossEntropy().loss(model, there).of_tokens
        assert of_tokens is not None
        losses[batch.places - part.tokens.start] = of_tokens.float().cpu().numpy()
        advance(len(batch.places))
    return losses
