"""evaluate.py --pairs: log-probabilities of answers by a plain formula, and the figures made of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models
from fabric_train.evaluation.pairs import PairScores, figures_of
from tests.support.pair_datasets import tokenize, write_model, write_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in loaded.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", range(24))


def evaluated(output: Path, *words: object) -> dict[str, dict[str, dict[str, Any]]]:
    """Run the program in this process and return pairs.json."""
    compare_models(parse_arguments(EvaluateArguments, [*map(str, words), "--output_dir", str(output)]))
    return json.loads((output / "pairs.json").read_text())


def plain_sum(model: Any, tokenizer: Any, row: dict[str, Any], answer: str) -> float:
    """Return the log-probability of an answer with its end-of-turn token, by full logits.

    The prompt ends with a space that is a part of the answer's first token.
    """
    whole, prompt = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=ends, return_dict=False)
        for messages, ends in ((row["prompt"] + row[answer], False), (row["prompt"], True))
    )
    with torch.no_grad():
        logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    begin = next(
        (place for place, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt)
    )
    return float(sum(logs[place - 1, whole[place]] for place in range(begin, len(whole))))


def test_answers_have_the_log_probabilities_of_a_plain_forward_pass(
    tmp_path: Path, model: Path, other: Path, source: Path
) -> None:
    output = tmp_path / "out"
    figures = evaluated(output, "--models", model, other, "--pairs", f"count={source}", "--max_length", 192)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    lines = [json.loads(line) for line in (output / "pairs.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(rows)
    for folder in (model, other):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        own = [line for line in lines if line["model"] == str(folder)]
        of_rows = {int(line["pair"].rpartition(":")[2]): line for line in own}
        for number, row in enumerate(rows, 1):
            for answer in ("chosen", "rejected"):
                found = of_rows[number][answer]
                assert found == pytest.approx(plain_sum(loaded, tokenizer, row, answer), abs=1e-4)
        margins = [line["chosen"] - line["rejected"] for line in own]
        of_model = figures[str(folder)]["count"]
        assert of_model["pairs"] == len(rows)
        assert of_model["accuracy"]["value"] == pytest.approx(np.mean(np.array(margins) > 0))
        assert of_model["margin"]["value"] == pytest.approx(np.mean(margins))
        low, high = of_model["margin"]["ci"]
        assert low < of_model["margin"]["value"] < high
    assert figures[str(model)]["count"]["reward_accuracy"] is None
    first, second = (
        np.array([line["chosen"] - line["rejected"] for line in lines if line["model"] == str(one)])
        for one in (model, other)
    )
    reward = figures[str(other)]["count"]["reward_accuracy"]["value"]
    assert reward == pytest.approx(np.mean(second > first))
    assert 0 < reward < 1


def test_a_token_dataset_gives_the_figures_of_its_rows(tmp_path: Path, model: Path, source: Path) -> None:
    tokens = tokenize(tmp_path / "tokens", model, [source], validation_split=0)
    given = ["--models", model, "--pairs", f"rows={source}", f"tokens={tokens}", "--max_length", 192]
    found = evaluated(tmp_path / "out", *given)[str(model)]
    assert found["rows"] == found["tokens"]
    with pytest.raises(InputError, match=r"^--pairs .*config.json: .*'chosen' is missing"):
        evaluated(tmp_path / "texts", "--models", model, "--pairs", model / "config.json")
    with pytest.raises(InputError, match="one after the other"):
        evaluated(tmp_path / "both", "--models", model, "--pairs", tokens, "--texts", source)


def test_figures_count_ties_and_length_bias() -> None:
    sums = np.array([(-1.0, -2.0), (-2.0, -2.0), (-3.0, -1.0), (-4.0, -6.0)])
    tokens = np.array([(4, 2), (2, 4), (3, 3), (8, 2)])
    places = ["a:1", "a:2", "a:3", "a:4"]
    likelier = sums + np.array([1, 0])
    first, second = figures_of([PairScores(sums, tokens, places), PairScores(likelier, tokens, places)], seed=0)
    assert first.accuracy.value == pytest.approx(2.5 / 4)
    assert first.accuracy_per_token.value == pytest.approx(2 / 4)  # of the sums per token: pairs 1 and 4
    assert first.margin.value == pytest.approx(1 / 4)
    assert first.margin.ci is None  # too few pairs
    assert first.length_bias is not None
    assert first.length_bias.value == pytest.approx(1 - 0.5)
    assert second.reward_accuracy is not None
    assert second.reward_accuracy.value == 1
