"""Print the longest rows of Llama-3-8B on one GPU by the plan: ``python -m benchmarks.largest_row``.

It is for docs/long_rows.md. Nothing is measured. All layers are recomputed, from inputs that are kept in host memory,
with and without tiles.
"""

from dataclasses import dataclass

from fabric_train.arguments import TrainArguments, parse
from fabric_train.checkpoint.adapter_folder import choose_adapter
from fabric_train.cli.argument_types import parse_size
from fabric_train.model.hf_model import ModelShape, shape_from_config
from fabric_train.model.init_weights import new_shape
from fabric_train.preflight.memory_forecast import Forecast, RunRequest
from fabric_train.training.step_plan import StepPlan

PRESET = "configs/llama-3-8b.yaml"
SHARE = 0.9  # of the memory, as --activation_checkpointing auto takes
# tokens
STEP = 4096
SHORTEST = 8192
TILES = ("none", "4096")
_SAVING = "--parallelism single --precision bf16-true --micro_batch_size 1 --compile false"
SAVING = f"{_SAVING} --activation_checkpointing full --activation_offload true"


@dataclass(frozen=True)
class Row:
    """A GPU, and the options that train the most of the model on it."""

    memory: str
    trained: str
    options: str = ""


TABLE = (
    Row("24GB", "LoRA, base in NF4", "--adapter lora --lora_rank 16 --base_weights nf4"),
    Row("48GB", "LoRA", "--adapter lora --lora_rank 16"),
    Row("80GB", "all weights, AdamW in 8 bits", "--optimizer_states 8bit"),
    Row("80GB", "all weights"),
    Row("141GB", "all weights"),
)


def main() -> None:
    """Print the table in Markdown."""
    print(
        "| GPU | trains | whole rows | in tiles | of that: weights, gradients, optimizer | activations | host memory |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in TABLE:
        whole, tiled = (longest(row, tiles) for tiles in TILES)
        parts = forecast(row, tiled, TILES[1]).budget.most.parts
        held = sum(parts.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
        cells = (f"{held / 1e9:.1f} GB", f"{parts['activations'] / 1e9:.1f} GB", f"{in_host(row, tiled) / 1e9:.1f} GB")
        print(f"| {row.memory} | {row.trained} | {whole:,} | {tiled:,} | {' | '.join(cells)} |", flush=True)


def longest(row: Row, tiles: str) -> int:
    """Return the most tokens of a row, a multiple of ``STEP``, that fit; 0 if ``SHORTEST`` do not.

    What a row needs grows with its length nearly in proportion, so a straight line finds the first guess.
    """
    usable = SHARE * parse_size(row.memory)  # type: ignore[operator] # the sizes are well-formed

    def needed(length: int) -> int:
        return forecast(row, length, tiles).device_bytes

    if needed(SHORTEST) > usable:
        return 0
    shorter = SHORTEST
    longer = 8 * SHORTEST
    per_token = (needed(longer) - needed(shorter)) / (longer - shorter)
    length = int(longer + (usable - needed(longer)) / per_token) // STEP * STEP
    length = max(length, SHORTEST)
    while needed(length) > usable:
        length -= STEP
    while needed(length + STEP) <= usable:
        length += STEP
    return length


def forecast(row: Row, length: int, tiles: str) -> Forecast:
    """Return the plan of steps of one row."""
    words = f"--config {PRESET} --train_data_dir tokens --output_dir run {SAVING} --mlp_tile_size {tiles} {row.options}"
    arguments = parse(TrainArguments, words.split())
    plan = StepPlan(None, 1, 1, 1, 1, 1, None, 10, length)
    memory = parse_size(row.memory) or 0
    return RunRequest(
        arguments, (_shape(arguments),), plan, "single", False, True, memory, is_elsewhere=True
    ).forecast()


def _shape(arguments: TrainArguments) -> ModelShape:
    shape = new_shape(arguments.model, arguments.fsdp.auto_wrap_policy)
    adapter = choose_adapter(arguments.adapter)
    if adapter is None:
        return shape
    layer_class = arguments.fsdp.auto_wrap_policy
    return shape_from_config(shape.config, shape.source, layer_class, "sdpa", adapter=adapter)


def in_host(row: Row, length: int) -> int:
    """Return the bytes of the layers' inputs, bf16, which are in host memory."""
    config = _shape(parse(TrainArguments, f"--config {PRESET} --train_data_dir x --output_dir y".split())).config
    return 2 * length * config.hidden_size * config.num_hidden_layers


if __name__ == "__main__":
    main()
