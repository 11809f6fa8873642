"""A chat template comes from strangers: whatever it does is refused in one line and within seconds."""

import itertools
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError
from fabric_train.tokenization.chats import chat_template, limits
from fabric_train.tokenization.chats.chat_template import LLAMA3_TEMPLATE, ChatTemplate, read_chosen_template
from fabric_train.tokenization.chats.limits import OutOfTimeError, find_fault_in_child, limited_time
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer

FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)
DOUBLING = "{% set n = namespace(text='x') %}{% for i in range(50) %}{% set n.text = n.text ~ n.text %}{% endfor %}"
FAULTY = {
    "division by zero": ("{{1/0}}", "fails with ZeroDivisionError: division by zero"),
    "a recursive macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails with RecursionError: "),
    "a large range": ("{% for i in range(10**9) %}{% endfor %}", "fails with OverflowError: Range too big."),
    "loops for ever": (FOR_EVER, "is still running after "),
    "a number of a billion digits": ("{{ 9 ** (9 ** 9) }}", "is still running after "),
    "wrong syntax": ("{% for %}", "rejects it: Expected an expression"),
    "loops in loops": ("{% for a in messages %}" * 30 + "{% endfor %}" * 30, "fails with SyntaxError: "),
    "deep brackets": ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "fails with RecursionError: "),
    "more memory than there is": ("{{ 'x' * 10**15 }}", "needs more than 256 MiB of memory"),
    "much memory at once": ("{{ 'x' * 10**10 }}", "needs more than 256 MiB of memory"),
    "memory by doubling": (DOUBLING, "needs more than 256 MiB of memory"),
    "a long text": (
        "{% for i in [1, 2] %}{{ 'x' * i * 10**7 }}{% endfor %}",
        "expands it to 30,000,000 characters, far",
    ),
    "its own refusal": ("{{ raise_exception('never\n') }}", "rejects it: never"),
    "another file": ("{% include '/etc/passwd' %}", "fails with TypeError: "),
    "Python's objects": ("{{ ''.__class__.__mro__ }}", "rejects it: "),
}


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MEMORY", 1 << 28)


@pytest.fixture(scope="module")
def tokenizer(chatml_dir: Path) -> CorpusTokenizer:
    return load_tokenizer(str(chatml_dir))


@pytest.mark.parametrize("name", FAULTY)
def test_a_template_that_fails_or_never_ends_is_refused(
    tmp_path: Path, tokenizer: CorpusTokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, reason = FAULTY[name]
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2 if reason.startswith("is still running") else 60.0)
    file = tmp_path / "template.jinja"
    file.write_text(source)
    with pytest.raises(InputError) as error:
        read_chosen_template(str(file), tokenizer)
    (fault,) = error.value.faults
    assert fault.startswith(f"--chat_template {file}: the chat template {reason}")
    assert "\n" not in fault


def test_a_file_that_is_no_template_is_refused(tmp_path: Path, tokenizer: CorpusTokenizer) -> None:
    latin = tmp_path / "latin-1.jinja"
    latin.write_bytes("{{ 'señor' }}".encode("latin-1"))
    (tmp_path / "empty.jinja").write_text(" \n")
    (tmp_path / "link.jinja").symlink_to("nowhere")
    expected = {
        tmp_path / "nowhere.jinja": "no such file; give a Jinja template",
        tmp_path / "link.jinja": "no such file; give a Jinja template",
        tmp_path: "not a file; give a Jinja template",
        latin: "byte 6 is not UTF-8 (0xf1); save the file as UTF-8",
        tmp_path / "empty.jinja": "the file is empty; give a Jinja template",
    }
    for file, reason in expected.items():
        with pytest.raises(InputError) as error:
            read_chosen_template(str(file), tokenizer)
        assert error.value.faults[0].removeprefix("--chat_template ") == f"{file}: {reason}"


def test_a_template_that_ends_only_for_some_chats_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% if messages[0].content == 'loop' %}" + FOR_EVER + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, {}, (), ())
    assert template.render([{"role": "user", "content": "Hello"}]) == "Hello"
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    with pytest.raises(BadRowError, match=r"still running after 0\.2 s"):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render([{"role": "user", "content": "Hello"}]) == "Hello"


def test_a_template_that_takes_memory_only_for_some_chats_is_a_bad_row() -> None:
    source = "{% if messages[0].content == 'double' %}" + DOUBLING + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, {}, (), ())
    before = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRowError, match="needs more than 256 MiB of memory"):
        template.render([{"role": "user", "content": "double"}])
    assert template.render([{"role": "user", "content": "Hello"}]) == "Hello"
    assert resource.getrlimit(resource.RLIMIT_AS) == before[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before[1] + (300 << 10)


def test_a_template_is_tried_in_a_process_of_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(attempt: Callable[[], object]) -> str | None:
        trials.append(os.getpid())
        return find_fault_in_child(attempt)

    trials: list[int] = []
    monkeypatch.setattr(chat_template, "find_fault_in_child", count)
    for _ in range(2):
        ChatTemplate("{{ messages[0].content }} once", {}, (), ())
    assert len(trials) == 1
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRowError, match="needs more than 256 MiB of memory"):
        ChatTemplate(DOUBLING, {}, (), ())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < size + (100 << 10)


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_LONGEST_TRIAL", 0.2)
    assert (
        find_fault_in_child(lambda: time.sleep(60))
        == "the chat template was stopped because it does not end, or crashes"
    )
    # a child that ends is not killed, however long it takes to start on a machine with other work
    monkeypatch.setattr(limits, "_LONGEST_TRIAL", 60)
    assert find_fault_in_child(lambda: None) is None


def test_the_time_limit_leaves_no_timer_and_no_handler() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(OutOfTimeError), limited_time(0.05):
        for _ in itertools.count():
            pass
    with limited_time(60):
        pass
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is before


PIECES = """
{{ }} {% %} {# #} {%- -%} ' " ( ) [ ] | . , ~ : = +1 *2 /0 %0 **9 //0 -'a' ==1 > not -1 0 1.5 none true x \\ é 😀 \0
for+m+in+messages endfor if+m elif else endif set+x= macro+f(x) endmacro f(x) call+f() endcall filter+upper block+b
endblock generation endgeneration break continue include+'x' import+'x'+as+y extends+'x' raw endraw do+x with+x=1
messages m.content m['role'] bos_token tools loop.index self caller() namespace(a=1) dict(a=1) range(9) cycler(1,2)
tojson trim length upper first join attr('x') map list int sort batch(2) groupby('role') format(1) sum random
raise_exception('x') strftime_now('%Y') in+x is+none is+defined
"""
pieces = st.sampled_from([piece.replace("+", " ") for piece in PIECES.split()] + [" ", "\n", "\ud7ff"])
templates = st.binary(max_size=60) | st.lists(pieces, max_size=25).map(
    lambda parts: "".join(parts).encode(errors="surrogatepass")
)


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=templates, whole=st.booleans())
def test_any_file_is_a_template_or_is_refused_in_one_line(
    tmp_path: Path, tokenizer: CorpusTokenizer, monkeypatch: pytest.MonkeyPatch, content: bytes, whole: bool
) -> None:
    monkeypatch.setattr(chat_template, "find_fault_in_child", lambda attempt: None)  # hundreds of forks take long
    file = tmp_path / "template.jinja"
    file.write_bytes(content if whole else LLAMA3_TEMPLATE.encode() + content)
    faults: tuple[str, ...] = ()
    try:
        read_chosen_template(str(file), tokenizer)
    except InputError as error:
        faults = error.faults
    assert len(faults) <= 1
    assert "\n" not in "".join(faults)
