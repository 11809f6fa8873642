"""A run reads parts as the full merge of them: the same weights, also after a kill, and the same trace and replay."""

import json
import re
import shutil
from pathlib import Path

import pytest

from fabric_train.checkpoint import read_trainer_json
from fabric_train.data.data_order import KEYED, DataOrder
from fabric_train.data.step_sampler import WindowOrder
from fabric_train.data.token_dataset import open_dataset
from fabric_train.tokenization import merge
from fabric_train.trace.__main__ import main as trace
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv, at_point, metrics
from tests.support.token_datasets import TEXTS, tokenize, write_jsonl

pytestmark = pytest.mark.slow
OPTIONS = {"max_step": 6, "eval_step_interval": 3, "eval_iters": 1, "save_step_interval": 2}
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


class Runs:
    """Runs on the full merge ``whole`` and on ``parts``; the one on parts is killed at step 5 and resumed."""

    def __init__(self, folder: Path, model: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self._model = model
        self._runs = runs
        parts = [str(folder / name) for name in ("es", "va")]
        for name, part, packing in zip(("es", "va"), parts, ("concat", "best_fit"), strict=True):
            documents = write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
            tokenize(Path(part), model, f"{name}={documents}", packing=packing, validation_split=0.2, max_length=24)
        merge.main([*parts, "--output_dir", str(folder / "whole")])
        merge.main([*parts, "--output_dir", str(folder / "parts"), "--parts", "true"])
        self.train("whole")
        assert self.train("parts", at_point(KILL, 5, "COMPUTING"), fails=True) == -9
        assert self.train("parts", resume="true", num_workers=1) == 0

    def train(self, name: str, before: str = "", *, fails: bool = False, **options: object) -> int:
        given = {"output_dir": self.folder / f"run-{name}", **OPTIONS, **options}
        words = argv(self._model, self.folder / name, Path(str(given.pop("output_dir"))), **given)
        run = self._runs.start(words, 1, before=before)
        (code,) = run.wait()
        assert (code != 0) is fails, run.report()
        return code

    def replay(self, name: str) -> str:
        """Train steps 3 and 4 of a run again, and return what the replay has printed."""
        words = [self.folder / f"run-{name}", "--steps", "3:4"]
        replay = self._runs.start(words, 1, program="fabric_train.replay")
        replay.finish()
        return replay.stdout()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Runs:
    return Runs(tmp_path_factory.mktemp("parts-runs"), tiny_model_dir, forked_runs)


def test_a_killed_run_on_parts_has_the_weights_of_a_run_on_the_full_merge(both: Runs) -> None:
    runs = [both.folder / f"run-{name}" for name in ("whole", "parts")]
    assert metrics(runs[0]) == metrics(runs[1])
    assert len(metrics(runs[0])) == OPTIONS["max_step"]
    last = [run / "checkpoints" / "step-00000006" for run in runs]
    for name in ("model.safetensors", "optimizer/optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    hashes = [read_trainer_json(folder).state.rows_hash for folder in last]
    assert hashes[0] == hashes[1]


def test_trace_and_replay_read_parts_as_the_full_merge(both: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[list[str]] = [[], []]
    for name, texts in zip(("whole", "parts"), found, strict=True):
        for words in (["--step", "5"], ["--document", "va.jsonl:7"]):
            trace([str(both.folder / f"run-{name}"), *words, "--json"])
            texts.append(re.sub(rf"{both.folder}/(run-)?{name}", "HERE", capsys.readouterr().out))
        replayed = both.replay(name)
        assert "16 rows checked, 0 altered" in replayed
        assert "holds: every compared figure is reproduced" in replayed
    assert found[0] == found[1]


def test_an_order_by_index_is_saved_resumed_and_traced(both: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    run = both.folder / "run-keyed"
    few = "import fabric_train.data.data_order; fabric_train.data.data_order.MOST_SHUFFLED = 10"
    assert both.train("parts", few + at_point(KILL, 4, "COMPUTING"), fails=True, output_dir=run) == -9
    assert both.train("parts", few, resume="true", output_dir=run) == 0
    saved = read_trainer_json(run / "checkpoints" / "step-00000006")
    assert isinstance(saved.data, DataOrder)
    assert saved.data.version == KEYED
    train = open_dataset(str(both.folder / "parts")).train
    order = WindowOrder(len(train), 8, 2, 1, 0, saved.data.seed, version=KEYED)
    assert saved.state.rows_hash == order.rows_hash(6)
    trace([str(run), "--step", "5", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {one["row"] for one in found["documents"]} == set(order.rows_of(5).tolist())
    row = found["documents"][0]
    trace([str(run), "--document", f"{Path(row['file']).name}:{row['line']}", "--json"])
    assert 5 in {read["step"] for read in json.loads(capsys.readouterr().out)["read"]}


def test_a_run_on_parts_may_go_on_with_the_full_merge(both: Runs) -> None:
    run = Path(shutil.copytree(both.folder / "run-parts", both.folder / "run-goes-on"))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    table = run / "metrics.csv"
    written = table.read_text()
    hashed = WindowOrder(len(open_dataset(str(both.folder / "whole")).train), 8, 2, 1, 0, seed=0).rows_hash(3)
    table.write_text(written.replace(hashed, "0" * len(hashed)))
    long = "from fabric_train.preflight import resume_check; resume_check._HASHED_AGAIN = 0"
    assert both.train("whole", long, fails=True, resume="true", output_dir=run) == 2
    table.write_text(written)
    assert both.train("whole", long, resume="true", output_dir=run) == 0
    assert metrics(run) == metrics(both.folder / "run-whole")
