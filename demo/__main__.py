"""Train SmolLM2-135M on Shakespeare (``make demo``). Each stage runs one of the project's own command lines."""

import csv
import json
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from demo.stages import ROOT, StageError, print_heading, run_stage
from fabric_train.sample_data import real_data
from fabric_train.training.loss_curves import draw_loss_curves
from fabric_train.training.metrics_table import MetricsTable, join_tables, read_metrics_table

FOLDER = Path("demo_run")
TOKENS = FOLDER / "tokens"
BEFORE = FOLDER / "before"
RUN = FOLDER / "run"
EXPORT = FOLDER / "model"
PICTURE = FOLDER / "loss.png"
PROMPT = "But soft! what light through yonder window"
_MAX_PERPLEXITY_RATIO = 0.9  # perplexity after training / perplexity before


@dataclass(frozen=True)
class Result:
    """Results of the demo: loss and perplexity on the held-out works, tokens per second over all devices."""

    loss_before: float
    perplexity_before: float
    perplexity_after: float
    num_tokens: int
    tokens_per_second: float


def main() -> None:
    """Run the stages in turn; exit with the exit code of a stage that fails."""
    started = time.monotonic()
    console = Console(highlight=False)
    try:
        result = _run_demo()
        _summarize(result, time.monotonic() - started, console)
    except (StageError, real_data.FetchError) as error:
        sys.exit(_failed(str(error), getattr(error, "exit_code", 1)))
    except KeyboardInterrupt:
        sys.exit(_failed("interrupted; run make demo again, complete data is kept", 130))
    if result.perplexity_after > _MAX_PERPLEXITY_RATIO * result.perplexity_before:
        perplexities = f"{result.perplexity_before:.1f} to {result.perplexity_after:.1f}"
        sys.exit(_failed(f"perplexity only went from {perplexities}; the model did not learn", 1))


def _run_demo() -> Result:
    print_heading("1/6  download real data: SmolLM2-135M and Shakespeare")
    model, documents = (path.relative_to(ROOT) for path in (real_data.smollm2(), real_data.shakespeare()))
    print(f"found {model} and {documents}", flush=True)

    print_heading("2/6  tokenize 42 works, 10 % of them held out")
    if (ROOT / TOKENS).exists():
        print(f"found {TOKENS}", flush=True)
    else:
        tokenize = ["--dataset", documents, "--tokenizer_name", model, "--output_dir", TOKENS]
        run_stage(
            "tokenization", "python", "tokenize_dataset.py", *tokenize, "--max_length", 128, "--validation_split", 0.1
        )
    for leftover in (BEFORE, RUN, EXPORT):
        shutil.rmtree(ROOT / leftover, ignore_errors=True)

    print_heading("3/6  evaluate the held-out perplexity before training")
    _train("evaluation", model, BEFORE, "--eval_only", "true")
    print_heading("4/6  train, evaluate, save")
    _train("training", model, RUN)

    print_heading("5/6  export the last checkpoint to Hugging Face format and verify it")
    run_stage("conversion", "python", "convert_to_hf.py", "--checkpoint", RUN, "--output_dir", EXPORT)
    print_heading("6/6  generate with the exported model")
    sampling = ["--num_tokens", 80, "--temperature", 0.8, "--top_p", 0.95]
    run_stage("generation", "python", "generate.py", "--model_name", EXPORT, "--prompt", PROMPT, *sampling)

    result = _read_result()
    before = MetricsTable(np.zeros(1, np.int64), {"val_loss": np.array([result.loss_before])})
    table = join_tables([before, read_metrics_table(ROOT / RUN / "metrics.csv")])
    draw_loss_curves(table, ROOT / PICTURE, "SmolLM2-135M on Shakespeare")
    return result


def _train(name: str, model: Path, run: Path, *more: str) -> None:
    """Run the training program on all GPUs, or on two CPU ranks, with a free port."""
    num_gpus = torch.cuda.device_count()
    devices = ["--devices", num_gpus, "--accelerator", "cuda"] if num_gpus else ["--devices", 2, "--accelerator", "cpu"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # fp32, in configs/demo.yaml, is fastest on a CPU; on a GPU bf16-mixed is faster and keeps fp32 weights
    precision = ["--precision", "bf16-mixed"] if num_gpus else []
    paths = ["--train_data_dir", TOKENS, "--model_name", model, "--output_dir", run]
    config = ["--config", "configs/demo.yaml"]
    run_stage(name, "fabric", "run", "--main-port", port, "fabric_train", *devices, *precision, *config, *paths, *more)


def _read_result() -> Result:
    before = json.loads((ROOT / BEFORE / "evaluation.json").read_text(encoding="utf-8"))
    with (ROOT / RUN / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # skip the first step, which includes warm-up; a harmonic mean, because all steps have the same number of tokens
    rates = [float(row["tokens_per_second"]) for row in rows[1:]]
    return Result(
        loss_before=before["loss"],
        perplexity_before=before["perplexity"],
        perplexity_after=float(rows[-1]["perplexity"]),
        num_tokens=int(rows[-1]["num_tokens"]),
        tokens_per_second=len(rates) / sum(1 / rate for rate in rates),
    )


def _summarize(result: Result, seconds: float, console: Console) -> None:
    table = Table(title="\nThe demo, from text to a Hugging Face model", title_justify="left", show_header=False)
    table.add_row("held-out perplexity before", f"{result.perplexity_before:.2f}")
    table.add_row("held-out perplexity after", f"[bold green]{result.perplexity_after:.2f}")
    table.add_row("trained on", f"{result.num_tokens:,} tokens at {result.tokens_per_second:,.0f} tokens/s")
    table.add_row("took", f"{int(seconds) // 60} min {int(seconds) % 60} s")
    table.add_row("loss curve", str(PICTURE))
    table.add_row("exported model", str(EXPORT))
    table.add_row("run: metrics, checkpoints", str(RUN))
    table.add_row("token dataset", str(TOKENS))
    console.print(table)


def _failed(reason: str, exit_code: int) -> int:
    print(f"\nerror: demo: {reason}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    main()
