"""Pushes to a stand-in for the hub: what arrives there, what goes on after a fault, and who is refused before work."""

import hashlib
import io
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fabric_train.cli.errors import FAILURE, InputError
from fabric_train.export.hub import PushError, PushRequest, _shown_progress, check_push, push
from fabric_train.programs import convert_to_hf
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.exports import verify_in_this_process
from tests.support.stand_in_hub import TOKEN, Fault, StandInHub
from tests.support.stand_in_hub_accounts import account
from tests.support.stand_in_xet import stored_bytes

TO = PushRequest("alice/model", "model")
PLACE = "models/alice/model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like an export: a file in parts, a large file in one, and small ones."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Model\n")
    (folder / "config.json").write_text("{}")
    for number, size in enumerate((200_000, 1_000), 1):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(size))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def oid(folder: Path, name: str) -> str:
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def pushed(hub: StandInHub, revision: str = "main") -> dict[str, bytes]:
    files = hub.repositories[PLACE].files(revision)
    return {path: data for path, data in files.items() if path != ".gitattributes"}


def failure(folder: Path, request: PushRequest = TO) -> str:
    with pytest.raises(PushError) as error:
        push(folder, request, "message")
    assert TOKEN not in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("private", [True, False])
def test_what_is_on_the_hub_is_the_folder_byte_for_byte(hub: StandInHub, folder: Path, private: bool) -> None:
    url = push(folder, PushRequest("alice/model", "model", private=private), "Step 5")
    assert url == f"{hub.address}/alice/model"
    assert pushed(hub) == content(folder)
    assert hub.repositories[PLACE].private == private
    assert hub.repositories[PLACE].messages == ["Step 5"]
    assert len(hub.calls_of(f"PUT /lfs/{oid(folder, 'model-1.safetensors')}/[1-4] 200")) == 4


def test_weights_of_an_earlier_push_are_removed_and_other_files_stay(hub: StandInHub, folder: Path) -> None:
    hub.add(PLACE, {"model.safetensors": b"before", "notes.md": b"mine", "config.json": b"before"})
    push(folder, TO, "message")
    assert pushed(hub) == {"notes.md": b"mine", **content(folder)}


def test_a_branch_is_created_and_main_stays(hub: StandInHub, folder: Path) -> None:
    hub.add(PLACE, {"notes.md": b"mine"})
    url = push(folder, PushRequest("alice/model", "model", revision="step-5"), "message")
    assert url == f"{hub.address}/alice/model/tree/step-5"
    assert pushed(hub, "step-5") == {"notes.md": b"mine", **content(folder)}
    assert pushed(hub) == {"notes.md": b"mine"}


def test_a_pull_request_is_opened_and_continued_by_its_revision(hub: StandInHub, folder: Path) -> None:
    hub.add("models/other/model", {})
    request = PushRequest("other/model", "model", create_pr=True)
    check_push(request)
    assert push(folder, request, "message") == f"{hub.address}/other/model/discussions/1"
    (folder / "config.json").write_text("{ }")
    further = PushRequest("other/model", "model", revision="refs/pr/1")
    check_push(further)
    assert push(folder, further, "message") == f"{hub.address}/other/model/discussions/1"
    repository = hub.repositories["models/other/model"]
    assert repository.files("refs/pr/1") == content(folder)
    assert repository.files() == {}


def test_a_push_that_was_cut_sends_no_file_again(hub: StandInHub, folder: Path, waits: list[float]) -> None:
    first, second = (oid(folder, f"model-{number}.safetensors") for number in (1, 2))
    hub.faults.append(Fault(f"PUT /lfs/{first}/3"))  # in the middle of the parts, each time
    line = failure(folder)
    assert f"{folder} is complete, but pushing it to alice/model failed: no answer from {hub.address}" in line
    assert line.endswith("; run the same command again to push the missing files")
    assert len(waits) == 5
    hub.faults.clear()
    push(folder, TO, "message")
    assert pushed(hub) == content(folder)
    assert len(hub.calls_of(f"PUT /lfs/{second} 200")) == 1
    push(folder, TO, "message")
    assert len(hub.calls_of(f"PUT /lfs/{first}/1 200")) == 2  # once in the push that was cut, once in the next
    assert len(hub.calls_of("POST .*/commit/main 200")) == 1


@pytest.mark.parametrize(
    "fault, waited",
    [
        (Fault("PUT /lfs/.*/2", times=1), 1),
        (Fault("PUT /lfs/.*/2", 500, times=1), 1),
        (Fault("POST .*/objects/batch", 429, times=1, headers={"Retry-After": "7"}), 8),  # and one, for rounding
    ],
    ids=["cut", "500", "429"],
)
def test_a_fault_for_a_moment_is_waited_for(
    hub: StandInHub,
    folder: Path,
    waits: list[float],
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    waited: float,
) -> None:
    hub.faults.append(fault)
    push(folder, TO, "message")
    assert pushed(hub) == content(folder)
    assert waits == [waited]
    assert "[Retry 1/5]" in caplog.text
    assert "Signature=" not in caplog.text


