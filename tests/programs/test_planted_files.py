"""Links, pipes and forged values in the folders of others' runs: one line, nothing lost elsewhere, and no waiting."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bad_input_folder import MODULES, edit_json
from tests.support.checkpoint_examples import trained_weights, write_checksums, write_full
from tests.support.exports import VERIFY_IN_PROCESS
from tests.support.forked_runs import ForkedRun, ForkedRuns

pytestmark = pytest.mark.slow

SECONDS = 60  # the longest that a refusal may take on a busy machine; most take two
THEIRS = "their file"
Start = Callable[..., ForkedRun]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> Path:
    """A folder with a model, a token dataset, texts and a run with checkpoints at steps 2 and 4; copy it."""
    folder = tmp_path_factory.mktemp("planted") / "place"
    shutil.copytree(tiny_model_dir, folder / "model")
    shutil.copytree(tiny_tokens_dir, folder / "tokens")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "Text number {n}, and on."}}\n' for n in range(40)))
    forked_runs.start(train("--max_step 4").split(), 1, cwd=folder).finish()
    return folder


@pytest.fixture
def place(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the folder, and a file and a folder of somebody else beside it, which must not change."""
    place = Path(shutil.copytree(trained, tmp_path / "place"))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").write_text(THEIRS)
    monkeypatch.chdir(place)
    yield place
    assert os.listdir(tmp_path / "theirs") == ["precious"]
    assert (tmp_path / "theirs" / "precious").read_text() == THEIRS


@pytest.fixture
def start(place: Path, forked_runs: ForkedRuns) -> Start:
    """Return ``start(program, line)``, which runs a command line in ``place`` to its end, in a few seconds."""

    def run(program: str, line: str, **options: Any) -> ForkedRun:
        started = forked_runs.start(line.split(), 1, cwd=place, program=MODULES[program], **options)
        started.wait(SECONDS)
        return started

    return run


def train(more: str, data: str = "--train_data_dir tokens") -> str:
    line = f"{data} --model_name model --output_dir run --accelerator cpu --total_batch_size 2 --precision 32-true "
    return line + "--eval_iters 1 --eval_step_interval 2 --save_step_interval 2 --num_workers 0 " + more


