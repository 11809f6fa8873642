"""--average exports the average of checkpoints, correctly rounded, whatever their layout, or refuses in one line."""

import json
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fabric_train.cli.errors import InputError
from fabric_train.export import average as average_module
from fabric_train.export import convert
from fabric_train.export.average import AveragedTensors, PlainAverage, WeightedCheckpoint
from fabric_train.export.convert import write_export
from fabric_train.programs import convert_to_hf
from tests.support.bad_input_folder import edit_json
from tests.support.checkpoint_examples import (
    run_with_two_checkpoints,
    trained_weights,
    write_checksums,
    write_full,
)
from tests.support.exports import verify_in_this_process
from tests.support.forked_runs import ForkedRuns

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def no_fresh_process() -> Iterator[None]:
    with verify_in_this_process():
        yield


@pytest.fixture(scope="module")
def weights(tiny_model_dir: Path) -> list[Tensors]:
    """The weights of the run's checkpoints; the first two have the same."""
    first = trained_weights(tiny_model_dir)
    noise = torch.Generator().manual_seed(2)
    third = {name: tensor + 0.01 * torch.randn(tensor.shape, generator=noise) for name, tensor in first.items()}
    return [first, first, third]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns, weights: list[Tensors]
) -> Path:
    """A run with a full, a sharded and again a full checkpoint."""
    shared_run = run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir, forked_runs)
    folder = shutil.copytree(shared_run, tmp_path_factory.mktemp("average") / "mixed")
    write_full(folder / "checkpoints" / "step-00000003", tiny_model_dir, weights[2], step=3)
    return folder


def export(monkeypatch: pytest.MonkeyPatch, *argv: object) -> None:
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    convert_to_hf.main()


def refusal(monkeypatch: pytest.MonkeyPatch, target: Path, *argv: object) -> str:
    with pytest.raises(InputError) as refused:
        export(monkeypatch, "--output_dir", target, *argv)
    assert not target.exists()
    assert len(refused.value.faults) == 1
    return str(refused.value)


def other_checkpoint(folder: Path, model_dir: Path, *, vocabulary: bool = False, **config: Any) -> Path:
    """Write a checkpoint whose model or tokenizer differs from the run's.

    ``config`` has the settings that differ; with ``vocabulary``, the tokens e and a have changed their ids.
    """
    model_config = LlamaConfig.from_pretrained(model_dir)
    model_config.update(config)
    model: Any = LlamaForCausalLM(model_config)
    model.save_pretrained(folder / "model")
    for file in model_dir.glob("tokenizer*"):
        shutil.copyfile(file, folder / "model" / file.name)
    if vocabulary:
        file = folder / "model" / "tokenizer.json"
        content = json.loads(file.read_text())
        tokens = content["model"]["vocab"]
        tokens["e"], tokens["a"] = tokens["a"], tokens["e"]
        file.write_text(json.dumps(content))
    names = {name for name, _ in model.named_parameters()}
    weights = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    return write_full(folder / "step-00000001", folder / "model", weights, step=1)


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_the_average_is_the_exact_one_rounded_to_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decay: float
) -> None:
    monkeypatch.setattr(average_module, "_BLOCK", 8)  # so that tensors are several blocks

    # three checkpoints with values of very different sizes
    noise = torch.Generator().manual_seed(0)
    matrices = []
    checkpoints = []
    for step in range(3):
        exponents = torch.randint(-6, 6, (7, 5), generator=noise)
        matrix = torch.randn(7, 5, generator=noise) * 10.0**exponents
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        save_file({"matrix": matrix, "vector": matrix[0].bfloat16()}, folder / "model.safetensors")
        matrices.append(matrix)
        checkpoints.append(WeightedCheckpoint(folder, weight=decay ** (2 - step)))

    # the average equals the other implementation, whole and in blocks
    averaged = AveragedTensors(checkpoints)
    plain = PlainAverage(checkpoints)
    for name in ("matrix", "vector"):
        assert torch.equal(averaged.read(name), plain.read(name))
    assert averaged.dtype("vector") == averaged.read("vector").dtype == torch.float32
    average_matrix = averaged.read("matrix")
    block = averaged.read_block("matrix", (2, 1), (3, 2))
    assert torch.equal(block, average_matrix[2:5, 1:3])

    # no neighbouring number of fp32 is nearer to the exact average
    weights = [Fraction(checkpoint.weight) for checkpoint in checkpoints]
    for index in np.ndindex(7, 5):
        weighted_sum = Fraction(0)
        for weight, matrix in zip(weights, matrices, strict=True):
            weighted_sum += weight * Fraction(matrix[index].item())
        exact = weighted_sum / sum(weights)
        value = np.float32(average_matrix[index].item())
        error = abs(Fraction(float(value)) - exact)
        for direction in (np.float32(-np.inf), np.float32(np.inf)):
            neighbour = np.nextafter(value, direction)
            assert error <= abs(Fraction(float(neighbour)) - exact)


