"""Verify an extended model: texts without a new token keep their ids, libraries agree, old weights are bit-equal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerFast

from fabric_train.cli.errors import RunError
from fabric_train.export.hub_format import blocks
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, safetensors_files
from fabric_train.tokenization.tokenizers.parity_check import HARD_STRINGS
from fabric_train.tokenization.tokenizers.text_encoder import load_fast, open_encoder
from fabric_train.vocabulary.learn import cut
from fabric_train.vocabulary.rows import ExtendedTensors
from fabric_train.vocabulary.tokenizer_files import NewTokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_CHARACTERS = 4_000_000
_SHOWN = 60


def verify_tokenizer(before: "Tokenizer", folder: Path, new: NewTokens, documents: Sequence[str]) -> "Tokenizer":
    """Load the tokenizer in ``folder``, and compare it with the old one and with the learned segments.

    Lines of the documents, up to 4 million characters, and texts on which encoders are likely to fail must have their
    old ids unless they have a new one. RunError if the tokenizer is not as it was made.
    """
    after = load_fast(folder / "tokenizer.json", special_text_is_plain=False)
    ids = after.get_vocab(with_added_tokens=True)
    for place, token in enumerate(new.texts):
        if ids.get(token) != new.first_id + place:
            raise RunError(f"the new token {token!r} has id {ids.get(token)}, not {new.first_id + place}")
    segments = new.learned.segments
    if cut(after, segments) != segments:
        raise RunError("the extended tokenizer cuts words in another way than its tokens were learned")
    texts = [*HARD_STRINGS, *_lines(documents)]
    old, found = (tokenizer.encode_batch(texts, add_special_tokens=False) for tokenizer in (before, after))
    for text, one, other in zip(texts, old, found, strict=True):
        if one.ids != other.ids and max(other.ids) < new.first_id:
            raise RunError(f"a text without a new token has other ids than before: {text[:_SHOWN]!r}")
    encoder, _ = open_encoder(folder / "tokenizer.json", special_text_is_plain=False)
    with_transformers = PreTrainedTokenizerFast.from_pretrained(folder)(texts, add_special_tokens=False)["input_ids"]
    for text, one, ours, theirs in zip(texts, found, encoder.encode_batch(texts), with_transformers, strict=True):
        if not one.ids == ours.tolist() == theirs:
            raise RunError(f"libraries give different ids to {text[:_SHOWN]!r}")
    return after


def _lines(documents: Sequence[str]) -> list[str]:
    """Return lines from all documents, of long ones the first, up to a limit of characters for each."""
    each = _MOST_CHARACTERS // max(1, len(documents)) + 1
    return [line for document in documents for line in document[:each].splitlines()]


def verify_weights(old: StoredTensors, written: ExtendedTensors, folder: Path) -> None:
    """Read the files in ``folder`` and compare the bits of all old weights; RunError at the first difference."""
    found = CheckpointTensors(safetensors_files(folder), "write the folder again")
    names = set(found)
    for name in written:
        if name not in names or found.shape(name) != written.shape(name) or found.dtype(name) != old.dtype(name):
            raise RunError(f"{folder}: {name} is missing, or has another shape or type than it was written with")
        matrix = written.matrices.get(name)
        kept = old.shape(name) if matrix is None else torch.Size((matrix.first_id, matrix.width))
        for wanted, block in zip(blocks(old, name, kept), blocks(found, name, kept), strict=True):
            if not torch.equal(_bits(wanted), _bits(block)):
                raise RunError(f"{folder}: {name} differs from the model's")


def _bits(block: torch.Tensor) -> torch.Tensor:
    return block.contiguous().reshape(-1).view(torch.uint8)
