"""Find the models of an evaluation before any is loaded: configuration, tokenizer and identity of the weights."""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fabric_train.checkpoint import checkpoints_of_all, describe_choice, find_checkpoint, is_short_name, means_all
from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.inference.load_model import is_adapter, read_base_name
from fabric_train.model.hf_model import check_readable, load_hf_tokenizer, read_shape
from fabric_train.tokenization.tokenizers.tokenizer_diff import compare_tokenizers

NUM_DIGITS = 16
"""Hexadecimal digits that tell weights and texts from others in ``documents.jsonl``."""


@dataclass(frozen=True)
class ComparedModel:
    """A model of ``--models``.

    Args:
        name: as it was given.
        source: its folder, or its name on the hub.
        checkpoint: whether it is a checkpoint of this project.
        identity: changes when the weights change.
        tokenizer: transformers' tokenizer.
        tokenizer_id: the same for tokenizers that give the same ids.
        max_positions: tokens that the model can see; None without a limit.
        vocab_size: rows of its embedding.
    """

    name: str
    source: str
    checkpoint: bool
    identity: str
    tokenizer: Any
    tokenizer_id: str
    max_positions: int | None
    vocab_size: int

    @property
    def weights(self) -> str:
        """What tells its weights from others, in few characters."""
        return full_digest(self.identity)[:NUM_DIGITS]


def find_models(names: Sequence[str]) -> tuple[list[ComparedModel], list[str]]:
    """Find the models of ``--models``, and return the names of damaged checkpoints of ``RUN/all`` too.

    A checkpoint of ``RUN/all`` has the name ``RUN/step-00000500``.

    Raises:
        InputError: a model cannot be found, or ``RUN/all`` has no undamaged checkpoint.
    """
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


def find_model(name: str) -> ComparedModel:
    """Find a model: a checkpoint or a run (see ``find_checkpoint``), a Hugging Face folder, an adapter or a hub name.

    Raises:
        InputError: there is none, or its configuration or tokenizer is damaged.
    """
    folder = Path(name)
    try:
        return _with_adapter(find_model(read_base_name(folder)), name) if is_adapter(folder) else _find_whole(name)
    except InputError as error:
        raise InputError(*(fault.replace("--model_name", "--models") for fault in error.faults)) from None


def _find_whole(name: str) -> ComparedModel:
    """Find a model that is not an adapter."""
    folder, source = Path(name), name
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
    tokenizer = load_hf_tokenizer(Path(source, "tokenizer") if is_checkpoint else source)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError(f"--models {name}: its tokenizer has neither BOS nor EOS, which begins a text; add one")
    identity = identity_of(Path(source)) if Path(source).is_dir() else f"{source} {shape.config._commit_hash}"
    return ComparedModel(
        name,
        source,
        is_checkpoint,
        identity,
        tokenizer,
        _tokenizer_id(tokenizer),
        shape.max_positions,
        shape.vocab_size,
    )


def _with_adapter(base: ComparedModel, name: str) -> ComparedModel:
    """Return the model of an adapter; a tokenizer beside it replaces that of the base model."""
    folder = Path(name)
    has_own = (folder / "tokenizer_config.json").is_file()
    tokenizer = load_hf_tokenizer(folder) if has_own else base.tokenizer
    identity = f"{identity_of(folder)}\n{base.identity}"
    own = replace(base, name=name, source=name, checkpoint=False, identity=identity)
    return replace(own, tokenizer=tokenizer, tokenizer_id=_tokenizer_id(tokenizer))


def check_tokenizer(model: ComparedModel, dataset: TokenDataset) -> None:
    """Check that a token dataset has the ids of the model's tokenizer, if it says what its tokenizer is.

    Raises:
        InputError: an id means another token, or a text gets other ids.
    """
    ours = dataset.folder / "tokenizer" / "tokenizer.json"
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if dataset.manifest is None or not ours.is_file() or backend is None:
        return
    record = dataset.manifest.tokenizer
    with TemporaryDirectory() as folder:
        theirs = Path(folder, "tokenizer.json")
        backend.save(str(theirs))
        difference = compare_tokenizers(ours, theirs, " ".join(filter(None, (record.bos_token, record.eos_token))))
    if difference.fault:
        raise InputError(
            f"{dataset.folder}: not made with the tokenizer of {model.name}: {difference.fault} (here: the token "
            "dataset's, there: the model's); give the documents themselves to --texts"
        )


def identity_of(folder: Path) -> str:
    """Return the checksums of a checkpoint, or the names, sizes and times of all files of another folder."""
    checksums = folder / "checksums.json"
    if checksums.is_file():
        return checksums.read_text(encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = [f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return "\n".join([os.path.realpath(folder), *listed])


def full_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _tokenizer_id(tokenizer: Any) -> str:
    """Return the SHA-256 of all that decides the ids of a text, and of the tokens around it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        deciding = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        content = json.loads(backend.to_str())
        deciding = [content[name] for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
    deciding += [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return full_digest(json.dumps(deciding, sort_keys=True))
