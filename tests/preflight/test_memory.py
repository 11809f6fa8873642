"""The plan: its memory is what real ranks have, its traffic what a ring sends, and what does not fit is refused."""

import json
import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import parse_size
from fabric_train.cli.errors import InputError
from fabric_train.distributed.decoder_layers import compile_layers
from fabric_train.model.flops import Attention, ModelFlops
from fabric_train.model.hf_model import ModelShape, read_shape, with_parts
from fabric_train.model.init_weights import new_shape
from fabric_train.model.trained_parts import TrainedParts
from fabric_train.preflight.memory_activations import MicroBatch, _layer_kinds, _trace, _with_layers, trace_activations
from fabric_train.preflight.memory_forecast import RunRequest
from fabric_train.preflight.memory_gpu import compile_for_trace
from fabric_train.preflight.memory_layout import Layout, Units, collectives_of_step, offloaded_bytes
from fabric_train.preflight.memory_plan import busiest_rank, faults_of
from fabric_train.training.step_plan import StepPlan
from tests.support import plan_accuracy, random_inputs
from tests.support.forked_runs import ForkedRuns
from tests.support.plan_accuracy import Case
from tests.support.unequal_rows import argv, write_model, write_rows

SIZES = {"num_layers": 10, "layer": 100, "rest": 200, "head": 90, "embedding": 90, "trained": 1200}
SIZES |= {"trained_layer": 100, "trained_rest": 200, "trained_embedding": 90, "touched": 1200, "touched_layer": 100}
SIZES |= {"parameters": 1200}
UNITS = Units(**SIZES, is_tied=False, states=4800, saved_states=4800)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """A Llama of 1.2 billion parameters in 16 layers, with a configuration and no weights."""
    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(str(folder), attention="sdpa")


