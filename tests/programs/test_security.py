"""Data and models from others run no code and read no other files; secrets are not written; files follow the umask."""

import http.server
import json
import pickle
import shutil
import socketserver
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.bad_input_folder import MODULES, Payload, edit_json
from tests.support.checkpoint_examples import trained_weights, write_full
from tests.support.exports import VERIFY_IN_PROCESS
from tests.support.forked_runs import ForkedRun, ForkedRuns

pytestmark = pytest.mark.slow

SECRETS = {
    "HF_TOKEN": "hf_sekretsekretsekret",
    "WANDB_API_KEY": "5ek2e75ek2e75ek2e75ek2e75ek2e75ek2e75ek2",
    "AWS_SECRET_ACCESS_KEY": "awssekretawssekret",
}
OUTPUTS = ("made", "merged", "run", "export")
UMASK_OF_A_GROUP = 0o027
Start = Callable[..., ForkedRun]


@pytest.fixture
def place(tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path) -> Path:
    """A folder with a model, a token dataset and texts, and a secret outside of them."""
    return fill(tmp_path, tiny_model_dir, tiny_tokens_dir)


def fill(folder: Path, model: Path, tokens: Path) -> Path:
    """Write what ``place`` has."""
    shutil.copytree(model, folder / "model")
    shutil.copytree(tokens, folder / "tokens")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "Text number {n}, and on."}}\n' for n in range(40)))
    (folder / "secret.txt").write_text("sekret of somebody")
    return folder


@pytest.fixture
def start(place: Path, forked_runs: ForkedRuns) -> Start:
    """Return ``start(program, line, **options)``, which runs a command line in ``place`` to its end."""

    def run(program: str, line: str, **options: Any) -> ForkedRun:
        return run_in(place, forked_runs, program, line, **options)

    return run


def run_in(folder: Path, runs: ForkedRuns, program: str, line: str, num_ranks: int = 1, **options: Any) -> ForkedRun:
    """Run a command line in a folder to its end."""
    run = runs.start(line.split(), num_ranks, cwd=folder, program=MODULES[program], **options)
    run.wait()
    return run


def train(more: str, model: str = "model", data: str = "tokens") -> str:
    line = f"--train_data_dir {data} --model_name {model} --output_dir run --accelerator cpu --max_step 1 "
    return line + "--total_batch_size 2 --precision 32-true --eval_iters 1 " + more


def fault(run: ForkedRun) -> str:
    """Return the one line with the fault for which the run was refused."""
    assert run.codes()[0] == 2, run.report()
    lines = [line for line in run.stderr().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, run.report()
    assert "Traceback" not in run.stderr()
    return lines[0].removeprefix("error: ")


# ------------------------------------------------------------------------------------------ no code from others


@pytest.mark.parametrize("form", ["pytorch_model.bin", "sharded", "protocol 0"])
def test_code_in_a_pickle_of_weights_does_not_run(place: Path, start: Start, form: str) -> None:
    (place / "model" / "model.safetensors").unlink()
    pickled = place / "model" / "pytorch_model.bin"
    content = {"model.norm.weight": Payload(place / "ran")}
    if form == "protocol 0":
        pickled.write_bytes(pickle.dumps(content, protocol=0))
    else:
        torch.save(content, pickled)
    if form == "sharded":
        pickled.rename(place / "model" / "shard.bin")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "shard.bin"}}
        (place / "model" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for run in (start("train", train("")), start("generate", "--model_name model --prompt Hello")):
        assert "model: cannot load its weights: " in fault(run)
    assert not (place / "ran").exists()
    assert not (place / "run").exists()


def test_plain_tensors_in_a_pickle_are_read(place: Path, start: Start) -> None:
    weights = load_file(place / "model" / "model.safetensors")
    (place / "model" / "model.safetensors").unlink()
    torch.save(weights, place / "model" / "pytorch_model.bin")
    run = start("generate", "--model_name model --prompt Hello --num_tokens 2")
    assert run.codes() == [0], run.report()


def test_code_in_a_model_folder_does_not_run(place: Path, start: Start) -> None:
    code = f"import os\nos.system('touch {place}/ran')\n"
    (place / "model" / "code.py").write_text(code)
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.A", "code.B"]}
    edit_json(place / "model" / "config.json", lambda content: content.update(model_type="own", auto_map=names))
    edit_json(
        place / "model" / "tokenizer_config.json",
        lambda content: content.update(tokenizer_class="Own", auto_map=names),
    )
    refusal = "--model_name model: the model comes with Python code, which is never run; "
    assert fault(start("train", train(""))).startswith(refusal)
    assert fault(start("generate", "--model_name model --prompt Hello")).startswith(refusal)
    (place / "model" / "tokenizer.json").rename(place / "model" / "vocab.json")
    (place / "model" / "merges.txt").touch()
    start("tokenize", "--dataset texts.jsonl --tokenizer_name model --output_dir out --num_proc 1")
    assert not (place / "ran").exists()


def test_a_chat_template_reaches_no_python(place: Path, start: Start) -> None:
    shell = "{{ cycler.__init__.__globals__.os.system('touch PLACE/ran') }}".replace("PLACE", str(place))
    (place / "model" / "chat_template.jinja").write_text(shell)
    chat = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]}
    (place / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    run = start("tokenize", "--dataset chats.jsonl --tokenizer_name model --output_dir out --num_proc 1")
    assert run.codes() == [2], run.report()
    assert not (place / "ran").exists()


# ------------------------------------------------------------------------------- no name leads out of its folder


@pytest.mark.parametrize("name", ["/PLACE/secret.safetensors", "a/../../secret.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(place: Path, start: Start, name: str) -> None:
    (place / "model" / "model.safetensors").rename(place / "secret.safetensors")  # readable, with the right tensors
    name = name.replace("/PLACE", str(place))
    weights = load_file(place / "secret.safetensors")
    index = place / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}))
    refusal = (
        f"model/{index.name}: it names {name!r}, outside its folder, so it is damaged or forged; download it again"
    )
    assert fault(start("train", train(""))) == refusal
    assert fault(start("generate", "--model_name model --prompt Hello")) == refusal
    index.rename(place / "model" / "pytorch_model.bin.index.json")
    assert "pytorch_model.bin.index.json: it names " in fault(start("train", train("")))


