"""merge_models writes what its formulas say, for all kinds of models and vocabularies, or refuses in one line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants, metadata_load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fabric_train.cli.errors import InputError
from fabric_train.export import hub_format, verification
from fabric_train.export.verification import VerificationError
from fabric_train.merge_models import merge as merging
from fabric_train.merge_models.__main__ import main
from fabric_train.merge_models.tensors import draw_kept
from tests.support.checkpoint_examples import CHAT_TEMPLATE, trained_weights, write_full
from tests.support.exports import verify_in_this_process
from tests.support.forked_commands import run_in_fork
from tests.support.forked_runs import ForkedRuns

Tensors = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module", autouse=True)
def no_fresh_process() -> Iterator[None]:
    with verify_in_this_process():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A run with a checkpoint at step 1."""
    folder = tmp_path_factory.mktemp("runs") / "ours"
    write_full(folder / "checkpoints" / "step-00000001", tiny_model_dir, trained_weights(tiny_model_dir), step=1)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A Hugging Face folder of the same architecture with other weights, from a repository with a licence."""
    folder = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("models") / "other")
    noise = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor + 0.04 * torch.randn(tensor.shape, generator=noise) for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "hub_source.json").write_text(json.dumps({"repository": "someone/other", "revision": "0123abcd" * 5}))
    (folder / "LICENSE").write_text("the text of a licence")
    return folder


def merge(folder: Path, *words: object) -> Tensors:
    """Merge in fp32; return the tensors of the result."""
    main([*map(str, words), "--output_dir", str(folder), "--dtype", "float32"])
    return load_file(folder / "model.safetensors")


def expected(method: str, base: Tensors, models: list[Tensors], name: str, density: float) -> np.ndarray:
    """Return a tensor of a merge with the weights 1 and 0.5, by formulas of numpy for whole tensors."""
    start = base[name].numpy()
    first, second = (model[name].numpy().astype(np.float64) for model in models)
    if method == "linear":
        return (first + 0.5 * second) / 1.5
    if method == "slerp":
        angle = np.arccos((first * second).sum() / np.linalg.norm(first) / np.linalg.norm(second))
        if np.cos(angle) > 0.9995:
            return first * 2 / 3 + second / 3
        return (np.sin(angle * 2 / 3) * first + np.sin(angle / 3) * second) / np.sin(angle)
    changes = [model[name].numpy() - start for model in models]
    if method == "dare":
        for model_index, change in enumerate(changes):
            is_kept = draw_kept(change.shape, density, 5, name, model_index).numpy()
            changes[model_index] = change * is_kept / density
    if method == "ties":
        # keep the largest changes of each model
        for model_index, change in enumerate(changes):
            num_kept = max(1, int(density * change.size))
            smallest_kept = np.sort(np.abs(change), axis=None)[-num_kept]
            changes[model_index] = np.where(np.abs(change) >= smallest_kept, change, 0)

        # the weighted mean of the changes that have the sign of their sum, by element
        weighted = np.stack([changes[0], changes[1] * 0.5])  # [models, ...]
        elected_sign = np.where(weighted.sum(0) >= 0, 1, -1)
        agrees = np.sign(weighted) == elected_sign
        total_weight = agrees[0] + 0.5 * agrees[1]  # of the models that agree
        return start + (weighted * agrees).sum(0) / np.where(total_weight == 0, 1, total_weight)
    return start + changes[0] + 0.5 * changes[1]


def test_a_merge_in_a_narrower_type_than_the_models_is_noted(
    tmp_path: Path, other: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--method", "linear", "--models", other, tiny_model_dir]
    merge(tmp_path / "merged", *words)
    assert "rounded to" not in capsys.readouterr().err
    main([*map(str, words), "--output_dir", str(tmp_path / "rounded")])
    said = f"note: the merged weights are rounded to bfloat16: those of {other}, {tiny_model_dir} are float32 (--dtype)"
    assert said in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("method", ["linear", "slerp", "task_arithmetic", "ties", "dare"])
def test_runs_and_folders_are_merged_as_the_formula_says(
    tmp_path: Path, run: Path, other: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(hub_format, "BLOCK_BYTES", 12_000)  # a tensor is several blocks
    given: list[object] = ["--method", method, "--models", run, other, "--weights", 1, 0.5]
    given += ["--base", tiny_model_dir] if method in ("task_arithmetic", "ties", "dare") else []
    given += ["--density", 0.3] if method in ("ties", "dare") else []
    given += ["--seed", 5] if method == "dare" else []
    found = merge(tmp_path / "merged", *given)
    models = [trained_weights(tiny_model_dir), load_file(other / "model.safetensors")]
    base = load_file(tiny_model_dir / "model.safetensors")
    assert found.keys() == models[0].keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, expected(method, base, models, name, 0.3), rtol=0, atol=2e-7)
    report = json.loads((tmp_path / "merged" / "verification.json").read_text())
    assert (report["faults"], report["tensors"]["compared"]) == ([], len(found))
    assert report["logits"]["max_difference"] == 0


def test_a_merge_is_a_whole_folder_with_a_card(
    tmp_path: Path, run: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "merged"
    main(["--method", "linear", "--models", f"{run}/step-1", str(other), "--output_dir", str(target)])
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto", output_loading_info=True)
    model, loading = loaded
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(target).chat_template == CHAT_TEMPLATE  # of the first model
    assert (target / "LICENSE").read_text() == "the text of a licence"
    metadata = metadata_load(target / "README.md") or {}
    assert metadata["base_model"] == ["someone/other"]
    assert metadata["base_model_relation"] == "merge"
    assert "license" not in metadata  # the run's base has none that is known
    card = (target / "README.md").read_text()
    assert "A merge of 2 models" in card
    for line in ("| `ours, step 1` | `tiny-llama` | 1 | 0 |", "| `someone/other` | `0123abcd0123` | 1 |"):
        assert line in card
    assert str(tmp_path) not in card
    printed = capsys.readouterr().out
    assert "verified by a separate process: 20 tensors are bit-identical" in printed


def test_a_process_of_its_own_verifies(
    tmp_path: Path, run: Path, other: Path, monkeypatch: pytest.MonkeyPatch, forked_runs: ForkedRuns
) -> None:
    monkeypatch.setattr(verification, "subprocess", SimpleNamespace(run=run_in_fork(forked_runs)))
    merge(tmp_path / "merged", "--method", "slerp", "--models", run, other, "--weights", 0.7, 0.3)
    report = json.loads((tmp_path / "merged" / "verification.json").read_text())
    assert (report["faults"], report["tensors"]["different"], report["tokenizer"]) == ([], [], "equal")


def test_what_the_fresh_process_does_not_find_again_never_gets_its_name(
    tmp_path: Path, run: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrong_model(source: merging.ModelMerge, folder: Path, *settings: Any) -> None:
        merging_write(source, folder, *settings)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][3] += 0.5
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    merging_write = merging.write_model
    monkeypatch.setattr(merging, "write_model", write_wrong_model)
    with pytest.raises(VerificationError, match=r"model\.norm\.weight"):
        merge(tmp_path / "merged", "--method", "linear", "--models", run, other)
    assert list(tmp_path.iterdir()) == []


def with_vocabulary(folder: Path, model_dir: Path, tokens: list[str], num_rows: int) -> Tensors:
    """Write a copy of a model whose i-th token is ``tokens[i]``, with random rows; return its tensors."""
    shutil.copytree(model_dir, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {token: row for row, token in enumerate(tokens)}
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if {*pair, "".join(pair)} <= set(tokens)]
    for token in content["added_tokens"]:
        token["id"] = tokens.index(token["content"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = LlamaConfig.from_pretrained(model_dir, vocab_size=num_rows)
    torch.manual_seed(num_rows)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_rows_of_other_vocabularies_are_found_by_the_text_of_their_tokens(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    extended = [*tokens, "Ġllengua", "Ġdona"]
    shuffled = [*tokens[:2], *reversed(tokens[2:-5]), "Ġelsewhere"]  # without the last five
    one = with_vocabulary(tmp_path / "one", tiny_model_dir, extended, 1024)
    two = with_vocabulary(tmp_path / "two", tiny_model_dir, shuffled, len(shuffled))
    found = merge(tmp_path / "merged", "--method", "linear", "--models", tmp_path / "one", tmp_path / "two")
    assert found[EMBEDDING].shape == (1024, 64)
    for row, token in enumerate(extended):
        both = [one[EMBEDDING][row], *([two[EMBEDDING][shuffled.index(token)]] if token in shuffled else [])]
        torch.testing.assert_close(found[EMBEDDING][row], sum(both) / len(both), rtol=0, atol=1e-7)
    assert torch.equal(found[EMBEDDING][len(extended) :], one[EMBEDDING][len(extended) :])  # rows of no token
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == {t: i for i, t in enumerate(extended)}
    line = f"two: its vocabulary has {len(shuffled) - 1:,} of the first model's tokens; the other 7 keep the first "
    line += "model's rows; 1 of its tokens are left out."
    assert line in " ".join(capsys.readouterr().out.split())
    assert line in (tmp_path / "merged" / "README.md").read_text()


def test_what_chats_have_learned_goes_into_a_model_with_new_tokens(tmp_path: Path, tiny_model_dir: Path) -> None:
    vocabulary = AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    ours = with_vocabulary(tmp_path / "ours", tiny_model_dir, [*tokens, "Ġllengua"], len(tokens) + 24)
    instruct = with_vocabulary(tmp_path / "instruct", tiny_model_dir, tokens, len(tokens))
    given = ["--models", tmp_path / "ours", tmp_path / "instruct", "--base", tiny_model_dir]
    found = merge(tmp_path / "merged", "--method", "task_arithmetic", *given)
    base = load_file(tiny_model_dir / "model.safetensors")
    for name in base:
        old = slice(len(tokens)) if name == EMBEDDING else slice(None)
        wanted = ours[name][old] + instruct[name] - base[name]
        torch.testing.assert_close(found[name][old], wanted, rtol=0, atol=1e-6)
    assert torch.equal(found[EMBEDDING][len(tokens) :], ours[EMBEDDING][len(tokens) :])


def refusal(target: Path, *words: object) -> str:
    with pytest.raises(InputError) as refused:
        merge(target, *words)
    assert not target.exists()
    assert len(refused.value.faults) == 1
    return str(refused.value)


def test_models_that_do_not_fit_together_are_refused_in_one_line(
    tmp_path: Path, run: Path, other: Path, tiny_model_dir: Path
) -> None:
    linear = ("--method", "linear", "--models")
    wide: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model_dir, intermediate_size=96))
    wide.save_pretrained(tmp_path / "wide")
    fault = refusal(tmp_path / "out", *linear, other, tmp_path / "wide")
    assert (
        "model.layers.0.mlp.down_proj.weight is [64, 96], not [64, 128]; give models of the same architecture" in fault
    )

    mistral = shutil.copytree(other, tmp_path / "mistral")
    config = json.loads((mistral / "config.json").read_text())
    (mistral / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    assert "it is a mistral, not a llama; give models of the same architecture" in refusal(
        tmp_path / "out", *linear, other, mistral
    )

    few = [f"word{number}" for number in range(700)]
    vocabulary = AutoTokenizer.from_pretrained(tiny_model_dir).get_vocab()
    common = sorted(vocabulary, key=vocabulary.__getitem__)[:300]
    with_vocabulary(tmp_path / "few", tiny_model_dir, [*common, *few], 1000)
    fault = refusal(tmp_path / "out", *linear, other, tmp_path / "few")
    assert (
        f"only 300 of the {len(vocabulary):,} tokens are in both vocabularies; give models with related tokenizers"
        in fault
    )

    for file in (tmp_path / "few").glob("tokenizer*"):
        file.unlink()
    fault = refusal(tmp_path / "out", *linear, other, tmp_path / "few")
    assert f"{tmp_path / 'few'} has no tokenizer, so its tokens cannot be matched" in fault

    assert "no such folder" in refusal(tmp_path / "out", *linear, other, tmp_path / "gone")
    assert "is complete and is never changed" in refusal(other / "out", *linear, run, other)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "an adapter without its base; convert its checkpoint with --merge true" in refusal(
        tmp_path / "out", *linear, other, tmp_path / "adapter"
    )
    with pytest.raises(InputError, match="already exists and is not empty"):
        merge(other, *linear, run, tiny_model_dir)


def test_other_settings_are_noted_and_taken_from_the_first_model(
    tmp_path: Path, other: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = shutil.copytree(tiny_model_dir, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    merge(tmp_path / "out", "--method", "linear", "--models", other, longer)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 256
    note = f"note: max_position_embeddings is 512 in {longer}, 256 in {other}; the result has the first model's value"
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, fault",
    [
        ("linear --models a", "--method linear merges 2 or more models, but --models has 1"),
        ("slerp --models a b c", "--method slerp merges 2 models, but --models has 3"),
        ("ties --models a b", "--method ties needs --base, the model that all of --models were trained from"),
        (
            "slerp --models a b --base c",
            "--base does not apply to --method slerp; leave out --base, or list the model in --models",
        ),
        ("dare --models a b --base ./b", "--base ./b is also in --models, where it has no effect; …"),
        ("linear --models a ./a", "--models: a is given twice, also as ./a; give it once"),
        ("linear --models a b --weights 1", "--weights has 1 number for 2 models in --models; give one for each"),
        ("linear --models a b --weights -1 2", "--method linear needs --weights of 0 or more that are not all 0"),
        ("slerp --models a b --weights 0 0", "--method slerp needs --weights of 0 or more that are not all 0"),
        ("linear --models a b --density 0.5", "--density only applies to --method ties and dare, not linear"),
        ("linear --models a b --max_shard_size 5", "--max_shard_size: expected a size such as 5GB or 500MB, got '5'"),
        ("ties --models a b --base c --density 0", "--density: expected a number above 0 and at most 1…, got '0'"),
        ("passthrough --models a", "--method passthrough needs --layers, the decoder layers to keep, such as …"),
        ("passthrough --models a b --layers 0", "--method passthrough keeps layers of 1 model, but --models has 2"),
        ("passthrough --models a --layers 0 --weights 1", "--weights does not apply to --method passthrough; …"),
        ("passthrough --models a --layers 0 --base b", "--base does not apply to --method passthrough; leave it out"),
        ("passthrough --models a --layers 5-3", "--layers: expected layers and ascending ranges such as …, got '5-3'"),
        ("passthrough --models a --layers 0,,1", "--layers: expected layers and ascending …, got '0,,1'"),
        ("passthrough --models a --layers 0:4", "--layers: expected layers and ascending ranges …, got '0:4'"),
        ("linear --models a b --layers 0-3", "--layers only applies to --method passthrough, not linear"),
        ("mean --models a b", "--method: expected one of linear, slerp, ties, dare, …, passthrough, got 'mean'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(words: str, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        main(["--method", *words.split(), "--output_dir", "out"])
    begin, _, end = fault.partition("…")
    assert len(refused.value.faults) == 1
    assert str(refused.value).startswith(begin)
    assert str(refused.value).endswith(end)


def test_a_model_that_cannot_be_read_in_parts_is_merged_too(tmp_path: Path, other: Path, tiny_model_dir: Path) -> None:
    pickled = shutil.copytree(tiny_model_dir, tmp_path / "pickled")
    tensors = load_file(pickled / "model.safetensors")
    torch.save(tensors, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    found = merge(tmp_path / "merged", "--method", "linear", "--models", other, pickled)
    both = (load_file(other / "model.safetensors")[EMBEDDING], tensors[EMBEDDING])
    assert torch.equal(found[EMBEDDING], ((both[0].double() + both[1].double()) / 2).float())


def test_models_without_a_tokenizer_are_merged_if_they_have_the_same_number_of_rows(
    tmp_path: Path, other: Path, tiny_model_dir: Path
) -> None:
    bare = [shutil.copytree(folder, tmp_path / folder.name) for folder in (other, tiny_model_dir)]
    for file in (file for folder in bare for file in folder.glob("tokenizer*")):
        file.unlink()
    found = merge(tmp_path / "merged", "--method", "linear", "--models", *bare)
    assert len(found) == 20
    assert json.loads((tmp_path / "merged" / "verification.json").read_text())["tokenizer"] == "absent"
    assert "has no tokenizer, so its tokens cannot be matched" in refusal(
        tmp_path / "out", "--method", "linear", "--models", other, bare[0]
    )


def test_a_model_in_the_cache_of_the_hub_is_merged_by_its_name(
    tmp_path: Path, other: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--some--model"
    commit = "0123456789" * 4
    shutil.copytree(tiny_model_dir, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = merge(tmp_path / "merged", "--method", "linear", "--models", "some/model", other)
    halves = [load_file(folder / "model.safetensors")[EMBEDDING] / 2 for folder in (tiny_model_dir, other)]
    torch.testing.assert_close(found[EMBEDDING], halves[0] + halves[1], rtol=0, atol=1e-7)
    assert (metadata_load(tmp_path / "merged" / "README.md") or {})["base_model"] == ["some/model", "someone/other"]
    assert f"| `some/model` | `{commit[:12]}` | 1 | 0 |" in (tmp_path / "merged" / "README.md").read_text()
