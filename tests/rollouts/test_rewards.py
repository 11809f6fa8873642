"""Rewards run in processes of their own, whose failures cost the run no more than the reward."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest

from fabric_train.cli.errors import InputError
from fabric_train.rollouts.reward_messages import CallAnswer, MessageChannel
from fabric_train.rollouts.reward_processes import RewardLimits
from fabric_train.rollouts.rewards import Rewards, name_rewards, open_rewards

LIMITS = RewardLimits(call_seconds=0.9)
PATIENT = RewardLimits(call_seconds=60)
"""Limits of the tests that wait for no limit, so that a busy machine does not fail them."""
Open = Callable[..., Rewards]
SOCKETS = (
    "def sockets():\n"
    "    fds = [int(name) for name in os.listdir('/proc/self/fd')]\n"
    "    return [fd for fd in fds if os.path.exists(f'/proc/self/fd/{fd}') and is_socket(fd)]\n"
    "def is_socket(fd):\n"
    "    return stat.S_ISSOCK(os.fstat(fd).st_mode)\n"
)
"""Python source of a function that returns the sockets of its process."""


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the rewards of a file with this text, and closes them after the test."""
    opened: list[Rewards] = []

    def open_text(
        text: str,
        *functions: str,
        on_error: Literal["zero", "stop"] = "zero",
        limits: RewardLimits = PATIENT,
        settings: dict[str, dict[str, Any]] | None = None,
        weights: dict[str, float] | None = None,
    ) -> Rewards:
        file = tmp_path / "rewards.py"
        file.write_text(text, encoding="utf-8")
        specs = [f"{file}:{function}" for function in functions] or [str(file)]
        rewards = open_rewards(specs, weights, settings, on_error, limits)
        opened.append(rewards)
        return rewards

    yield open_text
    for rewards in opened:
        rewards.close()


def faults_of(*specs: str, **options: Any) -> tuple[str, ...]:
    """Return why rewards cannot be opened."""
    with pytest.raises(InputError) as raised:
        open_rewards(specs, options.get("weights"), options.get("settings"), "zero", PATIENT)
    return raised.value.faults


def process_ids(rewards: Rewards) -> list[int]:
    processes = [reward.process._process for reward in rewards._rewards]
    return [process.pid for process in processes if process is not None]


def test_rewards_are_computed_and_weighted(tmp_path: Path, open_file: Open) -> None:
    (tmp_path / "helper.py").write_text("def score(text, wanted):\n    return float(text == wanted)\n")
    rewards = open_file(
        "import helper\n"
        "def size(completions, prompts, **columns):\n"
        "    return [len(completion) for completion in completions]\n"
        "def tone(prompts, completions, wanted):\n"  # another order, and no **columns
        "    return (helper.score(text, value) for text, value in zip(completions, wanted, strict=True))\n"
        "def columns_are_whole(completions, **columns):\n"
        "    chat = [{'role': 'user', 'content': 'é'}]\n"
        "    expected = {'prompts': [chat, 'q'], 'wanted': ['日本', ''], 'nested': [{'a': [None]}, 1.5]}\n"
        "    return [columns == expected] * 2\n",
        "size",
        "tone",
        "columns_are_whole",
        weights={"size": 0.5, "tone": -2},
    )
    assert rewards.names == ("size", "tone", "columns_are_whole")
    assert rewards.weights == (0.5, -2.0, 1.0)
    columns: dict[str, list[Any]] = {"wanted": ["日本", ""], "nested": [{"a": [None]}, 1.5]}
    table = rewards.compute(["日本", "\ud800\x1b🤷"], [[{"role": "user", "content": "é"}], "q"], columns)
    assert table.values.dtype == table.total.dtype == np.float64
    assert table.values.tolist() == [[2, 3], [1, 0], [1, 1]]
    assert table.total.tolist() == [0.5 * 2 - 2 + 1, 0.5 * 3 + 1]
    assert table.errors == [None, None]
    assert table.num_errors == 0


def test_no_completions_have_no_rewards(open_file: Open) -> None:
    table = open_file("def reward(completions): raise OSError").compute([], [], {"answer": []})
    assert table.values.shape == (1, 0)
    assert table.total.shape == (0,)
    assert table.errors == []


