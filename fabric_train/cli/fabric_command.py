# PYTHON_ARGCOMPLETE_OK
"""The commands ``fabric`` and ``fabric-train``, and how to call a program from the current folder.

``fabric`` is Lightning's own, except when ``fabric run`` starts this project. Lightning's is torchrun, which after a
signal kills the ranks within 30 s, whether they have saved or not, ends with a traceback and exit code 1 however they
have ended, and takes ``--help`` after the script for itself.
"""

import importlib
import io
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import psutil  # here, because a second signal may come while the handler of the first one imports it

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.errors import FAILURE, INPUT_ERROR, InputError, print_errors, run_program
from fabric_train.cli.launcher import LOOPBACK, as_launcher, serve_on_loopback, variables_of_rank_0
from fabric_train.cli.output import keep_streams_writable

PROGRAMS = {
    "tokenize": "fabric_train.programs.tokenize_dataset",
    "inspect": "fabric_train.inspection",
    "merge": "fabric_train.tokenization.merge",
    "publish": "fabric_train.export.publish",
    "vocabulary": "fabric_train.vocabulary",
    "train": "fabric_train",
    "runs": "fabric_train.runs",
    "trace": "fabric_train.trace",
    "replay": "fabric_train.replay",
    "report": "fabric_train.report",
    "convert": "fabric_train.programs.convert_to_hf",
    "merge_models": "fabric_train.merge_models",
    "generate": "fabric_train.programs.generate",
    "evaluate": "fabric_train.programs.evaluate",
    "download": "fabric_train.programs.download_model",
    "doctor": "fabric_train.doctor",
    "sample_data": "fabric_train.sample_data",
    "launch_files": "fabric_train.launch_files",
    "translate": "fabric_train.translate",
}
"""What ``fabric-train`` calls each program, and its module."""

called_as: str | None = None
"""``fabric-train NAME`` if this process was started so."""

