"""A chat model from a base tokenizer stops after its turn: in plain transformers, generate.py and from a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, pipeline

from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import generate
from fabric_train.inference.load_model import load_for_inference
from fabric_train.inference.prompts import encode_text
from fabric_train.programs import tokenize_dataset
from tests.support.exports import VERIFY_IN_PROCESS
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv
from tests.support.token_datasets import manifest_of

pytestmark = pytest.mark.slow

QUESTION = {"role": "user", "content": "Which colour is the sky?"}
ANSWER = {"role": "assistant", "content": "The sky is blue."}
# <|end_of_text|> and <|eot_id|>
BASE_EOS = 1
END_OF_TURN = 9


@dataclass(frozen=True)
class ChatModel:
    """One chat, learned by heart: its checkpoint and the export."""

    checkpoint: Path
    export: Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, small_llama3_dir: Path) -> Path:
    """A tiny base model with Llama-3's special tokens, without a chat template, and a published generation config."""
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=BASE_EOS,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    # as Llama-2's: flags of sampling without do_sample, which transformers does not save after a change
    published = {"bos_token_id": 0, "eos_token_id": BASE_EOS, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(published))
    for file in small_llama3_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path, forked_runs: ForkedRuns) -> ChatModel:
    folder = tmp_path_factory.mktemp("chat")
    line = json.dumps({"messages": [QUESTION, ANSWER]}) + "\n"
    (folder / "chats.jsonl").write_text(line * 64)
    words = f"--dataset {folder / 'chats.jsonl'} --tokenizer_name {base} --output_dir {folder / 'tokens'}"
    tokenize_dataset.main(f"{words} --max_length 32 --validation_split 0 --num_proc 1".split())
    options = {"number_epochs": 5, "max_step": 40, "lr": 0.02, "eval_iters": None, "save_step_interval": 1000}
    forked_runs.start(argv(base, folder / "tokens", folder / "run", **options), 1).finish()
    words = f"--checkpoint {folder / 'run'} --output_dir {folder / 'export'} --dtype float32"
    program = "fabric_train.programs.convert_to_hf"
    forked_runs.start(words.split(), 1, program=program, before=VERIFY_IN_PROCESS).finish()
    return ChatModel(folder / "run" / "checkpoints" / "step-00000040", folder / "export")


def test_the_dataset_records_the_token_that_ends_turns(trained: ChatModel) -> None:
    tokenizer = manifest_of(trained.checkpoint).tokenizer
    assert tokenizer.turn_end_token_ids == (END_OF_TURN,)
    assert tokenizer.stop_token_ids == (BASE_EOS, END_OF_TURN)


def test_checkpoint_and_export_name_every_stop_token(trained: ChatModel) -> None:
    for folder in (trained.checkpoint, trained.export):
        content = json.loads((folder / "generation_config.json").read_text())
        assert content["eos_token_id"] == [BASE_EOS, END_OF_TURN]
        assert (content["temperature"], content["top_p"]) == (0.6, 0.9)


def test_the_plain_pipeline_stops_after_the_memorised_answer(trained: ChatModel) -> None:
    chat: Any = pipeline("text-generation", model=str(trained.export))
    (answer,) = chat([QUESTION], max_new_tokens=40, do_sample=False)
    assert answer["generated_text"][-1] == ANSWER


def test_generate_stops_with_the_checkpoint_and_with_the_export(trained: ChatModel) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(trained.export)
    prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    for folder in (trained.checkpoint, trained.export):
        loaded = load_for_inference(str(folder))
        (generated,) = generate(*loaded, [encode_text(tokenizer, prompt)], GenerateArguments("", num_tokens=40))
        ids = generated.new_ids
        assert ids[-1] == END_OF_TURN
        assert tokenizer.decode(ids, skip_special_tokens=True) == ANSWER["content"]
