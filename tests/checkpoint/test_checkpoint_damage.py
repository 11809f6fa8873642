"""A damaged checkpoint is named and not used: the one before it is."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fabric_train.checkpoint import newest_checkpoint
from fabric_train.checkpoint.files import find_damage, find_wrong_content
from tests.checkpoint.test_checkpoint_saves import SETTINGS, checkpoints, named
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import option_words
from tests.support.run_comparison import differences, metrics

pytestmark = pytest.mark.slow


def cut(checkpoint: Path) -> None:
    path = next(checkpoint.glob("model/shard-*"))
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(checkpoint: Path) -> None:
    sorted((checkpoint / "optimizer").glob("shard-*"))[1].unlink()


def flip_a_byte(checkpoint: Path) -> None:
    path = sorted((checkpoint / "optimizer").glob("shard-*"))[-1]
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)


def flip_a_weight(checkpoint: Path) -> None:
    path = next(checkpoint.glob("model/shard-*"))
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)


def lose_trainer_json(checkpoint: Path) -> None:
    (checkpoint / "trainer.json").unlink()


def break_trainer_json(checkpoint: Path) -> None:
    path = checkpoint / "trainer.json"
    path.write_text(path.read_text().replace("{", "[", 1))


def lose_checksums(checkpoint: Path) -> None:
    (checkpoint / "checksums.json").unlink()


def break_checksums(checkpoint: Path) -> None:
    (checkpoint / "checksums.json").write_text('{"files": {"trainer.json": {"size": ')


DAMAGES: dict[Callable[[Path], None], str] = {
    cut: "instead of",
    lose_a_shard: "optimizer/shard-00002-model-00001-of-00001.safetensors is missing",
    flip_a_byte: "of optimizer/shard-00002-model-00001-of-00001.safetensors have changed since they were written",
    lose_trainer_json: "trainer.json is missing",
    break_trainer_json: "of trainer.json have changed since they were written",
    lose_checksums: "checksums.json is missing",
    break_checksums: "checksums.json is damaged",
}


def argv(tokens: Path, model: Path, run: Path, **options: object) -> list[str]:
    return option_words({"train_data_dir": tokens, "model_name": model, **SETTINGS, "output_dir": run, **options})


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Path:
    """A run of two ranks with checkpoints at steps 2 and 4, to be copied."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = argv(tiny_tokens_dir, tiny_model_dir, folder, max_step=4, state_dict_type="sharded")
    forked_runs.start(words, 2).finish()
    return folder


@pytest.fixture
def damaged(tmp_path: Path, run: Path) -> Path:
    """Return a copy of the run, whose newest checkpoint a test damages."""
    return shutil.copytree(run, tmp_path / "run")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damaged: Path,
    forked_runs: ForkedRuns,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    run: Path,
    damage: Callable[[Path], None],
) -> None:
    newest = damaged / "checkpoints" / "step-00000004"
    num_ranks = 2 if damage is lose_a_shard else 1
    damage(newest)
    last = 4 if num_ranks == 2 else 5
    options = {"max_step": last, "state_dict_type": "sharded", "resume": "true"}
    again = forked_runs.start(argv(tiny_tokens_dir, tiny_model_dir, damaged, **options), num_ranks)
    again.finish()
    lines = [line for line in again.stdout(0).splitlines() if "is damaged" in line]
    assert len(lines) == 1
    assert f"note: {newest} is damaged: " in lines[0]
    assert DAMAGES[damage] in lines[0]
    assert lines[0].endswith("; using step-00000002 instead")
    assert checkpoints(damaged) == named(2, *range(4, last + 1))
    assert find_damage(newest) is None  # it was written again
    assert find_wrong_content(newest) is None
    assert [row["step"] for row in metrics(damaged)] == [str(step) for step in range(1, last + 1)]
    if num_ranks == 2:
        assert again.stdout(1) == ""
        assert differences(damaged, run) == []  # also shards are read bit for bit


@pytest.mark.parametrize("damage", [cut, flip_a_weight], ids=lambda damage: damage.__name__)
def test_every_program_refuses_a_damaged_checkpoint_given_by_name(
    damaged: Path, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path, damage: Callable[[Path], None]
) -> None:
    newest = damaged / "checkpoints" / "step-00000004"
    targets = [damaged.parent / name for name in ("run 2", "export")]
    damage(newest)
    train = argv(tiny_tokens_dir, tiny_model_dir, targets[0], max_step=6, checkpoint=newest)
    programs: dict[str, Sequence[object]] = {
        "fabric_train.__main__": train,
        "fabric_train.programs.convert_to_hf": ["--checkpoint", newest, "--output_dir", targets[1]],
        "fabric_train.programs.generate": ["--model_name", newest, "--prompt", "To be"],
    }
    started = [forked_runs.start(words, 1, program=program) for program, words in programs.items()]
    for program in started:
        assert program.wait() == [2]
        (line,) = program.stderr(0).splitlines()
        assert line.startswith(f"error: {newest} is damaged: ")
        assert line.endswith("; use another checkpoint")
    assert not any(target.exists() for target in targets)


def test_generate_uses_the_checkpoint_before_a_damaged_one_too(damaged: Path, forked_runs: ForkedRuns) -> None:
    newest = damaged / "checkpoints" / "step-00000004"
    flip_a_weight(newest)
    words = ["--model_name", damaged, "--prompt", "To be", "--num_tokens", 2]
    generated = forked_runs.start(words, 1, program="fabric_train.programs.generate")
    generated.finish()
    assert f"note: {newest} is damaged: " in generated.stderr(0)
    assert "; using step-00000002 instead" in generated.stderr(0)


def test_run_is_refused_where_no_checkpoint_is_intact(
    damaged: Path, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    for name in named(2, 4):
        cut(damaged / "checkpoints" / name)
    before = (damaged / "metrics.csv").read_text()
    refused = forked_runs.start(argv(tiny_tokens_dir, tiny_model_dir, damaged, resume="true"), 1)
    assert refused.wait() == [2]
    assert [line.split(" is damaged: ")[0].split("/")[-1] for line in refused.stderr(0).splitlines()] == named(2, 4)
    assert (damaged / "metrics.csv").read_text() == before


def test_damaged_checkpoint_does_not_count_when_old_ones_are_removed(
    damaged: Path, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    cut(damaged / "checkpoints" / "step-00000004")
    options = {"resume": "true", "keep_checkpoints": 1, "max_step": 6, "save_step_interval": 3, "eval_step_interval": 3}
    forked_runs.start(argv(tiny_tokens_dir, tiny_model_dir, damaged, **options), 1).finish()
    assert newest_checkpoint(damaged) == damaged / "checkpoints" / "step-00000006"
    assert checkpoints(damaged) == named(4, 6)  # the damaged one is left as it was found
