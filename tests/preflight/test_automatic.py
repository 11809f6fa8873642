"""``auto`` recomputes no more than a device's memory asks for, and compiles where that pays."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig, LlamaConfig, MixtralConfig

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint import TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.model.hf_model import ModelShape, shape_from_config
from fabric_train.model.row_tiles import TILE_SIZE
from fabric_train.optim.learning_rate import Schedule, Schedules
from fabric_train.preflight.automatic import resolve_automatic
from fabric_train.preflight.memory_forecast import make_request
from fabric_train.preflight.memory_plan import print_plan
from fabric_train.training.prepared_run import DevicePlan, PhaseModels, PreparedRun, StartingPoint
from fabric_train.training.step_plan import StepPlan
from tests.support.forked_runs import ForkedRuns
from tests.support.unequal_rows import argv, metrics, write_model, write_rows

REQUIRED = ["--train_data_dir", "tokens", "--output_dir", "run"]
LENGTH = 8192
# all layers are traced, and what they keep is most of a device's memory
FEW_LAYERS = 3
LONG = 65_536
PLANNED = ("--plan", "true", "--device_memory", "80GB", "--activation_checkpointing", "full")


def shape_of(num_layers: int, vocabulary: int) -> ModelShape:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
    )
    return shape_from_config(config, "model", "LlamaDecoderLayer", "sdpa", is_new=True)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_of(24, 32_000)


def prepared(
    shape: ModelShape, *options: str, accelerator: str = "cuda", num_steps: int = 10, length: int = LENGTH
) -> PreparedRun:
    arguments = parse(TrainArguments, [*REQUIRED, *options])
    data: Any = SimpleNamespace(isolates=True, validation=None)
    order: Any = None
    return PreparedRun(
        user_arguments=arguments,
        arguments=arguments,
        folder=Path("run"),
        devices=DevicePlan(accelerator, 8, "fsdp2"),
        start=StartingPoint(None, TrainerState()),
        data=data,
        models=PhaseModels({1: shape}),
        plan=StepPlan(None, 8, 8, 1, 4, 32, None, num_steps, length),
        order=order,
        schedules=Schedules(Schedule(num_steps, arguments.training)),
        versions={},
        notes=(),
    )


def device_bytes(run: PreparedRun, **options: Any) -> int:
    arguments = replace(run.arguments, fsdp=replace(run.arguments.fsdp, **options))
    return make_request(replace(run, arguments=arguments)).forecast().device_bytes


def test_least_recomputation_that_fits_is_chosen() -> None:
    shape = shape_of(FEW_LAYERS, 1000)

    def on(memory: str) -> PreparedRun:
        return prepared(shape, "--plan", "true", "--device_memory", memory, "--compile", "false", length=LONG)

    run = on("80GB")
    none, full = (device_bytes(run, activation_checkpointing=kind) for kind in ("none", "full"))
    assert full < 0.5 * none
    between = (none + full) // 2
    for usable, kind in {none + 1_000_000: "none", between: "selective", 1: "full"}.items():
        memory = f"{usable / 0.9 / 1e9 + 1e-9:.9f}GB"
        resolved = resolve_automatic(on(memory))
        chosen = resolved.arguments.fsdp
        assert chosen.activation_checkpointing == kind
        note = resolved.notes[0]
        assert note.startswith(f"--activation_checkpointing auto: {kind}")
        if kind == "selective":
            budget = chosen.activation_memory_budget
            assert device_bytes(resolved) <= usable < device_bytes(resolved, activation_memory_budget=budget + 0.1)
        assert resolved.user_arguments.fsdp.activation_checkpointing == "auto"


def test_tiles_are_taken_only_if_recomputing_all_layers_is_not_enough() -> None:
    shape = shape_of(FEW_LAYERS, 1000)

    def resolved(memory: int, *options: str) -> PreparedRun:
        given = ("--plan", "true", "--device_memory", f"{memory / 0.9 / 1e9 + 1e-9:.9f}GB", *options)
        return resolve_automatic(prepared(shape, *given, length=LONG))

    full = ("--activation_checkpointing", "full", "--compile", "false")
    whole = device_bytes(resolved(1, *full, "--mlp_tile_size", "none"))
    for usable, size in ((whole + 1_000_000, "none"), (whole - 1_000_000, 4096)):
        run = resolved(usable, *full)
        assert run.arguments.fsdp.mlp_tile_size == size
        assert [line.partition(",")[0] for line in run.notes] == (
            [] if size == "none" else ["--mlp_tile_size auto: 4096 without compiling"]
        )
    assert device_bytes(resolved(1, *full)) < whole
    (note,) = resolved(1, "--activation_checkpointing", "full", "--mlp_tile_size", "8k").notes
    assert note == "--compile auto: false, since --mlp_tile_size 8192 does not work with it"
    compiled = resolved(1, "--activation_checkpointing", "full", "--compile", "true")
    assert compiled.arguments.fsdp.mlp_tile_size == "none"


def test_tiles_that_take_more_memory_than_compiled_layers_are_not_taken() -> None:
    shape = shape_of(FEW_LAYERS, 1000)
    # rows that are not longer than a tile, on a device on which nothing fits
    given = ("--plan", "true", "--device_memory", "2.2GB", "--activation_checkpointing", "full")
    run = resolve_automatic(prepared(shape, *given, length=TILE_SIZE, num_steps=1_000_000))
    fsdp = run.arguments.fsdp
    assert (fsdp.compile, fsdp.mlp_tile_size) == (True, "none")
    assert device_bytes(run) > 0.9 * 2.2e9
    assert device_bytes(run, compile=False, mlp_tile_size=TILE_SIZE) > device_bytes(run)
    assert [note.partition(",")[0] for note in run.notes] == ["--compile auto: true"]


def test_what_is_given_stays_and_a_cpu_does_neither(shape: ModelShape) -> None:
    given = ("--activation_checkpointing", "full", "--compile", "true")
    run = prepared(shape, *given, "--mlp_tile_size", "none")
    assert resolve_automatic(run) == run
    for options, accelerator in (([], "cpu"), (["--eval_only", "true"], "cuda")):
        resolved = resolve_automatic(prepared(shape, *options, accelerator=accelerator))
        assert resolved.arguments.fsdp.activation_checkpointing == "none"
        assert resolved.arguments.fsdp.compile is False
        assert resolved.notes == ()


SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
UNTRACED = [
    MixtralConfig(**HEADS, num_local_experts=4),
    Gemma3nTextConfig(
        **HEADS,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=50,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
]


@pytest.mark.parametrize("config", UNTRACED, ids=lambda config: config.model_type)
def test_model_that_cannot_be_traced_trains_and_is_not_planned(config: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Experts read how many tokens they get; a Gemma 3n of fewer layers cannot be built."""
    shape = shape_from_config(config, "model", "LlamaDecoderLayer", "sdpa")
    options = ("--plan", "true", "--device_memory", "80GB", "--compile", "false", "--precision", "32-true")
    run = prepared(shape, *options, length=64)
    resolved = resolve_automatic(run)
    assert resolved.arguments.fsdp.activation_checkpointing == "none"
    assert any("the memory of the model's activations cannot be computed" in note for note in resolved.notes)
    with pytest.raises(InputError, match=rf"^--plan true: model \({config.model_type}\): the memory of") as raised:
        print_plan(resolved)
    assert len(raised.value.faults) == 1
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("num_steps", "options", "compiles", "reason"),
    [
        (10, [], False, "since the run takes about "),
        (100_000, [], True, " hours and compiling takes about 0.5 minutes"),
        (10, ["--float8", "true"], True, "since float8 needs it"),
    ],
)
def test_long_runs_are_compiled(
    shape: ModelShape,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    options: list[str],
    compiles: bool,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    kept = ["--activation_checkpointing", "none"]
    run = resolve_automatic(prepared(shape, *kept, *options, num_steps=num_steps))
    assert run.arguments.fsdp.compile is compiles
    assert reason in run.notes[0]
    if "--float8" in options:
        return  # preflight refuses it without a compiler
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = resolve_automatic(prepared(shape, *kept, *options, num_steps=num_steps))
    assert run.arguments.fsdp.compile is False
    assert run.notes == ("--compile auto: false, since this machine has no compiler no-such-compiler",)


def test_compile_takes_auto_true_and_false(tmp_path: Path) -> None:
    assert parse(TrainArguments, REQUIRED).fsdp.compile == "auto"
    for text, value in (("auto", "auto"), ("true", True), ("false", False)):
        (tmp_path / "config.yaml").write_text(f"compile: {text}\n")
        config = ["--config", str(tmp_path / "config.yaml")]
        for given in (["--compile", text], config):
            found = parse(TrainArguments, [*REQUIRED, *given]).fsdp.compile
            assert (found, type(found)) == (value, type(value))
    with pytest.raises(InputError, match="--compile: expected true or false or auto, got 'maybe'"):
        parse(TrainArguments, [*REQUIRED, "--compile", "maybe"])


def test_resumed_run_says_what_is_recomputed_now(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    forked_runs.start(argv(model, tokens, tmp_path / "run", max_step=4, save_step_interval=2), 1).finish()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert json.loads((checkpoint / "trainer.json").read_text())["arguments"]["activation_checkpointing"] == "none"
    assert "activation_checkpointing: auto" in (tmp_path / "run" / "config.yaml").read_text()
    options = {"max_step": 4, "checkpoint": checkpoint, "activation_checkpointing": "full"}
    resumed = forked_runs.start(argv(model, tokens, tmp_path / "resumed", **options), 1)
    resumed.finish()
    assert "activation_checkpointing: none -> full" in resumed.stdout()
    after = [row["train_loss"] for row in metrics(tmp_path / "run")[2:]]
    assert [row["train_loss"] for row in metrics(tmp_path / "resumed")] == after


def test_layers_are_not_compiled_where_fsdp_cannot(shape: ModelShape) -> None:
    for parallelism, compiles in (("fsdp", False), ("fsdp2", True)):
        run = prepared(shape, *PLANNED, "--gradient_reduction", "micro_batch", num_steps=10**6)
        run = replace(run, devices=replace(run.devices, parallelism=parallelism))
        assert resolve_automatic(run).arguments.fsdp.compile is compiles
