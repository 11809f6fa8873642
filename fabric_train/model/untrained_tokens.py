"""Tokens whose embedding was never trained, such as Llama-3 base's ``<|eot_id|>``, the end of every turn of a chat."""

import torch
from tokenizers import Tokenizer

from fabric_train.data.token_dataset import TokenDataset
from fabric_train.model.load_weights import Unread

# A row that got no gradient has decayed to almost nothing, or lies where all such rows lie. In SmolLM2, eleven reserved
# tokens and four others are within 0.003 of the median norm of each other; of the rest none is shorter than half of the
# median, and only one pair is nearer than 0.05.
_SMALL = 0.1
_SAME = 0.01
_ROWS_AT_ONCE = 8192


def note_on_end_of_turn(unread: Unread, dataset: TokenDataset) -> str | None:
    """Return what to tell the user of a model that never learnt the token that ends every turn of the dataset."""
    manifest = dataset.manifest
    token_id = manifest.tokenizer.end_of_turn_token_id if manifest else None
    if token_id is None or not untrained(unread, [token_id]):
        return None
    token = Tokenizer.from_file(str(dataset.folder / "tokenizer" / "tokenizer.json")).id_to_token(token_id)
    return (
        f"{token} (id {token_id}) ends every turn of {dataset.folder}, and this model was never trained on it: it "
        "learns it here if there are many chats; for few, start from the instruct model, or tokenize with a chat "
        "template whose end of turn the model knows"
    )


def untrained(unread: Unread, token_ids: list[int]) -> list[int]:
    """Return those of ``token_ids`` whose row of the input embedding or the output layer was never trained.

    Such a row has less than a tenth of the rows' median norm, or two other rows lie within a hundredth of it: what
    training moves, it moves apart. A few rows are read at a time.
    """
    model = unread.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    matrices = {names[id(layer.weight)] for layer in layers}  # one where they are tied
    return [token_id for token_id in token_ids if any(_is_untrained(unread, name, token_id) for name in matrices)]


def _is_untrained(unread: Unread, name: str, token_id: int) -> bool:
    """Return whether row ``token_id`` of the matrix [V, hidden size] of that name was never trained."""
    row = unread.read_rows(name, token_id, token_id + 1).float()
    norms, distances = [], []
    num_rows = unread.model.get_parameter(name).shape[0]
    for begin in range(0, num_rows, _ROWS_AT_ONCE):
        rows = unread.read_rows(name, begin, min(begin + _ROWS_AT_ONCE, num_rows)).float()
        norms.append(rows.norm(dim=1))
        distances.append((rows - row).norm(dim=1))
    median = torch.cat(norms).median()
    near = int((torch.cat(distances) < _SAME * median).sum())
    return bool(row.norm() < _SMALL * median) or near > 2  # itself is one
