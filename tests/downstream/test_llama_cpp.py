"""llama.cpp's converter makes a GGUF file of an export, and llama.cpp computes the same from it.

The converter comes with the source distribution of llama-cpp-python, which has llama.cpp in it.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fabric_train.files.atomic_folder import complete_folder
from fabric_train.sample_data import real_data
from fabric_train.sample_data.real_data import CACHE
from fabric_train.tokenization.tokenizers.tokenizer_folder import set_chat_template
from fabric_train.vocabulary.__main__ import main as vocabulary
from tests.support.checkpoint_examples import CHAT_TEMPLATE, TOKENIZER_FILES, write_full
from tests.support.downstream_uses import (
    OPTIONS,
    Checked,
    ModelOutputs,
    assert_same,
    use_in_llama_cpp,
    use_in_transformers,
)
from tests.support.environments import downstream_environment
from tests.support.exports import convert_run
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

pytestmark = [pytest.mark.slow, pytest.mark.downstream]

LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
RELEASE = "llama_cpp_python-0.3.36"
LORA_CONVERTER = "convert_lora_to_gguf.py"
TOLERANCE = 1e-3


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """Python with llama-cpp-python."""
    return downstream_environment("llama_cpp")


@pytest.fixture(scope="session")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program convert_hf_to_gguf.py, with convert_lora_to_gguf.py and the packages that they need beside it."""
    target = CACHE / "downstream" / f"{RELEASE}-converters"
    if not target.exists():
        folder = tmp_path_factory.mktemp("llama-cpp")
        requirement = RELEASE.replace("-", "==")  # such as llama_cpp_python==0.3.36
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
        subprocess.run([*pip, requirement], check=True)
        with complete_folder(target) as unpacked, tarfile.open(folder / f"{RELEASE}.tar.gz") as archive:
            llama_cpp_dir = f"{RELEASE}/vendor/llama.cpp/"
            needed = ("convert_hf_to_gguf.py", LORA_CONVERTER, "conversion/", "gguf-py/")
            needed_paths = tuple(llama_cpp_dir + name for name in needed)
            needed_files = [file for file in archive if file.name.startswith(needed_paths)]
            archive.extractall(unpacked, needed_files, filter="data")
    return target / RELEASE / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py"


def to_gguf(converter: Path, folder: Path, file: Path, *words: object) -> Path:
    """Convert a Hugging Face folder, or a folder of peft, to GGUF with fp32 weights."""
    command = [sys.executable, str(converter), str(folder), "--outtype", "f32", "--outfile", str(file)]
    command += map(str, words)
    ended = subprocess.run(command, text=True, capture_output=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return file


@pytest.fixture(scope="module")
def llama_3(tmp_path_factory: pytest.TempPathFactory, llama3_dir: Path, forked_runs: ForkedRuns) -> Path:
    """Export in fp32 of a small random Llama-3.1: its tokenizer, scaled positions, a head that is not tied."""
    folder = tmp_path_factory.mktemp("llama-3-gguf")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_3))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "base")
    for name in TOKENIZER_FILES:
        shutil.copy(llama3_dir / name, folder / "base")
    checkpoint = write_full(folder / "step-00000001", folder / "base", model.state_dict(), 1)
    return convert_run(forked_runs, folder / "export", "--checkpoint", checkpoint, "--dtype", "float32")


def test_llama_cpp_makes_the_same_of_it(
    tmp_path: Path, converter: Path, llama_cpp: Path, export: Path, used: ModelOutputs, checked: Checked
) -> None:
    """Ids, logits, greedy text, the chat template, and a reply that ends at the end of the turn."""
    found = use_in_llama_cpp(llama_cpp, to_gguf(converter, export, tmp_path / "model.gguf"))
    assert_same(found, used, TOLERANCE)
    what = f"fp32 GGUF: logits within {TOLERANCE:g} of transformers; same text, reply and chat template"
    checked("llama.cpp (llama-cpp-python)", found.version, what)