def test_full_and_sharded_checkpoints_are_averaged_by_age(
    tmp_path: Path,
    run: Path,
    weights: list[Tensors],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "out"
    export(
        monkeypatch, "--checkpoint", run, "--average", "last:3", "--average_decay", 0.5, "--dtype", "float32",
        "--output_dir", target,
    )  # fmt: skip
    assert json.loads((target / "verification.json").read_text())["faults"] == []
    assert "average of 3 checkpoints up to step 3" in capsys.readouterr().out
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    loaded_weights = model.state_dict()
    first, second, third = weights
    for name in first:
        weighted_sum = 0.25 * first[name].double() + 0.5 * second[name].double() + third[name].double()
        expected = weighted_sum / (0.25 + 0.5 + 1)
        assert torch.equal(loaded_weights[name], expected.float())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    card = (target / "README.md").read_text()
    assert "The weights are the average of 3 checkpoints." in card
    for line in ("| `mixed` | 1 | 14.29% |", "| `mixed` | 2 | 28.57% |", "| `mixed` | 3 | 57.14% |"):
        assert line in card


def test_a_list_of_untied_checkpoints_is_averaged_uniformly(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = other_checkpoint(tmp_path / "a", tiny_model_dir, tie_word_embeddings=False)
    second = other_checkpoint(tmp_path / "b", tiny_model_dir, tie_word_embeddings=False)
    target = tmp_path / "out"
    words = ("--checkpoint", first, second, "--average", "all", "--dtype", "float32", "--output_dir", target)
    export(monkeypatch, *words)
    head, first_head, second_head = (
        load_file(folder / "model.safetensors")["lm_head.weight"] for folder in (target, first, second)
    )
    expected = (first_head.double() + second_head.double()) / 2
    assert torch.equal(head, expected.float())


def test_a_damaged_checkpoint_is_left_out_of_the_average(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_copy = shutil.copytree(run, tmp_path / "run")
    weights_file = run_copy / "checkpoints" / "step-00000003" / "model.safetensors"
    with weights_file.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    export(monkeypatch, "--checkpoint", run_copy, "--average", "last:2", "--output_dir", tmp_path / "out")
    printed = capsys.readouterr()
    assert "average of 2 checkpoints up to step 2" in printed.out
    assert f"note: {weights_file.parent} is damaged" in printed.err


def test_a_checkpoint_of_a_signal_does_not_count_for_the_last_ones(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_copy = shutil.copytree(run, tmp_path / "run")
    saved_at_signal = run_copy / "checkpoints" / "step-00000002"
    edit_json(saved_at_signal / "trainer.json", lambda content: content.update(scheduled=False))
    write_checksums(saved_at_signal)

    # the last two are those of steps 1 and 3
    export(monkeypatch, "--checkpoint", run_copy, "--average", "last:2", "--output_dir", tmp_path / "out")
    assert f"note: {saved_at_signal} was saved for a signal or a loss" in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("| `run` | 1 | 50.00% |", "| `run` | 3 | 50.00% |"):
        assert line in card

    # there are no three
    words = ("--checkpoint", run_copy, "--average", "last:3")
    assert "3 different checkpoints" in refusal(monkeypatch, tmp_path / "none", *words)


@pytest.mark.parametrize(
    "difference, fault",
    [
        ({"intermediate_size": 96}, "model.layers.0.mlp.down_proj.weight is [64, 96], not [64, 128]"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight is absent, not [64]"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is 0.5 in its config.json"),
        ({"vocabulary": True}, "its tokenizer has a different vocabulary"),
    ],
)
def test_checkpoints_of_different_models_are_refused(
    tmp_path: Path,
    run: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    difference: dict[str, Any],
    fault: str,
) -> None:
    other = other_checkpoint(tmp_path, tiny_model_dir, **difference)
    message = refusal(monkeypatch, tmp_path / "out", "--checkpoint", other, run, "--average", "all")
    assert message.startswith(f"{other} cannot be averaged with {run / 'checkpoints' / 'step-00000003'}: {fault}")


@pytest.mark.parametrize(
    "average, names, fault",
    [
        ("last:4", [""], "--average last:4 needs 4 different checkpoints"),
        ("last:2", ["", ""], "--average last:2 needs a single --checkpoint that is a run"),
        ("all", ["best", "step-1"], "--average all needs 2 different checkpoints"),
        ("last:1", [""], "--average: expected last:K such as last:5, or all"),
        ("3", [""], "--average: expected last:K such as last:5, or all"),
    ],
)
def test_an_average_of_too_few_checkpoints_is_refused(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, average: str, names: list[str], fault: str
) -> None:
    paths = [run / name for name in names]
    assert fault in refusal(monkeypatch, tmp_path / "out", "--checkpoint", *paths, "--average", average)


def test_a_wrong_bit_in_an_average_leaves_nothing(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_wrong_export(source: Any, folder: Path, *settings: Any) -> None:
        write_export(source, folder, *settings)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(convert, "write_export", write_wrong_export)
    words = ("--checkpoint", run, "--average", "all", "--dtype", "float32", "--output_dir", tmp_path / "out")
    with pytest.raises(SystemExit):
        export(monkeypatch, *words)
    assert "tensors different in shape, type or value: model.norm.weight" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