def test_an_index_in_the_hub_cache_that_names_a_file_elsewhere_is_refused(place: Path, start: Start) -> None:
    repository = place / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = Path(shutil.move(place / "model", repository / "snapshots" / ("0" * 40)))
    weights = load_file(snapshot / "model.safetensors")
    shutil.move(snapshot / "model.safetensors", snapshot.parent / "secret.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../secret.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    before = (
        "import huggingface_hub.constants as constants, transformers.utils.hub as hub\n"
        f"constants.HF_HUB_CACHE = hub.TRANSFORMERS_CACHE = {str(place / 'hub')!r}"
    )
    run = start("generate", "--model_name owner/name --prompt Hello", before=before)
    assert "it names '../secret.safetensors', outside its folder" in fault(run)


def forge_splits(tokens: Path) -> None:
    edit_json(tokens / "dataset_dict.json", lambda content: content["splits"].append("../other"))


def forge_files(tokens: Path) -> None:
    edit_json(
        tokens / "train" / "state.json", lambda content: content["_data_files"][0].update(filename="../../x.arrow")
    )


def forge_manifest(tokens: Path) -> None:
    edit_json(
        tokens / "manifest.json", lambda content: content["tokenizer"]["sha256"].update({"../../secret.txt": "0"})
    )


@pytest.mark.parametrize("forge", [forge_splits, forge_files, forge_manifest])
def test_a_token_dataset_that_names_files_elsewhere_is_refused(
    place: Path, start: Start, forge: Callable[[Path], None]
) -> None:
    shutil.copytree(place / "tokens", place / "other")
    shutil.copyfile(next((place / "tokens" / "train").glob("*.arrow")), place / "x.arrow")
    forge(place / "tokens")
    for program, line in (("train", train("")), ("inspect", "tokens"), ("merge", "other tokens --output_dir out")):
        assert "outside its folder, so it is damaged or forged" in fault(start(program, line))
    if forge is not forge_manifest:
        line = "--dataset tokens --tokenizer_name model --output_dir out --num_proc 1"
        assert "outside its folder, so it is damaged or forged" in fault(start("tokenize", line))


def test_a_link_out_of_a_tokenizer_folder_is_not_copied(place: Path, start: Start) -> None:
    (place / "tokens" / "tokenizer" / "notes.txt").symlink_to("../../secret.txt")
    shutil.copytree(place / "tokens", place / "other", symlinks=True)
    refusal = "tokens/tokenizer/notes.txt: a link to ../../secret.txt, outside its folder; replace it with the file"
    assert fault(start("train", train(""))) == refusal
    assert fault(start("merge", "tokens other --output_dir out")) == refusal
    assert not (place / "run").exists()
    assert not (place / "out").exists()


def test_a_link_out_of_a_checkpoint_is_not_exported(place: Path, start: Start) -> None:
    checkpoint = write_full(place / "step-00000001", place / "model", trained_weights(place / "model"), step=1)
    (checkpoint / "tokenizer" / "notes.txt").symlink_to("../../secret.txt")
    assert "notes.txt: a link to ../../secret.txt, outside its folder" in fault(
        start("convert", "--checkpoint step-00000001 --output_dir out")
    )
    assert not (place / "out").exists()


# -------------------------------------------------------------------------------------- secrets and permissions


