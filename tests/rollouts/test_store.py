"""RUN/rollouts/step-…: what is written is read again, and damage or another policy is noticed."""

from pathlib import Path

import numpy as np
import pytest
from lightning import Fabric

from fabric_train.cli.errors import RunError
from fabric_train.rollouts.store import RolloutManifest, RolloutStore, StoredCompletion, list_steps, read_rollouts


def completion(group: int, text: str) -> StoredCompletion:
    return StoredCompletion(
        group=group,
        prompt_id=f"math:{group}",
        source=0,
        text=text,
        prompt_token_ids=np.array([0, 5], dtype=np.int32),
        token_ids=np.array([7, 1], dtype=np.int32),
        log_probabilities=np.array([-0.25, -1.5], dtype=np.float32),
        finish_reason="stop",
        reward=1.5,
        advantage=0.5,
        lacks_variance=False,
        rewards=np.array([1.0, 0.5]),
        reward_error=None,
    )


def manifest(step: int, policy: str = "a") -> RolloutManifest:
    return RolloutManifest(
        step=step,
        policy=policy,
        reward_names=("exact", "length"),
        source_names=("math",),
        sampler="in_process",
        num_ranks=1,
        sampling_seconds=1.0,
        reward_seconds=0.5,
        sha256=(),
    )


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    return RolloutStore(tmp_path, Fabric(accelerator="cpu", devices=1), keep=None)


def test_completions_are_read_as_they_were_written(store: RolloutStore) -> None:
    written = [completion(0, "uno\x1b[31m"), completion(0, "dos"), completion(1, "")]
    store.write(written, manifest(3))
    assert store.keep_if_usable(3, "a")
    rollouts = read_rollouts(store.path(3))
    assert [stored.text for stored in rollouts.completions] == ["uno\x1b[31m", "dos", ""]
    first = rollouts.completions[0]
    np.testing.assert_array_equal(first.token_ids, [7, 1])
    np.testing.assert_array_equal(first.log_probabilities, np.array([-0.25, -1.5], dtype=np.float32))
    np.testing.assert_array_equal(first.rewards, [1.0, 0.5])
    assert rollouts.manifest.reward_names == ("exact", "length")


def test_completions_of_another_policy_are_removed(store: RolloutStore) -> None:
    store.write([completion(0, "uno")], manifest(3))
    assert not store.keep_if_usable(3, "b")
    assert not store.path(3).exists()


def test_a_changed_file_is_refused(store: RolloutStore) -> None:
    store.write([completion(0, "uno")], manifest(3))
    (file,) = store.path(3).glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match="has changed since it was written"):
        read_rollouts(store.path(3))


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, Fabric(accelerator="cpu", devices=1), keep=2)
    for step in (1, 2, 3):
        store.write([completion(0, "uno")], manifest(step))
    assert list_steps(tmp_path) == [2, 3]
    resumed = RolloutStore(tmp_path, Fabric(accelerator="cpu", devices=1), keep=1)
    assert resumed.keep_if_usable(3, "a")
    assert list_steps(tmp_path) == [3]


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    """Their folders have six digits up to step 999,999, and then seven."""
    store = RolloutStore(tmp_path, Fabric(accelerator="cpu", devices=1), keep=1)
    for step in (999_999, 1_000_000):
        store.write([completion(0, "uno")], manifest(step))
    assert list_steps(tmp_path) == [1_000_000]


def test_an_unfinished_folder_is_not_taken_for_a_step(tmp_path: Path) -> None:
    leftover = tmp_path / "rollouts" / ".step-000004.other-1.tmp"
    leftover.mkdir(parents=True)
    store = RolloutStore(tmp_path, Fabric(accelerator="cpu", devices=1), keep=None)
    assert not store.keep_if_usable(4, "a")
    assert not leftover.exists()
