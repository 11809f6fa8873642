"""List the programs of this project, and build the shell commands that call them from the current folder."""

import os
import shlex
import shutil
import sys
from pathlib import Path

PROGRAMS = {
    "tokenize": "fabric_train.programs.tokenize_dataset",
    "inspect": "fabric_train.inspection",
    "merge": "fabric_train.tokenization.merge",
    "publish": "fabric_train.export.publish",
    "vocabulary": "fabric_train.vocabulary",
    "teach": "fabric_train.teacher_states",
    "train": "fabric_train",
    "runs": "fabric_train.runs",
    "trace": "fabric_train.trace",
    "replay": "fabric_train.replay",
    "report": "fabric_train.report",
    "rollouts": "fabric_train.rollouts",
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
"""The name of each program for ``fabric-train``, and its module."""

PACKAGE_DIR = Path(__file__).resolve().parents[1]
"""The folder ``fabric_train`` of the running code."""
_PROJECT = PACKAGE_DIR.parent
_SCRIPT_PACKAGE = "fabric_train.programs"  # its modules have the names of the scripts at the top of a checkout
CALLED_AS = "CALLED_AS"
"""Global of the module ``__main__`` in which ``fabric-train NAME`` leaves these words for the program's help."""


def called_as() -> str | None:
    """Return ``fabric-train NAME`` if this process was started that way, and otherwise None."""
    words: str | None = getattr(sys.modules["__main__"], CALLED_AS, None)
    return words


def program_name() -> str:
    """Return the command that started this program, without arguments; a script's path is from the current folder."""
    if Path(sys.argv[0]).resolve() == PACKAGE_DIR:  # only fabric run starts a folder
        return "fabric run fabric_train"
    command = called_as()
    if command:
        return command
    module = sys.modules["__main__"].__spec__
    if module is None:
        return f"python {shortest_path(Path(sys.argv[0]))}"
    return f"python -m {module.name.removesuffix('.__main__')}"


def project_first() -> dict[str, str]:
    """Return variables with which Python finds this project's modules first, whatever is in the current folder.

    PYTHONSAFEPATH, which keeps the current folder out of ``sys.path``, has an effect from Python 3.11 on.
    """
    python_path = str(_PROJECT)
    if os.environ.get("PYTHONPATH"):
        python_path += os.pathsep + os.environ["PYTHONPATH"]
    return {"PYTHONPATH": python_path, "PYTHONSAFEPATH": "1"}


def command_from_here(name: str) -> str:
    """Return the words that call a program of :data:`PROGRAMS` in a shell in the current folder.

    In the project's folder they are ``python convert_to_hf.py``, elsewhere ``fabric-train convert``. ``python`` and
    the commands have their path if the shell would not find this virtual environment's.
    """
    module = PROGRAMS[name]
    if name == "train":
        return f"{_shell_command('fabric')} run fabric_train"
    is_in_project = Path(PACKAGE_DIR.name).resolve() == PACKAGE_DIR
    if not is_in_project and _path_beside_python("fabric-train").exists():
        return f"{_shell_command('fabric-train')} {name}"

    script = script_of(name)
    if script is None or not (_PROJECT / script).is_file():
        return f"{_shell_command('python')} -m {module}"
    script_path = script if is_in_project else shortest_path(_PROJECT / script)
    return f"{_shell_command('python')} {script_path}"


def script_of(name: str) -> str | None:
    """Return the script at the top of a checkout that starts a program of :data:`PROGRAMS`; None if it has none."""
    package, _, stem = PROGRAMS[name].rpartition(".")
    return f"{stem}.py" if package == _SCRIPT_PACKAGE else None


def shortest_path(path: Path) -> str:
    """Return a path as a word of a shell: relative to the current folder or absolute, whichever is shorter."""
    return shlex.quote(min(os.path.relpath(path), os.path.abspath(path), key=len))


def _shell_command(name: str) -> str:
    """Return the name of a command of this virtual environment if the shell would find it, otherwise its path."""
    expected_path = _path_beside_python(name)
    shell_path = shutil.which(name)
    if shell_path and os.path.realpath(os.path.dirname(shell_path)) == os.path.realpath(expected_path.parent):
        return name
    return shortest_path(expected_path if expected_path.exists() else Path(sys.executable))


def _path_beside_python(command: str) -> Path:
    return Path(os.path.abspath(sys.executable)).with_name(command)
