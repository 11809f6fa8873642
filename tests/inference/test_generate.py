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
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import GeneratedText, TextPrinter, generate
from fabric_train.inference.load_model import load_for_inference
from fabric_train.inference.prompt_file import Prompt
from fabric_train.inference.prompts import PromptEncoder, encode_prompts, encode_text, limits_of
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
    return _generate_all(loaded, [PROMPT], **changes)[0]


def _generate_all(loaded: tuple[Any, Any], prompts: list[str], **changes: Any) -> list[GeneratedText]:
    encoded = [encode_text(loaded[1], prompt) for prompt in prompts]
    return generate(*loaded, encoded, GenerateArguments("", **{"num_tokens": 20, **changes}))


def test_greedy_text_is_that_of_transformers(run: Path, loaded: tuple[Any, Any]) -> None:
    checkpoint = run / "checkpoints" / "step-00000001"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0].tolist()
    generated = _generate(loaded)
    assert [*encode_text(loaded[1], PROMPT), *generated.new_ids] == expected
    assert PROMPT + generated.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_checkpoint_full_or_sharded_and_export_give_the_same_text(tmp_path: Path, run: Path) -> None:
    full = run / "checkpoints" / "step-00000001"
    sharded = run / "checkpoints" / "step-00000002"
    write_export(ExportSource(sharded), tmp_path, torch.float32, "100KB", CardFacts("tiny"))
    texts = {_generate(load_for_inference(str(place))).text for place in (full, sharded, tmp_path)}
    assert len(texts) == 1


def test_the_same_seed_gives_the_same_text(loaded: tuple[Any, Any]) -> None:
    first, again, other = (_generate(loaded, temperature=1.0, seed=seed) for seed in (3, 3, 4))
    assert first.new_ids == again.new_ids
    assert first.new_ids != other.new_ids


def test_a_tiny_top_p_leaves_only_the_most_likely_token(loaded: tuple[Any, Any]) -> None:
    assert _generate(loaded, temperature=1.0, top_p=1e-6).new_ids == _generate(loaded).new_ids


def test_top_k_and_min_p_leave_out_unlikely_tokens(loaded: tuple[Any, Any]) -> None:
    greedy = _generate(loaded).new_ids
    assert _generate(loaded, temperature=5.0, top_k=1).new_ids == greedy
    assert _generate(loaded, temperature=5.0, min_p=1.0).new_ids == greedy
    assert _generate(loaded, temperature=5.0).new_ids != greedy


def test_a_high_repetition_penalty_repeats_no_token(loaded: tuple[Any, Any]) -> None:
    new_ids = _generate(loaded, repetition_penalty=1e6).new_ids
    assert len(set(new_ids)) == len(new_ids)
    assert len(set(_generate(loaded).new_ids)) < 20


def test_samples_have_the_probabilities_of_the_model(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = encode_text(tokenizer, PROMPT)
    expected = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    settings = GenerateArguments("", num_tokens=1, temperature=1.0)
    drawn = [text.new_ids[0] for text in generate(model, tokenizer, [ids] * 1000, settings)]
    shares = torch.bincount(torch.tensor(drawn), minlength=len(expected)) / 1000
    assert (shares - expected).abs().max() < 4 * (expected.max() / 1000).sqrt()
    assert len(set(drawn)) > 20


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "repetition_penalty": 1.3}])
def test_a_text_does_not_depend_on_the_rest_of_its_batch(loaded: tuple[Any, Any], changes: dict[str, Any]) -> None:
    prompts = [PROMPT, "Now", "A much longer prompt than the others: the quality of mercy is not strained"]
    encoded = [encode_text(loaded[1], prompt) for prompt in prompts]
    settings = GenerateArguments("", num_tokens=20, **changes)
    alone = [generate(*loaded, [ids], settings, prompt_numbers=[number])[0].text for number, ids in enumerate(encoded)]
    assert [text.text for text in generate(*loaded, encoded, settings)] == alone


def test_text_ends_before_a_stop_string_and_it_is_not_printed(
    loaded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _generate(loaded).text
    stop = whole[9:12]
    ids = encode_text(loaded[1], PROMPT)
    printer = TextPrinter(loaded[1], (stop,))
    (generated,) = generate(*loaded, [ids], GenerateArguments("", num_tokens=20, stop=[stop]), printer=printer)
    assert generated.text == whole[: whole.find(stop)]
    assert generated.ended_by == "stop"
    assert len(generated.new_ids) < 20
    assert capsys.readouterr().out == generated.text + "\n"


def test_an_interrupt_ends_the_text_after_the_token(loaded: tuple[Any, Any]) -> None:
    calls = iter([False, False, True])
    ids = encode_text(loaded[1], PROMPT)
    (generated,) = generate(*loaded, [ids], GenerateArguments("", num_tokens=20), is_interrupted=lambda: next(calls))
    assert generated.new_ids == _generate(loaded).new_ids[:3]
    assert generated.ended_by == "interrupt"


def test_bos_comes_before_the_prompt_exactly_once(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)  # it adds BOS itself
    bos = tokenizer.bos_token_id
    for prompt in (PROMPT, tokenizer.bos_token + PROMPT):
        ids = encode_text(tokenizer, prompt)
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
    with pytest.raises(InputError, match="exceeds the model's 256 positions"):
        encode_prompts(
            PromptEncoder(loaded[1], "tiny", prompts_chats=False), [Prompt(PROMPT)], limits_of(loaded[0]), 256
        )


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_for_inference(str(tmp_path / "nothing-here"))
    with pytest.raises(InputError, match="neither a complete checkpoint"):
        load_for_inference(str(tmp_path))


def test_the_program_prints_prompt_and_text_and_one_line_on_the_speed(
    run: Path, loaded: tuple[Any, Any], forked_runs: ForkedRuns
) -> None:
    argv = ["--model_name", run, "--prompt", PROMPT, "--num_tokens", 20]
    program = forked_runs.start(argv, 1, program="fabric_train.programs.generate")
    program.finish()
    assert program.stdout() == PROMPT + _generate(loaded).text + "\n"
    note, speed = program.stderr().splitlines()
    assert note == f"note: {run}: using the newest complete checkpoint, step-00000002"
    assert speed.startswith("20 tokens in ")


def test_the_best_and_the_latest_checkpoint_of_a_run_have_names(run: Path, loaded: tuple[Any, Any]) -> None:
    for name in ("best", "latest", "step-2", "checkpoints/step-00000002"):
        assert _generate(load_for_inference(str(run / name))).text == _generate(loaded).text
