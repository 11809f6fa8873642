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
        for name, packing in (("es", "concat"), ("va", "best_fit")):
            documents = write_jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
            tokenize(folder / name, model, f"{name}={documents}", packing=packing, validation_split=0.2, max_length=24)
        parts = [str(folder / "es"), str(folder / "va")]
        merge.main([*parts, "--output_dir", str(folder / "whole")])
        merge.main([*parts, "--output_dir", str(folder / "parts"), "--parts", "true"])
        self.train("whole")
        assert self.train("parts", at_point(KILL, 5, "COMPUTING"), fails=True) == -9
        assert self.train("parts", resume="true", num_workers=1) == 0

    def train(
        self, name: str, before: str = "", *, fails: bool = False, run_dir: Path | None = None, **options: object
    ) -> int:
        """Train on the token dataset ``name``, into ``run-NAME`` by default, and return the exit code."""
        words = argv(self._model, self.folder / name, run_dir or self.folder / f"run-{name}", **{**OPTIONS, **options})
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
    on_whole = both.folder / "run-whole"
    on_parts = both.folder / "run-parts"
    assert metrics(on_parts) == metrics(on_whole)
    assert len(metrics(on_parts)) == OPTIONS["max_step"]
    checkpoint = on_parts / "checkpoints" / "step-00000006"
    expected_checkpoint = on_whole / "checkpoints" / "step-00000006"
    for name in ("model.safetensors", "optimizer/optimizer.safetensors"):
        assert (checkpoint / name).read_bytes() == (expected_checkpoint / name).read_bytes(), name
    expected_hash = read_trainer_json(expected_checkpoint).state.rows_hash
    assert read_trainer_json(checkpoint).state.rows_hash == expected_hash


def test_trace_and_replay_read_parts_as_the_full_merge(both: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    def traced(name: str, *words: str) -> str:
        trace([str(both.folder / f"run-{name}"), *words, "--json"])
        return re.sub(rf"{both.folder}/(run-)?{name}", "HERE", capsys.readouterr().out)

    assert traced("parts", "--step", "5") == traced("whole", "--step", "5")
    assert traced("parts", "--document", "va.jsonl:7") == traced("whole", "--document", "va.jsonl:7")
    for name in ("whole", "parts"):
        replayed = both.replay(name)
        assert "16 rows checked, 0 altered" in replayed
        assert "passed: every compared value is reproduced" in replayed


def test_an_order_by_index_is_saved_resumed_and_traced(both: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    # given a run whose rows are too many to shuffle, so that their order is a function of the index, which is killed
    run = both.folder / "run-keyed"
    few = "import fabric_train.data.data_order; fabric_train.data.data_order.MOST_SHUFFLED = 10"
    assert both.train("parts", few + at_point(KILL, 4, "COMPUTING"), fails=True, run_dir=run) == -9
    assert both.train("parts", few, resume="true", run_dir=run) == 0
    # then it has read the rows of that order
    saved = read_trainer_json(run / "checkpoints" / "step-00000006")
    assert isinstance(saved.data, DataOrder)
    assert saved.data.version == KEYED
    num_rows = len(open_dataset(str(both.folder / "parts")).train)
    order = WindowOrder(num_rows, 8, 2, 1, 0, saved.data.seed, version=KEYED)
    assert saved.state.rows_hash == order.rows_hash(6)
    # and the trace lists them, by step and by document
    trace([str(run), "--step", "5", "--json"])
    step_documents = json.loads(capsys.readouterr().out)["documents"]
    assert {document["row"] for document in step_documents} == set(order.rows_of(5).tolist())
    document = step_documents[0]
    trace([str(run), "--document", f"{Path(document['file']).name}:{document['line']}", "--json"])
    assert 5 in {read["step"] for read in json.loads(capsys.readouterr().out)["read"]}


def test_a_run_on_parts_may_go_on_with_the_full_merge(both: Runs) -> None:
    # given a run on parts without its last checkpoint, too long to hash all its rows again
    run = Path(shutil.copytree(both.folder / "run-parts", both.folder / "run-goes-on"))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    metrics_csv = run / "metrics.csv"
    content = metrics_csv.read_text()
    hash_no_rows_again = "from fabric_train.preflight import resume_check; resume_check._HASHED_AGAIN = 0"

    # it does not go on if metrics.csv has another hash for the last step before the checkpoint of step 4
    num_rows = len(open_dataset(str(both.folder / "whole")).train)
    order = WindowOrder(num_rows, rows_per_window=8, micro_batch_size=2, world_size=1, rank=0, seed=0)
    hash_of_step_3 = order.rows_hash(3)
    assert hash_of_step_3 in content
    metrics_csv.write_text(content.replace(hash_of_step_3, "0" * len(hash_of_step_3)))
    assert both.train("whole", hash_no_rows_again, fails=True, resume="true", run_dir=run) == 2

    # and goes on with the right hash
    metrics_csv.write_text(content)
    assert both.train("whole", hash_no_rows_again, resume="true", run_dir=run) == 0
    assert metrics(run) == metrics(both.folder / "run-whole")
