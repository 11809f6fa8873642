"""evaluate.py: each token is predicted once with its context, as by a plain formula, by lm_eval and by a run itself."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Fabric
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from fabric_train.cli.errors import InputError, RunError
from fabric_train.cli.parser import parse_arguments
from fabric_train.data.token_dataset import open_dataset
from fabric_train.evaluation import texts as evaluation_texts
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.compare_models import compare_models
from fabric_train.evaluation.loss_table import DocumentLoss, compare_evaluated, read_evaluated
from fabric_train.evaluation.models import LossCache, find_model
from fabric_train.evaluation.texts import TextChunk, cut_windows
from fabric_train.inference.load_model import load_for_inference
from fabric_train.training.evaluation import evaluate
from tests.model.test_rope_frequencies import LONGROPE
from tests.support.checkpoint_examples import trained_weights, write_checksums, write_full
from tests.support.forked_runs import ForkedRuns
from tests.support.token_datasets import manifest_of, tokenize, write_jsonl

BOS = 0  # of the tiny tokenizer
ES = [f"El número {number} és después de {number - 1}; " * (1 + number % 7) for number in range(24)]
EN = [f"The number {number} comes after {number - 1}.\n" * 3 for number in range(12)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what --texts names: NAME=FILE for the Spanish and the English texts."""
    folder = tmp_path_factory.mktemp("texts")
    return [
        f"es.jsonl={write_jsonl(folder / 'es.jsonl', ES)}",
        f"en.jsonl={write_jsonl(folder / 'en.jsonl', EN)}",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Path:
    """A run on the tiny token dataset with one checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    checkpoint = write_full(
        folder / "checkpoints" / "step-00000001", tiny_model_dir, trained_weights(tiny_model_dir), 1
    )
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    trainer["arguments"]["train_data_dir"] = str(tiny_tokens_dir)
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)
    return folder


def evaluated(output: Path, *words: object) -> dict[str, dict[str, dict[str, Any]]]:
    """Run the program in this process and return evaluation.json."""
    compare_models(parse_arguments(EvaluateArguments, [*map(str, words), "--output_dir", str(output)]))
    return json.loads((output / "evaluation.json").read_text())


@pytest.mark.parametrize(
    ("free_bytes", "fault"), [(1000, "an evaluation needs"), (1_000_001, "the loss of each token needs")]
)
def test_a_full_disk_is_found_before_a_model_is_loaded(
    free_bytes: int, fault: str, tmp_path: Path, texts: list[str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fabric_train.files.requirements.free_bytes", lambda _: free_bytes)
    monkeypatch.setattr("fabric_train.evaluation.models.ModelsInTurn", lambda: pytest.fail("a model is loaded"))
    with pytest.raises(InputError, match=fault):
        evaluated(tmp_path / "new", "--models", tiny_model_dir, "--texts", *texts)
    assert list(tmp_path.iterdir()) == []


def plain_nats(folder: Path, text: str, max_length: int, overlap: int) -> list[float]:
    """Return the loss of each token by the definition: token by token from an own forward pass.

    See ``cut_windows`` for the windows; a window predicts the tokens up to ``last_predicted``.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [BOS, *AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)]
    nats = []
    begin = 0
    last_predicted = max_length
    for token in range(1, len(ids)):
        if token > last_predicted:  # the next window has at least ``overlap`` tokens before this one
            last_predicted = min(token - overlap + max_length, len(ids) - 1)
            begin = last_predicted - max_length
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:token]])).logits[0, -1]
        log_probs = torch.log_softmax(logits.double(), dim=0)
        nats.append(-float(log_probs[ids[token]]))
    return nats


@given(st.integers(0, 60), st.integers(2, 12), st.data())
@settings(deadline=None)
def test_windows_predict_each_token_once_with_the_overlap(num_tokens: int, length: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, length - 1))
    predicting: list[int] = []
    for window in cut_windows(0, num_tokens, length, overlap):
        predicting += range(window.first_predicting, window.stop)
        assert 0 <= window.begin <= window.first_predicting
        assert window.stop - window.begin <= length
        if window.begin > 0:
            assert window.first_predicting - window.begin >= overlap - 1
    assert predicting == list(range(num_tokens))


