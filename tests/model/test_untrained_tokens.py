"""Tokens that a model was never trained on are found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.data.token_dataset import open_dataset
from fabric_train.model.load_weights import MetaModel
from fabric_train.model.untrained_rows import find_untrained, note_on_end_of_turn

END_OF_TURN = 2  # <|im_end|> in SmolLM2


@pytest.fixture
def model(smollm2_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)


def test_smollm2_was_trained_on_its_turns_and_not_on_its_reserved_tokens(model: Any, smollm2_dir: Path) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", " the", "<file_sep>", "<gh_stars>", "<empty_output>"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    ids = [tokenizer.encode(name, add_special_tokens=False)[0] for name in names]
    assert tokenizer.convert_ids_to_tokens(find_untrained(MetaModel(model, None), ids)) == names[4:]


def test_a_row_of_almost_nothing_is_untrained(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[END_OF_TURN] *= 0.01  # as Llama-3 base's <|eot_id|>
    assert find_untrained(MetaModel(model, None), [1, END_OF_TURN]) == [END_OF_TURN]


def test_an_output_layer_of_its_own_is_looked_at_too(model: Any) -> None:
    output = torch.nn.Linear(576, 49152, bias=False, dtype=torch.bfloat16)
    output.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.set_output_embeddings(output)
    assert find_untrained(MetaModel(model, None), [1, END_OF_TURN]) == []
    with torch.no_grad():
        output.weight[END_OF_TURN] = 0
    assert find_untrained(MetaModel(model, None), [1, END_OF_TURN]) == [END_OF_TURN]


def test_the_note_names_the_token_that_ends_the_datasets_turns(
    model: Any, smollm2_dir: Path, tiny_tokens_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_tokens_dir, tmp_path / "tokens"))
    assert note_on_end_of_turn(MetaModel(model, None), open_dataset(str(folder))) is None  # it holds no chats
    shutil.copy(smollm2_dir / "tokenizer.json", folder / "tokenizer")
    content = json.loads((folder / "manifest.json").read_text())
    content["tokenizer"]["end_of_turn_token_id"] = END_OF_TURN
    (folder / "manifest.json").write_text(json.dumps(content))
    assert note_on_end_of_turn(MetaModel(model, None), open_dataset(str(folder))) is None  # SmolLM2 knows it
    with torch.no_grad():
        model.get_input_embeddings().weight[END_OF_TURN] = 0
    note = note_on_end_of_turn(MetaModel(model, None), open_dataset(str(folder)))
    assert note is not None
    assert note.startswith("<|im_end|> (id 2) ends every turn")
