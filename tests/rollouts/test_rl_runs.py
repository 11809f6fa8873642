"""Whole runs of --objective rl: the same on any ranks, exact after kills and stops, and they learn."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fabric_train.arguments import TrainArguments, parse
from fabric_train.cli.errors import FAILURE, INPUT_ERROR, STOPPED, InputError
from fabric_train.model.hf_model import load_hf_tokenizer
from fabric_train.preflight.paths import check_paths
from fabric_train.preflight.prepare import prepare
from fabric_train.rollouts.store import read_manifest, read_rollouts, step_folder
from fabric_train.training.metrics import read_metrics
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import option_words
from tests.support.rl_runs import KILL, MAX_STEP, TOLERANCE, VOWELS, Reinforcing
from tests.support.run_comparison import differences, metrics
from tests.support.short_runs import TERMINATE, at_point, saved_steps

pytestmark = pytest.mark.slow

HANGING = """
import os
import time
import judge

num_calls = 0

def vowels(completions, **columns):
    global num_calls
    num_calls += 1
    is_last_rank = os.environ.get("RANK", "0") == "{last_rank}"
    if num_calls == 4 and is_last_rank and os.path.exists("hang"):
        os.rename("hang", "hanging")
        time.sleep(600)
    return judge.vowels(completions)
