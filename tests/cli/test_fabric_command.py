"""``fabric run fabric_train`` says what a rank has said, ends with its exit code, and shows our help.

The programs are found from any folder, and the commands that they print are for the folder they were started in.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fabric_train.all_arguments import ALL_ARGUMENTS
from fabric_train.cli import fabric_command
from fabric_train.cli.commands import PROGRAMS, command_from_here, project_first
from fabric_train.cli.errors import InputError
from fabric_train.cli.help import search_help
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.launched import launcher, living_children
from tests.support.ports import free_port
from tests.support.programs import ROOT

FAULT = (
    "error: --train_data_dir nowhere: no such folder; write a token dataset with fabric-train tokenize --output_dir "
    "nowhere"
)
BAD_NUMBER = "error: --lr: expected a number above 0, got 'x'"
ARGUMENTS = ["--train_data_dir", "nowhere", "--model_name", "m", "--output_dir", "out", "--accelerator", "cpu"]

pytestmark = pytest.mark.slow


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command line in a folder, as a user does."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def start_launcher(runs: ForkedRuns, folder: Path, *words: str) -> ForkedRun:
    """Start ``fabric run`` on two ranks; its process is a fork that need not import torch, the ranks are fresh ones."""
    _, *command, script = launcher("fabric run", free_port())
    words = (*command, Path(script).name, *(words or ARGUMENTS))
    return runs.start(words, 1, cwd=folder, program="fabric_train.cli.fabric_command")


def test_bad_arguments_are_one_line_and_exit_code_2(tmp_path: Path, forked_runs: ForkedRuns) -> None:
    (tmp_path / "arguments.py").write_text("raise RuntimeError('the file of a user')")
    ended = start_launcher(forked_runs, tmp_path, *ARGUMENTS, "--lr", "x")
    assert (ended.wait(), ended.stdout(), ended.stderr()) == ([2], "", BAD_NUMBER + "\n")
    assert [path.name for path in tmp_path.iterdir()] == ["arguments.py"]


WITHOUT_TORCH = """
import json, os, sys
sys.modules["torch"] = None
from fabric_train.__main__ import check_before_launch
from fabric_train.cli.errors import InputError
for words in json.loads(sys.argv[1]):
    try:
        check_before_launch(words, os.environ)
        print("nothing")
    except InputError as error:
        print(*error.faults, sep="; ")
"""


def test_wrong_paths_and_runs_are_found_without_torch(
    tmp_path: Path, tiny_tokens_dir: Path, tiny_model_dir: Path
) -> None:
    """To import it takes seconds, and minutes on a loaded machine."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("step\n")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("{}")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "IA3", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    given: dict[str, object] = {
        "train_data_dir": tiny_tokens_dir,
        "model_name": tiny_model_dir,
        "output_dir": "out",
    }
    faults = {
        ("lr", "x"): "--lr: expected a number above 0, got 'x'",
        (
            "train_data_dir",
            "empty",
        ): "--train_data_dir empty: the folder has no dataset_dict.json; write a token dataset with",
        (
            "output_dir",
            "run",
        ): "--output_dir run already has a run, which has not saved a checkpoint; give --resume true",
        ("output_dir", "file"): "--output_dir file: file is a file; give another folder",
        ("model_name", "./nowhere"): "--model_name ./nowhere: no such folder",
        ("model_name", "empty"): "--model_name empty: the folder has no config.json; give a Hugging Face model",
        ("checkpoint", "nowhere"): "nowhere: no such folder; checkpoints are",
        ("branch", "nowhere@3"): "--branch nowhere@3: nowhere: no such folder; give the folder of a run",
        ("phases", "nowhere.yaml"): "--phases",
        ("streaming_dataset", "nowhere.txt"): "--streaming_dataset nowhere.txt: no such file or folder",
        ("sample_prompts", "nowhere.txt"): "nowhere.txt: No such file or directory; give a .txt file",
        ("sample_prompts", "bad.jsonl"): "bad.jsonl, line 1: give either",
        ("init_adapter", "nowhere"): "nowhere/adapter_config.json",
        ("init_adapter", "adapter"): "adapter/adapter_config.json: this is a IA3 adapter; give a LORA adapter",
        ("seed", 1): "nothing",
        ("objective", "dpo"): "nothing",
        ("optimizer", "adamw"): "nothing",
    }
    lines = []
    for name, value in faults:
        arguments = given | {name: value}
        if name == "streaming_dataset":
            del arguments["train_data_dir"]
        if name == "phases":
            arguments["max_step"] = 4
        lines.append([word for key, one in arguments.items() for word in (f"--{key}", str(one))])
    ended = run(tmp_path, sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines))
    assert ended.stderr == ""
    for line, expected in zip(ended.stdout.splitlines(), faults.values(), strict=True):
        assert line.startswith(expected)