def wanted(
    shape: ModelShape, world_size: int, gigabytes: float, *options: str, rows: int = 8, length: int = 4096
) -> RunRequest:
    words = ["--train_data_dir", "tokens", "--output_dir", "run", *options]
    arguments = parse(TrainArguments, words)
    num_data_ranks = world_size // arguments.fsdp.ranks_of_rows
    size = arguments.training.micro_batch_size
    accumulation = max(1, rows // (size * num_data_ranks))
    plan = StepPlan(None, world_size, num_data_ranks, size, accumulation, rows, None, 10, length)
    memory = round(gigabytes * 1e9)
    return RunRequest(arguments, (shape,), plan, arguments.fsdp.parallelism, False, True, memory, is_elsewhere=True)


# ------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize(("on_gpu", "by_unit"), [(False, False), (True, True)])
def test_traced_memory_is_what_layers_or_checkpointing_keep(llama: ModelShape, on_gpu: bool, by_unit: bool) -> None:
    plain, full = (
        trace_activations(
            llama,
            parse(TrainArguments, ["--train_data_dir", "x", "--output_dir", "y", "--activation_checkpointing", kind]),
            MicroBatch(1, 1024, torch.bfloat16, None, has_borders=False, on_gpu=on_gpu, by_unit=by_unit),
        )
        for kind in ("none", "full")
    )
    hidden = 1024 * 2048 * 2  # bytes of a layer's input
    assert plain.kept - full.kept > 16 * 10 * hidden
    logits = 1024 * 128_256
    assert 16 * hidden < full.kept < 16 * hidden + 12 * logits
    assert plain.at_end < plain.most
    assert full.most - full.kept <= plain.most - plain.kept + 20 * hidden


@pytest.mark.parametrize("parts", [(), ("layers.1[2-5]",), ("embed_tokens", "q_proj", "layers.[3-6]")])
def test_a_few_traced_layers_tell_what_all_of_them_hold(llama: ModelShape, parts: tuple[str, ...]) -> None:
    llama = with_parts(llama, TrainedParts(parts)) if parts else llama
    arguments = parse(TrainArguments, ["--train_data_dir", "x", "--output_dir", "y"])
    batch = MicroBatch(1, 2048, torch.float32, None, has_borders=False, on_gpu=False, by_unit=True)
    traced = trace_activations(llama, arguments, batch)
    assert astuple(traced) == pytest.approx(astuple(_trace(llama, _layer_kinds(llama), arguments, batch)), rel=0.01)


def test_a_mask_costs_itself_and_copies_of_the_heads(llama: ModelShape) -> None:
    arguments = parse(TrainArguments, ["--train_data_dir", "x", "--output_dir", "y"])
    plain, masked = (
        trace_activations(
            llama, arguments, MicroBatch(1, 1024, torch.bfloat16, None, borders, on_gpu=True, by_unit=True)
        )
        for borders in (False, True)
    )
    config = llama.config
    mask = 2 * 1024 * 1024  # in bf16
    copied_heads = 2 * 2 * 1024 * config.head_dim * (config.num_attention_heads - config.num_key_value_heads)
    expected = config.num_hidden_layers * (mask + copied_heads)
    assert masked.kept - plain.kept == pytest.approx(expected, rel=1e-5)


MEASURED_COMPILED = [("llama-3.2-1b", 4, 32_369_103_872), ("llama-3-8b", 1, 86_297_837_568)]
"""Preset, rows at once and peak bytes on an H200: benchmarks/results/gpu-first-hour-2026-11-22-nvidia-h200.json."""
SAVED_BY_SLICES = (1 << 30) * 4 // 6 - (64 << 20)
"""What the loss needs less since it was measured. Of a chunk of 1 GiB, 4 of 6 bytes were log-probabilities, which are
now computed in slices of 64 MiB."""


@pytest.mark.parametrize(("preset", "num_rows", "measured"), MEASURED_COMPILED)
def test_compiled_layers_take_what_an_h200_measured(preset: str, num_rows: int, measured: int) -> None:
    model = parse(TrainArguments, ["--train_data_dir", "x", "--output_dir", "y", "--config", f"configs/{preset}.yaml"])
    shape = new_shape(model.model, model.fsdp.auto_wrap_policy)
    options = ["--parallelism", "single", "--micro_batch_size", str(num_rows), "--compile", "true"]
    planned = wanted(shape, 1, 141, *options, rows=4 * num_rows).forecast()
    assert planned.budget.most.total == pytest.approx(measured - SAVED_BY_SLICES, rel=0.02)


@pytest.mark.parametrize("budget", [1.0, 0.4])
def test_a_compiled_layer_keeps_on_a_cpu_what_the_plan_counts(budget: float) -> None:
    """Compile a layer with real tensors, and compare the bytes that autograd keeps with the trace."""
    config = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4)
    config._attn_implementation = "sdpa"
    torch._dynamo.reset()  # else the code that another budget compiled is used
    inputs = torch.randn(1, 128, 64, requires_grad=True)
    positions = torch.ones(1, 128, 16), torch.zeros(1, 128, 16)

    def kept(traced: bool) -> int:
        layer = LlamaDecoderLayer(config, 0)
        own = {weight.untyped_storage()._cdata for weight in layer.parameters()}
        sizes: dict[int, int] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                sizes[storage._cdata] = storage.nbytes()
            return tensor

        if traced:
            compile_for_trace([layer], budget, "on a CPU")
        else:
            compile_layers([layer], any_length=False, budget=budget)
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            layer(inputs, position_embeddings=positions)
        return sum(sizes.values())

    assert kept(traced=True) == kept(traced=False)


# ----------------------------------------------------------------------------------------------------------- traffic


def layout(name: str, world_size: int, num_nodes: int = 1, num_shards: int = 1, **given: Any) -> Layout:
    usual: dict[str, Any] = {
        "gathers_at_once": False,
        "stored_itemsize": 2,
        "pass_itemsize": 2,
        "accumulation": 3,
        "reduces_each": False,
        "offloads": False,
    }
    return Layout(name, world_size, world_size, num_nodes, num_shards, **{**usual, **given})


