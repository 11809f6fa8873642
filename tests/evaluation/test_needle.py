"""evaluate.py --needle: where facts are hidden in a text, how they are asked for, and how answers are counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models
from fabric_train.evaluation.haystack import DEPTHS, Haystack, find_language, invented_text, number_in
from fabric_train.evaluation.needle import Answer, figures_of, generate_answers, share_interval
from fabric_train.evaluation.texts import DocumentTexts


def evaluated(output: Path, *words: object) -> dict[str, dict[str, dict[str, Any]]]:
    """Run the program in this process and return needle.json."""
    compare_models(parse_arguments(EvaluateArguments, [*map(str, words), "--output_dir", str(output)]))
    return json.loads((output / "needle.json").read_text())


def answers_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "needle.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def spm_dir(tmp_path_factory: pytest.TempPathFactory, spm_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    spm_tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("folder", ["smollm2_dir", "llama3_dir", "spm_dir"])
def test_facts_stand_at_their_depths_in_a_text_of_exact_length(
    folder: str, bible_es_jsonl: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(request.getfixturevalue(folder))
    with bible_es_jsonl.open(encoding="utf-8") as lines:
        texts = [json.loads(next(lines))["text"] for _ in range(12)]
    haystack = Haystack("es", texts, "es", tokenizer, 4096)
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    for length in (400, 1000, 4096):
        hidden = haystack.hide(length, 1, seed=0)
        asked = max(len(fact.question_ids) + fact.answer_tokens for fact in hidden.facts)
        assert len(hidden.input_ids) + asked == length
        assert hidden.input_ids[0] == prefix
        rest = list(hidden.input_ids[1:])
        shares = []
        for fact in hidden.facts:
            sentence = f"\nEl número secreto de {fact.town} es {fact.number}.\n"
            written = tokenizer.encode(sentence, add_special_tokens=False)
            begin = fact.place - (len(hidden.input_ids) - len(rest))  # without the facts before it
            assert rest[begin : begin + len(written)] == written
            del rest[begin : begin + len(written)]
            assert tokenizer.decode(fact.question_ids).strip() == f"El número secreto de {fact.town} es"
            if begin not in (0, len(rest)) and length > 4000:  # a sentence ends within 5 % of a long text
                assert tokenizer.decode(rest[begin - 1]).rstrip(" ")[-1:] in (*".!?", "\n")
            shares.append(begin)
        assert [100 * begin / len(rest) for begin in shares] == pytest.approx(DEPTHS, abs=5)
        assert (shares[0], shares[-1]) == (0, len(rest))
        assert " ".join(tokenizer.decode(rest[1:-1]).split()) in " ".join(" ".join(texts).split())


@pytest.mark.parametrize(
    "text, right",
    [
        (" 1234567.\nThe", True),
        ("1234567", True),
        (" 12345678", False),
        (" 1234566.", False),
        (" not 1234567.", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_begins_with_the_whole_number(text: str, right: bool) -> None:
    assert (number_in(text) == "1234567") is right


def test_figures_count_answers_with_the_number_of_another_fact() -> None:
    def answer(depth: int, trial: int, number: str, text: str) -> Answer:
        own = ("model", "weights", "en", 4096, depth, trial, f"prompt {trial}", 1, "Rome")
        return Answer(*own, number, text, number_in(text) == number)

    answers = [
        answer(0, 0, "1111111", " 1111111."),
        answer(25, 0, "2222222", " 1111111."),
        answer(50, 0, "3333333", "?"),
    ]
    answers += [answer(0, 1, "4444444", " 1111111."), answer(25, 1, "5555555", " 5555555.")]
    found = figures_of(answers)["4096"]
    assert (found["right"], found["questions"], found["share"], found["other_fact"]) == (2, 5, 0.4, 1)
    assert found["depths"]["25"] == {"right": 1, "questions": 2}
    assert found["depths"]["100"] == {"right": 0, "questions": 0}


def test_the_interval_of_a_share_is_wilsons() -> None:
    z2 = 1.959964**2
    assert share_interval(0, 15) == pytest.approx((0, z2 / (15 + z2)))
    assert share_interval(15, 15) == pytest.approx((15 / (15 + z2), 1))
    assert share_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Brown, Cai and DasGupta 2001


def test_facts_have_the_language_of_the_text(bible_es_jsonl: Path, catalan_jsonl: Path) -> None:
    def language(name: str, file: Path) -> str:
        with file.open(encoding="utf-8") as lines:
            return find_language(DocumentTexts(name, (json.loads(next(lines))["text"],), ("",)))

    assert language("bible", bible_es_jsonl) == "es"
    assert language("manual", catalan_jsonl) == "ca"
    assert language("va-news", bible_es_jsonl) == "ca"  # the name decides


@torch.no_grad()
def test_answers_are_those_of_plain_greedy_generation(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    haystack = Haystack("en", invented_text(2000).texts, "en", tokenizer, 1000)
    hidden = haystack.hide(1000, 0, seed=3)
    read: list[int] = []
    found = generate_answers(model, hidden, 100, read.append)
    assert sum(read) == 1000
    model.generation_config.eos_token_id = None
    for fact, new_ids in zip(hidden.facts, found, strict=True):
        prompt = torch.tensor([[*hidden.input_ids, *fact.question_ids]])
        whole = model.generate(prompt, max_new_tokens=fact.answer_tokens, do_sample=False)[0].tolist()
        assert new_ids == whole[prompt.shape[1] :]


def test_a_real_model_finds_facts_and_is_not_asked_twice(
    tmp_path: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--models", smollm2_dir, "--needle", 300, "--needle_trials", 1)
    found = evaluated(tmp_path / "out", *given)[str(smollm2_dir)]["en"]["300"]
    answers = answers_in(tmp_path / "out")
    assert [answer["depth"] for answer in answers] == [*DEPTHS]
    assert found["questions"] == len(DEPTHS)
    assert found["right"] == sum(answer["right"] for answer in answers)
    assert found["right"] >= 3
    assert found["share"] == found["right"] / len(DEPTHS)
    for answer in answers:
        assert answer["right"] == answer["answer"].lstrip().startswith(answer["number"])
        assert found["depths"][str(answer["depth"])] == {"right": int(answer["right"]), "questions": 1}
    assert (tmp_path / "out" / "needle.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "300" in shown
    assert f"{found['share']:.0%}" in shown
    changed = [{**answer, "answer": "kept"} for answer in answers]
    (tmp_path / "out" / "needle.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in changed))
    assert evaluated(tmp_path / "out", *given)[str(smollm2_dir)]["en"]["300"] == found
    assert [answer["answer"] for answer in answers_in(tmp_path / "out")] == ["kept"] * len(DEPTHS)


def test_what_cannot_be_asked_is_refused(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> None:
    refused = [
        (("--needle", "100", "1k"), r"256 positions, but --needle 1024 is longer; .* --rope_scaling"),
        (("--needle", 100), r"^--needle 100: too short for 5 facts in a text; give \d+ or more"),
        (("--needle", 250, "--texts", tiny_tokens_dir), "a token dataset has none"),
        (("--needle", 250, "--pairs", tiny_tokens_dir), "--needle and --pairs"),
    ]
    for words, fault in refused:
        with pytest.raises(InputError, match=fault):
            evaluated(tmp_path / "out", "--models", tiny_model_dir, *words)
    assert not (tmp_path / "out").exists()