def test_llama_cpp_reads_the_tokenizer_and_positions_of_llama_3(
    tmp_path: Path, converter: Path, llama_cpp: Path, llama_3: Path, checked: Checked
) -> None:
    expected = use_in_transformers(sys.executable, llama_3)
    found = use_in_llama_cpp(llama_cpp, to_gguf(converter, llama_3, tmp_path / "llama-3.gguf"))
    assert found.ids == expected.ids
    assert found.ids[0] == LLAMA_3["bos_token_id"]
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert found.template == CHAT_TEMPLATE
    what = "GGUF of a small random Llama-3.1 with untied embeddings: same token ids and chat template; "
    what += f"logits within {TOLERANCE:g} of transformers"
    checked("llama.cpp (llama-cpp-python)", found.version, what)


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory, spm_dir: Path, spm_tokenizer_model: Path) -> Path:
    """A small random Llama-2 with a tokenizer.model of SentencePiece."""
    folder = Path(shutil.copytree(spm_dir, tmp_path_factory.mktemp("llama-2") / "base"))
    shutil.copy(spm_tokenizer_model, folder / "tokenizer.model")
    set_chat_template(folder, CHAT_TEMPLATE)
    torch.manual_seed(0)
    sizes = {name: LLAMA_3[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = LlamaConfig(vocab_size=32_000, num_attention_heads=4, bos_token_id=1, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("base", ["smollm2_dir", "llama_2"])
def test_llama_cpp_reads_a_vocabulary_that_was_extended(
    base: str,
    tmp_path: Path,
    converter: Path,
    llama_cpp: Path,
    checked: Checked,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = request.getfixturevalue(base)
    (tmp_path / "tokens.txt").write_text("Costa Brava\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = f"--model {folder} --texts ca={real_data.guide('ca')} --num_tokens 500 --output_dir extended"
    vocabulary(["extend", *words.split(), "--tokens", "tokens.txt"])
    text = "La instal·lació del sistema a la Costa Brava també és possible amb aquest paquet."
    expected = use_in_transformers(sys.executable, tmp_path / "extended", text)
    gguf = to_gguf(converter, tmp_path / "extended", tmp_path / "extended.gguf")
    found = use_in_llama_cpp(llama_cpp, gguf, text=text)
    first = json.loads((tmp_path / "extended" / "vocabulary.json").read_text())["first_id"]
    assert sum(index >= first for index in expected.ids) > 4
    assert found.ids == expected.ids
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
    kind = "SmolLM2" if base == "smollm2_dir" else "a small random Llama-2"
    what = f"GGUF of {kind} extended by 501 tokens, on a text that uses them: same token ids; "
    what += f"logits within {TOLERANCE:g} of transformers"
    checked("llama.cpp (llama-cpp-python)", found.version, what)


def test_llama_cpp_puts_an_adapter_on_its_base(
    tmp_path: Path,
    converter: Path,
    llama_cpp: Path,
    run: Path,
    smollm2_dir: Path,
    forked_runs: ForkedRuns,
    checked: Checked,
) -> None:
    options = {**OPTIONS, "lora_rank": 8, "lr": 1e-2}
    forked_runs.start(argv(smollm2_dir, run.parent / "tokens", tmp_path / "run", **options), 1).finish(900)
    adapter = convert_run(forked_runs, tmp_path / "adapter", "--checkpoint", tmp_path / "run")
    lora = to_gguf(converter.with_name(LORA_CONVERTER), adapter, tmp_path / "lora.gguf", "--base", smollm2_dir)
    base = to_gguf(converter, smollm2_dir, tmp_path / "base.gguf")
    expected, plain = (use_in_transformers(sys.executable, folder) for folder in (adapter, smollm2_dir))
    assert abs(expected.logits - plain.logits).max() > 100 * TOLERANCE
    found = use_in_llama_cpp(llama_cpp, base, lora)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert (found.ids, found.text) == (expected.ids, expected.text)
    what = f"an adapter converted by `{LORA_CONVERTER}`, on its fp32 base: "
    what += f"logits within {TOLERANCE:g} of peft; same text"
    checked("llama.cpp (llama-cpp-python)", found.version, what)
