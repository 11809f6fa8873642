"""Run benchmarks, print a table for each and write it into results/: ``python -m benchmarks [NAME …]``."""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType

from benchmarks import (
    adapter_steps,
    adapters,
    chat_tokens,
    chats,
    checkpoint,
    cleaning,
    context_rows,
    distillation,
    export,
    faults,
    first_hour,
    gpu,
    gpu_sizes,
    growth,
    identity,
    invariance,
    long_report,
    long_rows,
    loss,
    order,
    overhead,
    plan,
    precision,
    preference,
    quarter_hour,
    rehearsal,
    rollout_steps,
    rollouts,
    tokenization,
    training,
    vllm_sampling,
    vocabulary,
)
from benchmarks.measure import ROOT
from benchmarks.report import Report, this_machine, write_report
from benchmarks.scale import measure as scale
from fabric_train.cli.code_commit import checked_out_commit
from fabric_train.cli.errors import InputError, run_program
from fabric_train.sample_data import real_data


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: ``measure(work)`` runs the systems with its files in ``work``, ``table`` shows the report.

    With ``only_by_name`` it runs only if it is named, because it takes long, gigabytes of disk or a GPU.
    """

    measure: Callable[[Path], Report]
    table: Callable[[Report], RenderableType]
    only_by_name: bool = False


BENCHMARKS = {
    "tokenization": Benchmark(tokenization.measure, tokenization.table),
    "identity": Benchmark(identity.measure, identity.table),
    "training": Benchmark(training.measure, training.table),
    "adapters": Benchmark(adapters.measure, adapters.table, only_by_name=True),
    "chats": Benchmark(chats.measure, chats.table),
    "chat_tokens": Benchmark(chat_tokens.measure, chat_tokens.table),
    "cleaning": Benchmark(cleaning.measure, cleaning.table),
    "loss": Benchmark(loss.measure, loss.table),
    "rollouts": Benchmark(rollouts.measure, rollouts.table, only_by_name=True),
    "vllm_sampling": Benchmark(vllm_sampling.measure, vllm_sampling.table, only_by_name=True),
    "rollout_steps": Benchmark(rollout_steps.measure, rollout_steps.table, only_by_name=True),
    "preference": Benchmark(preference.measure, preference.table, only_by_name=True),
    "distillation": Benchmark(distillation.measure, distillation.table, only_by_name=True),
    "overhead": Benchmark(overhead.measure, overhead.table),
    "checkpoint": Benchmark(checkpoint.measure, checkpoint.table),
    "invariance": Benchmark(invariance.measure, invariance.table),
    "order": Benchmark(order.measure, order.table),
    "gpu": Benchmark(gpu.measure, gpu.table, only_by_name=True),
    "faults": Benchmark(faults.measure, faults.table, only_by_name=True),
    "plan": Benchmark(plan.measure, plan.table, only_by_name=True),
    "growth": Benchmark(growth.measure, growth.table, only_by_name=True),
    "export": Benchmark(export.measure, export.table, only_by_name=True),
    "precision": Benchmark(precision.measure, precision.table, only_by_name=True),
    "vocabulary": Benchmark(vocabulary.measure, vocabulary.table, only_by_name=True),
    "long_report": Benchmark(long_report.measure, long_report.table, only_by_name=True),
    "context_rows": Benchmark(context_rows.measure, context_rows.table),
    "long_rows": Benchmark(long_rows.measure, long_rows.table, only_by_name=True),
    "scale": Benchmark(scale.measure, scale.table, only_by_name=True),
    "adapter_steps": Benchmark(adapter_steps.measure, adapter_steps.table, only_by_name=True),
    "rehearsal": Benchmark(rehearsal.measure, rehearsal.table, only_by_name=True),
}
_ONLY_BY_NAME = [name for name, benchmark in BENCHMARKS.items() if benchmark.only_by_name]
_IDLE_LOAD = 0.25  # load average per core


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure this project and its peers.")
    parser.add_argument(
        "names",
        nargs="*",
        help=f"what to measure: {', '.join(BENCHMARKS)}; default: all except {', '.join(_ONLY_BY_NAME)}",
    )
    parser.add_argument(
        "--first_hour",
        action="store_true",
        help="of gpu: environment, tests, parity and resume first, then speed and memory; see benchmarks/README.md",
    )
    parser.add_argument(
        "--quarter_hour",
        action="store_true",
        help="of gpu: adapters of an 8B beside TRL, float8 and long rows in 12 minutes; see benchmarks/README.md",
    )
    parser.add_argument(
        "--sizes",
        choices=gpu_sizes.SIZES,
        default="full",
        help="of --first_hour and --quarter_hour: tiny takes small models, to try whether it runs through",
    )
    parser.add_argument(
        "--work",
        type=Path,
        help=f"of --first_hour and --quarter_hour: folder for their files; default: {first_hour.WORK} and "
        f"{quarter_hour.WORK}",
    )
    parser.add_argument("--systems", default="", help="of gpu: regular expression, which systems to run; default: all")
    parser.add_argument(
        "--repetitions", type=int, default=gpu.REPETITIONS, help="of gpu: runs of each system; default: %(default)s"
    )
    parser.add_argument("--kept", type=Path, help="of gpu and scale: file that keeps what ended, for a second start")
    return parser.parse_args()


def main() -> None:
    """Run the benchmarks named on the command line, or all that do not have to be named.

    Raises:
        InputError: there is no benchmark with that name.
        ConnectionError: the real data cannot be downloaded.
    """
    given = _parse()
    names = given.names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise InputError(f"no benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    for option in ("first_hour", "quarter_hour"):
        if getattr(given, option) and names != ["gpu"]:
            raise InputError(f"--{option} is of the benchmark gpu; give: python -m benchmarks gpu --{option}")
    if given.first_hour and given.quarter_hour:
        raise InputError("--first_hour and --quarter_hour are two measurements; give one of them")

    console = Console(highlight=False, soft_wrap=True)
    # before measuring: both may change meanwhile
    machine = this_machine()
    commit = checked_out_commit()
    if machine.load_average > _IDLE_LOAD * machine.cores:
        note = f"note: the load average is {machine.load_average:.1f} on {machine.cores} cores; other processes here "
        console.print(note + "slow down the measured program", style="yellow")
    real_data.CACHE.mkdir(exist_ok=True)
    if given.first_hour:
        first_hour.run_first_hour(given.sizes, given.work or first_hour.WORK, machine, commit)
        return
    if given.quarter_hour:
        quarter_hour.run_quarter_hour(given.sizes, given.work or quarter_hour.WORK, machine, commit)
        return
    kept = given.kept and given.kept.absolute()
    for name in names or [name for name in BENCHMARKS if name not in _ONLY_BY_NAME]:
        # on the project's own disk, because the systems write their output there
        with tempfile.TemporaryDirectory(dir=real_data.CACHE, prefix=f"benchmark-{name}-") as folder:
            try:
                work = Path(folder).relative_to(ROOT)
                if name == "scale":
                    report = scale.measure(work, kept)
                elif name == "gpu":
                    report = gpu.measure(work, "", given.systems, given.repetitions, kept)
                else:
                    report = BENCHMARKS[name].measure(work)
            except real_data.FetchError as error:
                raise ConnectionError(str(error)) from error
        path = write_report(report, machine, commit)
        console.print(BENCHMARKS[name].table(report))
        console.print(f"written {path.relative_to(ROOT)}")


if __name__ == "__main__":
    run_program(main)
