# PYTHON_ARGCOMPLETE_OK
"""The commands ``fabric`` and ``fabric-train``.

``fabric`` is Lightning's own command, except when ``fabric run`` starts this project. Lightning runs torchrun, which is
not suitable here: after a signal it kills the ranks within 30 s, whether they have saved or not; it always ends with a
traceback and exit code 1; and it answers a ``--help`` after the script itself.
"""

import importlib
import io
import logging
import os
import runpy
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import psutil  # not in the signal handler: a second signal may come while the handler of the first imports it

from fabric_train.cli.argument_types import nearest_name
from fabric_train.cli.commands import CALLED_AS, PACKAGE_DIR, PROGRAMS, project_first
from fabric_train.cli.errors import FAILURE, INPUT_ERROR, InputError, print_errors, run_program
from fabric_train.cli.help import complete_choice, print_version, search_help
from fabric_train.cli.launcher import LOOPBACK, as_launcher, launcher_arguments, serve_on_loopback, variables_of_rank_0
from fabric_train.cli.output import keep_streams_writable

_OPTIONS = ("accelerator", "strategy", "devices", "num_nodes", "node_rank", "main_address", "main_port", "precision")
_HELP = ("--help", "-h", "help")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def main() -> None:
    """Run Lightning's ``fabric``, with the changes above if the script is this project."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions; the program prints them and exits
        runpy.run_module(PROGRAMS["train"], run_name="__main__", alter_sys=True)
    words = sys.argv[1:]
    script_index = _find_script(words)
    if script_index is not None:
        program_dir = _resolve_program(words[script_index])
        if program_dir is not None:
            words[script_index] = str(program_dir)
            sys.argv[1:] = words  # Lightning's command and torchrun read it again
            _run(words, script_index)
    from lightning.fabric.cli import _main

    _main()


def fabric_train() -> None:
    """Run the program that the first word names, in this process: ``fabric-train convert --checkpoint RUN …``."""
    words = sys.argv[1:]
    if "_ARGCOMPLETE" in os.environ:
        words = os.environ["COMP_LINE"].split()[1:]
    command = words[0] if words else "--help"
    name = command.replace("-", "_")  # merge-models is merge_models
    if name not in PROGRAMS:
        _run_without_program(command, words[1:])
        return
    os.environ |= project_first()
    del sys.argv[1:2]
    call = {CALLED_AS: f"fabric-train {command}"}
    runpy.run_module(PROGRAMS[name], init_globals=call, run_name="__main__", alter_sys=True)


def _run_without_program(command: str, words: Sequence[str]) -> None:
    """Complete, show the version or the help, or report a ``command`` that is not a program; ``words`` follow it."""
    if "_ARGCOMPLETE" in os.environ:
        complete_choice("program", PROGRAMS)  # exits
    if command == "--version":
        print_version()
        return
    if command in _HELP and words:
        all_arguments = importlib.import_module("fabric_train.all_arguments")  # by name: cli must not import programs
        run_program(lambda: search_help(all_arguments.ALL_ARGUMENTS, words))
    usage = f"fabric-train {'|'.join(PROGRAMS)} [--argument value ...]"
    if command in _HELP:
        print(f"usage: {usage}")
        print(
            "fabric-train NAME --help shows a program's arguments; fabric-train --help WORD shows all arguments whose"
        )
        print("name or help text contains the word, for all programs")
        return
    print_errors(f"error: fabric-train {command}: no such program{nearest_name(command, PROGRAMS)}; write {usage}")
    raise SystemExit(INPUT_ERROR)


def _find_script(words: Sequence[str]) -> int | None:
    """Return the index of the script among the words of ``fabric run``: the first that is not an option or a value.

    None if the command is not ``fabric run`` or has no script. Each option has a value, after = or as the next word.
    """
    if words[:1] != ["run"]:
        return None
    index = 1
    while index < len(words):
        word = words[index]
        if not word.startswith("-"):
            return index
        has_next_word_as_value = "=" not in word and word != "--help"
        index += 2 if has_next_word_as_value else 1
    return None


def _resolve_program(script: str) -> Path | None:
    """Return the folder of this program that a script means; None for any other script.

    The folder may belong to another clone, whose code then runs. The plain name fabric_train means this clone unless
    the current folder has a file or package of that name.
    """
    script_path = Path(script)
    if (script_path / "cli" / Path(__file__).name).is_file():
        return script_path
    is_other_program = script_path.is_file() or (script_path / "__main__.py").is_file()
    if script == PACKAGE_DIR.name and not is_other_program:
        return PACKAGE_DIR
    return None


def _run(words: list[str], script_index: int) -> NoReturn:
    """Run ``fabric run`` on the script at ``words[script_index]``, or show the script's help; then exit."""
    script = words[script_index]
    script_words = words[script_index + 1 :]
    if {"--help", "-h", "--version"} & set(script_words):
        os.execv(sys.executable, [sys.executable, script, *script_words])
    keep_streams_writable()

    # Check what can be checked in this process, before torch is imported.
    uses_tpu = "--accelerator=tpu" in words or "--accelerator tpu" in " ".join(words)
    if uses_tpu:  # Lightning would show a traceback
        print_errors(
            "error: fabric run --accelerator tpu: a TPU is used by a single process; start python -m fabric_train "
            "--tpu true"
        )
        raise SystemExit(INPUT_ERROR)
    options, program_words = _parse_run_words(words)
    if Path(script).resolve() == PACKAGE_DIR:  # another clone's arguments may differ
        environment = {**os.environ, **variables_of_rank_0(options)}
        only_plans = _check_arguments(program_words, environment)
        if only_plans:
            _run_plan(script, program_words, environment)

    _send_signals_to_ranks()
    logging.disable(logging.ERROR)  # torchrun repeats what the failed ranks have reported
    _keep_store_on_loopback(has_port="main_port" in options)
    raise SystemExit(_launch())


