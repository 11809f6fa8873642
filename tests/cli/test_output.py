"""Output that nobody reads ends no program and changes no exit code."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fabric_train.cli.output import redact
from tests.support.forked_runs import ForkedRuns
from tests.support.programs import ROOT
from tests.support.short_runs import argv, saved_steps
from tests.support.terminal import run_in_terminal, shown

PRINTS = """
import sys
from fabric_train.cli.errors import run_program
from fabric_train.cli.output import keep_streams_writable
def main():
    for number in range(20_000):
        print("line", number)
        print("fault", number, file=sys.stderr)
    print("→ done")
    open("finished", "x").close()
    raise SystemExit(75)
run_program(main)
"""


ENDS = """
import sys
from fabric_train.cli.errors import run_program
def main():
    sys.exit({reason!r})
run_program(main)
"""


@pytest.mark.parametrize(("reason", "code", "printed"), [("no space", 1, "no space\n"), (None, 0, ""), (75, 75, "")])
def test_a_program_that_exits_with_a_text_has_failed(reason: object, code: int, printed: str) -> None:
    command = [sys.executable, "-c", ENDS.format(reason=reason)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (code, printed)


def run_in_shell(folder: Path, redirection: str, **environment: str) -> int:
    """Run a program that prints much, with a shell's redirection; return its own exit code."""
    (folder / "program.py").write_text(PRINTS)
    command = f"'{sys.executable}' program.py {redirection}; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    "redirection",
    [
        ">&-",
        "2>&- >/dev/null",
        "<&- >&- 2>&-",
        "2>/dev/null | head -1 >/dev/null",
        "2>&1 | true",
        ">/dev/full 2>/dev/full",
    ],
)
def test_a_program_goes_on_when_its_output_fails(tmp_path: Path, redirection: str) -> None:
    assert run_in_shell(tmp_path, redirection) == 75
    assert (tmp_path / "finished").exists()


def test_characters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    assert run_in_shell(tmp_path, ">out 2>/dev/null", PYTHONIOENCODING="ascii", PYTHONUTF8="0") == 75
    lines = (tmp_path / "out").read_text(encoding="ascii").splitlines()
    assert (len(lines), lines[-1]) == (20_001, "\\u2192 done")


def test_a_file_never_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Without care, the first file that a program opens is its standard output."""
    program = (
        "from fabric_train.cli.output import keep_streams_writable as keep\nkeep()\nprint(open('file', 'w').fileno())"
    )
    command = f"'{sys.executable}' -c \"{program}\" >&- 2>err"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "file").read_text() == ""


def test_a_terminal_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    """Writing to it is an input/output error from then on, as after a lost connection under nohup."""
    waits = "import os, time\nprint('ready')\nwhile os.isatty(1):\n    time.sleep(0.01)\n"
    (tmp_path / "program.py").write_text(waits + PRINTS)
    terminal, there = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, stdin=there, stdout=there, stderr=there
    ) as process:
        os.close(there)
        seen = b""
        while not seen.endswith(b"\n"):
            seen += os.read(terminal, 100)
        os.close(terminal)
        assert process.wait(60) == 75
    assert (tmp_path / "finished").exists()


def test_a_failure_is_no_crash_when_nobody_can_read_it(tmp_path: Path) -> None:
    program = "from fabric_train.cli.errors import InputError, run_program\ndef main(): raise InputError('x')\n"
    (tmp_path / "program.py").write_text(program + "run_program(main)\n")
    command = f"'{sys.executable}' program.py 2>&-"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, check=False).returncode == 2


SHOWS = """
import sys
from pathlib import Path
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.output import open_console
def main():
    evil = Path("evil").read_bytes().decode()
    print(evil)
    print(evil, file=sys.stderr)
    sys.stderr.write("\\r 50%")
    print()
    open_console().print(evil, style="bold")
    from rich.progress import track
    for _ in track([1], evil, console=open_console(stderr=True)):
        print(evil)
    raise InputError(evil + "; fix it")
