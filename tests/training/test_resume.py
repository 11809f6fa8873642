"""A run that was killed with SIGKILL and resumed equals the run without kills bit for bit: real ranks, real kills.

``python -m benchmarks faults`` kills hundreds of times; here every moment and every setting is tried once.
"""

import json
import random
import shutil
from pathlib import Path

import datasets
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from fabric_train.arguments import TrainArguments, TrainingArguments, parse
from fabric_train.cli.parser import flatten
from fabric_train.optim.learning_rate import learning_rate
from fabric_train.preflight.resume_check import OWN_VERSIONS, Change, _decides, find_changes
from fabric_train.training.metrics import grouped_name
from tests.support.checkpoint_examples import write_checksums
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.kill_moments import MOMENTS
from tests.support.kills import AT_RANDOM, IN_A_SAVE, Kill, RunTimes, Training, train_uninterrupted, train_with_kills
from tests.support.run_comparison import differences, metrics
from tests.support.short_runs import at_point
from tests.support.wandb_files import read_history

pytestmark = pytest.mark.slow
Options = dict[str, object]

# epochs of 4 windows, the last one of 6 rows; saves at every third step and at each epoch's end
NUM_ROWS = 30
SETTINGS = {
    "accelerator": "cpu",
    "precision": "32-true",
    "micro_batch_size": 4,
    "total_batch_size": 8,
    "number_epochs": 9,
    "lr": 1e-3,
    "warmup_steps": 2,
    "eval_step_interval": 100,
    "eval_iters": 2,
    "save_step_interval": 3,
    "keep_checkpoints": 2,
    "num_workers": 0,
    "eval_at_start": "false",
    "loggers": "csv",
}
ONE_RANK: Options = {"parallelism": "single", "micro_batch_size": 8}
"""For what does not depend on ranks: one micro-batch a step."""


class Killing:
    """Trains without and with kills, and compares."""

    def __init__(self, folder: Path, runs: ForkedRuns, given: Options) -> None:
        self.folder = folder
        self.runs = runs
        self.given = given
        self.random = random.Random(seed := random.SystemRandom().randrange(2**32))
        print(f"kills are drawn from seed {seed}")
        self._whole: dict[str, tuple[Path, RunTimes]] = {}

    def whole(self, options: Options, num_ranks: int) -> tuple[Path, RunTimes]:
        """Return a run that nobody killed, and how long it took; it is trained once."""
        training = Training({**self.given, **options}, num_ranks)
        key = f"{num_ranks} {sorted(options.items())}"
        if key not in self._whole:
            run = self.folder / f"whole-{len(self._whole)}"
            self._whole[key] = run, train_uninterrupted(self.runs, training, run)
        return self._whole[key]

    def __call__(self, name: str, moments: list[str], num_ranks: int, options: Options) -> list[Kill]:
        training = Training({**self.given, **options}, num_ranks)
        killed = self.folder / name
        whole, course = self.whole(options, num_ranks)
        for attempt in range(5):  # the run may end before a moment that is drawn at random
            kills = train_with_kills(self.runs, training, killed, moments, self.random, course)
            for kill in kills:
                print(kill)
            assert differences(killed, whole) == []
            if len(kills) >= len(moments) / 2:
                return kills
            killed.rename(self.folder / f"{name}-{attempt}")
        pytest.fail(f"five runs ended before they could be killed {len(moments)} times")