@pytest.mark.parametrize("overlap", [1, 5])
def test_the_loss_is_that_of_a_plain_formula(tmp_path: Path, tiny_model_dir: Path, overlap: int) -> None:
    documents = ES[1:3]
    max_length = 16
    source = f"es={write_jsonl(tmp_path / 'es.jsonl', documents)}"
    words = ("--models", tiny_model_dir, "--texts", source, "--max_length", max_length, "--overlap", overlap)
    figures = evaluated(tmp_path / "out", *words, "--batch_tokens", 40)[str(tiny_model_dir)]["es"]

    # all documents together
    nats_of_documents = [plain_nats(tiny_model_dir, text, max_length, overlap) for text in documents]
    num_tokens = sum(len(nats) for nats in nats_of_documents)
    num_bytes = sum(len(text.encode()) for text in documents)
    sums = [sum(nats) for nats in nats_of_documents]
    total = sum(sums)
    assert num_tokens > 4 * max_length  # several windows
    assert figures["tokens"] == num_tokens
    assert figures["bytes"] == num_bytes
    assert figures["loss"] == pytest.approx(total / num_tokens, abs=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, abs=1e-5)

    # each document
    lines = [json.loads(line) for line in (tmp_path / "out" / "documents.jsonl").read_text().splitlines()]
    assert [line["nats"] for line in lines] == pytest.approx(sums, rel=1e-5)
    assert lines[1]["document"].endswith("es.jsonl, line 2")