def test_the_options_of_fabric_run_may_stand_after_the_script() -> None:
    words = ["run", "--devices=2", "fabric_train", "--lr", "1", "--num-nodes", "3", "--resume"]
    options, script_words = fabric_command._parse_run_words(words)
    assert (options, script_words) == ({"devices": "2", "num_nodes": "3"}, ["--lr", "1", "--resume"])


def test_a_plan_for_other_machines_waits_for_none(tmp_path: Path, tiny_tokens_dir: Path, tiny_model_dir: Path) -> None:
    arguments = ["--train_data_dir", str(tiny_tokens_dir), "--model_name", str(tiny_model_dir), "--output_dir", "out"]
    plan = ["--plan", "true", "--device_memory", "24GB"]
    command = [sys.executable, "-m", "fabric_train.cli.fabric_command"]
    launch = ["run", "--devices", "8", "--num-nodes", "2", "--strategy", "ddp", str(ROOT / "fabric_train")]
    planned = run(tmp_path, *command, *launch, *arguments, *plan)
    assert planned.returncode == 0, planned.stderr
    assert "16 × ddp on 2 machines" in planned.stdout


@pytest.mark.parametrize(
    ("words", "devices"),
    # fabric run starts one process unless the user says otherwise, on any number of GPUs
    [([], "1"), (["--devices", "4"], "4")],
)
def test_a_plan_has_the_devices_of_the_run(
    words: list[str],
    devices: str,
    tmp_path: Path,
    tiny_tokens_dir: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(_program: str, started_words: list[str]) -> None:
        executed.extend(started_words)
        raise SystemExit(0)

    executed: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", end)
    given = ["--train_data_dir", str(tiny_tokens_dir), "--model_name", str(tiny_model_dir), "--output_dir", "out"]
    with pytest.raises(SystemExit):
        fabric_command._run(["run", str(ROOT / "fabric_train"), *given, "--plan", "true", *words], 1)
    assert [word for word in executed if word.startswith("--devices")] == [f"--devices={devices}"]
    assert "--num_nodes=1" in executed


PRINTS_PORT = "import torch.distributed.run as r; r.main = lambda w: print(next(x for x in w if 'port' in x))"


@pytest.mark.parametrize("port", [None, 29411])
def test_a_run_on_one_machine_takes_a_free_port_unless_one_is_given(
    port: int | None, tmp_path: Path, forked_runs: ForkedRuns, tiny_tokens_dir: Path, tiny_model_dir: Path
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        options = [] if port is None else ["--main-port", str(port)]
        given = ["--train_data_dir", tiny_tokens_dir, "--model_name", tiny_model_dir, "--output_dir", "out"]
        words = ["run", "--accelerator", "cpu", *options, "fabric_train", *given]
        program = "fabric_train.cli.fabric_command"
        ended = forked_runs.start(words, 1, cwd=tmp_path, program=program, before=PRINTS_PORT)
        assert ended.wait() == [0], ended.report()
    taken = int(ended.stdout().strip().removeprefix("--master_port="))
    assert taken == port if port else taken not in (0, 29400)


@pytest.mark.launchers
def test_bad_arguments_are_torchruns_first_and_last_line(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    options = ["--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "fabric_train"]
    ended = run(tmp_path, torchrun, *options, *ARGUMENTS)
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip(" =")]
    assert ended.returncode == 1
    assert lines[0] == FAULT
    assert lines[-1].endswith(FAULT)


def test_a_tpu_is_refused_in_one_line(tmp_path: Path) -> None:
    command = launcher("fabric run", free_port())
    ended = run(tmp_path, *command[:-1], "--accelerator", "tpu", command[-1], "--lr", "1")
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: fabric run --accelerator tpu: a TPU is used by a single process; start python -m fabric_train --tpu "
        "true\n"
    )


def test_help_is_that_of_the_program(tmp_path: Path) -> None:
    ended = run(tmp_path, *launcher("fabric run", free_port()), "--lr", "1", "--help")
    assert ended.returncode == 0
    assert "--train_data_dir" in ended.stdout
    assert "--main-address" not in ended.stdout


@pytest.mark.launchers
def test_other_scripts_and_commands_are_lightnings(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('script', sys.argv[1:]); sys.exit(3)")
    fabric = str(Path(sys.executable).with_name("fabric"))
    assert "--main-address" in run(tmp_path, fabric, "run", "--help").stdout
    ended = run(tmp_path, fabric, "run", "--accelerator=cpu", "script.py", "--one")
    assert "script ['--one']" in ended.stdout
    assert ended.returncode == 1
    assert "ChildFailedError" in ended.stderr


@pytest.mark.launchers
def test_a_port_in_use_is_one_line_after_the_faults_of_arguments(
    tmp_path: Path, tiny_tokens_dir: Path, tiny_model_dir: Path
) -> None:
    right = ["--train_data_dir", str(tiny_tokens_dir), "--model_name", str(tiny_model_dir), "--output_dir", "out"]
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        command = launcher("fabric run", busy.getsockname()[1])
        wrong = run(tmp_path, *command, *ARGUMENTS)
        ended = run(tmp_path, *command, *right)
    assert (wrong.returncode, wrong.stderr) == (2, f"{FAULT}\n")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("give a free port with --main-port")


def test_a_rank_killed_while_it_starts_is_named(
    tmp_path: Path, forked_runs: ForkedRuns, tiny_tokens_dir: Path, tiny_model_dir: Path
) -> None:
    right = ["--train_data_dir", str(tiny_tokens_dir), "--model_name", str(tiny_model_dir), "--output_dir", "out"]
    started = start_launcher(forked_runs, tmp_path, *right)
    assert started.wait_until(lambda: len(living_children(started.pids[0])) == 2), started.report()
    os.kill(living_children(started.pids[0])[1].pid, signal.SIGKILL)
    assert started.wait() == [1], started.report()
    assert "error: rank 1 was killed by SIGKILL" in started.stderr()
    assert "Traceback" not in started.report()


# ------------------------------------------------------------------------------------------ from the user's own folder


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A folder with files with the names of the project's modules."""
    folder = tmp_path / "a user's folder"
    folder.mkdir()
    for name in ("arguments", "evaluate", "tokenize_dataset"):
        (folder / f"{name}.py").write_text("raise RuntimeError('the file of a user')")
    return folder


def test_a_run_starts_in_a_folder_with_files_of_the_same_names(own_folder: Path) -> None:
    # tests/programs/test_slurm_scripts.py has a run in such a folder that imports everything
    ended = run(own_folder, sys.executable, "-m", "fabric_train", *ARGUMENTS, "--lr", "x")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", BAD_NUMBER + "\n")


def test_a_clones_folder_is_started_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "second"
    clone.mkdir()
    shutil.copytree(ROOT / "fabric_train", clone / "fabric_train")
    with (clone / "fabric_train" / "cli" / "parser.py").open("a") as module:
        module.write("print('second', __file__)\n")
    monkeypatch.chdir(clone)
    assert fabric_command._resolve_program("fabric_train") == Path("fabric_train")
    ended = run(clone, sys.executable, "fabric_train", *ARGUMENTS, "--lr", "x")  # what fabric run starts
    assert (ended.returncode, ended.stderr) == (2, BAD_NUMBER + "\n")
    assert f"second {clone / 'fabric_train' / 'cli' / 'parser.py'}\n" in ended.stdout


@pytest.mark.parametrize(
    "words, script_index",
    [
        ("run fabric_train --lr 1", 1),
        ("run --devices 2 --accelerator=cpu fabric_train", 4),
        ("run other.py fabric_train", 1),
        ("run --devices fabric_train", None),
        ("fabric_train", None),
    ],
)
def test_the_script_is_the_first_word_that_is_no_option_of_fabric_run(words: str, script_index: int | None) -> None:
    assert fabric_command._find_script(words.split()) == script_index


def test_another_folder_named_fabric_train_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fabric_train").mkdir()
    assert fabric_command._resolve_program("fabric_train") == ROOT / "fabric_train"
    (tmp_path / "fabric_train" / "__main__.py").touch()
    assert fabric_command._resolve_program("fabric_train") is None
    assert fabric_command._resolve_program(str(ROOT / "fabric_train")) == ROOT / "fabric_train"


@pytest.mark.parametrize("name", ["convert", "merge", "train"])
def test_fabric_train_runs_a_program_from_any_folder(name: str, own_folder: Path) -> None:
    program = "from fabric_train.cli.fabric_command import fabric_train; fabric_train()"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = filter(None, sys.path); {program}", name, "--help"]
    env = {**os.environ, **project_first()}
    ended = subprocess.run(command, cwd=own_folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: fabric-train {name} ")


def test_every_name_of_fabric_train_is_a_program() -> None:
    assert [name for name, module in PROGRAMS.items() if find_spec(module) is None] == []


def test_fabric_train_without_a_program_says_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fabric-train", "fly"])
    with pytest.raises(SystemExit) as ended:
        fabric_command.fabric_train()
    assert ended.value.code == 2
    assert "error: fabric-train fly: no such program; write fabric-train tokenize|inspect|" in capsys.readouterr().err


def test_help_is_a_word_like_the_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fabric-train", "help"])
    fabric_command.fabric_train()
    assert capsys.readouterr().out.startswith("usage: fabric-train tokenize|")


def test_a_mistyped_program_gets_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fabric-train", "trian"])
    with pytest.raises(SystemExit):
        fabric_command.fabric_train()
    assert "did you mean train?" in capsys.readouterr().err


def test_help_with_a_word_searches_the_arguments_of_all_programs(capsys: pytest.CaptureFixture[str]) -> None:
    search_help(ALL_ARGUMENTS, ["validation_split"])
    shown = capsys.readouterr().out
    assert "usage: fabric-train tokenize " in shown
    assert "--validation_split" in shown
    assert "usage: fabric-train doctor" not in shown
    with pytest.raises(InputError, match="no argument's name or help text contains it in any program"):
        search_help(ALL_ARGUMENTS, ["nosuchword"])
    assert set(PROGRAMS) == {name.split()[0] for name in ALL_ARGUMENTS}


def test_help_with_several_words_shows_arguments_that_have_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    search_help(ALL_ARGUMENTS, ["rank", "lora"])
    shown = capsys.readouterr().out
    assert "--lora_rank" in shown
    assert "--rank_timeout" not in shown


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a virtual environment's commands, with nothing of it on the path."""
    commands = tmp_path / "environment" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "fabric", "fabric-train"):
        (commands / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(commands / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    return commands


IN_PROJECT = {
    "convert": "python convert_to_hf.py",
    "merge": "python -m fabric_train.tokenization.merge",
    "train": "fabric run fabric_train",
}


@pytest.mark.parametrize("name", IN_PROJECT)
def test_commands_are_those_of_the_documents_in_the_project(
    name: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert command_from_here(name).endswith(IN_PROJECT[name].removeprefix("python"))
    program = ROOT / command_from_here(name).split()[0]  # its shorter path depends on where the project lies
    assert os.path.normpath(program.parent) == str(installed)
    monkeypatch.setenv("PATH", str(installed))
    assert command_from_here(name) == IN_PROJECT[name]


@pytest.mark.parametrize("name", IN_PROJECT)
def test_commands_elsewhere_need_no_folder_of_the_project(
    name: str, installed: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"train": "fabric run fabric_train"}.get(name, f"fabric-train {name}")
    monkeypatch.chdir(own_folder)
    assert command_from_here(name) == f"../environment/bin/{expected}"
    monkeypatch.setenv("PATH", str(installed))
    assert command_from_here(name) == expected


def test_without_the_command_a_program_is_named_by_its_path(
    installed: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "fabric-train").unlink()
    monkeypatch.setenv("PATH", str(installed))
    monkeypatch.chdir(own_folder)
    assert Path(shlex.split(command_from_here("convert"))[1]).resolve() == ROOT / "convert_to_hf.py"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_processes_of_our_own_get_the_projects_modules(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that verifies an export, and the one of lm_eval, are started with ``python -m``."""
    monkeypatch.chdir(own_folder)
    (own_folder / "fabric_train.py").write_text("raise RuntimeError('the file of a user')")
    finds = "import fabric_train; print(fabric_train.__file__)"
    env = {**os.environ, **project_first()}
    found = subprocess.run([sys.executable, "-c", finds], env=env, capture_output=True, text=True, check=True).stdout
    assert found == f"{ROOT / 'fabric_train' / '__init__.py'}\n"


def test_evaluate_means_hugging_faces_package_in_the_checkout_too(tmp_path: Path) -> None:
    """Tasks of lm_eval import it, in processes that have the checkout first on their path."""
    package = tmp_path / "packages" / "evaluate"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from evaluate.loading import load\n")
    (package / "loading.py").write_text("def load(name: str) -> str:\n    return f'the metric {name}'\n")
    loads = "import sys; import evaluate; print(evaluate.load('rouge'), sys.modules['evaluate'] is evaluate)"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{package.parent}"}
    command = [sys.executable, "-c", loads]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert found == "the metric rouge True\n"


IMPORTS_NOTHING = """
import os, signal, sys
from fabric_train.cli import fabric_command

class Refuses:
    has_sent = False

    def find_spec(self, name, *_):
        if name == "lightning":
            Refuses.has_sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        if self.has_sent:
            raise ImportError(name)

sys.meta_path.insert(0, Refuses())
sys.argv = ["fabric", "run", "fabric_train"]
fabric_command._check_arguments = lambda words, options: None
fabric_command.main()
"""


def test_the_handler_of_signals_imports_nothing() -> None:
    """A second signal would find the module half imported."""
    ended = subprocess.run([sys.executable, "-c", IMPORTS_NOTHING], cwd=ROOT, check=False, capture_output=True)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr.decode()