@pytest.fixture(scope="module")
def killing(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Killing:
    folder = tmp_path_factory.mktemp("killed")
    splits = datasets.load_from_disk(tiny_tokens_dir)
    few = {"train": splits["train"].select(range(NUM_ROWS)), "validation": splits["validation"].select(range(16))}
    datasets.DatasetDict(few).save_to_disk(folder / "tokens")
    given = {**SETTINGS, "model_name": tiny_model_dir, "train_data_dir": folder / "tokens"}
    return Killing(folder, forked_runs, given)


FSDP: Options = {"parallelism": "fsdp", "max_step": 6, "keep_checkpoints": 9}
# most saves are for the lowest validation loss
FSDP2: Options = {"parallelism": "fsdp2", "state_dict_type": "sharded", "max_step": 9}
FSDP2 |= {"eval_step_interval": 2, "save_step_interval": 5}
SINGLE: Options = {**ONE_RANK, "log_step_interval": 2, "max_step": 27}
# a start on one rank takes a fifth of one on two: what happens on rank 0 alone is tried there
KILLS: list[tuple[str, int, list[str], Options]] = [
    ("fsdp", 2, ["optimizer step, half the parameters changed"], FSDP),
    ("fsdp2", 2, [IN_A_SAVE, "validation"], FSDP2),
    ("ddp", 2, ["backward pass"], {"parallelism": "ddp", "num_workers": 1, "max_step": 4, "save_step_interval": 1}),
    (
        "single",
        1,
        [
            "forward pass",
            "between two steps",
            "row of metrics.csv",
            "start, metrics.csv cut to the checkpoint",
            "before a checkpoint gets its name",
            "after a checkpoint got its name",
            "removal of an old checkpoint",
            AT_RANDOM,
        ],
        SINGLE,
    ),
]


@pytest.mark.parametrize(("name", "num_ranks", "moments", "options"), KILLS, ids=[name for name, *_ in KILLS])
def test_run_killed_at_any_moment_resumes_bit_for_bit(
    killing: Killing, name: str, num_ranks: int, moments: list[str], options: Options
) -> None:
    chosen = [moment for moment in moments if moment != AT_RANDOM]
    killing.random.shuffle(chosen)
    at_random = moments[len(chosen) :]  # last: the run may end before
    kills = killing(name, [*chosen, *at_random], num_ranks, options)
    assert [kill.moment for kill in kills][: len(chosen)] == chosen


def test_every_moment_is_tried() -> None:
    assert {moment for _, _, moments, _ in KILLS for moment in moments} == {*MOMENTS, IN_A_SAVE, AT_RANDOM}


@pytest.mark.parametrize("split", ["tensor_parallel_size", "context_parallel_size"])
def test_run_killed_with_split_rows_or_matrices_resumes_bit_for_bit(killing: Killing, split: str) -> None:
    options: Options = {"parallelism": "fsdp2", split: 2, "max_step": 3, "save_step_interval": 1}
    killing(split, ["forward pass"], 2, options)


STOP_IN_A_VALIDATION = """
import os, signal, time
import fabric_train.training.evaluation
from fabric_train.distributed.signals import stop_signals
hash_supervised = fabric_train.training.evaluation.hash_supervised
def stopped(*args):
    if not stop_signals.received:
        os.kill(os.getpid(), signal.SIGTERM)
    while not stop_signals.received:  # a thread reads it
        time.sleep(0.01)
    return hash_supervised(*args)
fabric_train.training.evaluation.hash_supervised = stopped
"""
DIE_BEFORE_A_STEP = """
import os, signal
import fabric_train.training.step
fabric_train.training.step.seed_step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_step_whose_validation_a_signal_ended_is_logged_once(killing: Killing) -> None:
    training = Training({**killing.given, **ONE_RANK, "max_step": 6, "eval_step_interval": 2}, 1)
    whole = killing.folder / "signalled-whole"
    run = killing.folder / "signalled"
    train_uninterrupted(killing.runs, training, whole)
    assert killing.runs.start(training.line(run), 1, before=STOP_IN_A_VALIDATION).wait() == [75]
    assert metrics(run) == metrics(whole)[:1]  # step 2 is saved, and not logged before it is evaluated
    assert killing.runs.start(training.line(run), 1, before=DIE_BEFORE_A_STEP).wait() == [-9]
    assert metrics(run) == metrics(whole)[:2]
    killing.runs.start(training.line(run), 1).finish()
    assert metrics(run) == metrics(whole)


DIE_BEFORE_WANDB_ENDS = """
import os, signal
from fabric_train.training.trackers import WandbLogger
WandbLogger.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)
"""
NUM_LOGGED = 7


def test_tensorboard_and_wandb_hold_every_step_once_after_kills(killing: Killing) -> None:
    """The second kill is in the end of a run: wandb lacks its last steps, and gets them when it is started again."""
    run = killing.folder / "logged"
    options = {**killing.given, **ONE_RANK, "loggers": ["csv", "tensorboard", "wandb"], "max_step": NUM_LOGGED}
    line = Training(options, 1).line(run)
    for before in (at_point("os.kill(os.getpid(), signal.SIGKILL)", 6, "COMPUTING"), DIE_BEFORE_WANDB_ENDS):
        assert killing.runs.start(line, 1, before=before).wait() == [-9]
    assert (run / "checkpoints" / f"step-{NUM_LOGGED:08d}").is_dir()
    again = killing.runs.start(line, 1)
    again.finish()
    assert "nothing left to train" in again.stdout()
    rows = metrics(run)
    (tracked,) = (run / "wandb").glob("offline-run-*")
    history = read_history(tracked)
    assert [row["_step"] for row in history] == [int(row["step"]) for row in rows] == list(range(1, NUM_LOGGED + 1))
    killing.runs.start(line, 1).finish()
    assert list((run / "wandb").glob("offline-run-*")) == [tracked]  # nothing was missing any more
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for column in ("train_loss", "grad_norm", "learning_rate", "num_tokens", "val_loss"):
        name = grouped_name(column)
        expected = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        assert expected
        assert [(row["_step"], row[name]) for row in history if name in row] == expected
        assert [(event.step, event.value) for event in events.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in expected
        ]
    files = [EventFileLoader(str(file)).Load() for file in (run / "tensorboard").iterdir()]
    steps = [
        event.step for events in files for event in events for value in event.summary.value if value.tag == "train/loss"
    ]
    assert sorted(steps) == list(range(1, NUM_LOGGED + 1))


# -------------------------------------------------------------------------------------------- another configuration

OTHER_ORDER = """
import numpy
import fabric_train.data.step_sampler
fabric_train.data.step_sampler._shuffle_rows = lambda num_rows, seed, epoch: numpy.arange(num_rows)
"""


class Resumed:
    """Starts that resume from a run of six steps, each into a folder of its own."""

    def __init__(self, killing: Killing) -> None:
        self.killing = killing
        self.run, _ = killing.whole(FSDP, 2)

    def __call__(self, name: str, num_ranks: int, options: Options, before: str = "") -> ForkedRun:
        given = {**self.killing.given, "max_step": 6, "keep_checkpoints": 9, "checkpoint": self.run, **options}
        line = Training(given, num_ranks).line(self.killing.folder / name, given.get("resume") == "true")
        return self.killing.runs.start(line, num_ranks, before=before)

    def faults(self, name: str, options: Options, before: str = "") -> list[str]:
        """Return why the run may not resume; nothing else is printed, and nothing is written."""
        refused = self(name, 1, options, before)
        assert refused.wait() == [2], refused.report()
        assert refused.stdout() == ""
        assert not (self.killing.folder / name).exists()
        assert all(line.startswith("error: ") for line in refused.stderr().splitlines())
        return [line.removeprefix("error: ") for line in refused.stderr().splitlines()]


@pytest.fixture(scope="module")
def resumed(killing: Killing) -> Resumed:
    return Resumed(killing)


def test_changed_arguments_that_decide_the_losses_are_listed(resumed: Resumed) -> None:
    changed = {"lr": 2e-3, "precision": "bf16-true", "grad_clip": 0, "eval_iters": "null", "eval_step_interval": 3}
    changed |= {"beta2": 0.99, "weight_decay": 0.1}
    faults = resumed.faults("changed", changed)
    checkpoint = resumed.run / "checkpoints" / "step-00000006"
    assert sorted(faults) == sorted(
        f"{name}: {there} -> {here} since {checkpoint}, which changes future losses; give --{name} {there}, or "
        "accept different losses with --allow_changes true (docs/reference/errors.md#resume-refused)"
        for name, there, here in (
            ("precision", "32-true", "bf16-true"),
            ("grad_clip", "1.0", "0.0"),
            ("beta2", "0.95", "0.99"),
            ("weight_decay", "0.01", "0.1"),
            ("lr", "0.001", "0.002"),
            ("eval_iters", "2", "null"),
        )
    )


def test_every_argument_that_decides_the_losses_is_compared() -> None:
    arguments = parse(TrainArguments, ["--train_data_dir", "tokens", "--output_dir", "run", "--eval_iters", "4"])
    found = {name for name in flatten(arguments) if _decides(Change(name, 1, 2), arguments)}
    assert found == {
        *("lr", "min_lr", "lr_decay", "lr_schedule", "warmup_steps", "decay_steps", "decay_share", "decay_form"),
        *("weight_decay", "beta1", "beta2", "grad_clip"),
        *("precision", "float8", "optimizer_states", "stochastic_rounding", "attention"),
        *("seed", "isolate_documents", "eval_iters", "eval_batch_size"),
        *("train_only", "freeze", "lr_of", "rope_scaling", "rope_theta"),
        *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "base_weights"),
        *("objective", "dpo_beta", "length_normalised", "label_smoothing", "sft_weight", "simpo_gamma", "reference"),
        *("dpop_lambda", "kto_desirable_weight", "kto_undesirable_weight"),
        *("teacher_weights", "divergence", "jsd_beta", "distill_temperature", "distill_on"),
        *("group_size", "max_new_tokens", "temperature", "rewards", "reward_weights", "reward_settings"),
        *("on_reward_error", "advantage", "refill", "loss_normalisation", "kl_weight"),
        *("muon_lr", "muon_momentum", "muon_adjust_lr"),
    }
    here = dict.fromkeys(flatten(arguments), 2)
    compared = {change.name for change in find_changes(dict.fromkeys(here, 1), here, ["max_length"])}
    assert compared == found - {"eval_iters", "eval_batch_size"} | {"max_length"}


def test_changes_that_are_allowed_or_decide_nothing_are_printed(resumed: Resumed) -> None:
    options: Options = {"max_step": 8, "lr": 2e-3, "eval_step_interval": 3, "micro_batch_size": 8}
    run = resumed("allowed", 1, {**options, "allow_changes": "true", "parallelism": "single"})
    run.finish()
    deciding, others = (line for line in sorted(run.lines()) if line.startswith("note: changed since"))
    assert others.startswith("note: changed since step-00000006: ")
    for change in (
        "devices: ",
        "eval_step_interval: 100 -> 3",
        "micro_batch_size: 4 -> 8",
        "parallelism: fsdp -> single",
    ):
        assert change in others
    assert deciding.endswith("so future losses differ from an unchanged run's: lr: 0.001 -> 0.002")
    rate = learning_rate(8, 8, TrainingArguments(lr=2e-3, warmup_steps=2))
    assert [row["learning_rate"] for row in metrics(resumed.killing.folder / "allowed")][-1] == str(rate)


def test_damaged_metrics_are_refused_and_lost_rows_are_noted(resumed: Resumed) -> None:
    run = resumed.killing.folder / "rows-lost"
    shutil.copytree(resumed.run, run)
    table = run / "metrics.csv"
    whole = table.read_text()
    options: Options = {**ONE_RANK, "max_step": 8, "checkpoint": "null", "resume": "true"}
    table.write_text(whole.replace(",", ";"))  # as a spreadsheet may save it
    refused = resumed("rows-lost", 1, options)
    assert refused.wait() == [2]
    (line,) = refused.stderr().splitlines()
    assert line.startswith(f"error: {table}: its first line is not the metrics.csv header")
    assert table.read_text() == whole.replace(",", ";")
    table.write_text("".join(whole.splitlines(keepends=True)[:4]))
    resumes = resumed("rows-lost", 1, options)
    resumes.finish()
    assert f"note: {table}: rows are lost: it ends at step 3, but the run resumes after step 6; " in resumes.stdout()
    assert [row["step"] for row in metrics(run)] == ["1", "2", "3", "7", "8"]


def test_checkpoint_of_an_earlier_version_is_noted(resumed: Resumed) -> None:
    checkpoint = resumed.killing.folder / "earlier" / "checkpoints" / "step-00000003"
    shutil.copytree(resumed.run / "checkpoints" / "step-00000003", checkpoint)
    content = json.loads((checkpoint / "trainer.json").read_text())
    for name in OWN_VERSIONS:
        del content["versions"][name]
    (checkpoint / "trainer.json").write_text(json.dumps(content))
    write_checksums(checkpoint)
    given = {"decaying": {}, "constant": {"lr_schedule": "constant", "eval_iters": "null", "allow_changes": "true"}}
    for name, options in given.items():
        run = resumed(f"since-{name}", 1, {**ONE_RANK, **options, "checkpoint": checkpoint, "max_step": 4})
        run.finish()
        noted = [line for line in run.lines() if line.startswith("note: versions have changed since step-00000003, ")]
        assert [line.partition("may differ: ")[2] for line in noted] == (
            ["fabric_train learning rates: 1 -> 2, fabric_train validation rows: 1 -> 2"] if name == "decaying" else []
        )


def test_hash_of_the_rows_reveals_another_order(resumed: Resumed) -> None:
    (fault,) = resumed.faults("reordered", {"max_step": 8}, OTHER_ORDER)
    assert "step-00000006: up to step 6, its run read different rows than this run would (hash " in fault


def test_another_seed_and_another_window_are_named(resumed: Resumed) -> None:
    seed, window = sorted(resumed.faults("seeded", {"seed": 1, "total_batch_size": 4}))
    assert "--seed differs: 0 there, 1 here; resume with the same data, or load only its weights" in seed + window
    assert (
        "the number of rows per optimizer step differs (keep it with --total_batch_size or --prompts_per_step): "
        "8 there, 4 here" in seed + window
    )


@pytest.mark.parametrize("raised", [{"max_step": 6}, {"number_epochs": 2}])
def test_finished_run_continues_when_given_more_steps(resumed: Resumed, raised: Options) -> None:
    (raises,) = raised
    name = f"raised-{raises}"
    first: Options = {"number_epochs": 1, "max_step": "null"} if raises == "number_epochs" else {"max_step": 4}
    first |= ONE_RANK
    resumed(name, 1, {**first, "checkpoint": "null"}).finish()
    before = metrics(resumed.killing.folder / name)
    again = resumed(name, 1, {**first, "checkpoint": "null", "resume": "true"})
    again.finish()
    assert f"step {len(before)} of {len(before)}: nothing left to train" in again.stdout()
    assert metrics(resumed.killing.folder / name) == before
    more = resumed(name, 1, {**first, **raised, "checkpoint": "null", "resume": "true"})
    more.finish()
    rows = metrics(resumed.killing.folder / name)
    assert rows[: len(before)] == before
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > len(before)
    assert {row["learning_rate"] for row in rows[len(before) :]} == {before[-1]["learning_rate"]}
    ended = float(before[-1]["learning_rate"])
    lengths = f"the run now has {len(rows)} steps instead of {len(before)}: to avoid a jump, the learning rate "
    lengths += (
        f"keeps following its cosine schedule of {len(before)} steps and stays at {ended:g} from step {len(before)} on"
    )
    assert f"note: {lengths}; --allow_changes true stretches " in more.stdout()
    assert f"one step after the last of its {len(before)} steps, but stays at {ended:g} from step" in more.stdout()


def test_schedule_is_stretched_only_where_it_is_allowed(resumed: Resumed) -> None:
    def rates(**options: object) -> list[float]:
        given = {"checkpoint": "null", "resume": "true", **ONE_RANK, **options}
        resumed("stretched", 1, given).finish()
        return [float(row["learning_rate"]) for row in metrics(resumed.killing.folder / "stretched")]

    training = TrainingArguments(lr=1e-3, warmup_steps=2)
    last = learning_rate(6, 6, training)
    assert rates(resume="false")[5] == last
    rates(max_step=7)
    assert rates(max_step=8)[5:] == [last] * 3  # the schedule has the length of the first run, not of the second
    assert rates(max_step=10, allow_changes="true")[8:] == [learning_rate(step, 10, training) for step in (9, 10)]
    assert rates(max_step=11)[8:] == [
        *(learning_rate(step, 10, training) for step in (9, 10, 10)),
    ]


def test_a_stable_phase_is_prolonged_before_its_decay(resumed: Resumed) -> None:
    options = {"lr_schedule": "wsd", "decay_steps": 3, "checkpoint": "null", **ONE_RANK}
    resumed("trunk-of-decay", 1, options).finish()
    checkpoint = resumed.killing.folder / "trunk-of-decay" / "checkpoints" / "step-00000003"
    longer = resumed("prolonged", 1, {**options, "checkpoint": checkpoint, "max_step": 9})
    longer.finish()
    training = TrainingArguments(lr=1e-3, warmup_steps=2, lr_schedule="wsd", decay_steps=3)
    found = [float(row["learning_rate"]) for row in metrics(resumed.killing.folder / "prolonged")]
    assert found == [learning_rate(step, 9, training) for step in range(4, 10)]
    assert "wsd, 0.001 up to step 6, then 1-sqrt over 3 steps to 0 one step after the last" in longer.stdout()


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (4, {"parallelism": "fsdp2", "tensor_parallel_size": 2}),
        (1, ONE_RANK),
        (2, {"parallelism": "ddp", "micro_batch_size": 4, "state_dict_type": "sharded"}),
        (4, {"parallelism": "fsdp2", "context_parallel_size": 2}),
    ],
)
def test_full_checkpoint_resumes_on_other_ranks_with_the_same_rows(
    resumed: Resumed, num_ranks: int, options: Options
) -> None:
    name = f"other-{num_ranks}-{options.get('tensor_parallel_size', 1)}-{options.get('context_parallel_size', 1)}"
    run = resumed.killing.folder
    checkpoint = resumed.run / "checkpoints" / "step-00000004"
    resumed(name, num_ranks, {**options, "checkpoint": checkpoint}).finish()
    ours = metrics(run / name)
    theirs = metrics(resumed.run)[4:]
    assert [row["step"] for row in ours] == ["5", "6"]
    for row, same in zip(ours, theirs, strict=True):
        assert row["num_tokens"] == same["num_tokens"]
        for column in ("train_loss", "grad_norm"):
            assert float(row[column]) == pytest.approx(float(same[column]), abs=1e-5)
    (here, there) = (
        json.loads((folder / "checkpoints" / "step-00000006" / "trainer.json").read_text())["rows_hash"]
        for folder in (run / name, resumed.run)
    )
    assert here == there