def test_a_validation_split_without_supervised_tokens_is_refused(
    tmp_path: Path, chatml_dir: Path, tiny_model_dir: Path
) -> None:
    """The two rows of 29 tokens end before the answer: what does not fill a row is left out."""
    rows = [{"prompt": f"Question {number} of many, which goes on", "completion": " No."} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"packing": "concat", "validation_split": 0.01, "max_length": 29}
    tokenize(tmp_path / "tokens", chatml_dir, tmp_path / "chats.jsonl", **options)
    assert manifest_of(tmp_path / "tokens").ledger.splits["validation"].tokens_supervised == 0
    with pytest.raises(InputError, match="validation rows is supervised"):
        evaluated(tmp_path / "out", "--models", tiny_model_dir, "--texts", tmp_path / "tokens")
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_the_loss_of_a_runs_own_validation_is_its_val_loss(
    tmp_path: Path, run: Path, tiny_tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # what the program computes, and what a run does
    figures_by_source = evaluated(tmp_path, "--models", run)[str(run)]
    (reason,) = (line for line in capsys.readouterr().out.splitlines() if "are supervised" in line)
    rows = open_dataset(str(tiny_tokens_dir)).validation
    assert rows is not None
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-00000001", dtype=torch.float32)
    batches = [rows.__getitems__([row]) for row in range(len(rows))]
    expected = evaluate(Fabric(accelerator="cpu", devices=1), model, batches, rows.source_names)
    assert expected is not None

    assert list(figures_by_source) == list(expected.sources)
    (figures,) = figures_by_source.values()
    num_tokens = figures["tokens"]
    assert num_tokens == expected.whole.num_tokens
    num_supervised = manifest_of(tiny_tokens_dir).ledger.splits["validation"].tokens_supervised
    num_left_out = num_supervised - num_tokens
    assert f"{num_supervised:,} validation tokens are supervised; {num_left_out:,} of these" in reason
    assert figures["loss"] == pytest.approx(expected.whole.loss, abs=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(expected.whole.bits_per_byte, abs=1e-6)


def test_a_token_dataset_is_a_text_under_its_name(tmp_path: Path, run: Path, tiny_tokens_dir: Path) -> None:
    named_figures = evaluated(tmp_path / "named", "--models", run, "--texts", f"en={tiny_tokens_dir}")[str(run)]
    (figures,) = evaluated(tmp_path / "default", "--models", run)[str(run)].values()
    assert named_figures == {"en": figures}


def test_a_text_that_is_not_utf_8_is_refused_with_advice_that_can_be_followed(tmp_path: Path, run: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"convert the file to UTF-8; fix it, or .*tokenize --on_bad_rows"):
        evaluated(tmp_path / "out", "--models", run, "--texts", tmp_path / "latin.txt")


def test_models_are_compared_with_the_first_by_source(
    tmp_path: Path, tiny_model_dir: Path, run: Path, texts: list[str], forked_runs: ForkedRuns
) -> None:
    words = ["--models", tiny_model_dir, run, "--texts", *texts, "--max_length", 64, "--output_dir", tmp_path / "out"]
    program = forked_runs.start(words, 1, program="fabric_train.programs.evaluate")
    program.finish()
    output = program.stdout()
    figures_by_model = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(figures_by_model) == [str(tiny_model_dir), str(run)]
    for source, documents in (("es.jsonl", ES), ("en.jsonl", EN)):
        # the first model, with its interval
        first = figures_by_model[str(tiny_model_dir)][source]
        assert first["documents"] == len(documents)
        low, high = first["ci"]["bits_per_byte"]
        assert low < first["bits_per_byte"] < high
        assert "difference" not in first

        # the run, with its difference from the first model
        second = figures_by_model[str(run)][source]
        difference = second["difference"]
        assert difference["to"] == str(tiny_model_dir)
        assert difference["value"] == pytest.approx(second["bits_per_byte"] - first["bits_per_byte"])
        low, high = difference["ci"]
        assert difference["excludes_0"] == (low > 0 or high < 0)
        assert f"{second['bits_per_byte']:.4f}" in output
    is_worse = figures_by_model[str(run)]["es.jsonl"]["difference"]["value"] > 0
    assert ("worse" if is_worse else "better") in output


def test_finished_parts_are_not_computed_again(
    tmp_path: Path, tiny_model_dir: Path, run: Path, texts: list[str]
) -> None:
    model = str(tiny_model_dir)
    words = ("--texts", *texts, "--max_length", 64)
    figures_before = evaluated(tmp_path, "--models", model, *words)
    first_model_files = sorted((tmp_path / "token_losses").iterdir())
    assert len(first_model_files) == 2  # one for each text
    times = [file.stat().st_mtime_ns for file in first_model_files]

    # a second model adds its files
    figures_of_both = evaluated(tmp_path, "--models", model, run, *words)
    assert figures_of_both[model] == figures_before[model]
    assert [file.stat().st_mtime_ns for file in first_model_files] == times
    assert len(list((tmp_path / "token_losses").iterdir())) == 4

    # a file is used as it is, unless it is damaged
    altered_file = first_model_files[0]
    np.save(altered_file, np.zeros_like(np.load(altered_file)))
    altered_figures = evaluated(tmp_path, "--models", model, *words)[model]
    assert 0 in [figures["loss"] for figures in altered_figures.values()]
    altered_file.write_bytes(b"cut off")
    assert evaluated(tmp_path, "--models", model, *words) == figures_of_both


def test_models_and_texts_are_added_to_those_in_the_folder(
    tmp_path: Path, tiny_model_dir: Path, run: Path, texts: list[str]
) -> None:
    es, en = texts
    model = str(tiny_model_dir)
    folder = tmp_path / "out"
    figures = evaluated(folder, "--models", model, "--texts", es, "--max_length", 64)
    extended = evaluated(folder, "--models", run, "--texts", en, "--max_length", 64)
    assert list(extended) == [model, str(run)]
    assert extended[model] == figures[model]
    assert list(extended[model]) == ["es.jsonl"]
    assert list(extended[str(run)]) == ["en.jsonl"]

    # complete, it is as if all had been evaluated at once
    evaluated(folder, "--models", run, "--texts", es, "--max_length", 64)
    complete = evaluated(folder, "--models", model, "--texts", en, "--max_length", 64)
    words = ("--models", model, run, "--texts", *texts, "--max_length", 64)
    assert complete == evaluated(tmp_path / "at_once", *words)
    assert len((folder / "documents.jsonl").read_text().splitlines()) == 2 * (len(ES) + len(EN))


def test_a_source_means_the_same_documents_and_windows_for_all_models(
    tmp_path: Path, tiny_model_dir: Path, run: Path, texts: list[str]
) -> None:
    es, en = texts
    en_file = en.partition("=")[2]
    evaluated(tmp_path, "--models", tiny_model_dir, "--texts", es, "--max_length", 64)
    results = (tmp_path / "evaluation.json").read_text()

    # another model may not be added with other windows or documents
    other_windows = ("--texts", es, "--max_length", 32)
    other_documents = ("--texts", f"es.jsonl={en_file}", "--max_length", 64)
    for words in (other_windows, other_documents):
        with pytest.raises(
            InputError, match=rf"already has losses of {tiny_model_dir} for this name on different documents, or .*"
        ):
            evaluated(tmp_path, "--models", run, *words)
    assert (tmp_path / "evaluation.json").read_text() == results

    # all models together may
    figures = evaluated(tmp_path, "--models", tiny_model_dir, run, *other_windows)
    assert "difference" in figures[str(run)]["es.jsonl"]


def test_a_model_with_other_weights_replaces_the_former_one_with_a_note(
    tmp_path: Path, tiny_model_dir: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    before = evaluated(tmp_path / "out", "--models", model, "--texts", *texts, "--max_length", 64)[str(model)]
    assert "other weights" not in capsys.readouterr().err
    save_file(trained_weights(tiny_model_dir), model / "model.safetensors", metadata={"format": "pt"})
    after = evaluated(tmp_path / "out", "--models", model, "--texts", texts[0], "--max_length", 64)[str(model)]
    assert list(after) == ["es.jsonl"]
    assert after["es.jsonl"]["loss"] != before["es.jsonl"]["loss"]
    assert f"note: the weights of {model} have changed since the earlier evaluation" in capsys.readouterr().err


def test_all_means_each_checkpoint_and_a_damaged_one_fails_after_the_others(
    tmp_path: Path, tiny_model_dir: Path, texts: list[str]
) -> None:
    for step in (1, 2, 3):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08}"
        write_full(folder, tiny_model_dir, trained_weights(tiny_model_dir), step)
    weights = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    words = ("--models", tmp_path / "run" / "all", "--texts", texts[1], "--max_length", 64)
    with pytest.raises(
        RunError, match=r"^not evaluated because they are damaged: .*/run/step-00000002; remove them, or restore"
    ):
        evaluated(tmp_path / "out", *words)
    figures_by_model = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(figures_by_model) == [str(tmp_path / "run" / f"step-{step:08}") for step in (1, 3)]


def test_a_damaged_file_of_documents_is_one_line(tmp_path: Path, run: Path) -> None:
    evaluated(tmp_path, "--models", run)
    file = tmp_path / "documents.jsonl"
    file.write_text(file.read_text()[:-20])
    with pytest.raises(InputError, match=r"documents\.jsonl, line \d+: damaged, or .*; choose another --out"):
        evaluated(tmp_path, "--models", run)


def test_losses_of_another_type_or_number_are_damage(tmp_path: Path) -> None:
    loss = DocumentLoss(
        model="one",
        weights="w",
        source="es",
        text="t",
        document="es.jsonl:1",
        tokens=3,
        bytes=10,
        nats=2.5,
    )
    file = tmp_path / "documents.jsonl"
    for damage in ({"bytes": "x"}, {"tokens": 1.5}, {"nats": None}, {"model": ["one"]}):
        file.write_text(json.dumps(asdict(loss) | damage) + "\n")
        with pytest.raises(InputError, match=r"documents\.jsonl, line 1: damaged"):
            read_evaluated(tmp_path)

    # one model has two documents, the other one
    losses = [loss, replace(loss, document="es.jsonl:2"), replace(loss, model="two")]
    file.write_text("".join(json.dumps(asdict(document_loss)) + "\n" for document_loss in losses))
    with pytest.raises(InputError, match="models were not evaluated on the same documents from es"):
        compare_evaluated(read_evaluated(tmp_path), seed=0)


def test_parts_join_to_the_whole(
    tmp_path: Path, run: Path, tiny_tokens_dir: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--models", run, "--texts", *texts, f"tokens={tiny_tokens_dir}", "--max_length", 64)
    whole_figures = evaluated(tmp_path / "whole", *words)[str(run)]
    monkeypatch.setattr(evaluation_texts, "_CHUNK_TOKENS", 200)
    joined_figures = evaluated(tmp_path / "chunks", *words, "--batch_tokens", 100)[str(run)]
    assert len(list((tmp_path / "chunks" / "token_losses").iterdir())) > 10
    for source, whole in whole_figures.items():
        joined = joined_figures[source]
        assert joined["loss"] == pytest.approx(whole["loss"], abs=1e-6)
        assert joined["tokens"] == whole["tokens"]
        assert joined["bytes"] == whole["bytes"]


def test_an_adapter_has_the_texts_of_its_base_model_and_an_identity_of_its_own(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = {"base_model_name_or_path": str(tiny_model_dir), "peft_type": "LORA", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{module}.lora_{matrix}.weight": torch.ones(2, 2) for matrix in "AB"}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    base = find_model(str(tiny_model_dir))
    adapted = find_model(str(tmp_path))
    assert adapted.name == str(tmp_path)
    assert adapted.source == str(tmp_path)
    assert adapted.tokenizer_id == base.tokenizer_id
    assert adapted.vocab_size == base.vocab_size

    # base, adapter, and the adapter with other weights
    changed_weights = {name: weight + 1 for name, weight in weights.items()}
    save_file(changed_weights, tmp_path / "adapter_model.safetensors")
    changed = find_model(str(tmp_path))
    assert len({base.identity, adapted.identity, changed.identity}) == 3


def test_an_adapter_brings_the_tokenizer_that_its_base_lacks(tmp_path: Path, tiny_model_dir: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(tiny_model_dir, tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(tiny_model_dir, adapter, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    config = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA", "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 2}))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{name}.lora_A.weight": torch.ones(2, 64), f"{name}.lora_B.weight": torch.ones(64, 2)},
        adapter / "adapter_model.safetensors",
    )
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        find_model(str(tmp_path / "base"))
    assert find_model(str(adapter)).tokenizer_id == find_model(str(tiny_model_dir)).tokenizer_id
    _, tokenizer = load_for_inference(str(adapter))
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()


def test_losses_are_kept_apart_by_the_frequencies_that_the_longest_text_chooses(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    chunk = TextChunk(units=range(1), tokens=range(3), content="content", longest_input=30)
    cache = LossCache(tmp_path)
    for config, are_shared in ((LONGROPE, False), (LlamaConfig(), True)):
        model = replace(find_model(str(tiny_model_dir)), identity=config.model_type, config=config)
        cache.write(model, chunk, np.zeros(3, dtype=np.float32))
        assert cache.has(model, replace(chunk, longest_input=40))
        assert (
            cache.has(model, replace(chunk, longest_input=41)) is are_shared
        )  # LONGROPE has other frequencies beyond 40


def refusal(tmp_path: Path, *words: object) -> str:
    """Return the error of an evaluation that writes nothing."""
    with pytest.raises(InputError) as error:
        evaluated(tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
    return str(error.value)


def test_texts_that_cannot_be_evaluated_are_refused_at_once(
    tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    models = ("--models", tiny_model_dir)
    assert "--texts is required" in refusal(tmp_path, *models)
    assert "no such file" in refusal(tmp_path, *models, "--texts", "es=./none.jsonl")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
    assert "chats or instructions" in refusal(tmp_path, *models, "--texts", chats)
    tokenize(tmp_path / "tokens", tiny_model_dir, tiny_tokens_dir.parent / "slice.jsonl", validation_split=0)
    assert "no validation split" in refusal(tmp_path, *models, "--texts", tmp_path / "tokens")


def test_models_that_cannot_be_evaluated_are_refused_at_once(
    tmp_path: Path, tiny_model_dir: Path, chatml_dir: Path, tiny_tokens_dir: Path, texts: list[str]
) -> None:
    # no such folder
    missing = tmp_path / "none"
    assert refusal(tmp_path, "--models", missing, "--texts", *texts) == f"--models {missing}: no such folder"

    # fewer positions than the windows of a text have tokens
    long_text = write_jsonl(tmp_path / "long.jsonl", [" a" * 999])
    assert "has 256 positions" in refusal(tmp_path, "--models", tiny_model_dir, "--texts", long_text)

    # another tokenizer than that of the token dataset
    chat_model = Path(shutil.copytree(tiny_model_dir, tmp_path / "chat_model"))
    shutil.copytree(chatml_dir, chat_model, dirs_exist_ok=True)
    assert "not tokenized with the tokenizer of" in refusal(
        tmp_path, "--models", chat_model, "--texts", tiny_tokens_dir
    )


def test_an_output_folder_with_other_files_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(InputError, match="has other files but no evaluation"):
        evaluated(run, "--models", run)