def files_with(folder: Path, secrets: list[str]) -> list[str]:
    """Return the files below a folder with one of the secrets in their name or content."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if any(s.encode() in file.read_bytes() or s in file.name for s in secrets)]


@dataclass(frozen=True)
class Written:
    """A folder in which each program that writes has run once, with keys in its environment and a umask."""

    folder: Path
    runs: dict[str, ForkedRun]

    def wrong_permissions(self, umask: int) -> dict[str, str]:
        """Return files and folders with other permissions than the umask gives; links have none."""
        made = [self.folder / name for name in OUTPUTS if (self.folder / name).is_dir()]
        paths = [path for folder in made for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
        return {
            str(path): oct(mode) for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~umask
        }


def write(folder: Path, runs: ForkedRuns, lines: dict[str, str], umask: int) -> Written:
    """Run command lines, and the one with sharded checkpoints on two ranks."""
    before = f"import os; os.umask({umask}); {VERIFY_IN_PROCESS}"
    ended = {}
    for program, line in lines.items():
        num_ranks = 2 if "sharded" in line else 1
        run = run_in(folder, runs, program, line, num_ranks, env=SECRETS, before=before, draws=True)
        assert set(run.codes()) == {0}, run.report()
        ended[program] = run
    return Written(folder, ended)


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path, forked_runs: ForkedRuns
) -> Written:
    """What all programs have written with a umask that leaves the group its reading."""
    folder = fill(tmp_path_factory.mktemp("written"), tiny_model_dir, tiny_tokens_dir)
    shutil.copytree(folder / "tokens", folder / "other")
    lines = {
        "tokenize": "--dataset texts.jsonl --tokenizer_name model --num_proc 1 --max_length 16 --output_dir made",
        "merge": "tokens other --output_dir merged",
        "train": train("--state_dict_type sharded --loggers csv tensorboard wandb", data="merged"),
        "convert": "--checkpoint run --output_dir export",
    }
    return write(folder, forked_runs, lines, UMASK_OF_A_GROUP)


def test_no_key_of_the_environment_is_written_or_printed(written: Written) -> None:
    assert (written.folder / "run" / "wandb").is_dir()
    assert not files_with(written.folder, list(SECRETS.values()))
    for ended in written.runs.values():
        printed = [ended.stdout(rank) + ended.stderr(rank) for rank in range(len(ended.pids))]
        assert not any(secret in text for secret in SECRETS.values() for text in printed)


def test_all_files_have_the_permissions_of_the_umask(written: Written) -> None:
    assert all((written.folder / name).is_dir() for name in OUTPUTS)
    assert (written.folder / "run" / "loss_curves.png").is_file()
    assert not written.wrong_permissions(UMASK_OF_A_GROUP)


def test_full_checkpoints_have_the_permissions_of_a_strict_umask(place: Path, forked_runs: ForkedRuns) -> None:
    strict = write(place, forked_runs, {"train": train("--state_dict_type full")}, 0o077)
    assert (place / "run" / "loss_curves.png").is_file()
    assert not strict.wrong_permissions(0o077)


def test_a_secret_in_an_error_is_not_printed(place: Path, start: Start) -> None:
    before = (
        "import fabric_train.inspection.__main__ as program, os\n"
        "address = 'https://me:pazzword@host/a?sig=zignature'\n"
        "def fail(_): raise ValueError(f'401 for {address}: ' + os.environ['HF_TOKEN'])\n"
        "program._examine = fail"
    )
    run = start("inspect", "tokens --debug", before=before, env=SECRETS)
    assert "401 for https://host/a?***: ***" in run.stderr()
    assert not any(secret in run.stderr() for secret in ("pazzword", "zignature", SECRETS["HF_TOKEN"]))


@pytest.fixture
def server(place: Path) -> Iterator[str]:
    """A web server for the folder; yields host and port."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(place))

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{served.server_address[1]}"
        served.shutdown()


def test_the_password_of_a_url_is_in_no_manifest_and_no_message(place: Path, start: Start, server: str) -> None:
    address = f"http://me:pazzword@{server}/texts.jsonl?signature=zignature"
    options = "--tokenizer_name model --num_proc 1 --max_length 16 --output_dir"
    run = start("tokenize", f"--dataset {address} --validation_dataset {address} {options} out")
    assert run.codes() == [0], run.report()
    manifest = json.loads((place / "out" / "manifest.json").read_text())
    shown = f"http://{server}/texts.jsonl?***"
    assert [source["name"] for source in manifest["sources"]] == [shown, shown]
    assert manifest["settings"]["validation_dataset"] == [shown]
    refused = start("tokenize", f"--dataset {address.replace('texts', 'nothing')} {options} other")
    assert f"--dataset http://{server}/nothing.jsonl?***: cannot be downloaded: " in fault(refused)
    assert not files_with(place, ["pazzword", "zignature"])
    for ended in (run, refused):
        assert not any(secret in ended.stdout() + ended.stderr() for secret in ("pazzword", "zignature"))