@pytest.mark.parametrize("status", [429, 500])
def test_a_fault_that_stays_is_one_line_and_uploads_are_kept(
    hub: StandInHub, folder: Path, waits: list[float], status: int
) -> None:
    before = content(folder)
    hub.faults.append(Fault("POST .*/commit/", status, content={"error": "too\nmany"}))
    assert f"the hub answered {status} (too many); run the same command" in failure(folder)
    assert content(folder) == before
    uploads = hub.calls_of("PUT ")
    hub.faults.clear()
    push(folder, TO, "message")
    assert pushed(hub) == before
    assert hub.calls_of("PUT ") == uploads
    assert waits == []


def test_with_hf_xet_no_chunk_is_uploaded_again(
    hub: StandInHub, folder: Path, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.xet_storage = tmp_path / "storage"
    hub.faults.append(Fault("POST .*/commit/", 500))
    assert "failed: the hub answered 500 (" in failure(folder)
    assert len(waits) == 5
    uploaded = stored_bytes(hub.xet_storage)
    assert uploaded > 200_000
    hub.faults.clear()
    push(folder, TO, "message")
    assert pushed(hub) == content(folder)
    assert stored_bytes(hub.xet_storage) == uploaded
    (folder / "config.json").write_text("{ }")
    request = PushRequest("alice/model", "model", create_pr=True)
    assert push(folder, request, "message") == f"{hub.address}/alice/model/discussions/1"
    assert pushed(hub, "refs/pr/1")["config.json"] == b"{ }"
    assert stored_bytes(hub.xet_storage) == uploaded


def test_a_name_taken_by_a_hidden_repository_is_reported(hub: StandInHub, folder: Path) -> None:
    hub.add(PLACE, {})
    hub.faults.append(Fault("(GET|POST) /api/models/", 404, headers={"X-Error-Code": "RepoNotFound"}))
    assert "the name is taken by a repository that this token cannot read or write" in failure(folder)


# ------------------------------------------------------------------------------------------- checks before


def refusal(request: PushRequest = TO) -> str:
    with pytest.raises(InputError) as error:
        check_push(request)
    (line,) = error.value.faults
    assert TOKEN not in line
    return line


NO_RIGHTS = {
    "a token that reads": (account("alice", "read"), "'token-of-alice' of alice can only read; create one"),
    "another's name": (account("bob", orgs={"team": "write"}), "account or an organization: bob, team"),
    "a reader of the organization": (
        account("bob", orgs={"alice": "read"}),
        "bob only has read access to the organization",
    ),
    "a scope for another place": (
        account("alice", "fineGrained", scopes={"team": ["repo.write"]}),
        "has no write access to the repositories of alice; add it (repo.write)",
    ),
}


@pytest.mark.parametrize("case", NO_RIGHTS)
def test_a_token_without_the_right_to_create_is_refused(hub: StandInHub, case: str) -> None:
    who, reason = NO_RIGHTS[case]
    hub.accounts[TOKEN] = who
    assert reason in refusal()
    assert hub.calls_of("POST|PUT") == []


def test_a_token_without_the_right_to_write_is_refused(hub: StandInHub) -> None:
    hub.add("models/other/model", {})
    line = refusal(PushRequest("other/model", "model"))
    assert "it exists, but the token 'token-of-alice' of alice cannot write to it" in line
    assert line.endswith("or propose a change with --create_pr true")
    scopes = {"other/model": ["repo.content.write"]}
    hub.accounts[TOKEN] = account("alice", "fineGrained", orgs={"other": "write"}, scopes=scopes)
    check_push(PushRequest("other/model", "model"))


def test_an_unknown_token_and_no_token_are_refused(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.accounts.clear()
    assert "the hub does not accept the token" in refusal()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "needs a Hugging Face token with write access; run `hf auth login`" in refusal()


def test_a_hub_that_is_not_reached_is_reported_before_work(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("GET /api/whoami-v2", 500))
    assert refusal().endswith("the hub answered 500 (Internal Server Error); try again later")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert "no answer from http://127.0.0.1:9 (" in refusal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = refusal()
    assert (
        "HF_HUB_OFFLINE is set, so nothing is sent to the hub; without internet access, leave out --push_to_hub" in line
    )


def test_a_repository_that_exists_is_described(hub: StandInHub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add("datasets/alice/model", {})
    check_push(TO)
    assert "note: alice/model is a dataset on the hub; the model gets a separate repository" in capfd.readouterr().err
    hub.add(PLACE, {"config.json": b"{}"})
    check_push(TO)
    notes = capfd.readouterr().err.splitlines()
    assert notes[0] == "note: alice/model already exists and is public; --private true only applies to new repositories"
    assert notes[1].startswith("note: alice/model has 1 files; ")
    gone = PushRequest("alice/model", "model", revision="refs/pr/9")
    assert refusal(gone).endswith("--revision refs/pr/9: there is no such pull request")


# ------------------------------------------------------------------------------------------------ convert_to_hf.py


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000001"
    return write_full(folder, tiny_model_dir, trained_weights(tiny_model_dir), step=1)


def convert(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    """Run the program and return its exit code."""
    monkeypatch.setattr("sys.argv", ["convert_to_hf.py", *map(str, argv)])
    with verify_in_this_process():
        try:
            convert_to_hf.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_the_same_command_pushes_an_export_whose_push_was_cut(
    tmp_path: Path,
    checkpoint: Path,
    hub: StandInHub,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "out"
    argv = ["--checkpoint", checkpoint, "--output_dir", target, "--push_to_hub", "alice/model"]
    hub.faults.append(Fault("PUT "))
    assert convert(monkeypatch, *argv) == FAILURE
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "is complete, but pushing it to alice/model failed: no answer" in line
    assert len(waits) == 5
    hub.faults.clear()
    weights = (target / "model.safetensors").stat().st_mtime_ns
    assert convert(monkeypatch, *argv) == 0
    printed = capfd.readouterr().out
    assert f"{target} is already a verified export of step 1; only pushing it" in printed
    assert f"pushed to {hub.address}/alice/model" in printed
    assert (target / "model.safetensors").stat().st_mtime_ns == weights
    assert pushed(hub) == content(target)
    assert hub.repositories[PLACE].messages == ["Step 1, exported by Fabric Train"]


def test_an_export_made_without_internet_gets_the_name_on_the_hub(
    tmp_path: Path, checkpoint: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "local-name"
    argv = ["--checkpoint", checkpoint, "--output_dir", target]
    assert convert(monkeypatch, *argv) == 0
    assert '"local-name"' in (target / "README.md").read_text()
    argv += ["--push_to_hub", "alice/model", "--license", "mit"]
    assert convert(monkeypatch, *argv) == 0
    card = pushed(hub)["README.md"].decode()
    assert 'from_pretrained("alice/model"' in card
    assert "license: mit" in card
    assert "local-name" not in card
    (target / "README.md").write_text(f"{card}\nMy own words.\n")
    assert convert(monkeypatch, *argv, "--language", "ca") == 0
    assert pushed(hub)["README.md"].decode() == f"{card}\nMy own words.\n"


def test_a_folder_that_is_not_this_export_is_not_pushed(
    tmp_path: Path, checkpoint: Path, tiny_model_dir: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    assert convert(monkeypatch, "--checkpoint", checkpoint, "--output_dir", target, "--dtype", "float32") == 0
    other = write_full(tmp_path / "step-00000002", tiny_model_dir, trained_weights(tiny_model_dir), step=2)

    def refused(*argv: object) -> str:
        with pytest.raises(InputError) as error:
            convert(monkeypatch, "--output_dir", target, "--push_to_hub", "alice/model", *argv)
        return "; ".join(error.value.faults)

    assert f"{target} already exists and is not empty" in refused("--checkpoint", other, "--dtype", "float32")
    assert f"{target} already exists and is not empty" in refused("--checkpoint", checkpoint)  # in bfloat16
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert str(weights) in refused("--checkpoint", checkpoint, "--dtype", "float32")
    assert hub.calls == []


def test_several_checkpoints_are_pushed_to_branches_of_their_names(
    tmp_path: Path, checkpoint: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for name in ("step-00000001", "step-00000002"):
        shutil.copytree(checkpoint, run / "checkpoints" / name)
    argv = ["--checkpoint", run / "all", "--output_dir", tmp_path / "out", "--push_to_hub", "alice/model"]
    assert convert(monkeypatch, *argv) == 0
    for name in ("step-00000001", "step-00000002"):
        assert pushed(hub, name) == content(tmp_path / "out" / name)
    assert pushed(hub) == {}


def test_a_card_that_the_hub_refuses_is_reported_in_one_line(
    tmp_path: Path,
    checkpoint: Path,
    hub: StandInHub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    message: dict[str, Any] = {"errors": [{"message": '"license" must be one of [apache-2.0, ...]'}]}
    hub.faults.append(Fault("POST /api/validate-yaml", 400, content=message))
    argv = ["--checkpoint", checkpoint, "--output_dir", tmp_path / "out", "--push_to_hub", "alice/model"]
    assert convert(monkeypatch, *argv, "--license", "my-license") == FAILURE
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "is complete, but pushing it to alice/model failed: Invalid metadata in README.md. " in line
    assert '"license" must be one of' in line


@pytest.mark.parametrize(("is_terminal", "level"), [(True, logging.NOTSET), (False, logging.INFO)])
def test_an_upload_shows_lines_where_no_terminal_shows_bars(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, level: int
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    uploads = logging.getLogger("huggingface_hub._upload_pipeline")
    with _shown_progress():
        assert uploads.level == level
    assert uploads.level == logging.NOTSET