def sent(of: Layout) -> list[tuple[int, int]]:
    return [(collective.sent, collective.leaving_machine) for collective in collectives_of_step(UNITS, of)]


def test_what_a_step_sends_is_what_rings_send() -> None:
    """1200 parameters, 1000 of them in layers; weights have 2 bytes, gradients are summed in 4."""
    assert sent(layout("single", 1)) == []
    assert sent(layout("ddp", 4)) == [(2 * 4800 * 3 // 4, 0)]
    gathered = 3 * (2 * 2200) * 3 // 4  # of 3 micro-batches; the backward pass gathers the layers again
    assert sent(layout("fsdp", 4, num_shards=4)) == [(gathered, 0), (4800 * 3 // 4, 0)]
    assert sent(layout("fsdp", 4, num_shards=4, reduces_each=True)) == [(gathered, 0), (3 * 4800 * 3 // 4, 0)]
    assert sent(layout("fsdp2", 4, 2, num_shards=4)) == [(gathered, gathered), (3600, 3600)]
    assert sent(layout("fsdp", 4, num_shards=4, gathers_at_once=True)) == [(2400 * 3 // 4, 0), (3600, 0)]
    assert sent(layout("fsdp2", 4, num_shards=4, gathers_at_once=True)) == [(3 * 2400 * 3 // 4, 0), (3600, 0)]
    hybrid = sent(layout("fsdp", 8, 2, num_shards=4))
    assert hybrid == [(gathered, 0), (3600, 0), (1200, 4 * 1200)]  # each of a machine's ranks sums its shard


def test_a_line_between_machines_that_is_slower_decides() -> None:
    collective = collectives_of_step(UNITS, layout("fsdp2", 4, 2, num_shards=4))[1]
    assert collective.seconds(interconnect=3600, network=1800) == 2
    assert collective.seconds(interconnect=900, network=1800) == 4


# ------------------------------------------------------------------------------------------------------------ fitting


def test_run_that_does_not_fit_is_refused_with_a_change_that_fits(llama: ModelShape) -> None:
    tried = wanted(llama, 4, 16, "--parallelism", "ddp", "--micro_batch_size", "2", "--precision", "32-true")
    (fault,) = faults_of(tried, tried.forecast())
    options = re.search(r"; with (--.+) it would need ([\d.]+) GB ", fault)
    assert options, fault
    given = dict(zip(options[1].split()[::2], options[1].split()[1::2], strict=True))
    usual = {"--parallelism": "ddp", "--micro_batch_size": "2", "--precision": "32-true"}
    devices = int(given.pop("--devices", 4))
    changed = wanted(llama, devices, 16, *(word for pair in (usual | given).items() for word in pair))
    forecast = changed.forecast()
    assert faults_of(changed, forecast) == []
    assert forecast.device_bytes / 1e9 == pytest.approx(float(options[2]), abs=0.1)


def test_ranks_that_share_rows_are_offered_for_long_ones(llama: ModelShape) -> None:
    given = ("--parallelism", "fsdp2", "--activation_checkpointing", "full", "--mlp_tile_size", "4k")
    tried = wanted(llama, 8, 40, *given, length=131_072)
    alone = tried.forecast()
    (fault,) = faults_of(replace(tried, device_memory=alone.device_bytes * 3 // 4), alone)
    assert " --context_parallel_size 2 it would need " in fault
    shared = wanted(llama, 8, 40, *given, "--context_parallel_size", "4", rows=2, length=131_072)
    forecast = shared.forecast()
    *_, gathered, reduced = forecast.collectives
    keys = 16 * 2 * 8 * 64 * 32_768 * 3  # 16 layers, keys and values of 8 heads of 64, sent to three ranks
    assert (gathered.sent, reduced.sent) == (2 * 2 * keys, 4 * keys)  # in 16 bits, again for the backward pass; in fp32
    assert forecast.activations.kept < alone.activations.kept / 3  # a fourth, and the chunk of logits


def test_the_work_of_ranks_that_share_rows_is_compared() -> None:
    flops = ModelFlops(num_used=100, attention=(Attention(num_layers=1, width=8, window=None),))
    assert busiest_rank(flops, np.array([0, 64, 128]), 2) == 1  # a document each
    assert 1 < busiest_rank(flops, np.array([0, 1, 64]), 2) < 1.02


def test_run_that_fits_passes_and_one_that_never_fits_is_named(llama: ModelShape) -> None:
    fits = wanted(llama, 4, 80, "--parallelism", "fsdp2")
    assert faults_of(fits, fits.forecast()) == []
    never = wanted(llama, 1, 2.1, "--parallelism", "single")
    (fault,) = faults_of(never, never.forecast())
    assert "no change of the arguments makes the run fit" in fault


def test_gradients_reduced_each_micro_batch_are_held_in_shards(llama: ModelShape) -> None:
    """Else fsdp2 holds the whole sum of earlier micro-batches in fp32, and fsdp in the type of the pass."""
    parameters = 1_235_814_400
    for name, itemsize in (("fsdp", 2), ("fsdp2", 4)):
        once, each = (
            wanted(llama, 4, 80, "--parallelism", name, "--gradient_reduction", reduction).forecast()
            for reduction in ("step", "micro_batch")
        )
        assert once.units.total == parameters
        assert once.budget.phases[0].parts["gradients"] == itemsize * parameters
        assert each.budget.phases[0].parts["gradients"] == 2 * parameters // 4


def test_tied_vocabulary_gradients_count_as_the_strategy_holds_them(llama: ModelShape) -> None:
    """single has the embedding's gradient until it is added, ddp the sum as well until a bucket has it."""
    forecasts = [
        wanted(llama, ranks, 80, "--parallelism", name, "--precision", "32-true").forecast()
        for name, ranks in (("single", 1), ("ddp", 2))
    ]
    matrix = 4 * 128_256 * 2048
    extra = [each.budget.phases[1].parts["activations"] - each.activations.at_end for each in forecasts]
    assert extra == [matrix, 2 * matrix]


@pytest.mark.parametrize(
    ("parallelism", "precision", "buckets"),
    [("ddp", "bf16-true", 2), ("ddp", "32-true", 0), ("single", "bf16-true", 0)],
)
def test_ddp_in_bf16_has_fp32_copies_of_two_buckets(
    llama: ModelShape, parallelism: str, precision: str, buckets: int
) -> None:
    options = ["--parallelism", parallelism, "--precision", precision]
    loss, backward, _ = wanted(llama, 2 if parallelism == "ddp" else 1, 80, *options).forecast().budget.phases
    for phase in (loss, backward):
        assert phase.parts["communication"] == buckets * 25 * 2**20


def test_checkpoints_are_counted_as_a_run_leaves_them(llama: ModelShape) -> None:
    every_four = wanted(llama, 1, 80, "--parallelism", "single", "--save_step_interval", "4")
    assert every_four.num_checkpoints() == 3  # 4, 8 and the last, 10
    more = ["--parallelism", "single", "--save_step_interval", "4", "--eval_step_interval", "3"]
    assert wanted(llama, 1, 80, *more).num_checkpoints() == 4  # and the best one, of 3, 6 or 9
    assert wanted(llama, 1, 80, *more, "--save_best", "false").num_checkpoints() == 3
    assert replace(wanted(llama, 1, 80, *more), validates=False).num_checkpoints() == 3
    assert wanted(llama, 1, 80, *more, "--keep_checkpoints", "2").num_checkpoints() == 3
    two = wanted(llama, 1, 80, "--parallelism", "single", "--save_step_interval", "1", "--keep_checkpoints", "2")
    assert two.num_checkpoints() == 3  # and the best one
    assert two.forecast().budget.checkpoint == 6 * 1_235_814_400


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_size("80GB") == 80_000_000_000
    assert parse_size("1.5GiB") == 3 * 2**29
    assert parse_size("450 GB/s") == 450_000_000_000
    assert [parse_size(text) for text in ("80", "GB", "80Gb", "-1GB", "0GB", "1e3GB")] == [None] * 6


@pytest.mark.parametrize(
    ("parallelism", "pinned"),
    [
        # by unit: 60,821,504 × 2 / 8 bytes are 15,205,376, and bytes of the rest 65,667,584
        ("fsdp", 16 * 2**24 + 2**26),
        # by parameter: q and o, k and v, three of the MLP, two norms; embedding and norm
        ("fsdp2", 16 * (2 * 2**20 + 2 * 2**18 + 3 * 2**22 + 2 * 512) + 2**26 + 512),
    ],
)
def test_offloaded_weights_and_gradients_count_as_torch_pins_them(
    llama: ModelShape, parallelism: str, pinned: int
) -> None:
    """Each allocation takes a power of two. Moments are not pinned."""
    request = wanted(llama, 8, 80, "--parallelism", parallelism, "--cpu_offload", "true")
    assert offloaded_bytes(llama, request.layout(), 4 * 1_235_814_400) == 2 * pinned + 4 * 1_235_814_400 // 8
    layout = wanted(llama, 8, 80, "--parallelism", parallelism).layout()
    assert offloaded_bytes(llama, layout, 4 * 1_235_814_400) == 0


# -------------------------------------------------------------------------------------------------- the whole program

_SIZES = {  # argument: name in config.json
    "hidden_width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_context_width": "max_position_embeddings",
    "vocab_size": "vocab_size",
}


def test_a_plan_writes_nothing_and_needs_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fabric_train.__main__ import main

    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    words = argv(model, tokens, tmp_path / "run", max_step=5, total_batch_size=32)
    options = "--plan true --device_memory 80GB --devices 8 --num_nodes 4 --interconnect 450GB/s --network 50GB/s"
    words += options.split()
    main([word if word != "cpu" else "cuda" for word in words])
    printed = capsys.readouterr().out
    assert "32 × fsdp on 4 machines, weights sharded over 32" in printed
    assert "on A100" in printed
    assert "reduce-scatter" in printed
    assert "one in 1,583.7 h: 32 devices, each fails once in 50,677 h, the rate of Llama 3" in printed
    assert "copied at 10.0 GB/s per device, written at 1.0 GB/s per machine" in printed
    assert "it fits" in printed
    assert not (tmp_path / "run").exists()


def test_an_adapter_is_planned_from_a_configuration_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fabric_train.__main__ import main

    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    plan = ["--plan", "true", "--device_memory", "24GB", "--devices", "1", "--adapter", "lora"]
    words = [*argv(model, tokens, tmp_path / "run", max_step=5), *plan]
    main(words)
    with_weights = capsys.readouterr().out
    assert "of them the adapter's" in with_weights

    for weights in model.glob("*.safetensors"):
        weights.unlink()
    main(words)
    without_weights = capsys.readouterr().out
    assert _planned_figures(without_weights) == _planned_figures(with_weights)

    sizes = json.loads((model / "config.json").read_text())
    position = words.index("--model_name")
    del words[position : position + 2]
    words += ["--from_scratch", "llama"]
    for argument, size_name in _SIZES.items():
        words += [f"--{argument}", str(sizes[size_name])]
    words += ["--architecture", json.dumps({"tie_word_embeddings": sizes["tie_word_embeddings"]})]
    main(words)
    assert _planned_figures(capsys.readouterr().out) == _planned_figures(with_weights)
    position = words.index("--plan")
    del words[position : position + 4]
    with pytest.raises(InputError, match="no pretrained weights for an adapter to change"):
        main(words)


def _planned_figures(printed: str) -> list[str]:
    """Return the lines of a printed plan that have its parameters, FLOPs and memory."""
    names = ("parameters", "computing", "weights", "optimizer", "gradients", "activations", "in all")
    figures = [line for line in printed.splitlines() if line.startswith(names)]
    assert len(figures) == len(names)
    return figures


def test_a_plan_says_how_evenly_the_rows_are_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fabric_train.__main__ import main

    words = argv(write_model(tmp_path / "model"), write_rows(tmp_path / "tokens"), tmp_path / "run", max_step=5)
    main([*words, *["--plan", "true", "--devices", "4", "--parallelism", "fsdp2", "--context_parallel_size", "2"]])
    shown = re.search(
        r"in the worst of 51 micro-batches, the busiest device has (1\.\d+) × the mean FLOPs", capsys.readouterr().out
    )
    assert shown
    assert 1 <= float(shown[1]) < 1.05


def test_a_plan_that_does_not_fit_ends_as_wrong_input(tmp_path: Path) -> None:
    from fabric_train.__main__ import main

    words = argv(write_model(tmp_path / "model"), write_rows(tmp_path / "tokens"), tmp_path / "run", max_step=5)
    with pytest.raises(InputError, match=r"needs 2\.0 GB on a device, which has 1\.0 GB"):
        main([*words, "--plan", "true", "--device_memory", "1GB", "--devices", "1"])
    for option in (["--interconnect", "450GB/s"], ["--mtbf_hours", "3"]):
        with pytest.raises(InputError, match=f"{option[0]} needs --plan true"):
            main([*words, *option])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that is large beside a process, and rows for it."""
    folder = tmp_path_factory.mktemp("measured")
    return random_inputs.write_model(folder / "model"), random_inputs.write_rows(folder / "tokens", length=128)


MEASURED = [
    Case("single", 1, ("--gradient_accumulation_steps", "2")),
    Case("fsdp2", 2),
]
MEASURED_MORE = [
    Case("fsdp", 2),
    Case("single", 1, ("--train_only", "layers.[67]")),
    Case("fsdp", 2, ("--train_only", "q_proj")),
    Case("single", 1, ("--lora_rank", "16", "--base_weights", "nf4")),
    Case("single", 1, ("--lora_rank", "16", "--gradient_accumulation_steps", "2")),
    Case("ddp", 2, ("--adapter", "dora")),
    Case("fsdp", 2, ("--lora_rank", "16")),
    Case("fsdp2", 2, ("--lora_rank", "16")),
    Case("fsdp2", 2, ("--context_parallel_size", "2")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*MEASURED, *(pytest.param(case, marks=pytest.mark.cuda_rehearsal) for case in MEASURED_MORE)], ids=str
)
def test_plan_is_within_15_percent_of_resident_memory(
    forked_runs: ForkedRuns, measured: tuple[Path, Path], tmp_path: Path, case: Case
) -> None:
    planned = plan_accuracy.planned_bytes(forked_runs, case, *measured, tmp_path / "run")
    resident = plan_accuracy.resident_bytes(forked_runs, case, *measured, tmp_path / "run")
    assert planned == pytest.approx(resident, rel=plan_accuracy.TOLERANCE)


def test_chosen_steps_are_traced_and_the_losses_are_the_same(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    from tests.support.unequal_rows import metrics

    model = write_model(tmp_path / "model")
    tokens = write_rows(tmp_path / "tokens")
    traced = argv(model, tokens, tmp_path / "traced", devices=2, max_step=4, profile="2:3")
    forked_runs.start(traced, 2).finish()
    forked_runs.start(argv(model, tokens, tmp_path / "plain", devices=2, max_step=4), 2).finish()
    losses = [[row["train_loss"] for row in metrics(tmp_path / name)] for name in ("traced", "plain")]
    assert losses[0] == losses[1]
    (file,) = (tmp_path / "traced" / "profile").iterdir()
    assert file.name == "steps-2-3-rank-0.json"
    names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2


def test_fewer_layers_of_a_model_that_computes_their_types() -> None:
    from transformers import JambaConfig

    config = _with_layers(JambaConfig(num_hidden_layers=8), 3)
    assert len(config.layer_types) == config.num_hidden_layers == 3
