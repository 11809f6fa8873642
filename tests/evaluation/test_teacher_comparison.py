"""evaluate.py --teacher: divergence and agreement by plain full distributions, and teachers that cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models

TEXTS = ["Two households, both alike in dignity", "In fair Verona, where we lay our scene"]


def write_changed(folder: Path, model: Path, vocabulary_size: int | None = None) -> Path:
    """Write a model with other weights, and with rows of padding up to ``vocabulary_size``."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in loaded.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if vocabulary_size is not None:
            loaded.resize_token_embeddings(vocabulary_size, mean_resizing=False)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def evaluate(output: Path, model: Path, teacher: Path, texts: Path) -> dict[str, Any]:
    """Run the program in this process and return the model's figures in teacher.json."""
    words = ["--models", str(model), "--teacher", str(teacher), "--texts", f"en={texts}", "--output_dir", str(output)]
    compare_models(parse_arguments(EvaluateArguments, words))
    content: dict[str, Any] = json.loads((output / "teacher.json").read_text())
    return content["models"][str(model)]["en"]


def plain_figures(model_dir: Path, teacher_dir: Path) -> tuple[float, float]:
    """Return the mean divergence and the agreement by full logits over the tokenizer's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32)
    divergences = []
    agreements = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        inputs = torch.tensor([[tokenizer.bos_token_id, *ids[:-1]]])
        with torch.no_grad():
            student_log_probs = model(inputs).logits[0, :, : len(tokenizer)].double().log_softmax(-1)
            teacher_log_probs = teacher(inputs).logits[0, :, : len(tokenizer)].double().log_softmax(-1)
        divergences.append(F.kl_div(student_log_probs, teacher_log_probs, reduction="none", log_target=True).sum(-1))
        agreements.append((student_log_probs.argmax(-1) == teacher_log_probs.argmax(-1)).double())
    return float(torch.cat(divergences).mean()), float(torch.cat(agreements).mean())


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def test_figures_are_those_of_full_distributions(tmp_path: Path, tiny_model_dir: Path, texts: Path) -> None:
    num_rows = AutoModelForCausalLM.from_pretrained(tiny_model_dir).config.vocab_size
    student = write_changed(tmp_path / "student", tiny_model_dir, vocabulary_size=num_rows + 8)
    divergence, agreement = plain_figures(student, tiny_model_dir)

    figures = evaluate(tmp_path / "out", student, tiny_model_dir, texts)

    assert figures["divergence"]["value"] == pytest.approx(divergence, rel=1e-4)
    assert figures["agreement"]["value"] == pytest.approx(agreement, abs=1e-9)
    # again, from the finished chunks
    assert evaluate(tmp_path / "out", student, tiny_model_dir, texts) == figures


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_model_dir: Path, smollm2_dir: Path, texts: Path
) -> None:
    with pytest.raises(InputError, match=f"--teacher {smollm2_dir}: it has a different tokenizer: id"):
        evaluate(tmp_path / "out", tiny_model_dir, smollm2_dir, texts)
    assert not (tmp_path / "out").exists()


def test_a_teacher_with_too_few_rows_is_refused(tmp_path: Path, tiny_model_dir: Path, texts: Path) -> None:
    num_tokens = len(AutoTokenizer.from_pretrained(tiny_model_dir))
    teacher = write_changed(tmp_path / "teacher", tiny_model_dir, vocabulary_size=num_tokens - 8)
    with pytest.raises(InputError, match=f"--teacher .*: its head has {num_tokens - 8} rows"):
        evaluate(tmp_path / "out", tiny_model_dir, teacher, texts)


def test_progress_counts_only_what_is_not_in_the_cache(
    tmp_path: Path, tiny_model_dir: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = write_changed(tmp_path / "student", tiny_model_dir)
    evaluate(tmp_path / "out", student, tiny_model_dir, texts)
    capsys.readouterr()
    evaluate(tmp_path / "out", student, tiny_model_dir, texts)
    assert "scoring" not in capsys.readouterr().err
