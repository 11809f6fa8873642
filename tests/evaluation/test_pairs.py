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
def changed_model(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "changed"
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
    prompt_ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(row["prompt"] + row[answer], return_dict=False)
    begin = 0  # of the answer: the first id that is not the prompt's
    while begin < len(prompt_ids) and prompt_ids[begin] == ids[begin]:
        begin += 1
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    return float(sum(log_probs[position - 1, ids[position]] for position in range(begin, len(ids))))


def test_answers_have_the_log_probabilities_of_a_plain_forward_pass(
    tmp_path: Path, model: Path, changed_model: Path, source: Path
) -> None:
    output = tmp_path / "out"
    models = ("--models", model, changed_model)
    figures_by_model = evaluated(output, *models, "--pairs", f"count={source}", "--max_length", 192)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    all_lines = [json.loads(line) for line in (output / "pairs.jsonl").read_text().splitlines()]
    assert len(all_lines) == 2 * len(rows)
    margins_by_model = {}
    for folder in (model, changed_model):
        # each answer
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        lines = [line for line in all_lines if line["model"] == str(folder)]
        for line in lines:
            row_number = int(line["pair"].rpartition(":")[2])
            row = rows[row_number - 1]
            for answer in ("chosen", "rejected"):
                assert line[answer] == pytest.approx(plain_sum(loaded, tokenizer, row, answer), abs=1e-4)

        # the figures of the model
        margins = np.array([line["chosen"] - line["rejected"] for line in lines])
        margins_by_model[folder] = margins
        figures = figures_by_model[str(folder)]["count"]
        assert figures["pairs"] == len(rows)
        assert figures["accuracy"]["value"] == pytest.approx(np.mean(margins > 0))
        assert figures["margin"]["value"] == pytest.approx(np.mean(margins))
        low, high = figures["margin"]["ci"]
        assert low < figures["margin"]["value"] < high

    # the second model in comparison with the first
    assert figures_by_model[str(model)]["count"]["reward_accuracy"] is None
    reward_accuracy = figures_by_model[str(changed_model)]["count"]["reward_accuracy"]["value"]
    assert reward_accuracy == pytest.approx(np.mean(margins_by_model[changed_model] > margins_by_model[model]))
    assert 0 < reward_accuracy < 1


def test_a_token_dataset_gives_the_figures_of_its_rows(tmp_path: Path, model: Path, source: Path) -> None:
    tokens = tokenize(tmp_path / "tokens", model, [source], validation_split=0)
    words = ["--models", model, "--pairs", f"rows={source}", f"tokens={tokens}", "--max_length", 192]
    figures_by_source = evaluated(tmp_path / "out", *words)[str(model)]
    assert figures_by_source["rows"] == figures_by_source["tokens"]
    with pytest.raises(InputError, match=r"^--pairs .*config.json: .*'chosen' is missing"):
        evaluated(tmp_path / "texts", "--models", model, "--pairs", model / "config.json")
    with pytest.raises(InputError, match="one after the other"):
        evaluated(tmp_path / "both", "--models", model, "--pairs", tokens, "--texts", source)


def test_figures_count_ties_and_length_bias() -> None:
    # chosen and rejected answers of pairs 1 to 4; the second model finds every chosen one more likely
    sums = np.array([(-1.0, -2.0), (-2.0, -2.0), (-3.0, -1.0), (-4.0, -6.0)])
    tokens = np.array([(4, 2), (2, 4), (3, 3), (8, 2)])
    locations = ["a:1", "a:2", "a:3", "a:4"]
    first_scores = PairScores(sums, tokens, locations)
    second_scores = PairScores(sums + np.array([1, 0]), tokens, locations)
    first, second = figures_of([first_scores, second_scores], seed=0)

    assert first.accuracy.value == pytest.approx(2.5 / 4)  # pairs 1 and 4, and the tie of pair 2
    assert first.accuracy_per_token.value == pytest.approx(2 / 4)  # pairs 1 and 4
    assert first.margin.value == pytest.approx(1 / 4)
    assert first.margin.ci is None  # too few pairs
    assert first.length_bias is not None
    assert first.length_bias.value == pytest.approx(1 - 0.5)  # longer in pairs 1 and 4, shorter in pair 2
    assert second.reward_accuracy is not None
    assert second.reward_accuracy.value == 1
