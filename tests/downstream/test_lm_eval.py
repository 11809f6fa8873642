"""lm_eval evaluates an export with a task in local files."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.downstream_uses import Checked

pytestmark = [pytest.mark.slow, pytest.mark.downstream]

TOLERANCE = 1e-3
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "purple", "seven"], "answer": 0},
    {"question": "Two plus two is", "choices": ["a dog", "four", "Rome"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["bread", "to swim", "cold"], "answer": 2},
]
TASK = """\
task: local_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, lm_eval_python: Path, export: Path) -> Path:
    """The folder with the results and samples of lm_eval."""
    folder = tmp_path_factory.mktemp("lm-eval")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS), encoding="utf-8")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "questions.yaml").write_text(TASK.format(questions=questions), encoding="utf-8")
    words = f"--model hf --model_args pretrained={export},dtype=float32 --device cpu --batch_size 1 --log_samples "
    words += f"--tasks local_questions --include_path {folder / 'tasks'} --output_path {folder / 'out'}"
    command = [str(lm_eval_python), "-m", "lm_eval", "run", *words.split()]
    ended = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder / "out"


def only(folder: Path, pattern: str) -> Path:
    (file,) = folder.rglob(pattern)
    return file


def loglikelihood(model: Any, tokenizer: Any, question: str, choice: str) -> float:
    """Return the sum of the choice's log probabilities after the question."""
    start = len(tokenizer(question)["input_ids"])
    ids = tokenizer(f"{question} {choice}", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logs = model(ids).logits[0, :-1].log_softmax(-1)
    return float(logs.gather(1, ids[0, 1:, None])[start - 1 :].sum())


def test_lm_eval_scores_each_answer_as_plain_transformers_does(evaluated: Path, export: Path, checked: Checked) -> None:
    results = json.loads(only(evaluated, "results_*.json").read_text())
    assert results["results"]["local_questions"]["acc,none"] == 1
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    samples = [json.loads(line) for line in only(evaluated, "samples_*.jsonl").read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        document = sample["doc"]
        expected = [loglikelihood(model, tokenizer, document["question"], choice) for choice in document["choices"]]
        assert [float(score) for score, _ in sample["filtered_resps"]] == pytest.approx(expected, abs=TOLERANCE)
    what = f"a task from local files: each answer's log-probability within {TOLERANCE:g} of plain transformers"
    checked("lm_eval", results["lm_eval_version"], what)