run_program(main)
"""
EVIL = "a\tb\x1b[2Jc\x1b]0;title\x07d\x1b[31me\x9b1Af\rg\u202eh\x00i\u00e9"
SAFE = "b\\x1b[2Jc\\x1b]0;title\\x07de\\x9b1Af\\rg\\u202eh\\x00i\u00e9"


@pytest.fixture
def shows(tmp_path: Path) -> list[str]:
    """A command that shows a text with control characters in every way."""
    (tmp_path / "program.py").write_text(SHOWS)
    (tmp_path / "evil").write_bytes(EVIL.encode())
    return [sys.executable, str(tmp_path / "program.py")]


def test_no_text_of_others_controls_a_terminal(tmp_path: Path, shows: list[str]) -> None:
    code, written = run_in_terminal(shows, tmp_path, columns=200, env={"PYTHONPATH": str(ROOT)})
    assert code == 2
    own = re.compile(r"\x1b\[(?:\?25[hl]|2K|1A|[0-9;]*m)|[\r\n\t]")  # of rich
    assert own.sub("", written).isprintable()
    lines = shown(written.replace("\t", " "), columns=200)
    assert lines.count(f"a {SAFE}") >= 2
    assert f"error: a {SAFE}; fix it" in lines
    assert "\x1b[1m" in written  # what the program itself wants in bold
    assert "\r 50%" in written


def test_a_pipe_gets_the_text_as_it_is_and_a_log_does_not(tmp_path: Path, shows: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(shows, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.stdout.startswith(EVIL.encode() + b"\n")
    lines = done.stderr.decode().split("\n")
    assert lines[0] == f"a\t{SAFE}"
    assert lines[-2] == f"error: a\t{SAFE}; fix it"


def test_secrets_in_urls_are_left_out_and_the_rest_stays() -> None:
    for text, without_secrets in {
        "https://user:pass@host/a.jsonl": "https://host/a.jsonl",
        "read s3://key:secret@bucket/x and http://t0ken@host.": "read s3://bucket/x and http://host.",
        "(https://host/a?sig=abc&x=1), then": "(https://host/a?***), then",
        "https://host/a?sig=a.b:c;": "https://host/a?***;",
        "is it http://host/a? http://u:p@host/b": "is it http://host/a? http://host/b",
        "http://host/a?http://u:p@host/b": "http://host/a?http://host/b",
        "a:b@c, no URL": "a:b@c, no URL",
    }.items():
        assert redact(text) == without_secrets


@pytest.mark.parametrize("text", ["a", "--a", "://", "http://@", "http://a?=", "http://a?a=.", "?="])
def test_secrets_are_looked_for_in_a_word_of_any_length_at_once(text: str) -> None:
    began = time.process_time()
    redact(text[:-1] + text[-1] * 200_000)
    redact(text * 100_000)
    assert time.process_time() - began < 3  # a scheme looked for at each letter took minutes


def test_no_program_has_a_console_of_rich_that_does_not_escape() -> None:
    sources = [*(ROOT / "fabric_train").rglob("*.py"), *ROOT.glob("*.py")]
    own = [path.name for path in sources if re.search(r"(?<![\w.])(Console|get_console)\(", path.read_text())]
    assert own == []


@pytest.mark.slow
def test_a_run_whose_output_has_no_reader_trains_to_its_end(
    forked_runs: ForkedRuns, tmp_path: Path, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    breaks = "import os\nr, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)"
    forked_runs.start(argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run"), before=breaks).finish()
    assert saved_steps(tmp_path / "run")[-1] == 8


def test_a_program_ends_without_a_new_thread(tmp_path: Path) -> None:
    """Where no thread can be started any more, as under ulimit -u, ending must still work."""
    program = """
import threading
from fabric_train.cli.errors import run_program, InputError
def none(*_): raise RuntimeError("can't start new thread")
def main():
    threading.Thread.start = none
    raise InputError("a fault; how to fix it")
run_program(main)
"""
    (tmp_path / "program.py").write_text(program)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, timeout=20, text=True, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "error: a fault; how to fix it\n")


def test_a_python_without_docstrings_is_refused_by_name() -> None:
    program = "from fabric_train.cli.errors import run_program; run_program(lambda: print('ran'))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for option, expected in {"-O": (0, "ran\n"), "-OO": (2, "error: Python runs without docstrings, ")}.items():
        command = [sys.executable, option, "-c", program]
        ended = subprocess.run(command, env=env, timeout=20, text=True, capture_output=True, check=False)
        assert (ended.returncode, (ended.stdout + ended.stderr)[: len(expected[1])]) == expected
