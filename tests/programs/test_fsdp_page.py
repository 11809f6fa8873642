"""Pages with plans of an 8B: FSDP, also its lines of examples/minimal.py, and the last layers of a model."""

import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import plan_table
from docs_build import fsdp_figures
from fabric_train.__main__ import main
from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.preflight.memory_layout import REDUCED_BYTES, collectives_of_step, make_layout, read_units
from fabric_train.programs import tokenize_dataset
from fabric_train.training.step_plan import StepPlan
from tests.support.documented_commands import Command, commands_in, plain
from tests.support.programs import ROOT

PAGES = ("docs/explanation/fsdp.md", "docs/es/fsdp.md")
ENGLISH = (ROOT / PAGES[0]).read_text(encoding="utf-8")
NUM_GPUS = fsdp_figures.NUM_GPUS
_BEGIN_OF_PLAN = "plan() { fabric-train train"
_END_OF_PLAN = '"$@"; }'


def table_after(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table whose header begins with ``heading``."""
    lines = text[text.index(heading) :].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def sent_parameters(options: str, parallelism: str, accumulation: int) -> float:
    """Return what a GPU sends in a step by the plan, in multiples of 7/8 of the parameters.

    A collective among 8 GPUs sends 7/8 of its tensor. Only the layers of the 8B count: FSDP gathers the embedding and
    the head once a step and each layer twice, so the page's multiples hold for layers alone.
    """
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", *options.split()])
    plan = StepPlan(
        num_rows=None,
        world_size=NUM_GPUS,
        num_data_ranks=NUM_GPUS,
        micro_batch_size=1,
        accumulation=accumulation,
        rows_per_window=NUM_GPUS * accumulation,
        windows_per_epoch=None,
        num_steps=1,
        tokens_per_row=8192,
    )
    layout = make_layout(arguments, plan, parallelism)
    units = read_units(plan_table.read_model("8B"), arguments)
    num_in_layers = units.layer * units.num_layers
    layers_only = replace(units, rest=0, trained=num_in_layers, touched=num_in_layers)
    sent_once = num_in_layers * (NUM_GPUS - 1) / NUM_GPUS
    num_times = 0.0
    for collective in collectives_of_step(layers_only, layout):
        is_gather = collective.name.startswith("all-gather")
        itemsize = layout.pass_itemsize if is_gather else REDUCED_BYTES
        num_times += collective.sent / (itemsize * sent_once)
    return num_times


@pytest.mark.parametrize("page", PAGES)
def test_memory_of_the_strategies_is_what_their_shards_take(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    num_parameters = plan_table.read_model("8B").num_parameters
    heading = "| | sharded |" if "| | sharded |" in text else "| | se reparte |"
    shown = {row[0]: row[2].replace(",", ".") for row in table_after(text, heading)}
    for strategy in fsdp_figures.SHARDED:
        gigabytes = sum(fsdp_figures.bytes_on_gpu(strategy, num_parameters, NUM_GPUS).values()) / 1e9
        assert shown[strategy] == f"{gigabytes:.1f}"


@pytest.mark.parametrize(
    "options, parallelism, at_one, at_eight",
    [
        ("", "ddp", 2, 2),
        ("", "fsdp", 3, 2 * 8 + 1),
        ("--gradient_reduction micro_batch", "fsdp", 3, 3 * 8),
        ("--sharding_strategy SHARD_GRAD_OP", "fsdp", 2, 2),
        ("--sharding_strategy SHARD_GRAD_OP", "fsdp2", 2, 8 + 1),
    ],
)
def test_traffic_of_the_strategies_is_what_the_plan_counts(
    options: str, parallelism: str, at_one: int, at_eight: int
) -> None:
    assert sent_parameters(options, parallelism, 1) == pytest.approx(at_one)
    assert sent_parameters(options, parallelism, 8) == pytest.approx(at_eight)


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_the_example_are_in_it(page: str) -> None:
    example = (ROOT / "examples/minimal.py").read_text(encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    heading = "| what | line |" if "| what | line |" in text else "| qué | línea |"
    lines = [row[1].strip("`") for row in table_after(text, heading)]
    assert len(lines) == 10
    assert [line for line in lines if line not in example] == []


def test_a_step_gathers_computes_and_frees_each_layer_twice() -> None:
    spans = fsdp_figures.spans_of_step(fsdp_figures.NUM_LAYERS)
    computations = [span for span in spans if span.kind in ("forward", "backward")]
    assert [span.layer for span in computations] == [1, 2, 3, 4, 4, 3, 2, 1]
    whole = [span for span in spans if span.kind == "whole"]
    for computation in computations:
        held = [span for span in whole if span.start < computation.end and computation.start < span.end]
        assert computation.layer in {span.layer for span in held}
        assert len(held) <= 2
    network = sorted((span.start, span.end) for span in spans if span.kind in ("gather", "reduce"))
    assert all(end <= next_start for (_, end), (next_start, _) in pairwise(network))


def test_a_step_of_two_layers_overlaps_as_worked_out_by_hand() -> None:
    # a gather and a reduction take 1, a forward pass 2, a backward pass 4, the update 2
    steps = {(span.kind, span.layer, span.start, span.end) for span in fsdp_figures.spans_of_step(2)}
    network = {("gather", 1, 0, 1), ("gather", 2, 1, 2), ("gather", 2, 5, 6), ("gather", 1, 6, 7)}
    network |= {("reduce", 2, 10, 11), ("reduce", 1, 14, 15)}
    computing = {("forward", 1, 1, 3), ("forward", 2, 3, 5), ("backward", 2, 6, 10), ("backward", 1, 10, 14)}
    whole = {("whole", 1, 0, 3), ("whole", 2, 1, 5), ("whole", 2, 5, 10), ("whole", 1, 6, 14)}
    assert steps == network | computing | whole | {("update", 0, 15, 17)}


@pytest.fixture(scope="module")
def reader_dir(tmp_path_factory: pytest.TempPathFactory, shakespeare_jsonl: Path, tiny_model_dir: Path) -> Path:
    """A folder with what the plans of the page read."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    words = f"--dataset {shakespeare_jsonl} --tokenizer_name {tiny_model_dir} --max_length 8k --num_proc 1"
    tokenize_dataset.main([*words.split(), "--output_dir", str(folder / "data/8k")])
    return folder


def plan_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the page's ``plan`` prints with these arguments, and its error."""
    definition = next(command.line for command in commands_in(ENGLISH) if command.line.startswith(_BEGIN_OF_PLAN))
    shared = shlex.split(definition.removeprefix(_BEGIN_OF_PLAN).removesuffix(_END_OF_PLAN))
    return printed_by([*shared, *shlex.split(words)], capsys)


def printed_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a training command with these words prints, and its error."""
    error = ""
    try:
        main(words)
    except InputError as refused:
        error = f"error: {refused}"
    return plain(f"{capsys.readouterr().out}\n{error}")


def assert_shown(command: Command, printed: str) -> None:
    """Assert that a program printed each line that a page shows below its command."""
    for line in command.shown:
        assert plain(line.replace("…", "")) in printed


@pytest.mark.slow
def test_plans_print_what_the_page_shows(
    reader_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reader_dir)
    plans = [command for command in commands_in(ENGLISH) if command.line.startswith("plan --")]
    assert len(plans) == 5
    for command in plans:
        printed = plan_of(command.line.removeprefix("plan "), capsys)
        assert_shown(command, printed)


@pytest.mark.slow
def test_the_plan_of_the_last_layers_prints_what_the_page_shows(
    reader_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reader_dir)
    program = "fabric-train train"
    commands = commands_in((ROOT / "docs/how-to/last_layers.md").read_text(encoding="utf-8"))
    command = next(command for command in commands if command.line.startswith(program))
    printed = printed_by(shlex.split(command.line.removeprefix(program)), capsys)
    assert_shown(command, printed)


@pytest.mark.slow
def test_tables_of_the_exercises_are_those_of_plans(
    reader_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reader_dir)
    cells = {
        f"--devices {row[0]} --precision bf16-mixed": row[1] for row in table_after(ENGLISH, "| GPUs | `--precision")
    }
    for row in table_after(ENGLISH, "| `--micro_batch_size` |"):
        options = f"--devices 8 --precision bf16-mixed --micro_batch_size {row[0]} --activation_checkpointing"
        cells[f"{options} none"] = row[2]
        cells[f"{options} full"] = row[3]
    assert len(cells) == 12
    for words, cell in cells.items():
        printed = plan_of(words, capsys)
        needed = re.search(r"at most ([\d.]+) GB", printed)
        assert needed is not None
        assert cell.startswith(f"{float(needed[1]):.1f} GB"), words
        assert ("does not fit" in cell) == ("error: " in printed), words
