"""Print the plans of Llama-3 8B and 70B on 80 GB GPUs for docs/performance.md: ``python -m benchmarks.plan_table``.

Nothing is measured. The sizes are from the published config.json files; no weights are needed.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.model.hf_model import ModelShape, read_shape
from fabric_train.preflight.memory_forecast import Forecast, RunRequest
from fabric_train.preflight.memory_plan import faults_of
from fabric_train.training.step_plan import StepPlan

LENGTH = 8192
ROWS = 128
DEVICE_MEMORY = "80GB"
# NVLink 4; eight ports of 400 Gbit/s per machine
INTERCONNECT = "450GB/s"
NETWORK = "400GB/s"
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MODELS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


@dataclass(frozen=True)
class Row:
    """A line of the table: a model on ``num_nodes`` machines of ``devices`` GPUs, with options that are not default."""

    model: str
    num_nodes: int
    devices: int
    options: str = ""


TABLE = (
    Row("8B", 1, 4, "--activation_checkpointing none"),
    Row("8B", 1, 4, "--activation_checkpointing full"),
    Row("8B", 1, 4, "--activation_checkpointing full --gradient_reduction micro_batch"),
    Row("8B", 1, 4, "--activation_checkpointing full --gradient_reduction micro_batch --precision bf16-mixed"),
    Row("70B", 2, 8, "--activation_checkpointing full"),
    Row("70B", 2, 8, "--activation_checkpointing full --gradient_reduction micro_batch"),
    Row("8B", 8, 8, "--activation_checkpointing full"),
    Row("8B", 8, 8, "--activation_checkpointing full --sharding_strategy HYBRID_SHARD"),
    Row("70B", 8, 8, "--activation_checkpointing full --gradient_reduction micro_batch"),
)


def main() -> None:
    """Print the table in Markdown."""
    print("| model | GPUs | options | of 80 GB | weights | optimizer | gradients | gathered | activations |", end="")
    print(" sent a step | takes | checkpoint |")
    print("|---|---|---|" + "---:|" * 9)
    for row in TABLE:
        request = request_of(row)
        forecast = request.forecast()
        print("| " + " | ".join(cells(row, request, forecast)) + " |")


def request_of(row: Row) -> RunRequest:
    """Return the run of a line: fsdp, micro-batches of one row, bf16-true unless its options differ."""
    words = ["--train_data_dir", "tokens", "--output_dir", "run", "--num_nodes", str(row.num_nodes)]
    arguments = parse(TrainArguments, [*words, *row.options.split()])
    world_size = row.num_nodes * row.devices
    plan = StepPlan(
        None, world_size, world_size, arguments.training.micro_batch_size, ROWS // world_size, ROWS, None, 1, LENGTH
    )
    memory = parse_size(DEVICE_MEMORY)
    assert memory is not None
    return RunRequest(arguments, (read_model(row.model),), plan, "fsdp", False, True, memory, is_elsewhere=True)


def cells(row: Row, request: RunRequest, forecast: Forecast) -> list[str]:
    """Return the cells of a line, as Markdown."""
    most = forecast.budget.most
    interconnect, network = (float(parse_size(line) or 0) for line in (INTERCONNECT, NETWORK))
    seconds = sum(collective.seconds(interconnect, network) for collective in forecast.collectives)
    share = f"{forecast.device_bytes / request.device_memory:.0%}"
    kinds = ("weights", "optimizer", "gradients", "gathered weights", "activations")
    return [
        row.model,
        f"{row.num_nodes} × {row.devices}",
        f"`{row.options}`" if row.options else "",
        f"**{share}**" if faults_of(request, forecast) else share,
        *(show_size(most.parts.get(kind, 0)) for kind in kinds),
        show_size(sum(collective.sent for collective in forecast.collectives)),
        f"{seconds:.1f} s",
        show_size(forecast.budget.checkpoint),
    ]


def read_model(model: str) -> ModelShape:
    """Return the shape of a model of ``MODELS``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_LLAMA, **MODELS[model]}), encoding="utf-8")
        return read_shape(folder)


if __name__ == "__main__":
    main()
