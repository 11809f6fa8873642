"""Verify that an extended model gives texts without a new token the same ids, and keeps all old weights bit for bit."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerFast

from fabric_train.cli.errors import RunError
from fabric_train.export.hub_format import blocks
from fabric_train.model.weight_files import CheckpointTensors, StoredTensors, safetensors_files
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast
from fabric_train.tokenization.tokenizers.parity_check import HARD_STRINGS
from fabric_train.tokenization.tokenizers.text_encoder import open_encoder
from fabric_train.vocabulary.extendable_tokenizer import NewTokens
from fabric_train.vocabulary.extended_tensors import ExtendedTensors
from fabric_train.vocabulary.merges import cut

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROWS_COMPARED = 4096
_MAX_CHARACTERS = 4_000_000
_MAX_SHOWN = 60  # characters of a text in a message


def load_verified_tokenizer(old: "Tokenizer", folder: Path, new: NewTokens, documents: Sequence[str]) -> "Tokenizer":
    """Load the tokenizer in ``folder``, and compare it with the old one and with the learned segments.

    Lines of the documents, up to 4 million characters, and texts on which encoders are likely to fail must have their
    old ids unless they have a new one. Raises a RunError if the tokenizer differs from what was made.
    """
    extended = load_fast(folder / "tokenizer.json", special_text_is_plain=False)

    # The new tokens have the ids that they were made for, and cut words as they were learned.
    vocabulary = extended.get_vocab(with_added_tokens=True)
    for token_id, token in enumerate(new.texts, new.first_id):
        if vocabulary.get(token) != token_id:
            raise RunError(f"the new token {token!r} has id {vocabulary.get(token)}, not {token_id}")
    segments = new.learned.segments
    if cut(extended, segments) != segments:
        raise RunError("the extended tokenizer splits words differently than when its tokens were learned")

    # Texts without a new token have their old ids.
    texts = [*HARD_STRINGS, *_sample_lines(documents)]
    old_encodings = old.encode_batch(texts, add_special_tokens=False)
    encodings = extended.encode_batch(texts, add_special_tokens=False)
    for text, old_encoding, encoding in zip(texts, old_encodings, encodings, strict=True):
        if encoding.ids != old_encoding.ids and max(encoding.ids) < new.first_id:
            raise RunError(f"a text without a new token has different ids than before: {text[:_MAX_SHOWN]!r}")

    # Our encoder, tokenizers and transformers agree.
    encoder, _ = open_encoder(folder / "tokenizer.json", special_text_is_plain=False)
    our_ids = encoder.encode_batch(texts)
    transformers_ids = PreTrainedTokenizerFast.from_pretrained(folder)(texts, add_special_tokens=False)["input_ids"]
    for text, encoding, ours, theirs in zip(texts, encodings, our_ids, transformers_ids, strict=True):
        if not encoding.ids == ours.tolist() == theirs:
            raise RunError(f"libraries give different ids to {text[:_MAX_SHOWN]!r}")
    return extended


def _sample_lines(documents: Sequence[str]) -> list[str]:
    """Return lines from all documents, up to a limit of characters for each document."""
    document_limit = _MAX_CHARACTERS // max(1, len(documents)) + 1
    lines: list[str] = []
    for document in documents:
        lines += document[:document_limit].splitlines()
    return lines


def verify_weights(old: StoredTensors, extended: ExtendedTensors, folder: Path) -> None:
    """Read the files in ``folder`` and compare the bits of all old weights; RunError at the first difference."""
    written = CheckpointTensors(safetensors_files(folder), "write the folder again")
    names = set(written)
    for name in extended:
        fault = RunError(f"{folder}: {name} is missing, or does not have the shape or type that it was written with")
        if name not in names:
            raise fault
        if written.shape(name) != extended.shape(name) or written.dtype(name) != old.dtype(name):
            raise fault
        old_blocks = _kept_blocks(old, name, extended)
        written_blocks = _kept_blocks(written, name, extended)
        for old_block, written_block in zip(old_blocks, written_blocks, strict=True):
            if not torch.equal(_bits(old_block), _bits(written_block)):
                raise RunError(f"{folder}: {name} differs from the model's")


def _kept_blocks(tensors: StoredTensors, name: str, extended: ExtendedTensors) -> Iterator[torch.Tensor]:
    """Yield the blocks of a tensor that an extension does not change."""
    matrix = extended.matrices.get(name)
    if matrix is None:
        yield from blocks(tensors, name, tensors.shape(name))
        return
    old_tokens, without_token = matrix.kept_rows()
    yield from blocks(tensors, name, torch.Size((len(old_tokens), matrix.width)))
    for begin in range(without_token.start, without_token.stop, _ROWS_COMPARED):
        num_rows = min(_ROWS_COMPARED, without_token.stop - begin)
        yield tensors.read_block(name, (begin, 0), (num_rows, matrix.width))


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which are also equal for equal NaNs."""
    return block.contiguous().reshape(-1).view(torch.uint8)