_PROGRAM = Path(__file__).resolve().parents[1]
_PROJECT = _PROGRAM.parent
_OF_SCRIPTS = "fabric_train.programs"  # its modules have the names of the files at the top of a checkout
_OF_GIT_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
_OPTIONS = ("accelerator", "strategy", "devices", "num_nodes", "node_rank", "main_address", "main_port", "precision")
_HELP = ("--help", "-h", "help")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def main() -> None:
    """Run Lightning's ``fabric``, with the changes above if the script is this project."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        runpy.run_module(PROGRAMS["train"], run_name="__main__", alter_sys=True)
    words = sys.argv[1:]
    place = _place_of_script(words)
    program = _program_at(words[place]) if place < len(words) else None
    if program:
        sys.argv[1 + place] = words[place] = str(program)
        _run(words, place)
    from lightning.fabric.cli import _main

    _main()


def fabric_train() -> None:
    """Run the program that the first word names, in this process: ``fabric-train convert --checkpoint RUN …``."""
    global called_as
    words = sys.argv[1:]
    if "_ARGCOMPLETE" in os.environ:
        words = os.environ["COMP_LINE"].split()[1:]
    written = words[0] if words else "--help"
    name = written.replace("-", "_") if written.replace("-", "_") in PROGRAMS else written
    if name not in PROGRAMS:
        if "_ARGCOMPLETE" in os.environ:
            from fabric_train.cli.help import complete_choice  # which imports this module

            complete_choice("program", PROGRAMS)
        usage = f"fabric-train {'|'.join(PROGRAMS)} [--argument value ...]"
        if name == "--version":
            from fabric_train.cli.help import print_version  # which imports this module

            print_version()
            return
        if name in _HELP and words[1:]:
            programs = importlib.import_module("fabric_train.all_arguments")  # by name: it imports this module
            from fabric_train.cli.help import search_help

            run_program(lambda: search_help(programs.ALL_ARGUMENTS, words[1:]))
        if name in _HELP:
            print(f"usage: {usage}")
            print(
                "fabric-train NAME --help shows the arguments of a program, and fabric-train --help WORD those of all"
            )
            print("programs that have the word in their name or text")
            return
        print_errors(f"error: fabric-train {name}: no such program{nearest_name(name, PROGRAMS)}; write {usage}")
        raise SystemExit(INPUT_ERROR)
    called_as = f"fabric-train {written}"
    os.environ |= project_first()
    del sys.argv[1:2]
    runpy.run_module(PROGRAMS[name], run_name="__main__", alter_sys=True)


def checked_out_commit(project: Path = _PROJECT) -> str | None:
    """Return the commit of the code that runs; None if its folder is no repository of its own, or git cannot say.

    It ends in ``-dirty`` where files other than results and documents differ from the commit.
    """
    words = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--"]
    words += [".", ":!benchmarks/results", ":!docs"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_GIT_HOOKS}
    if not (project / ".git").exists():  # installed in a folder of another repository
        return None
    try:
        status = subprocess.run(words, cwd=project, env=environment, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    is_dirty = any(not line.startswith("#") for line in lines)
    return commit[:12] + "-dirty" * is_dirty if re.fullmatch("[0-9a-f]{40,64}", commit) else None


def installed_commit(name: str = "fabric-train") -> str | None:
    """Return the commit that pip installed from a repository's address; None if it took a folder or a wheel."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow

    try:
        origin = json.loads(distribution(name).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    return commit[:12] if re.fullmatch("[0-9a-f]{40,64}", commit) else None


def project_first() -> dict[str, str]:
    """Return variables with which Python finds this project's modules first, whatever lies in the current folder."""
    folders = filter(None, (str(_PROJECT), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}  # the second from Python 3.11 on


def command_from_here(name: str) -> str:
    """Return the words that call a program of :data:`PROGRAMS` in a shell in the current folder.

    In the project's folder these are ``python convert_to_hf.py``, elsewhere ``fabric-train convert``. ``python`` and
    the commands have their path if the shell would not find this virtual environment's.
    """
    module = PROGRAMS[name]
    if name == "train":
        return f"{_found('fabric')} run fabric_train"
    in_project = Path(_PROGRAM.name).resolve() == _PROGRAM
    if not in_project and _beside_python("fabric-train").exists():
        return f"{_found('fabric-train')} {name}"
    script = script_of(name)
    if script is None or not (_PROJECT / script).is_file():
        return f"{_found('python')} -m {module}"
    return f"{_found('python')} {script if in_project else shortest_path(_PROJECT / script)}"


def script_of(name: str) -> str | None:
    """Return the file at the top of a checkout that starts a program of :data:`PROGRAMS`; None if none does."""
    package, _, stem = PROGRAMS[name].rpartition(".")
    return f"{stem}.py" if package == _OF_SCRIPTS else None


def shortest_path(path: Path) -> str:
    """Return a path as a word of a shell: relative to the current folder or absolute, whichever is shorter."""
    return shlex.quote(min(os.path.relpath(path), os.path.abspath(path), key=len))


def _found(command: str) -> str:
    """Return the name of a command of this virtual environment if the shell would find it, else its path."""
    own = _beside_python(command)
    found = shutil.which(command)
    if found and os.path.realpath(os.path.dirname(found)) == os.path.realpath(own.parent):
        return command
    return shortest_path(own if own.exists() else Path(sys.executable))


def _beside_python(command: str) -> Path:
    return Path(os.path.abspath(sys.executable)).with_name(command)


def _place_of_script(words: Sequence[str]) -> int:
    """Return the index of the script among the words of ``fabric run``: the first that is no option and no value."""
    place = 1 if words[:1] == ["run"] else len(words)
    while place < len(words) and words[place].startswith("-"):
        place += 1 if "=" in words[place] or words[place] == "--help" else 2
    return place


def _program_at(script: str) -> Path | None:
    """Return the folder of this program that a script means; None for any other script.

    It may be in another clone, whose code then runs. The name alone means this one wherever no other file has it.
    """
    given = Path(script)
    if (given / "cli" / Path(__file__).name).is_file():
        return given
    is_other = given.is_file() or (given / "__main__.py").is_file()
    return _PROGRAM if script == _PROGRAM.name and not is_other else None


def _run(words: list[str], place: int) -> NoReturn:
    """Run ``fabric run`` on the script at ``words[place]``, or show the script's help."""
    script = words[place]
    arguments = words[place + 1 :]
    if {"--help", "-h", "--version"} & set(arguments):
        os.execv(sys.executable, [sys.executable, script, *arguments])
    keep_streams_writable()
    if "--accelerator=tpu" in words or "--accelerator tpu" in " ".join(words):  # Lightning's shows a traceback
        print_errors(
            "error: fabric run --accelerator tpu: one process uses a TPU; start python -m fabric_train --tpu true"
        )
        raise SystemExit(INPUT_ERROR)
    options, of_script = _read_line(words)
    if Path(script).resolve() == _PROGRAM:
        _check_first(of_script, options)
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torchrun leaves the others to the handler below
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, _pass_on)
    logging.disable(logging.ERROR)  # torchrun's own report of ranks that have reported themselves

    from lightning.fabric import cli
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch = cli._torchrun_launch

    def launch_locally(args: Namespace, script_args: list[str]) -> None:
        """If there is one machine, keep torchrun's store from the network, and take a free port if none is given."""
        store = None
        if args.num_nodes == 1:
            args.main_address = LOOPBACK
            try:
                store = serve_on_loopback(args.main_port if "main_port" in options else 0)
                args.main_port = store.port
            except (OSError, OverflowError) as error:
                reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
                fault = f"error: the ranks cannot connect by port {args.main_port}: {reason.lower()}"
                print_errors(f"{fault}; give a free port with --main-port")
                # a busy port is no fault of the command line: the same one may work a minute later
                is_no_port = isinstance(error, OverflowError)
                raise SystemExit(INPUT_ERROR if is_no_port else FAILURE) from None
        launch(args, script_args)
        del store

    cli._torchrun_launch = launch_locally
    try:
        with as_launcher():
            cli._main()
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            print_errors(f"error: rank {rank} was killed by {failure.signal_name()}; continue with --resume true")
        raise SystemExit(FAILURE if failure.exitcode < 0 else failure.exitcode) from None
    except DistNetworkError as error:
        print_errors(f"error: {str(error).splitlines()[0]}; give a free port with --main-port")
        raise SystemExit(FAILURE) from None
    raise SystemExit(0)


def _read_line(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of ``fabric run`` by name, wherever they stand on its line, and the words for the script."""
    options = [click.Option(sorted({f"--{name}", f"--{name.replace('_', '-')}"})) for name in _OPTIONS]
    of_script = click.Argument(["of_script"], nargs=-1, type=click.UNPROCESSED)
    command = click.Command("run", params=[*options, of_script], add_help_option=False)
    try:
        values = command.make_context("run", list(words[1:]), ignore_unknown_options=True).params
    except click.UsageError:
        return {}, []
    _, *arguments = values.pop("of_script")
    return {name: value for name, value in values.items() if value is not None}, arguments


def _check_first(words: list[str], options: Mapping[str, str]) -> None:
    """Report wrong arguments and paths before torch is imported and ranks are started, which takes seconds.

    Rank 0 checks the same again, and prints the notes.
    """
    program = importlib.import_module(f"{PROGRAMS['train']}.__main__")  # by name: it imports this module
    environment = {**os.environ, **variables_of_rank_0(options)}
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            program.check_before_launch(words, environment)
    except InputError as error:
        print_errors(*printed.getvalue().splitlines(), *(f"error: {fault}" for fault in error.faults))
        raise SystemExit(INPUT_ERROR) from None


def _pass_on(number: int, _: FrameType | None) -> None:
    """Send a signal to the ranks. They save and end by themselves, and the launcher waits for them."""
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)
    if not ranks:
        os._exit(128 + number)


if __name__ == "__main__":
    main()
