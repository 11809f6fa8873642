"""The command blocks of README and docs/ run in the order of their page, on tiny stand-ins, and print what it shows."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_train.all_arguments import ALL_ARGUMENTS
from tests.support.documented_commands import Command, commands_in, pattern_of, plain, words_of
from tests.support.documented_inputs import write_stand_ins
from tests.support.exports import VERIFY_IN_PROCESS
from tests.support.forked_runs import ForkedRuns
from tests.support.program_arguments import PROGRAM_ARGUMENTS, words_of_program
from tests.support.programs import ROOT
from tests.support.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

NOT_RUN = {
    "make ": "sets up an environment; CI and tests/programs/test_make.py run the targets",
    "pip install": "changes the environment",
    "docker ": "there is no Docker here; tests/programs/test_docker_files.py",
    "export HF_TOKEN": "belongs to the docker compose after it",
    "PJRT_DEVICE=CPU docker": "there is no Docker here; tests/programs/test_docker_files.py",
    "PJRT_DEVICE=CPU .cache/xla": "torch-xla has an environment of its own; make test-xla",
    "apptainer ": "there is no Apptainer here",
    "kubectl ": "there is no cluster here; tests/programs/test_kubernetes_manifests.py",
    "sky ": "rents machines",
    "python -m benchmarks.fake_rank": "counts for a minute; tests/cuda_rehearsal/test_step_budgets.py",
    "torchrun ": "several machines; tests/launchers/",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "belongs to the torchrun after it",
    "mpiexec ": "needs MPI; tests/launchers/",
    "launch/slurm/submit.sh": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "FABRIC_TRAIN_SETTINGS=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "export FABRIC_TRAIN_SETTINGS": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "submit() {": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "plan() {": "plans of an 8B; tests/programs/test_fsdp_page.py",
    "plan --": "plans of an 8B; tests/programs/test_fsdp_page.py",
    "tokenize=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "merge=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "counts=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "lines=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "slices=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "AFTER=": "there is no Slurm here; tests/programs/test_slurm_scripts.py",
    "$EDITOR": "opens an editor",
    ".venv/bin/": "sets up a machine without internet",
    "python3 -m venv": "sets up a machine without internet",
    "HF_HUB_OFFLINE=1 .venv/bin/": "of a machine without internet; tests/programs/test_doctor.py",
    "rsync ": "copies to another machine",
    "tail ": "follows a log without end",
    "cat questions.txt": "a chat through a pipe; tests/inference/",
    "seq 64": "64 processes; tests/tokenization/test_slices.py",
    "hf auth": "asks for a token",
    "fabric-train train": "tests/cli/test_fabric_command.py",
    "fabric-train translate": "tests/translate/",
    "fabric-train runs runs/sweep": "runs of a loop; tests/programs/test_runs.py",
    "fabric-train report runs/sweep": "runs of a loop; tests/report/",
    "fabric-train --": "tests/cli/test_fabric_command.py",
    "fabric-train launch-files": "tests/programs/test_package.py",
    "eval ": "changes the shell; tests/cli/test_help.py",
    "fabric-train sample-data": "downloads; tests/programs/test_sample_data.py",
    "fabric run fabric_train --devices 8 --extensions my_parts": "eight devices; tests/training/test_extensions.py",
    "fabric run fabric_train --devices 4 --train_data_dir /data/": "reads /data; test_former_command_line.py",
    "fabric run fabric_train --devices 1 --accelerator cpu --config": "real layers; tests/training/test_parts_runs.py",
    "fabric-train download": "needs the hub; tests/export/test_hub.py",
    "fabric-train vocabulary": "of real tokenizers and models; tests/vocabulary/",
    "fabric-train doctor": "looks at the machine; tests/programs/test_doctor.py",
    "fabric-train evaluate --watch": "needs lm_eval, which is not installed; tests/evaluation/",
    "fabric-train evaluate --models models/llama-3-8b models/salamandra-7b runs/1/best --tasks": "needs lm_eval",
    "fabric-train evaluate --models models/llama-3.1-8b runs/long/best --tasks": "needs lm_eval",
    "fabric-train evaluate --models models/llama-3-8b --tasks": "needs lm_eval",
    "fabric-train evaluate --models runs/long/best --tasks": "needs lm_eval",
    "CUDA_VISIBLE_DEVICES=7": "needs lm_eval, which is not installed; tests/evaluation/",
    "fabric-train publish": "needs the hub; tests/export/test_publish.py",
    "fabric-train merge_models --method passthrough": "of 32 layers; tests/merge_models/test_passthrough.py",
    "fabric run fabric_train --plan true --devices 8 --device_memory 80GB --config": "a file of the checkout; "
    "tests/preflight/test_recipes.py",
    "fabric run fabric_train --plan true --devices 1 --device_memory 80GB": "rows of 20k tokens; "
    "tests/preflight/test_memory_sampling.py",
    "fabric-train rollouts": "of a run that samples its rows; tests/rollouts/test_show_rollouts.py",
    "fabric-train teach": "of a teacher with the tokenizer of the rows; tests/teacher_states/",
    "fabric run fabric_train --devices 8 --train_data_dir data/tokens --model_name models/llama-3-1b": "reads what "
    "fabric-train teach has written; tests/teacher_states/",
    "fabric-train merge ": "of slices that xargs makes; tests/tokenization/test_slices.py",
}
"""The beginnings of command lines that are only parsed (``tests/cli/test_documented_commands.py``), and why."""
IN_A_SHELL = ("mkdir ", "head ", "cat > ", "python - <<", "python hold_out.py")
"""The beginnings of command lines that a shell runs as they stand."""
STAND_INS = {
    "fabric_train.__main__": "--devices 1 --accelerator cpu --precision 32-true --max_step 2 --micro_batch_size 1 "
    "--total_batch_size 2 --warmup_steps 0 --eval_iters 1 --eval_step_interval 2 --save_step_interval 2 --loggers csv "
    "--report false --compile false --num_workers 0 --context_parallel_size 1 --max_length 128",
    "fabric_train.programs.tokenize_dataset": "--num_proc 1 --max_length 128 --validation_split 0.2",
    "fabric_train.programs.generate": "--num_tokens 4",
    "fabric_train.programs.evaluate": "--max_length 128",
    "fabric_train.programs.convert_to_hf": "",
    "fabric_train.merge_models.__main__": "",
    "fabric_train.inspection.__main__": "",
    "fabric_train.report.__main__": "",
    "fabric_train.runs": "",
}
"""Arguments added to a command of each program, so that it takes a moment: the last value of an argument counts."""
SAMPLED_ROWS = "--prompts_per_step 2 --group_size 2 --max_new_tokens 4 --sampler_batch_size 4"
"""Arguments added to a command of training with --prompts, instead of the sizes of a batch."""
LEFT_OUT = ("push_to_hub", "license", "decontaminate", "language", "base_weights", "activation_offload")
"""Options that are not run: they need the hub, the files of a task, packages that are not installed, or a GPU."""
WITHOUT_PICTURES = (
    "from fabric_train.pages import drawing_process; drawing_process.run = lambda what, text, output: output.touch()"
)
"""Source that each program executes first: to draw takes more time than all else, and other tests look at pictures."""
NOT_COMPARED = {
    "fabric-train generate": "the text depends on the weights",
    "head ": "the file is a stand-in",
    "fabric-train runs": "the runs are stand-ins",
    "fabric run fabric_train --plan true": "the plan is of a stand-in for the model",
    "fabric-train inspect data/chats": "the chats are stand-ins",
    "fabric-train inspect data/two_chats": "the validation split of STAND_INS gets one of the chats",
    "fabric-train inspect data/pairs": "the pairs are stand-ins",
    "fabric-train evaluate --models models/half": "the stand-in has too few documents for intervals",
}
"""The beginnings of command lines whose output is not compared with the page, and why."""
OF_SLOW_RUNS = "reference log-probabilities of train, batch"
"""The beginning of lines that a run prints only if it has printed nothing for eight seconds."""
TRANSLATIONS = {
    "docs/es/primer_entrenamiento.md": "docs/tutorials/first_run.md",
    "docs/es/fsdp.md": "docs/explanation/fsdp.md",
}
"""Pages with the same commands as another one, which is run."""
PAGES = {
    path.relative_to(ROOT).as_posix(): list(commands_in(path.read_text(encoding="utf-8")))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
PROGRAMS = {f"python {words}": words for words in PROGRAM_ARGUMENTS}
PROGRAMS |= {f"fabric-train {name}": words_of_program(name) for name in ALL_ARGUMENTS}
PROGRAMS |= {"fabric run fabric_train": "-m fabric_train"}


def is_run(command: Command) -> bool:
    return not any(command.line.startswith(begin) for begin in NOT_RUN)


def module_of(line: str) -> str | None:
    """Return the module whose ``main`` is the program of a command line."""
    words = next((words for name, words in PROGRAMS.items() if f"{line} ".startswith(f"{name} ")), None)
    if words is None:
        return None
    if words.endswith(".py"):
        return f"fabric_train.programs.{words.removesuffix('.py')}"
    name = words.removeprefix("-m ").split()[0]
    return f"{name}.__main__" if (ROOT / name.replace(".", "/") / "__main__.py").is_file() else name


def without_options(words: list[str], names: tuple[str, ...]) -> list[str]:
    """Return the words of a command line without some options and their values."""
    kept: list[str] = []
    leaves_out = False
    for word in words:
        if word.startswith("--"):
            leaves_out = word[2:].partition("=")[0] in names
        if not leaves_out:
            kept.append(word)
    return kept


def arguments_of(line: str, folder: Path) -> list[str]:
    """Return the arguments with which a command line of a page is run in ``folder``, patterns of files expanded."""
    program = next(name for name in PROGRAMS if f"{line} ".startswith(f"{name} "))
    words = without_options(words_of(line.removeprefix(program)), LEFT_OUT)
    module = module_of(line)
    assert module is not None
    added = STAND_INS[module].split()
    if module == "fabric_train.__main__" and "--prompts" in words:
        added = [*without_options(added, ("total_batch_size", "eval_iters")), *SAMPLED_ROWS.split()]
    elif module == "fabric_train.__main__" and "--streaming_dataset" not in words:
        added = added[:-2]  # --max_length is of a stream
    return [*words, *added]


@pytest.fixture(scope="module")
def stand_ins(
    tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path, shakespeare_jsonl: Path, forked_runs: ForkedRuns
) -> Path:
    """A folder with all that the documents' commands read."""
    folder = tmp_path_factory.mktemp("documented")
    shutil.copytree(chatml_dir, folder / "a-model")
    write_tiny_llama(folder / "a-model", 2000)
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        plays = [json.dumps({"text": json.loads(line)["text"][:900]}) for line in lines]
    write_stand_ins(folder, folder / "a-model", plays)
    run(
        forked_runs,
        folder,
        "fabric-train tokenize --dataset chats.jsonl --tokenizer_name MODEL --output_dir data/va",
    )
    for name in ("tokens", "es", "en", "raw", "chats", "ca", "books-32k", "part1", "part2", "part3", "part4"):
        shutil.copytree(folder / "data/va", folder / "data" / name)
    train = "python -m fabric_train --model_name MODEL --train_data_dir data/va --output_dir"
    one_step = [
        "--max_step",
        "1",
        "--save_step_interval",
        "1",
        "--eval_step_interval",
        "1",
    ]  # a branch takes the second one
    run(forked_runs, folder, f"{train} runs/1", *one_step)
    run(forked_runs, folder, f"{train} adapters/1 --adapter lora", *one_step)
    for name in ("2", "es", "dpo", "xla", "valencian"):
        shutil.copytree(folder / "runs/1", folder / "runs" / name)
    return folder


