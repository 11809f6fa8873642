"""Find tokens whose rows of the embedding and the head were never trained, such as reserved tokens."""

from typing import Any

import torch
from tokenizers import Tokenizer

from fabric_train.data.token_dataset import TokenDataset
from fabric_train.model.load_weights import MetaModel

# A row without gradients decays to almost nothing, or stays next to the other untrained rows. In SmolLM2, eleven
# reserved tokens and four others are within 0.003 of the median norm of each other. Of the other rows, none has less
# than half of the median norm, and only one pair is closer than 0.05.
_SMALL_NORM = 0.1  # of the median norm
_SMALL_DISTANCE = 0.01  # of the median norm
_MAX_CLOSE_ROWS = 2  # with the row itself; two trained rows may be alike
_CHUNK_ROWS = 8192


def note_on_end_of_turn(meta_model: MetaModel, dataset: TokenDataset) -> str | None:
    """Return a note for the user if the model was never trained on the token that ends the dataset's chat turns."""
    manifest = dataset.manifest
    token_id = manifest.tokenizer.end_of_turn_token_id if manifest else None
    if token_id is None or not find_untrained(meta_model, [token_id]):
        return None
    tokenizer = Tokenizer.from_file(str(dataset.folder / "tokenizer" / "tokenizer.json"))
    token = tokenizer.id_to_token(token_id)
    return (
        f"{token} (id {token_id}) ends every turn of {dataset.folder}, but this model was never trained on it; it "
        "can learn the token from many chats; for few chats, start from the instruct model, or tokenize with a chat "
        "template whose end-of-turn token the model knows"
    )


def find_untrained(meta_model: MetaModel, token_ids: list[int]) -> list[int]:
    """Return the token ids whose row in the input embedding or the output layer was never trained.

    A row counts as untrained if its norm is less than a tenth of the median norm, or if two other rows are closer than
    a hundredth of it, because training moves rows apart.
    """
    model: Any = meta_model.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    matrix_names = {names[id(embedding.weight)]}
    if head is not None:
        matrix_names.add(names[id(head.weight)])  # the same name if it is tied
    untrained = []
    for token_id in token_ids:
        if any(_is_untrained(meta_model, name, token_id) for name in matrix_names):
            untrained.append(token_id)
    return untrained


def _is_untrained(meta_model: MetaModel, name: str, token_id: int) -> bool:
    """Return whether row ``token_id`` of the matrix ``name`` [V, H] was never trained."""
    row = meta_model.read_rows(name, token_id, token_id + 1).float()  # [1, H]
    norms = []
    distances = []
    num_rows = meta_model.model.get_parameter(name).shape[0]
    for begin in range(0, num_rows, _CHUNK_ROWS):
        rows = meta_model.read_rows(name, begin, min(begin + _CHUNK_ROWS, num_rows)).float()
        norms.append(rows.norm(dim=1))
        distances.append((rows - row).norm(dim=1))
    median_norm = torch.cat(norms).median()
    num_close = int((torch.cat(distances) < _SMALL_DISTANCE * median_norm).sum())
    has_small_norm = bool(row.norm() < _SMALL_NORM * median_norm)
    return has_small_norm or num_close > _MAX_CLOSE_ROWS