"""


@pytest.fixture(scope="module")
def reinforcing(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Reinforcing:
    folder = tmp_path_factory.mktemp("reinforcing")
    (folder / "model").symlink_to(tiny_model_dir)
    (folder / "tokens").symlink_to(tiny_tokens_dir)
    rows = [{"prompt": f"{number} and", "answer": str(number)} for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    others = [{"prompt": f"say {number}"} for number in range(6)]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    (folder / "judge.py").write_text(VOWELS)
    reinforcing = Reinforcing(folder, forked_runs)
    reinforcing.train("whole")
    return reinforcing


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_sample_and_learn_as_one(reinforcing: Reinforcing, parallelism: str) -> None:
    run = reinforcing.train(parallelism, num_ranks=2, parallelism=parallelism, micro_batch_size=2, devices=2)
    assert any("a full copy of the model" in line for line in run.lines()) == parallelism.startswith("fsdp")
    for step in range(1, MAX_STEP + 1):
        assert reinforcing.tokens(parallelism, step) == reinforcing.tokens("whole", step)
    for name in ("train_loss", "grad_norm", "train_reward", "train_entropy", "train_completion_tokens"):
        expected = reinforcing.column("whole", name)
        assert reinforcing.column(parallelism, name) == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    assert any(reinforcing.column("whole", "train_loss"))


def test_prompts_that_do_not_divide_among_the_ranks_all_train(reinforcing: Reinforcing) -> None:
    """Three ranks share the four groups of a step."""
    reinforcing.train("uneven", num_ranks=3, parallelism="ddp", devices=3, max_step=2)
    for step in (1, 2):
        assert reinforcing.tokens("uneven", step) == reinforcing.tokens("whole", step)
    for name in ("train_loss", "grad_norm", "train_reward", "train_completions"):
        expected = reinforcing.column("whole", name)[:2]
        assert reinforcing.column("uneven", name) == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_matrices_sample_and_learn_as_one(reinforcing: Reinforcing, num_ranks: int) -> None:
    """Each rank samples prompts of its own, and a killed run of four ranks continues."""
    run = f"tensor-{num_ranks}"
    options: dict[str, Any] = {"devices": num_ranks, "parallelism": "fsdp2", "tensor_parallel_size": 2}
    if num_ranks == 4:
        killed = reinforcing.start(run, num_ranks, before=at_point(KILL, 4, "COMPUTING"), **options)
        killed.wait()
        options |= {"resume": "true"}
    reinforcing.train(run, num_ranks, **options)
    for step in range(1, MAX_STEP + 1):
        assert reinforcing.tokens(run, step) == reinforcing.tokens("whole", step)
        assert read_manifest(step_folder(reinforcing.folder / run, step)).num_ranks == num_ranks
    for name in ("train_loss", "grad_norm", "train_reward", "train_sampler_weight", "train_completion_tokens"):
        expected = reinforcing.column("whole", name)
        assert reinforcing.column(run, name) == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_a_file_in_the_place_of_the_completions_is_refused(
    reinforcing: Reinforcing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reinforcing.folder)
    folder = reinforcing.folder / "obstructed"
    folder.mkdir()
    (folder / "rollouts").write_text("")
    with pytest.raises(InputError, match="rollouts is not a folder"):
        check(reinforcing.words("obstructed"))


@pytest.mark.parametrize(("phase", "index"), [("ROLLOUT", 2), ("COMPUTING", 1), ("OPTIMIZER", 0), ("SAVING", 0)])
def test_a_killed_run_continues_bit_for_bit(reinforcing: Reinforcing, phase: str, index: int) -> None:
    step = 2 if phase == "SAVING" else 4
    run = f"killed-{phase}"
    killed = reinforcing.start(run, before=at_point(KILL, step, phase, index))
    assert killed.wait() == [-9]
    reinforcing.train(run, resume="true")
    assert differences(reinforcing.folder / run, reinforcing.folder / "whole") == []
    for step in range(1, MAX_STEP + 1):
        assert reinforcing.tokens(run, step) == reinforcing.tokens("whole", step)


def test_metrics_have_the_mean_reward_without_noise(reinforcing: Reinforcing) -> None:
    (reinforcing.folder / "tenths.py").write_text(
        "def tenths(completions, prompts, **columns):\n    return [0.1 * (len(text) % 2) for text in completions]\n"
    )
    reinforcing.train("exact", rewards="tenths.py:tenths", max_step=1)
    (reward,) = reinforcing.column("exact", "train_reward")
    assert reward * 160 == pytest.approx(round(reward * 160), abs=1e-9)  # a mean of 16 values of 0 or 0.1


def test_the_sampled_tokens_train_although_their_text_is_encoded_otherwise(
    reinforcing: Reinforcing, tiny_model_dir: Path
) -> None:
    tokenizer = load_hf_tokenizer(tiny_model_dir)
    for step in range(1, MAX_STEP + 1):
        stored = read_rollouts(step_folder(reinforcing.folder / "whole", step)).completions
        encoded = [tokenizer.encode(completion.text, add_special_tokens=False) for completion in stored]
        assert encoded != reinforcing.tokens("whole", step)
    assert_losses_are_of_stored_tokens(reinforcing, "whole", MAX_STEP)


def test_a_sampled_end_counts_in_the_loss_although_it_is_the_token_of_padding(
    reinforcing: Reinforcing, tiny_model_dir: Path
) -> None:
    """The model has a large embedding of EOS, so that some completions end before others."""
    folder = reinforcing.folder / "padding-model"
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = load_hf_tokenizer(tiny_model_dir)
    tokenizer.pad_token = tokenizer.eos_token
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 30
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reinforcing.train("padding", model_name="padding-model", max_step=2)
    num_stopped = 0
    for step in (1, 2):
        for completion in read_rollouts(step_folder(reinforcing.folder / "padding", step)).completions:
            has_stopped = completion.finish_reason == "stop"
            num_stopped += has_stopped
            assert completion.token_ids.tolist().count(tokenizer.eos_token_id) == has_stopped
    assert 0 < num_stopped < 32
    assert_losses_are_of_stored_tokens(reinforcing, "padding", 2)


def assert_losses_are_of_stored_tokens(reinforcing: Reinforcing, run: str, num_steps: int) -> None:
    """Compare the loss of each step with -Σ advantage · log-probability / N over the tokens that are stored.

    The sampler's log-probabilities are those of the trainer, so the weights of the correction are 1.
    """
    for step in range(1, num_steps + 1):
        losses = []
        for completion in read_rollouts(step_folder(reinforcing.folder / run, step)).completions:
            assert len(completion.log_probabilities) == len(completion.token_ids)
            losses.append(-completion.advantage * completion.log_probabilities.astype(np.float64))
        token_losses = np.concatenate(losses)
        scale = np.abs(token_losses).mean()  # positive and negative losses cancel
        loss = reinforcing.column(run, "train_loss")[step - 1]
        assert loss == pytest.approx(token_losses.mean(), rel=0, abs=TOLERANCE * scale)
        assert reinforcing.column(run, "train_completion_tokens")[step - 1] == len(token_losses) / len(losses)


def test_the_note_on_changed_arguments_has_none_that_the_run_lacks(reinforcing: Reinforcing) -> None:
    reinforcing.train("divided", max_step=1)
    resumed = reinforcing.train("divided", resume="true", max_step=2, micro_batch_size=2)
    lines = "".join(resumed.lines())
    assert "micro_batch_size" in lines
    assert "gradient_accumulation_steps" not in lines


def test_stored_completions_are_not_sampled_again(reinforcing: Reinforcing) -> None:
    killed = reinforcing.start("reused", before=at_point(KILL, 4, "COMPUTING"))
    assert killed.wait() == [-9]
    assert saved_steps(reinforcing.folder / "reused") == [2]
    fails = "from fabric_train.rollouts.process_sampler import ProcessSampler\ndel ProcessSampler.sample\n"
    reinforcing.train("reused", resume="true", before=fails)  # steps 3 and 4 are stored
    rows = read_metrics(reinforcing.folder / "reused" / "metrics.csv", MAX_STEP)
    assert [row.sampling_time for row in rows[2:4]] == [0, 0]
    assert differences(reinforcing.folder / "reused", reinforcing.folder / "whole") == []


def test_damaged_completions_are_sampled_again(reinforcing: Reinforcing) -> None:
    killed = reinforcing.start("damaged", before=at_point(KILL, 4, "COMPUTING"))
    assert killed.wait() == [-9]
    (file,) = step_folder(reinforcing.folder / "damaged", 3).glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    resumed = reinforcing.train("damaged", resume="true")
    assert any("step 3 samples its completions again" in line for line in resumed.lines())
    assert differences(reinforcing.folder / "damaged", reinforcing.folder / "whole") == []


def test_sampling_is_no_wait_for_data(reinforcing: Reinforcing) -> None:
    """On one rank, the parts of a step follow one another."""
    for row in read_metrics(reinforcing.folder / "whole" / "metrics.csv", MAX_STEP):
        manifest = read_manifest(step_folder(reinforcing.folder / "whole", row.step))
        assert manifest.update_seconds > 0
        seconds = (manifest.update_seconds, manifest.sampling_seconds, manifest.reward_seconds)
        assert (row.weights_time, row.sampling_time, row.rewards_time) == seconds
        assert row.data_wait is not None
        assert row.step_time is not None
        assert row.data_wait * row.step_time + sum(seconds) <= row.step_time


def test_steps_without_anything_to_learn_give_a_note(reinforcing: Reinforcing) -> None:
    run = reinforcing.train(
        "flat-steps",
        rewards="length",
        reward_settings='{"length": {"max_characters": 999}}',
        max_step=10,
        number_epochs=9,
        prompts_per_step=1,
        group_size=2,
    )
    assert sum("there is nothing to learn" in line for line in run.lines()) == 1


def test_completions_after_others_are_sampled_again(reinforcing: Reinforcing) -> None:
    """A run that resumes before stored completions does not take those of a later step that follow others."""
    reinforcing.train("chained", max_step=4)
    folder = reinforcing.folder / "chained"
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(step_folder(folder, 3))
    policy = read_manifest(step_folder(folder, 4)).policy
    text = "import fabric_train.rollouts.windows as windows\n"  # other completions of step 3
    text += "original = windows.RolloutPlan.completion_seed\n"
    text += "windows.RolloutPlan.completion_seed = lambda plan, step, *rest: original(plan, step + 100, *rest)\n"
    reinforcing.train("chained", resume="true", before=text)
    assert read_manifest(step_folder(folder, 4)).policy != policy
    assert reinforcing.tokens("chained", 4) != reinforcing.tokens("whole", 4)


def test_other_arguments_sample_again(reinforcing: Reinforcing) -> None:
    killed = reinforcing.start("changed", before=at_point(KILL, 4, "COMPUTING"))
    assert killed.wait() == [-9]
    old_tokens = reinforcing.tokens("changed", 4)
    reinforcing.train("changed", resume="true", temperature=0.7, allow_changes="true")
    assert reinforcing.tokens("changed", 4) != old_tokens


def test_failed_rewards_are_counted_in_the_metrics(reinforcing: Reinforcing) -> None:
    failing = "def odd(completions, answer):\n    return [1 if int(text) % 2 else None for text in answer]\n"
    (reinforcing.folder / "failing.py").write_text(failing)
    reinforcing.train("failing", rewards="failing.py:odd", max_step=3, number_epochs=1)
    assert sum(reinforcing.column("failing", "train_failed_rewards")) == 3 / 2  # three steps of four: all prompts


def test_a_changed_file_of_a_reward_is_named(reinforcing: Reinforcing) -> None:
    judge = reinforcing.folder / "changing.py"
    judge.write_text(VOWELS)
    reinforcing.train("judged", rewards="changing.py:vowels", max_step=2)
    judge.write_text(VOWELS.replace("aeiou", "aeiouy"))
    resumed = reinforcing.train("judged", rewards="changing.py:vowels", resume="true")
    note = (
        "note: the file of the reward vowels of changing.py has changed since step-00000002, so its results may differ"
    )
    assert note in resumed.lines()


@pytest.mark.parametrize(
    ("program", "options", "reason"),
    [
        ("fabric_train.programs.evaluate", {"models": "whole", "output_dir": "losses"}, "no validation split"),
        ("fabric_train.trace.__main__", {"step": 3}, "fabric-train rollouts shows those of each step"),
        ("fabric_train.replay", {"steps": "3:4"}, "a run with --prompts cannot be replayed"),
    ],
)
def test_programs_that_read_the_rows_of_a_run_say_that_they_are_sampled(
    reinforcing: Reinforcing, program: str, options: dict[str, Any], reason: str
) -> None:
    words = option_words(options) if "models" in options else ["whole", *option_words(options)]
    refused = reinforcing.runs.start(words, 1, cwd=reinforcing.folder, program=program)
    assert refused.wait() == [INPUT_ERROR]
    *_, line = refused.stderr().splitlines()
    assert line.startswith("error: ")
    assert reason in line


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_while_sampling_saves_the_step_before(reinforcing: Reinforcing, num_ranks: int) -> None:
    run = f"stopped-{num_ranks}"
    options: dict[str, Any] = {"devices": num_ranks, "parallelism": "ddp" if num_ranks == 2 else "single"}
    stopped = reinforcing.start(run, num_ranks, at_point(TERMINATE, 4, "ROLLOUT", 1), **options)
    assert stopped.wait() == [STOPPED] * num_ranks
    assert saved_steps(reinforcing.folder / run) == [2, 3]
    reinforcing.train(run, num_ranks, resume="true", **options)
    assert reinforcing.tokens(run, 4) == reinforcing.tokens("whole", 4)


@pytest.fixture(scope="module")
def whole_on_two_ranks(reinforcing: Reinforcing) -> Path:
    """Return the folder of an uninterrupted run."""
    reinforcing.train("whole-2", 2, devices=2, parallelism="ddp")
    return reinforcing.folder / "whole-2"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_reward_hangs_saves_the_step_before(
    reinforcing: Reinforcing, signal_number: signal.Signals
) -> None:
    run = f"hanging-{signal_number.name}"
    stop_in_reward(reinforcing, run, 1, signal_number, rank=0, parallelism="single", devices=1)
    assert metrics(reinforcing.folder / run) == metrics(reinforcing.folder / "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_while_a_reward_hangs_on_one_rank_stops_both(
    reinforcing: Reinforcing, whole_on_two_ranks: Path, rank: int
) -> None:
    run = f"hanging-on-one-{rank}"
    stop_in_reward(reinforcing, run, 2, signal.SIGUSR1, rank=rank, parallelism="ddp", devices=2)
    assert metrics(reinforcing.folder / run) == metrics(whole_on_two_ranks)


def stop_in_reward(
    reinforcing: Reinforcing, run: str, num_ranks: int, signal_number: int, rank: int, **options: Any
) -> None:
    """Send a signal to a rank while the reward of the last rank hangs in step 4, check the end, and resume the run."""
    (reinforcing.folder / "hanging.py").write_text(HANGING.format(last_rank=num_ranks - 1))
    hang = reinforcing.folder / "hang"
    hang.touch()
    options |= {"rewards": "hanging.py:vowels", "reward_timeout": 60}
    stopped = reinforcing.start(run, num_ranks, **options)
    assert stopped.wait_until((reinforcing.folder / "hanging").exists), stopped.report()
    started = time.monotonic()
    stopped.kill(signal_number, ranks=[rank])
    assert stopped.wait() == [STOPPED] * num_ranks
    assert time.monotonic() - started < 30  # half of the time limit of the reward
    (reinforcing.folder / "hanging").unlink()
    assert saved_steps(reinforcing.folder / run) == [2, 3]
    assert not step_folder(reinforcing.folder / run, 4).exists()
    reinforcing.train(run, num_ranks, resume="true", **options)


def test_a_failure_on_one_rank_is_printed_and_counted(reinforcing: Reinforcing) -> None:
    options: dict[str, Any] = {"rewards": ["judge.py:vowels", "judge.py:vowels_but_one"], "max_step": 2}
    failing = reinforcing.train("failing-rank", 2, devices=2, parallelism="ddp", **options)
    notes = [line for line in failing.lines() if "failed for" in line]
    assert notes == [
        "note: --rewards judge.py:vowels_but_one failed for 1 of 8 completions: it returned NoneType, not a number; a "
        "reward that fails counts as 0, and later failures are only counted"
    ]
    for step in (1, 2):
        assert read_manifest(step_folder(reinforcing.folder / "failing-rank", step)).num_reward_errors == 1


def test_a_failure_on_one_rank_stops_all_ranks_with_one_message(reinforcing: Reinforcing) -> None:
    options: dict[str, Any] = {"rewards": "judge.py:vowels_but_one", "on_reward_error": "stop"}
    stopped = reinforcing.start("failed-rank", 2, devices=2, parallelism="ddp", **options)
    assert stopped.wait() == [FAILURE] * 2
    errors = [line for rank in range(2) for line in stopped.stderr(rank).splitlines() if "error" in line]
    assert errors == [
        "error: --rewards judge.py:vowels_but_one failed for 1 of 8 completions: it returned NoneType, not a number; "
        "correct the reward, or give --on_reward_error zero"
    ]


def test_a_run_learns_what_is_rewarded(reinforcing: Reinforcing) -> None:
    learning = reinforcing.train("learning", max_step=15, lr=2e-2, save_step_interval=15, number_epochs=9)
    rewards = reinforcing.column("learning", "train_reward")
    assert sum(rewards[-5:]) > 1.1 * sum(rewards[:5])
    assert any(f" reward {rewards[-1]:.3f} " in line for line in learning.lines())


def test_shares_decide_how_often_a_step_reads_a_source(reinforcing: Reinforcing) -> None:
    options: dict[str, Any] = {
        "prompts": ["add=prompts.jsonl", "say=other.jsonl"],
        "shares": ["add=0.5", "say=1"],
        "max_step": 3,
        "save_step_interval": 1,
    }
    killed = reinforcing.start("shares", before=at_point(KILL, 3, "COMPUTING"), **options)
    assert killed.wait() == [-9]
    reinforcing.train("shares", resume="true", **options)
    sources = []
    for step in (1, 2, 3):
        stored = read_rollouts(step_folder(reinforcing.folder / "shares", step))
        sources += [completion.source for completion in stored.completions]
    assert sources.count(0) == 6 * 4  # an epoch of three steps takes half of the 12 prompts of the first source
    assert sources.count(1) == 6 * 4
    assert reinforcing.column("shares", "train_reward/say") != reinforcing.column("shares", "train_reward/add")


def test_prompts_without_variance_are_replaced_by_the_same_ones_on_any_ranks(reinforcing: Reinforcing) -> None:
    options: dict[str, Any] = {"rewards": "judge.py:vowels_of_odd_prompts", "max_step": 2}
    reinforcing.train("flat", **options)
    assert max(reinforcing.column("flat", "train_flat_groups")) > 0  # every second prompt
    reinforcing.train("refilled", refill="true", **options)
    assert reinforcing.column("refilled", "train_flat_groups") == [0.0, 0.0]
    manifests = [read_manifest(step_folder(reinforcing.folder / "refilled", step)) for step in (1, 2)]
    assert all(manifest.num_replaced for manifest in manifests)
    reinforcing.train("refilled-2", 2, refill="true", devices=2, parallelism="ddp", **options)
    for step in (1, 2):
        assert reinforcing.tokens("refilled-2", step) == reinforcing.tokens("refilled", step)


def test_rows_beside_the_completions_add_their_mean_cross_entropy(reinforcing: Reinforcing) -> None:
    options: dict[str, Any] = {"train_data_dir": "tokens", "sft_weight": 0.25, "total_batch_size": 4, "max_step": 3}
    reinforcing.train("beside", **options)
    loss = reinforcing.column("beside", "train_loss")[0]
    sft_loss = reinforcing.column("beside", "train_sft_loss")[0]
    loss_alone = reinforcing.column("whole", "train_loss")[0]
    assert sft_loss > 1
    assert loss == pytest.approx(loss_alone + 0.25 * sft_loss, rel=TOLERANCE)

    killed = reinforcing.start("beside-killed", before=at_point(KILL, 3, "COMPUTING"), **options)
    assert killed.wait() == [-9]
    reinforcing.train("beside-killed", resume="true", **options)
    assert differences(reinforcing.folder / "beside-killed", reinforcing.folder / "beside") == []

    reinforcing.train("beside-2", 2, devices=2, parallelism="fsdp2", **options)
    for name in ("train_loss", "grad_norm", "train_reward", "train_sft_loss", "train_sft_tokens"):
        expected = reinforcing.column("beside", name)
        assert reinforcing.column("beside-2", name) == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_an_adapter_is_sampled_as_it_is_trained(reinforcing: Reinforcing) -> None:
    """The sampler's log-probabilities are those of the trainer, so the weights of the correction are 1."""
    reinforcing.train("lora", adapter="lora", lora_rank=4, lr=1e-2)
    assert reinforcing.column("lora", "train_sampler_weight") == pytest.approx([1.0] * MAX_STEP, abs=TOLERANCE)
    reinforcing.train("lora-fsdp2", 2, adapter="lora", lora_rank=4, lr=1e-2, parallelism="fsdp2", devices=2)
    assert reinforcing.tokens("lora-fsdp2", MAX_STEP) == reinforcing.tokens("lora", MAX_STEP)