def fault(run: ForkedRun) -> str:
    """Return the one line with the fault for which the run was refused."""
    assert run.codes() == [2], run.report()
    lines = [line for line in run.stderr().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, run.report()
    assert "Traceback" not in run.stderr()
    return lines[0].removeprefix("error: ")


def warning(run: ForkedRun, logger: str = "--loggers ") -> str:
    """Return the one warning about a logger, without which the run went on to its end."""
    assert run.codes() == [0], run.report()
    (line,) = (line for line in run.stdout().splitlines() if f" warning: {logger}" in line)
    return line.split(": ", 2)[2]


# ------------------------------------------------------------------------------------ the exit code of damage


def test_damage_is_code_2_before_the_first_file_and_code_1_after_it(place: Path, start: Start) -> None:
    index = place / "tokens" / "train" / "index" / "documents.npy"
    documents = np.load(index)
    documents["file"][-len(documents) // 2 :] = 999  # the first row, which is looked at before the start, is sound
    np.save(index, documents)
    started = start("train", train("--max_step 40").replace("--output_dir run", "--output_dir new"))
    assert started.codes() == [1], started.report()
    (line,) = (line for line in started.stderr().splitlines() if line.startswith("error"))
    assert line.endswith("the document index has a file that manifest.json does not list; tokenize again")
    assert (place / "new" / "config.yaml").is_file()
    index.write_bytes(index.read_bytes()[:-8])
    assert "documents.npy" in fault(start("train", train("").replace("--output_dir run", "--output_dir newer")))
    assert not (place / "newer").exists()


def test_a_damaged_record_of_a_run_is_refused_before_it_goes_on(place: Path, start: Start) -> None:
    config = (place / "run" / "config.yaml").read_bytes()
    for name, damage in (("samples.jsonl", b"{\n{}\n"), ("metrics.csv", b"\xe9\n")):
        kept = (place / "run" / name).read_bytes() if (place / "run" / name).exists() else b""
        (place / "run" / name).write_bytes(damage)
        assert fault(start("train", train("--max_step 6 --resume true --lr 5e-4"))).startswith(f"run/{name}")
        assert (place / "run" / "config.yaml").read_bytes() == config
        (place / "run" / name).write_bytes(kept)


def test_damaged_times_of_a_run_end_no_training(place: Path, start: Start) -> None:
    times = place / "run" / "times.jsonl"
    lines = times.read_bytes().replace(b'"starting"', b'"other"').splitlines(keepends=True)
    for damaged in (b"".join(lines), lines[0] + b"\xe9\xff\n", b"[" * 9 + b"\n", b'{"event": "start"}\n'):
        times.write_bytes(damaged)
        resumed = start("train", train("--max_step 6 --resume true"))
        assert resumed.codes() == [0], resumed.report()
        shutil.rmtree(place / "run" / "checkpoints" / "step-00000006")


# ------------------------------------------------------------------------------------ no write follows a link

RESUMED = "--max_step 6 --resume true"
LINKS = {
    ".lock": train(RESUMED),
    "config.yaml": train(RESUMED),
    "metrics.csv": train(RESUMED),
    "times.jsonl": train(RESUMED),
    "tensorboard/events.out.tfevents.1.theirs": train(f"{RESUMED} --loggers tensorboard"),
    "wandb_run_id": train(f"{RESUMED} --loggers wandb"),
    "wandb/told_up_to": train(f"{RESUMED} --loggers wandb"),
    "profile/steps-5-6-rank-0.json": train(f"{RESUMED} --profile 5:6"),
    "evaluation.json": train("--eval_only true --checkpoint run"),
    "self_check.json": train("--self_check true"),
    "tokenizer/tokenizer.json": train("--max_step 2 --max_length 16", "--streaming_dataset texts.jsonl"),
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_planted_in_a_run_folder_is_named_and_not_followed(place: Path, start: Start, name: str) -> None:
    if name.startswith("tokenizer"):
        shutil.rmtree(place / "run")
    link = place / "run" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(place.parent / "theirs" / "precious")
    run = start("train", LINKS[name])
    loggers = "--loggers " if "--loggers" in LINKS[name] else "times.jsonl" if name == "times.jsonl" else None
    found = warning(run, loggers) if loggers else fault(run)
    assert found.startswith(f"run/{name} is a link to {place.parent}/theirs/precious, ")


def test_a_link_in_place_of_a_folder_is_named_and_not_followed(place: Path, start: Start) -> None:
    for name, line, told in (("profile", "--profile 5:6", fault), ("tensorboard", "--loggers tensorboard", warning)):
        shutil.rmtree(place / "run" / name, ignore_errors=True)
        (place / "run" / name).symlink_to(place.parent / "theirs")
        assert told(start("train", train(f"{RESUMED} {line}"))).startswith(f"run/{name} is a link to ")
        (place / "run" / name).unlink()


def test_a_page_and_a_token_dataset_are_not_written_through_links(place: Path, start: Start) -> None:
    (place / "page.html").symlink_to(place.parent / "theirs" / "precious")
    assert fault(start("inspect", "tokens --html page.html")).startswith("page.html is a link to ")
    (place / ".out.unfinished").symlink_to(place.parent / "theirs")
    line = "--dataset texts.jsonl --tokenizer_name model --output_dir out --num_proc 1 --max_length 16"
    assert ".out.unfinished is a link to " in fault(start("tokenize", line))


def test_leftovers_that_are_no_folders_are_removed_and_not_followed(place: Path, start: Start) -> None:
    checkpoints = place / "run" / "checkpoints"
    for number, kind in enumerate(("link", "file", "circle"), 1):
        for name in (f".step-00000006.incomplete-host-{number}", f".step-0000000{number}.removed"):
            leftover = checkpoints / name
            if kind == "file":
                leftover.touch()
            else:
                leftover.symlink_to(place.parent / "theirs" if kind == "link" else leftover.name)
    run = start("train", train(RESUMED))
    assert run.codes() == [0], run.report()
    assert sorted(os.listdir(checkpoints)) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_circle_of_links_among_the_checkpoints_is_passed_over(place: Path, start: Start) -> None:
    checkpoints = place / "run" / "checkpoints"
    for name in ("step-00000006", "step-00000009"):  # the first one is in the way of a save
        (checkpoints / name).symlink_to(name)
    for program, line in (
        ("generate", "--model_name run --prompt Hello --num_tokens 2"),
        ("train", train(f"{RESUMED} --keep_checkpoints 1")),
    ):
        run = start(program, line)
        assert run.codes() == [0], run.report()
        assert "step-00000009 is damaged: checksums.json is missing; using step-00000004 instead" in run.report()
    assert (checkpoints / "step-00000006" / "trainer.json").is_file()
    assert "no such folder" in fault(start("convert", "--checkpoint run/checkpoints/step-00000009 --output_dir out"))


# -------------------------------------------------------------------------------- pipes, sockets and folders


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("trainer.json", "pipe"),
        ("checksums.json", "pipe"),
        ("checksums.json", "folder"),
        ("config.json", "socket"),
        ("tokenizer/tokenizer.json", "folder"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_no_file_is_refused_at_once(
    place: Path, start: Start, name: str, kind: str
) -> None:
    shutil.rmtree(place / "run" / "checkpoints" / "step-00000002")
    plant(place / "run" / "checkpoints" / "step-00000004" / name, kind)
    for program, line in (
        ("train", train(RESUMED)),
        ("convert", "--checkpoint run --output_dir out"),
        ("generate", "--model_name run/latest --prompt Hello"),
    ):
        assert f"step-00000004 is damaged: {name} is not a file" in fault(start(program, line))


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_pipe_that_no_checksum_lists_is_refused_at_once(place: Path, start: Start, kind: str) -> None:
    plant(place / "run" / "checkpoints" / "step-00000004" / "tokenizer" / "chat_template.jinja", kind)
    for program, line in (
        ("convert", "--checkpoint run --output_dir out"),
        ("generate", "--model_name run --prompt Hello"),
    ):
        assert "chat_template.jinja is a " in fault(start(program, line))
    plant(place / "model" / "model.safetensors", kind)
    assert "model.safetensors is a " in fault(start("generate", "--model_name model --prompt Hello"))


def plant(path: Path, kind: str) -> None:
    """Put something that is no file in place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        short = Path(os.path.relpath(path))  # the path of a socket has at most 107 bytes
        socket.socket(socket.AF_UNIX).bind(str(short))


# ---------------------------------------------------------------------------------------------- forged values


def forge(checkpoint: Path, change: Callable[[Any], Any], name: str = "trainer.json") -> None:
    """Change a JSON file of a checkpoint as if it had been written like this."""
    edit_json(checkpoint / name, change)
    (checkpoint / "checksums.json").unlink()
    write_checksums(checkpoint)


def test_a_billion_steps_are_not_replayed(place: Path, start: Start) -> None:
    checkpoint = place / "run" / "checkpoints" / "step-00000004"
    forge(checkpoint, lambda content: content.update(step=10**9))
    run = start("train", train(RESUMED))
    assert run.codes() == [0], run.report()
    assert (
        "trainer.json: damaged (step 1000000000, but its run had 4 steps); using step-00000002 instead" in run.stdout()
    )
    for place_of_run in ("run/step-4", "run/checkpoints/step-00000004"):
        forge(checkpoint, lambda content: content.update(step=10**9))
        line = f"--checkpoint {place_of_run} --output_dir out"
        assert "(step 1000000000, but its run had " in fault(start("convert", line))


def test_a_billion_steps_beyond_the_plan_leave_nothing_to_train(place: Path, start: Start) -> None:
    checkpoint = place / "run" / "checkpoints" / "step-00000004"
    more = {"number_epochs": 10**9, "max_step": None}
    forge(checkpoint, lambda content: content["arguments"].update(more) or content.update(step=10**9))
    run = start("train", train(f"{RESUMED} --number_epochs 1"))
    assert run.codes() == [0], run.report()
    assert "step 1000000000 of 6: nothing left to train" in run.stdout()


FORGED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no model name": ("trainer.json", lambda content: content["arguments"].pop("model_name"), "arguments.model_name: "),
    "a stream that is a number": (
        "trainer.json",
        lambda content: content["arguments"].update(streaming_dataset=7),
        "arguments.streaming_dataset: ",
    ),
    "no arguments": ("trainer.json", lambda content: content.update(arguments=[]), "(arguments: "),
    "a negative step": ("trainer.json", lambda content: content.update(step=-1), "(step: "),
    "a base model that is no name": (
        "trainer.json",
        lambda content: content.update(base_model={"name": "x", "repository": "../x"}),
        "(base_model.repository: ",
    ),
    "a tokenizer that is none": (
        "tokenizer/tokenizer.json",
        lambda content: content.update(model={"type": "BPE", "vocab": 7}),
        "tokenizer cannot be loaded: ",
    ),
    "a tokenizer configuration of other types": (
        "tokenizer/tokenizer_config.json",
        lambda content: content.update(eos_token=7),
        "tokenizer cannot be loaded: ",
    ),
    "an end token that is none": (
        "generation_config.json",
        lambda content: content.update(eos_token_id="x"),
        "is not a token id or a list of them",
    ),
    "a billion layers": ("config.json", lambda content: content.update(num_hidden_layers=10**9), "1000000000 layers"),
    "an unbalanced manifest": ("manifest.json", lambda content: content["ledger"]["train"].update(rows=1), "manifest"),
}


@pytest.mark.parametrize("name", FORGED)
def test_an_export_of_forged_values_is_refused_in_one_line(place: Path, start: Start, name: str) -> None:
    shutil.rmtree(place / "run" / "checkpoints" / "step-00000002")
    file, change, reason = FORGED[name]
    forge(place / "run" / "checkpoints" / "step-00000004", change, file)
    assert reason in fault(start("convert", "--checkpoint run --output_dir out"))
    assert not (place / "out").exists()


def test_a_diverged_run_is_exported_with_its_loss(place: Path, start: Start) -> None:
    checkpoint = place / "run" / "checkpoints" / "step-00000004"
    whole = {"nats": 1235.0, "num_tokens": 1}
    forge(checkpoint, lambda content: content.update(evaluation={"whole": whole, "step": 4}, first_evaluation=None))
    run = start("convert", "--checkpoint run/latest --output_dir out", before=VERIFY_IN_PROCESS)
    assert run.codes() == [0], run.report()
    assert "| validation | 1 | 1,235 | inf |" in (place / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("convert", "--checkpoint run"),
        ("tokenize", "--dataset texts.jsonl --tokenizer_name model --num_proc 1 --max_length 16"),
        ("merge", "tokens other"),
    ],
)
def test_the_root_of_the_file_system_is_no_place_for_a_result(
    place: Path, start: Start, program: str, line: str
) -> None:
    shutil.copytree(place / "tokens", place / "other")
    assert fault(start(program, f"{line} --output_dir /")).startswith("/ already exists and is not empty; ")


# ------------------------------------------------------------------------------------------ names of checkpoints


def test_names_of_checkpoints_are_understood_by_every_program(place: Path, start: Start) -> None:
    for step, loss in ((2, 3.0), (4, 3.5)):
        forge(place / "run" / "checkpoints" / f"step-{step:08d}", partial(dict.update, val_loss=loss))
    used = {
        "run": "using the newest complete checkpoint, step-00000004",
        "run/latest": "using the newest complete checkpoint, step-00000004",
        "run/best": "using the checkpoint with the lowest validation loss, step-00000002",
        "run/step-2": "using the checkpoint of that step, step-00000002",
        "run/checkpoints/step-2": "using the checkpoint of that step, step-00000002",
    }
    for name, note in used.items():
        generated = start("generate", f"--model_name {name} --prompt Hello --num_tokens 1")
        assert f"note: {name}: {note}" in generated.stderr(), generated.report()
    evaluated = start("train", train("--eval_only true --checkpoint run/best").replace("dir run", "dir other"))
    assert f"note: run/best: {used['run/best']}" in evaluated.stdout(), evaluated.report()
    exported = start("convert", "--checkpoint run/best run/latest --output_dir out", before=VERIFY_IN_PROCESS)
    assert exported.codes() == [0], exported.report()
    assert sorted(os.listdir(place / "out")) == ["step-00000002", "step-00000004"]
    assert "run/step-3: the run does not have this checkpoint; it has step-00000002, step-00000004" in fault(
        start("convert", "--checkpoint run/step-3 --output_dir new")
    )


def test_a_real_folder_with_such_a_name_wins(place: Path, start: Start) -> None:
    write_full(place / "run" / "best", place / "model", trained_weights(place / "model"), step=1)
    run = start("generate", "--model_name run/best --prompt Hello --num_tokens 1")
    assert run.codes() == [0], run.report()
    assert "note:" not in run.stderr()


def test_the_best_checkpoint_is_named_at_the_end(place: Path, start: Start) -> None:
    shutil.rmtree(place / "run")
    run = start("train", train("--max_step 4"))
    assert run.codes() == [0], run.report()
    (line,) = [line for line in run.stdout().splitlines() if line.startswith("best checkpoint")]
    assert "run/checkpoints/step-0000000" in line
    assert ", validation loss " in line
