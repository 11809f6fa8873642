"""torchrun and ``fabric run`` on two machines (network namespaces): one world, also when ranks come and go.

``GLOO_SOCKET_IFNAME`` is not set, and each machine takes its own name for 127.0.0.1.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.support.forked_runs import ForkedRuns
from tests.support.launched import Launched
from tests.support.programs import ROOT
from tests.support.short_runs import argv, metrics, saved_steps
from tests.support.two_machines import ADDRESSES, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

PORT = "29510"  # the namespaces are empty
LONG = {"max_step": 60, "eval_step_interval": 30, "save_step_interval": 5}
FABRIC = ["run", "--num-nodes", "2", "--devices", "1", "--main-address", ADDRESSES[0], "--main-port", PORT]
STATIC = ["--nproc-per-node", "1", "--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", PORT]


def c10d(machine: int, *nodes: str, conf: str = "") -> list[str]:
    """Return options of torchrun; it finds out neither its address nor that it is the endpoint if its name does not."""
    is_host = f"is_host={int(machine == 0)}"
    words = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
    return [*words, "--nnodes", *nodes, "--rdzv-conf", is_host + conf]


Start = Callable[..., Launched]


@pytest.fixture
def machines() -> Iterator[tuple[list[str], list[str]]]:
    with two_machines() as both:
        yield both


@pytest.fixture
def start(
    machines: tuple[list[str], list[str]], tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Iterator[Start]:
    """Return ``start(machine, launcher, *words, **options)``: a launcher on one machine, for a run in tmp_path/run."""
    with ExitStack() as stack:

        def start(machine: int, launcher: str, *words: str, **options: object) -> Launched:
            folder = tmp_path / f"machine-{machine}"
            folder.mkdir(exist_ok=True)
            given = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", **options)
            program = [str(ROOT / "fabric_train")] if launcher == "fabric" else ["-m", "fabric_train"]
            command = [str(Path(sys.executable).with_name(launcher)), *words, *program, *given]
            return stack.enter_context(Launched([*machines[machine], *command], folder))

        yield start


def has_step(run: Path, step: int) -> Callable[[], bool]:
    """Return whether the run has logged a step and saved a checkpoint, to wait for."""
    return lambda: len(metrics(run)) >= step and bool(saved_steps(run))


def undisturbed(runs: ForkedRuns, folder: Path, model: Path, tokens: Path, **options: object) -> list[tuple[str, ...]]:
    """Return the metrics of two ranks on one machine."""
    runs.start(argv(model, tokens, folder, **options)).finish(400)
    return metrics(folder)


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_machines_give_the_losses_of_one(
    start: Start,
    forked_runs: ForkedRuns,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    rendezvous: str,
) -> None:
    both = []
    for machine, address in enumerate(ADDRESSES):
        words = [*STATIC, "--node-rank", str(machine)]
        if rendezvous == "c10d":
            words = [*c10d(machine, "2"), "--local-addr", address]
        both.append(start(machine, "torchrun", *words))
    for each in both:
        assert each.process.wait(200) == 0, each.output()
    assert "2 × fsdp" in both[0].output()
    assert metrics(tmp_path / "run") == undisturbed(forked_runs, tmp_path / "one", tiny_model_dir, tiny_tokens_dir)


def test_a_name_that_means_each_machine_itself_is_refused(start: Start) -> None:
    """torchrun's c10d tells the others the first machine's own name unless ``--local-addr`` is given."""
    start(0, "torchrun", *c10d(0, "2"))
    second = start(1, "torchrun", *c10d(1, "2"))
    assert second.process.wait(200) == 1, second.output()
    lines = [line for line in second.output().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, second.output()
    assert "resolves to this machine itself" in lines[0]
    assert lines[0].endswith("give torchrun --local-addr ADDRESS on rank 0's machine")


def test_a_killed_rank_restarts_the_ranks_of_both_machines(
    start: Start, forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    run = tmp_path / "run"
    words = ["--max-restarts", "2", "--local-addr"]
    first, second = (
        start(machine, "torchrun", *c10d(machine, "2"), *words, address, resume="true", **LONG)
        for machine, address in enumerate(ADDRESSES)
    )
    first.wait_until(has_step(run, 8))
    (killed,) = second.ranks()
    killed.kill()
    for each in (first, second):
        assert each.process.wait(200) == 0, each.output()
    assert "died while the run was at" in first.output()
    assert metrics(run) == undisturbed(forked_runs, tmp_path / "one", tiny_model_dir, tiny_tokens_dir, **LONG)


def test_a_machine_that_joins_late_takes_part(
    start: Start,
    forked_runs: ForkedRuns,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun stops the first machine's rank, which saves, and starts both; the windows stay the same."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # else torchrun's newcomer waits for an address
    run = tmp_path / "run"
    options = {**LONG, "max_step": 100, "total_batch_size": 64, "number_epochs": 999, "lr": 1e-5}
    words = ["--max-restarts", "2", "--local-addr"]
    first, second = (c10d(machine, "1:2", conf=",last_call_timeout=1") for machine in (0, 1))
    early = start(0, "torchrun", *first, *words, ADDRESSES[0], resume="true", **options)
    early.wait_until(lambda: len(metrics(run)) >= 5)
    late = start(1, "torchrun", *second, *words, ADDRESSES[1], resume="true", **options)
    for each in (early, late):
        assert each.process.wait(400) == 0, each.output()
    assert "1 × single" in early.output()
    assert "2 × fsdp" in early.output()
    whole = undisturbed(forked_runs, tmp_path / "one", tiny_model_dir, tiny_tokens_dir, **options)
    losses, expected = ([float(row[2]) for row in rows] for rows in (metrics(run), whole))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_lost_machine_is_replaced_by_a_spare_one_or_done_without(
    start: Start,
    forked_runs: ForkedRuns,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three launchers for up to two machines, two train; the third replaces a lost one. After it, the first is left.

    The third runs on the second machine too: a launcher stands for a machine.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run = tmp_path / "run"
    options = {**LONG, "max_step": 40, "total_batch_size": 32, "number_epochs": 999, "lr": 1e-5, "resume": "true"}
    words = ["--max-restarts", "3", "--local-addr"]
    launched: list[Launched] = []
    for machine in (0, 1, 1):
        conf = ",last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
        given = [*c10d(machine, "1:2", conf=conf), *words, ADDRESSES[machine]]
        launched.append(start(machine, "torchrun", *given, **options))
    first, *others = launched
    first.wait_until(has_step(run, 8))
    for _ in range(2):
        (lost,) = (each for each in others if each.process.poll() is None and each.ranks())
        num_steps = len(metrics(run))
        for process in [*lost.ranks(), psutil.Process(lost.process.pid)]:
            process.kill()
        lost.process.wait()
        first.wait_until(has_step(run, num_steps + 5))  # more than were logged when the machine was lost
    assert first.process.wait(200) == 0, first.output()
    assert first.output().count("2 × fsdp") == 2
    assert first.output().count("1 × single") == 1
    whole = undisturbed(forked_runs, tmp_path / "one", tiny_model_dir, tiny_tokens_dir, **options)
    losses, expected = ([float(row[2]) for row in rows] for rows in (metrics(run), whole))
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_one_launcher_saves_on_both_machines(start: Start, tmp_path: Path, number: int) -> None:
    options = {**LONG, "max_step": 5000, "number_epochs": 999}
    first, second = (start(node, "fabric", *FABRIC, "--node-rank", str(node), **options) for node in (0, 1))
    first.wait_until(has_step(tmp_path / "run", 8))
    ranks: list[psutil.Process] = [*first.ranks(), *second.ranks()]
    assert len(ranks) == 2
    second.process.send_signal(number)
    assert first.process.wait(100) == 75, first.output()
    assert second.process.wait(100) == (75 if number == signal.SIGTERM else -number), second.output()
    assert not psutil.wait_procs(ranks, timeout=20)[1]
    assert max(saved_steps(tmp_path / "run")) > 5
