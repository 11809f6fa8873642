"""generate.py prints what the model generates, the same from a checkpoint as from its export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.export.convert import write_export
from fabric_train.export.model_card import CardFacts
from fabric_train.export.source import ExportSource
from fabric_train.inference.generate import GeneratedText, encode_prompt, generate
from fabric_train.inference.load_model import load_for_inference
from tests.support.checkpoint_examples import run_with_two_checkpoints
from tests.support.forked_runs import ForkedRuns

PROMPT = "To be, or not"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Path:
    return run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def loaded(run: Path) -> tuple[Any, Any]:
    return load_for_inference(str(run))


def _generate(loaded: tuple[Any, Any], **changes: Any) -> GeneratedText:
    settings = {"prompt": PROMPT, "num_tokens": 20, "temperature": 0.0, "top_p": 1.0, "seed": 0, **changes}
    return generate(*loaded, settings.pop("prompt"), **settings)


def test_greedy_text_is_that_of_transformers(run: Path, loaded: tuple[Any, Any]) -> None:
    checkpoint = run / "checkpoints" / "step-00000001"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0].tolist()
    generated = _generate(loaded)
    assert [*generated.prompt_ids, *generated.new_ids] == expected
    assert generated.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_checkpoint_full_or_sharded_and_export_give_the_same_text(tmp_path: Path, run: Path) -> None:
    full, sharded = run / "checkpoints" / "step-00000001", run / "checkpoints" / "step-00000002"
    write_export(ExportSource(sharded), tmp_path, torch.float32, "100KB", CardFacts("tiny"))
    texts = {_generate(load_for_inference(str(place))).text for place in (full, sharded, tmp_path)}
    assert len(texts) == 1


def test_the_same_seed_gives_the_same_text(loaded: tuple[Any, Any]) -> None:
    first, again, other = (_generate(loaded, temperature=1.0, seed=seed) for seed in (3, 3, 4))
    assert first.new_ids == again.new_ids
    assert first.new_ids != other.new_ids


def test_a_tiny_top_p_leaves_only_the_most_likely_token(loaded: tuple[Any, Any]) -> None:
    assert _generate(loaded, temperature=1.0, top_p=1e-6).new_ids == _generate(loaded).new_ids


def test_bos_comes_before_the_prompt_exactly_once(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)  # it adds BOS itself
    bos = tokenizer.bos_token_id
    for prompt in (PROMPT, tokenizer.bos_token + PROMPT):
        ids = encode_prompt(tokenizer, prompt)
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_text_ends_at_eos(run: Path) -> None:
    model, tokenizer = load_for_inference(str(run / "checkpoints" / "step-00000001"))
    third = _generate((model, tokenizer)).new_ids[2]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(third)
    new_ids = _generate((model, tokenizer)).new_ids
    assert new_ids[-1] == third
    assert len(new_ids) <= 3


def test_the_models_own_sampling_settings_do_not_apply(run: Path) -> None:
    model, tokenizer = load_for_inference(str(run))
    plain = _generate((model, tokenizer)).new_ids
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=10.0)
    assert _generate((model, tokenizer)).new_ids == plain


def test_more_tokens_than_positions_are_refused(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="exceed the model's 256 positions"):
        _generate(loaded, num_tokens=256)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_for_inference(str(tmp_path / "nothing-here"))
    with pytest.raises(InputError, match="neither a complete checkpoint"):
        load_for_inference(str(tmp_path))


def test_the_program_prints_prompt_and_text_and_one_line_on_the_speed(
    run: Path, loaded: tuple[Any, Any], forked_runs: ForkedRuns
) -> None:
    argv = ["--model_name", run, "--prompt", PROMPT, "--num_tokens", 20]
    program = forked_runs.start(argv, 1, program="generate")
    program.finish()
    assert program.stdout() == _generate(loaded).text + "\n"
    note, speed = program.stderr().splitlines()
    assert note == f"note: {run}: the newest complete checkpoint, step-00000002, is used"
    assert speed.startswith("20 tokens in ")


def test_the_best_and_the_latest_checkpoint_of_a_run_have_names(run: Path, loaded: tuple[Any, Any]) -> None:
    for name in ("best", "latest", "step-2", "checkpoints/step-00000002"):
        assert _generate(load_for_inference(str(run / name))).text == _generate(loaded).text