def _send_signals_to_ranks() -> None:
    """Let this process pass the signals that stop a run on to the ranks, and torchrun handle none of them."""
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torchrun wants at least one
    for signal_number in _SIGNALS:
        if signal.getsignal(signal_number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and it stays ignored
            signal.signal(signal_number, _send_to_ranks)


def _keep_store_on_loopback(*, has_port: bool) -> None:
    """Replace Lightning's launch by one that, on a single machine, keeps the ranks' store off the network.

    Args:
        has_port: whether the user has given ``--main-port``; by default the store is on a free port.
    """
    from lightning.fabric import cli

    launch_by_lightning = cli._torchrun_launch

    def launch(args: Namespace, script_args: list[str]) -> None:
        store = None
        if args.num_nodes == 1:
            args.main_address = LOOPBACK
            try:
                store = serve_on_loopback(args.main_port if has_port else 0)
            except (OSError, OverflowError) as error:
                raise _port_failure(error, args.main_port) from None
            args.main_port = store.port
        launch_by_lightning(args, script_args)
        del store  # it must live until the ranks have ended

    cli._torchrun_launch = launch


def _launch() -> int:
    """Run Lightning's ``fabric run``, report why ranks failed unless they have, and return the exit code."""
    from lightning.fabric import cli
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        with as_launcher():
            cli._main()
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:  # the rank has reported the reason
            return failure.exitcode
        print_errors(f"error: rank {rank} was killed by {failure.signal_name()}; continue with --resume true")
        return FAILURE
    except DistNetworkError as error:
        print_errors(f"error: {str(error).splitlines()[0]}; give a free port with --main-port")
        return FAILURE
    return 0


def _port_failure(error: OSError | OverflowError, port: object) -> SystemExit:
    """Print that the ranks cannot connect through a port, and return the exit to raise."""
    reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
    fault = f"error: the ranks cannot connect on port {port}: {reason.lower()}"
    print_errors(f"{fault}; give a free port with --main-port")
    # A number that is no port is wrong input. A busy port is not: the same command may work a minute later.
    return SystemExit(INPUT_ERROR if isinstance(error, OverflowError) else FAILURE)


def _parse_run_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of ``fabric run`` by name, wherever they are among ``words``, and the words for the script.

    Both are empty if the words are invalid, which Lightning reports.
    """
    options = []
    for name in _OPTIONS:
        spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
        options.append(click.Option(sorted(spellings)))
    script_argument = click.Argument(["script_words"], nargs=-1, type=click.UNPROCESSED)
    command = click.Command("run", params=[*options, script_argument], add_help_option=False)
    try:
        values = command.make_context("run", list(words[1:]), ignore_unknown_options=True).params
    except click.UsageError:
        return {}, []
    _script, *script_words = values.pop("script_words")
    options_set = {name: value for name, value in values.items() if value is not None}
    return options_set, script_words


def _run_plan(script: str, program_words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by one that plans; a plan needs neither the ranks nor the other machines.

    The options of ``fabric run``, which the variables of rank 0 hold, become arguments of the program. So do its
    defaults, one process on one machine: without them, the program would plan for all GPUs of this machine.
    """
    options = launcher_arguments(environment)
    launch_words = [f"--{name}={option.value}" for name, option in options.items()]
    os.execv(sys.executable, [sys.executable, script, *program_words, *launch_words])


def _check_arguments(words: list[str], environment: Mapping[str, str]) -> bool:
    """Report wrong arguments and paths before torch is imported and ranks are started; return whether the run plans.

    Rank 0 repeats these checks. What they print in this process is dropped unless there is a fault, because rank 0
    prints it too.
    """
    program = importlib.import_module(f"{PROGRAMS['train']}.__main__")  # by name: cli must not import a program
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            only_plans = bool(program.check_before_launch(words, environment))
    except InputError as error:
        print_errors(*stderr.getvalue().splitlines(), *(f"error: {fault}" for fault in error.faults))
        raise SystemExit(INPUT_ERROR) from None
    return only_plans


def _send_to_ranks(signal_number: int, _frame: FrameType | None) -> None:
    """Send a signal to the ranks, which save and end by themselves; the launcher waits for them.

    Before there are ranks, the signal ends this process.
    """
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal_number)
    if not ranks:
        os._exit(128 + signal_number)


if __name__ == "__main__":
    main()