def test_a_function_keeps_its_variables_between_calls_and_may_print(
    open_file: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = open_file(
        "import os, sys\n"
        "num_calls = 0\n"
        "def reward(completions):\n"
        "    global num_calls\n"
        "    num_calls += 1\n"
        "    print('{}' * 100_000)\n"
        "    os.write(2, b'noise')\n"
        "    sys.stdin.read()\n"
        "    os.system('echo noise')\n"
        "    return [num_calls] * len(completions)\n"
    )
    for num_calls in (1, 2, 3):
        assert rewards.compute(["a", "b"], ["p", "p"], {}).total.tolist() == [num_calls, num_calls]
    assert capfd.readouterr() == ("", "")


def test_an_exception_costs_only_its_completion(
    tmp_path: Path, open_file: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = open_file(
        "def reward(completions):\n"
        "    if '\\x1b[31mred\\ud800' in completions:\n"
        "        raise ValueError(completions[-1] + ' red\\nnext line')\n"
        "    return [1 / int(completion) for completion in completions]\n"
    )
    table = rewards.compute(["2", "0", "4", "\x1b[31mred\ud800"], ["p"] * 4, {})
    assert table.values.tolist() == [[0.5, 0, 0.25, 0]]
    assert table.num_errors == 2
    assert table.errors[0] is table.errors[2] is None
    assert table.errors[1] == "reward: ZeroDivisionError: division by zero (line 4)"
    assert table.errors[3] == r"reward: ValueError: \x1b[31mred\ud800 red (line 3)"

    assert next(filter(None, table.first_errors)) == (
        f"--rewards {tmp_path}/rewards.py failed for 2 of 4 completions: ZeroDivisionError: division by zero (line 4)"
    )
    assert capsys.readouterr() == ("", "")  # the ranks print it together


@pytest.mark.parametrize(
    ("returned", "values", "error"),
    [
        ("[1, float('nan'), 3]", [1, 0, 3], "it returned nan"),
        ("[1, float('-inf'), 3]", [1, 0, 3], "it returned -inf"),
        ("[1, 10**400, 3]", [1, 0, 3], "it returned inf"),
        ("[1, -1e31, 3]", [1, 0, 3], "it returned -1e+31, which is too large"),
        ("[1, None, 3]", [1, 0, 3], "it returned NoneType, not a number"),
        ("[1, '2', 3]", [1, 0, 3], "it returned str, not a number"),
        ("[True, 1j, 3]", [1, 0, 3], "it returned complex, not a number"),
        ("[1, 2]", [0, 0, 0], "it returned 2 values for 3 completions"),
        ("[]", [0, 0, 0], "it returned 0 values for 3 completions"),
        ("'abc'", [0, 0, 0], "it returned str, not a list with a number for each completion"),
        ("None", [0, 0, 0], "it returned NoneType, not a list with a number for each completion"),
        ("{0: 1, 1: 1, 2: 1}", [0, 0, 0], "it returned dict, not a list with a number for each completion"),
    ],
)
def test_what_is_no_finite_number_is_a_failure(open_file: Open, returned: str, values: list[float], error: str) -> None:
    rewards = open_file(f"def reward(completions):\n    return {returned}\n")
    table = rewards.compute(["a", "b", "c"], ["p"] * 3, {})
    assert table.values.tolist() == [values]
    assert table.errors[1] == f"reward: {error}"
    assert table.num_errors == (1 if values[2] else 3)


def test_numbers_of_numpy_are_numbers(open_file: Open) -> None:
    rewards = open_file("import numpy\ndef reward(completions):\n    return numpy.float32([0.5, 2])\n")
    assert rewards.compute(["a", "b"], ["p"] * 2, {}).total.tolist() == [0.5, 2]
    rewards = open_file("import numpy\ndef reward(completions):\n    return numpy.array(completions) == 'a'\n")
    assert rewards.compute(["a", "b"], ["p"] * 2, {}).total.tolist() == [1, 0]


@pytest.mark.parametrize(
    "hang",
    [
        "while True: pass",
        "__import__('time').sleep(60)",
        "__import__('re').match('(a+)+b', 'a' * 60)",  # in C, without releasing the interpreter's lock
    ],
)
def test_a_completion_that_hangs_costs_only_its_own_reward(open_file: Open, hang: str) -> None:
    rewards = open_file(
        "def reward(completions):\n"
        "    for completion in completions:\n"
        "        if completion == 'hang':\n"
        f"            {hang}\n"
        "    return [1] * len(completions)\n",
        limits=RewardLimits(call_seconds=1),
    )
    (first_process,) = process_ids(rewards)
    table = rewards.compute(["a", "hang", "b"], ["p"] * 3, {})
    assert table.values.tolist() == [[1, 0, 1]]
    assert table.errors[1] == ("reward: it took longer than 0.333 s for this completion alone; raise --reward_timeout")
    assert not psutil.pid_exists(first_process)
    assert rewards.compute(["a"], ["p"], {}).total.tolist() == [1]


@pytest.mark.parametrize(
    ("on_error", "error", "count"),
    [
        ("zero", None, "3 completions together, not for each alone"),
        ("stop", "slow_together: it took longer than 0.9 s; raise --reward_timeout", "3 of 3 completions"),
    ],
)
def test_a_slow_reward_costs_the_rewards_after_it_nothing(
    tmp_path: Path, open_file: Open, on_error: Literal["zero", "stop"], error: str | None, count: str
) -> None:
    rewards = open_file(
        "import time\n"
        "def slow_together(completions):\n"
        "    if len(completions) > 1:\n"
        "        time.sleep(60)\n"
        "    return [1]\n"
        "def one_fails(completions):\n"
        "    return ['?'] + [2] * (len(completions) - 1)\n",
        "slow_together",
        "one_fails",
        limits=LIMITS,
        on_error=on_error,
    )
    table = rewards.compute(["a", "b", "c"], ["p"] * 3, {})
    assert table.values[1].tolist() == [0, 2, 2]
    assert table.errors[1] == table.errors[2] == error
    assert table.first_errors == [
        f"--rewards {tmp_path}/rewards.py:slow_together failed for {count}: it took longer than 0.9 s; raise "
        "--reward_timeout",
        f"--rewards {tmp_path}/rewards.py:one_fails failed for 1 of 3 completions: it returned str, not a number",
    ]


def test_an_answer_that_has_arrived_is_read_after_its_deadline() -> None:
    run_end, process_end = socket.socketpair()
    receiver = MessageChannel(run_end)
    sender = MessageChannel(process_end)
    deadline = time.monotonic()
    with pytest.raises(TimeoutError):
        receiver.receive(deadline=deadline)
    answer = CallAnswer(None, [0.0], ["x" * 3_000_000])  # more than the socket buffers
    thread = threading.Thread(target=sender.send, args=[answer])
    thread.start()
    assert select.select([run_end], [], [], 10)[0]
    assert json.loads(receiver.receive(deadline=deadline)) == vars(answer)
    thread.join()
    receiver.close()
    sender.close()


@pytest.mark.parametrize(
    "hang",
    [
        "time.sleep(60)",
        "[os.write(fd, bytes(3)) for fd in sockets()]; time.sleep(60)",  # a part of a message
        "open(MARKER, 'w'); os._exit(1)",  # the file is loaded again
        "time.sleep(0.1); raise OSError",  # each completion is sent alone, and answered at once
    ],
)
def test_an_interrupted_call_ends_at_once(tmp_path: Path, open_file: Open, hang: str) -> None:
    rewards = open_file(
        "import os, stat, time\n"
        f"MARKER = {str(tmp_path / 'marker')!r}\n"
        "if os.path.exists(MARKER):\n"
        "    time.sleep(60)\n"
        "def hanging(completions):\n"
        "    if completions[0] != 'quick':\n"
        f"        {hang}\n"
        "    return [1] * len(completions)\n"
        "def quick(completions):\n"
        "    return [1] * len(completions)\n" + SOCKETS,
        "hanging",
        "quick",
    )
    started = time.monotonic()
    table = rewards.compute(["a"] * 1000, ["p"] * 1000, {}, lambda: time.monotonic() > started + 1)
    assert time.monotonic() - started < 30
    assert table.is_interrupted
    assert table.num_errors == 0
    assert process_ids(rewards) == []
    (tmp_path / "marker").unlink(missing_ok=True)
    assert rewards.compute(["quick"], ["p"], {}).total.tolist() == [2]


def test_an_interrupted_call_ends_at_once_before_its_process_has_read_it(open_file: Open) -> None:
    rewards = open_file("def reward(completions):\n    return [1]\n")
    (process_id,) = process_ids(rewards)
    os.kill(process_id, signal.SIGSTOP)
    started = time.monotonic()
    text = "x" * 3_000_000  # more than the socket buffers
    table = rewards.compute([text], ["p"], {}, lambda: time.monotonic() > started + 0.5)
    assert time.monotonic() - started < 30
    assert table.is_interrupted
    assert not psutil.pid_exists(process_id)


def test_calls_of_completions_alone_end_after_a_time(open_file: Open) -> None:
    rewards = open_file(
        "import time\ndef reward(completions):\n    time.sleep(60)\n",
        limits=RewardLimits(call_seconds=0.3, retry_seconds=1.2),
    )
    started = time.monotonic()
    table = rewards.compute(["a"] * 1000, ["p"] * 1000, {})
    # the call, the calls of single completions, and the last process
    assert time.monotonic() - started < 0.3 + 1.2 + 10
    assert table.num_errors == 1000
    assert "it was not called, because earlier completions took too long" in str(table.errors[-1])


def test_memory_over_the_limit_costs_only_its_completion(open_file: Open) -> None:
    rewards = open_file(
        "def reward(completions):\n    return [len(bytearray(int(completion))) for completion in completions]\n",
        limits=RewardLimits(call_seconds=60, memory_bytes=1 << 30),
    )
    table = rewards.compute(["10", str(1 << 31), "20"], ["p"] * 3, {})
    assert table.total.tolist() == [10, 0, 20]
    assert table.errors[1] == "reward: out of memory; raise --reward_memory_gb"


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("os._exit(3)", "its process ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "its process was killed by SIGKILL, as when memory runs out"),
        ("os.abort()", "its process was killed by SIGABRT, as when memory runs out"),
        ("os.kill(os.getpid(), 40)", "its process was killed by signal 40, as when memory runs out"),
        ("sys.exit(3)", "SystemExit: 3 (line 5)"),
        ("os.closerange(3, 4096); time.sleep(60)", "its process closed the connection to the run"),
        (
            "[os.write(fd, b'A' * 99) for fd in sockets()]; time.sleep(60)",
            "its process closed the connection to the run",
        ),
    ],
)
def test_a_process_that_ends_costs_only_its_completion(
    open_file: Open, monkeypatch: pytest.MonkeyPatch, end: str, error: str
) -> None:
    monkeypatch.setattr("fabric_train.rollouts.reward_processes._EXIT_SECONDS", 0.5)
    rewards = open_file(
        "import os, stat, sys, time\n"
        "def reward(completions):\n"
        "    for completion in completions:\n"
        "        if completion == 'end':\n"
        f"            {end}\n"
        "    return [1] * len(completions)\n" + SOCKETS
    )
    table = rewards.compute(["a", "end", "b"], ["p"] * 3, {})
    assert table.total.tolist() == [1, 0, 1]
    assert table.errors[1] == f"reward: {error}"


def test_a_process_that_was_killed_between_calls_is_started_again(open_file: Open) -> None:
    rewards = open_file("def reward(completions):\n    return [1] * len(completions)\n")
    (process_id,) = process_ids(rewards)
    kill(process_id)
    table = rewards.compute(["a"], ["p"], {})
    assert table.errors == [None]
    assert table.total.tolist() == [1]
    assert process_ids(rewards) != [process_id]


def test_a_process_that_starts_again_has_the_code_of_the_start_of_the_run(tmp_path: Path, open_file: Open) -> None:
    rewards = open_file("def reward(completions):\n    return [1] * len(completions)\n")
    (tmp_path / "rewards.py").write_text("def reward(completions):\n    return [2] * len(completions)\n")
    for process_id in process_ids(rewards):
        kill(process_id)
    assert rewards.compute(["a"], ["p"], {}).total.tolist() == [1]


def test_a_process_gets_no_secrets_and_imports_no_torch(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("MY_VARIABLE", "kept")
    rewards = open_file(
        "import os, sys\n"
        "def reward(completions):\n"
        "    names = ('HF_TOKEN', 'WANDB_API_KEY', 'MY_VARIABLE')\n"
        "    return [name in os.environ for name in names] + ['torch' in sys.modules]\n"
    )
    assert rewards.compute(["a"] * 4, ["p"] * 4, {}).total.tolist() == [0, 0, 1, 0]


def test_a_process_that_cannot_start_again_is_a_failure(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = open_file("def reward(completions):\n    return [1] * len(completions)\n")
    (process_id,) = process_ids(rewards)
    kill(process_id)
    monkeypatch.setattr(sys, "executable", "/no/python")
    table = rewards.compute(["a", "b"], ["p"] * 2, {})
    assert table.errors == ["reward: its process could not be started again: No such file or directory: /no/python"] * 2
    monkeypatch.undo()
    assert rewards.compute(["a"], ["p"], {}).errors == [None]


def test_the_name_of_a_reward_is_that_of_its_function() -> None:
    assert name_rewards(["length", "a.py", "~/b.py:polite", "c.py:"]) == ("length", "reward", "polite", "")
    assert faults_of("c.py:")[0].startswith("--rewards c.py:: '' cannot be the name of a reward")


def test_a_file_name_with_control_characters_makes_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a\nb\x1b.py"
    file.write_text("def reward(completions):\n    return None\n")
    rewards = open_rewards([str(file)], None, None, "stop", PATIENT)
    table = rewards.compute(["a"], ["p"], {})
    rewards.close()
    assert next(filter(None, table.first_errors)) == (
        f"--rewards {tmp_path}/a b\\x1b.py failed for 1 of 1 completions: it returned NoneType, not a list with a "
        "number for each completion"
    )


def test_closing_ends_the_processes_and_what_they_started(tmp_path: Path, open_file: Open) -> None:
    pid_file = tmp_path / "pid"
    rewards = open_file(
        "import pathlib, subprocess\n"
        "def reward(completions):\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(subprocess.Popen(['sleep', '60']).pid))\n"
        "    return [1] * len(completions)\n"
    )
    rewards.compute(["a"], ["p"], {})
    (process_id,) = process_ids(rewards)
    rewards.close()
    rewards.close()  # does nothing
    assert not psutil.pid_exists(process_id)
    wait_for_end(int(pid_file.read_text()))


def test_a_killed_run_leaves_no_process_that_hangs(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    pid_file = tmp_path / "pid"
    file.write_text(
        "import os, re\n"
        "def reward(completions):\n"
        f"    os.rename(open_pid(), {str(pid_file)!r})\n"
        "    re.match('(a+)+b', 'a' * 60)\n"
        "def open_pid():\n"
        f"    with open({str(tmp_path / 'unfinished')!r}, 'w') as opened:\n"
        "        opened.write(str(os.getpid()))\n"
        "    return opened.name\n"
    )
    program = (
        "from fabric_train.rollouts.reward_processes import RewardLimits\n"
        "from fabric_train.rollouts.rewards import open_rewards\n"
        f"rewards = open_rewards([{str(file)!r}], None, None, 'zero', RewardLimits(call_seconds=60))\n"
        "rewards.compute(['a'], ['p'], {})\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as run:
        while not pid_file.exists():
            assert run.poll() is None
            time.sleep(0.02)
        run.kill()
    wait_for_end(int(pid_file.read_text()))


def kill(process_id: int) -> None:
    """Kill a process and wait until it has ended."""
    os.kill(process_id, signal.SIGKILL)
    wait_for_end(process_id)


def wait_for_end(process_id: int) -> None:
    """Wait until a process has ended; its parent need not have noticed."""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(process_id) and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_wrong_rewards_are_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("value = 3\ndef polite(completions, **columns):\n    return []\ndef bare():\n    return []\n")
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    syntax = tmp_path / "syntax.py"
    syntax.write_text("def reward(:\n")

    assert faults_of() == (
        "--rewards: give at least one reward: exact_answer, math, regex, json_schema, language, length, or "
        "FILE.py:NAME",
    )
    assert (
        "--rewards exact_anwser: no built-in reward; did you mean exact_answer?; give exact_answer, math"
        in (faults_of("exact_anwser")[0])
    )
    assert faults_of(f"{tmp_path}/no.py", "nonsense")[0] == (
        f"--rewards {tmp_path}/no.py: no file {tmp_path}/no.py; give the path of a Python file"
    )
    assert faults_of(f"{file}:error")[0].startswith(f"--rewards {file}:error: 'error' cannot be the name of a reward")
    assert faults_of(f"{file}:polite", f"{file}:polite") == (
        f"--rewards {file}:polite: {file}:polite is called polite too; give functions with different names",
    )
    faults = faults_of(str(file), f"{file}:value", f"{file}:bare", str(broken).replace(".py", ".py:x"))
    assert faults == (
        f"--rewards {file}: no function reward; it defines polite, bare; correct it",
        f"--rewards {file}:value: value is int, not a function; correct it",
        f"--rewards {file}:bare: it has no parameter completions; define it as def reward(completions, prompts, "
        "**columns); correct it",
        f"--rewards {broken}:x: ModuleNotFoundError: No module named 'no_such_module' (line 1); correct it",
    )
    assert faults_of(str(syntax))[0].startswith(f"--rewards {syntax}: SyntaxError: ")


def test_wrong_weights_and_settings_are_refused_before_the_run() -> None:
    bounds = {"length": {"max_characters": 3}}
    assert faults_of("length", weights={"lenght": 2}) == (
        "--reward_weights: no reward is called lenght; did you mean length?; --rewards has length",
    )
    assert faults_of("length", weights={"length": float("nan")}) == (
        "--reward_weights: the weight of length is nan; give a finite number",
    )
    for wrong in ("much", True, [1], None):
        assert faults_of("length", weights={"length": wrong}) == (
            f"--reward_weights: the weight of length is {wrong!r}; give a finite number",
        )
    assert "every reward has weight 0" in faults_of("length", weights={"length": 0}, settings=bounds)[0]
    assert faults_of("length", settings={"length": 3}) == (
        "--reward_settings: length: expected names with values, such as {max_characters: 400}, got 3",
    )
    assert faults_of("length", settings={"regex": {"pattern": "a"}}) == (
        "--reward_settings: no reward is called regex; --rewards has length",
    )
    assert faults_of("length", settings={"length": {"completions": 3}})[0].startswith(
        "--reward_settings: length: no setting completions; it has max_characters"
    )
    assert faults_of("length", "regex", settings={"length": {"maximum": 3}, "regex": {"pattern": "("}}) == (
        "--reward_settings: length: no setting maximum; it has max_characters, min_characters; correct the setting",
        "--reward_settings: regex: the pattern '(' is no regular expression: missing ), unterminated subpattern at "
        "position 0; correct the setting",
    )


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert faults_of("math") == ("--rewards math needs math-verify; run pip install 'fabric-train[rl]'",)


def test_rewards_say_which_columns_they_need(open_file: Open) -> None:
    rewards = open_file(
        "def polite(completions, prompts, tone, place='here', **columns):\n    return [tone[0]] * len(completions)\n",
        "polite",
    )
    rewards.check_columns({"math": ["tone", "answer"]}, "--prompts")
    with pytest.raises(InputError) as raised:
        rewards.check_columns({"math": ["tone"], "chat": ["tones", "prompts"]}, "--prompts")
    assert raised.value.faults == (
        "--prompts: a column of chat is called prompts, as an argument of rewards; rename the column",
        f"--rewards {rewards._rewards[0].spec} needs a column tone of every prompt in --prompts; chat has prompts, "
        "tones; did you mean tones?; add the column, or give one value for all prompts: "
        '--reward_settings \'{"polite": {"tone": …}}\'',
    )


def test_a_setting_is_a_column_with_one_value(open_file: Open) -> None:
    rewards = open_file(
        "def polite(completions, tone):\n    return [tone == ['kind', 'kind']] * len(completions)\n",
        "polite",
        settings={"polite": {"tone": "kind"}},
    )
    rewards.check_columns({"math": []}, "--prompts")
    assert rewards.compute(["a", "b"], ["p"] * 2, {"tone": ["x", "y"]}).total.tolist() == [1, 1]


def test_builtin_rewards_run_in_processes_too() -> None:
    limits = RewardLimits(call_seconds=1)
    rewards = open_rewards(["exact_answer", "regex"], None, {"regex": {"pattern": "^(a+)+b"}}, "zero", limits)
    try:
        assert rewards.sources == {"exact_answer": None, "regex": None}
        rewards.check_columns({"math": ["answer"]}, "--prompts")
        table = rewards.compute(["aab", "a" * 60], ["p"] * 2, {"answer": ["aab", "b"]})
        assert table.values.tolist() == [[1, 0], [1, 0]]
        assert "regex: it took longer than 0.5 s" in str(table.errors[1])
    finally:
        rewards.close()