def test_the_adapter_of_a_resumed_run_is_in_the_weights_that_sample(reinforcing: Reinforcing) -> None:
    """It is merged once, and the first completions after the resume are not those of the base."""
    options: dict[str, Any] = {"adapter": "lora", "lora_rank": 4, "lr": 1e-2, "parallelism": "fsdp2", "devices": 2}
    killed = reinforcing.start("adapted", 2, before=at_point(KILL, 3, "ROLLOUT", 1), **options)
    killed.wait()
    reinforcing.train("adapted", 2, resume="true", **options)
    assert reinforcing.column("adapted", "train_sampler_weight") == pytest.approx([1.0] * MAX_STEP, abs=TOLERANCE)


def test_distillation_learns_on_the_students_own_completions(reinforcing: Reinforcing) -> None:
    reinforcing.train("gkd", objective="distill", teacher="model", rewards=None, lr=1e-6)
    assert reinforcing.column("gkd", "train_divergence") == pytest.approx([0.0] * MAX_STEP, abs=1e-6)
    assert reinforcing.tokens("gkd", 1) == reinforcing.tokens("whole", 1)


def check(words: list[str]) -> None:
    """Check the arguments of a run as the program does before it begins."""
    arguments = parse(TrainArguments, words, {})
    check_paths(arguments)
    prepare(arguments)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompts": None, "train_data_dir": "tokens"}, "--objective rl needs --prompts"),
        ({"rewards": None}, "--objective rl needs --rewards"),
        ({"objective": "distill", "teacher": "model", "rewards": None, "kl_weight": 0.1}, "--kl_weight only applies"),
        ({"objective": "sft"}, "--prompts only applies to --objective rl or distill"),
        ({"train_data_dir": "tokens"}, "needs --sft_weight above 0"),
        ({"sft_weight": 0.5}, "needs --train_data_dir"),
        ({"group_size": 1}, "leaves every advantage at 0"),
        ({"reference": "model"}, "--reference only applies to --kl_weight above 0"),
        ({"objective": "distill", "teacher": "model"}, "--rewards only applies to --objective rl"),
        (
            {"objective": "distill", "teacher": "model", "rewards": None, "refill": "true"},
            "--refill only applies to --objective rl",
        ),
        ({"text_column": "question"}, "--text_column does not apply to --prompts"),
        ({"temperature": 0.001}, "--temperature must be at least 0.01"),
        ({"total_batch_size": 8}, "give --prompts_per_step"),
        ({"context_parallel_size": 2, "parallelism": "fsdp2"}, "does not work with --context_parallel_size"),
        ({"self_check": "true"}, "--self_check does not work with --prompts"),
        ({"precision": "16-mixed"}, "16-mixed"),
        ({"max_new_tokens": 64}, "leaves no room for a prompt"),
        ({"max_length": 512}, "256 positions"),
        ({"sampler": "vllm", "sampler_batch_size": None, "sampler_devices": "6,7,6"}, "names a GPU twice"),
        ({"rewards": "lenght"}, "no built-in reward"),
        ({"rewards": "regex"}, "needs a column pattern"),
        ({"rewards": "missing.py:good"}, "no file missing.py"),
        ({"prompts": "missing.jsonl"}, "missing.jsonl"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_run(
    reinforcing: Reinforcing, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(reinforcing.folder)
    with pytest.raises(InputError, match=reason):
        check(reinforcing.words("refused", **options))
    assert not (reinforcing.folder / "refused").exists()