def run(runs: ForkedRuns, folder: Path, line: str, *further: str) -> str:
    """Run a command line as the reader of its page would, with ``further`` arguments, and return its output."""
    if line.startswith(IN_A_SHELL):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = ["bash", "-c", line]
        return subprocess.run(
            command, cwd=folder, env={"PATH": path}, text=True, capture_output=True, check=True
        ).stdout
    module = module_of(line)
    assert module is not None, line
    words = arguments_of(line, folder)
    if "--output_dir" in words:
        written = folder / words[words.index("--output_dir") + 1]
        shutil.rmtree(written, ignore_errors=True)  # a stand-in
    before = f"{WITHOUT_PICTURES}; {VERIFY_IN_PROCESS if 'convert' in module or 'merge_models' in module else ''}"
    started = runs.start([*words, *further], 1, cwd=folder, program=module, before=before)
    codes = started.wait()
    assert codes == [0], f"{line}\n{started.report()}"
    return started.stdout()


@pytest.mark.parametrize(
    "page", [page for page, commands in PAGES.items() if page not in TRANSLATIONS and any(map(is_run, commands))]
)
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    page: str, stand_ins: Path, forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(stand_ins, folder, symlinks=True)
    for command in filter(is_run, PAGES[page]):
        printed = plain(run(forked_runs, folder, command.line))
        if command.line.startswith(tuple(NOT_COMPARED)):
            continue
        shown = [line for line in command.shown if not line.startswith(OF_SLOW_RUNS)]
        missing = [line for line in shown if not re.search(pattern_of(line), printed)]
        advice = "put … for text of real data or a real model, or give a reason in NOT_COMPARED"
        assert not missing, "\n".join([command.line, "prints", printed, "and not", *missing, advice])


@pytest.mark.parametrize("page, original", TRANSLATIONS.items())
def test_a_translation_has_the_commands_of_its_original(page: str, original: str) -> None:
    assert [command.line for command in PAGES[page]] == [command.line for command in PAGES[original]]


def test_every_command_of_the_documents_is_run_or_has_a_reason_not_to() -> None:
    every = [command.line for commands in PAGES.values() for command in commands]
    run = [line for line in every if is_run(Command(line)) and not line.startswith(IN_A_SHELL)]
    unknown = [line for line in run if module_of(line) not in STAND_INS]
    assert not unknown, "give a reason in NOT_RUN:\n" + "\n".join(unknown)
    unused = [begin for begin in NOT_RUN if not any(line.startswith(begin) for line in every)]
    assert not unused, f"no page has these any more: {unused}"
