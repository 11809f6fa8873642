"""Start, watch and end one ``vllm serve`` process, which runs in a Python environment of its own.

vLLM needs other versions of torch and transformers than training, so it is never imported here.
"""

import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError, RunError, describe_os_error
from fabric_train.rollouts import vllm_supervisor
from fabric_train.rollouts.vllm_client import ServerFailedError, VllmClient
from fabric_train.rollouts.vllm_end import ON_CPU, MemoryAdvice, describe_end, describe_lack_of_memory

_OLDEST = (0, 32)
"""The oldest version with the endpoints that ``vllm_sampler`` uses."""
_FIND_VERSION = (
    "import importlib.metadata as m, importlib.util as u\n"
    "names = m.packages_distributions().get('vllm', []) if u.find_spec('vllm') else []\n"
    "print(m.version(names[0]) if names else '')"
)
_LAUNCHER_VARIABLES = re.compile(
    "RANK|LOCAL_RANK|GROUP_RANK|ROLE_.*|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|"
    "LT_.*|PL_.*|OMP_NUM_THREADS|PYTHON.*|VIRTUAL_ENV"
)
"""Variables of this run's processes that vLLM or its Python would take for its own."""
_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 10.0
_STOP_SECONDS = 20.0

_progress = logging.getLogger("fabric_train.progress")


@dataclass(frozen=True)
class ServerSettings:
    """How to start a vLLM server."""

    python: Path
    """Python of the environment with vLLM."""
    log: Path
    """The file that the server's output is appended to."""
    dtype: str
    """The dtype that vLLM computes in: float32, bfloat16 or float16."""
    max_length: int
    """The largest number of tokens of a prompt and its completion."""
    weights_root: Path | None = None
    """The folder of all versions of the weights, which is removed if this process is killed; None keeps it."""
    memory_advice: MemoryAdvice = ON_CPU
    """What to change if the server lacks memory."""
    start_seconds: float = 1000.0
    """How long the server may take to start: less than the ranks wait for each other, see ``--rank_timeout``."""
    devices: tuple[str, ...] | None = None
    """The GPUs of the server, as in CUDA_VISIBLE_DEVICES; None: those that this process sees."""
    num_replicas: int = 1
    """The number of GPUs, each of which has a copy of the model."""
    memory_share: float | None = None
    """The share of a GPU's memory that the server may use; None leaves it to vLLM."""
    compiles: bool = True
    """Whether the server compiles the model, which takes minutes on a CPU."""
    sleeps: bool = False
    """Whether the server must be able to free the GPUs while the model trains."""


class VllmServer:
    """A server process. One rank starts it, in its main thread: the server ends when that thread ends."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._is_asleep = False
        self._log_start = 0  # of the current process, in bytes
        # ``start`` creates it. Linux limits the path of a socket to 107 bytes, so it is not in the folder of the run
        self._socket_dir = Path(tempfile.gettempdir()) / f"fabric-train-vllm-{secrets.token_hex(8)}"
        self.client = VllmClient(self._socket_dir / "socket")

    @property
    def is_started(self) -> bool:
        """Whether the process has been started and not been stopped; it may have ended on its own."""
        return self._process is not None

    @property
    def has_answered(self) -> bool:
        """Whether the process has been started, has loaded its first weights, and has not been stopped."""
        return self._has_answered

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, model_dir: Path) -> None:
        """Start the server, which waits until the folder with its first weights is there.

        So its supervisor, which removes the folder if this process is killed, runs before the weights are written.

        Raises:
            RunError: it cannot be started.
        """
        self.stop()
        try:
            self._process = self._start_process(model_dir)
        except OSError as error:
            raise RunError(f"vLLM could not be started: {describe_os_error(error)}") from error

    def wait_until_it_answers(self) -> None:
        """Wait until the started server has loaded its weights and answers.

        Raises:
            RunError: it has ended, or does not answer in time.
        """
        start_seconds = self._settings.start_seconds
        started = time.monotonic()
        shown = started
        while not self.client.is_healthy():
            now = time.monotonic()
            if not self.is_running:
                raise RunError(f"vLLM ended while it was starting: {self.describe_end()}")
            if now - started > start_seconds:
                reason = self.describe_end()
                self.stop()
                raise RunError(f"vLLM did not start within {start_seconds:g} s: {reason}")
            if now - shown > _PROGRESS_SECONDS:
                shown = now
                _progress.info("starting vLLM, %.0f s", now - started)
            time.sleep(_POLL_SECONDS)
        self._has_answered = True

    def _start_process(self, model_dir: Path) -> "subprocess.Popen[bytes]":
        """Start the server's supervisor; an OSError if the folder of its socket or of its log cannot be created."""
        log_path = self._settings.log
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._socket_dir.mkdir(mode=0o700)
        supervisor = [sys.executable, "-I", vllm_supervisor.__file__, str(os.getpid()), str(model_dir)]
        supervisor.append(str(self._socket_dir))
        if self._settings.weights_root is not None:
            supervisor.append(str(self._settings.weights_root))
        supervisor.append("--")
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                supervisor + self._command(model_dir),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self._socket_dir,
                start_new_session=True,  # Ctrl-C reaches only the run, which ends the server
            )

    def reload(self, model_dir: Path) -> None:
        """Load other weights of the same model from a folder, which is not needed afterwards.

        Raises:
            ServerFailedError: the server has failed.
        """
        content = {"method": "reload_weights", "kwargs": {"weights_path": str(model_dir)}}
        self.client.post("/collective_rpc", content)
        # its keys and values are those of the previous weights
        if self.client.post("/reset_prefix_cache") != {"success": True}:
            raise ServerFailedError(
                "vLLM did not empty its prefix cache: completions would mix two versions of the weights"
            )

    def sleep(self) -> None:
        """Free the GPUs, if they are the run's own. The weights stay in host memory: at level 2 they would be lost."""
        if self._settings.sleeps and not self._is_asleep:
            self.client.post("/sleep?level=1")
            self._is_asleep = True

    def wake(self) -> None:
        """End the sleep. The prefix cache is empty: vLLM empties it when it begins to sleep."""
        if self._is_asleep:
            self.client.post("/wake_up")
            self._is_asleep = False

    def describe_end(self) -> str:
        """Return why the server has ended, or what it has logged last, and where the log is."""
        text = ""
        with suppress(OSError), self._settings.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        exit_code = self._process.poll() if self._process is not None else None
        reason = describe_end(exit_code, text, self._settings.memory_advice)
        return f"{reason} (log: {self._settings.log})"

    def describe_lack_of_memory(self, message: str) -> str:
        """Return the message of a running server that lacks memory, with what to change."""
        return describe_lack_of_memory(message, self._settings.memory_advice)

    def has_ended(self, seconds: float) -> bool:
        """Return whether the started process ends within so many seconds."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_running

    def terminate(self) -> None:
        """Begin to end the server; any thread may call this, and open requests fail."""
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """End the server and all of its processes, if it runs, and remove the folder of its socket."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        self._has_answered = False
        self._is_asleep = False
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _command(self, model_dir: Path) -> list[str]:
        settings = self._settings
        command = [
            *(str(settings.python), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--uds", str(self.client.path)),
            *("--dtype", settings.dtype),
            *("--max-model-len", str(settings.max_length)),
            "--tokens-only",
            # the log-probabilities of the distribution that tokens are drawn from, so after the temperature
            *("--logprobs-mode", "processed_logprobs"),
            # not the model's own top_p and top_k
            *("--generation-config", "vllm"),
            "--disable-uvicorn-access-log",
        ]
        if not settings.compiles:
            command.append("--enforce-eager")
        if settings.num_replicas > 1:
            command += ["--data-parallel-size", str(settings.num_replicas)]
        if settings.memory_share is not None:
            command += ["--gpu-memory-utilization", str(settings.memory_share)]
        if settings.sleeps:
            command.append("--enable-sleep-mode")
        return command

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
        binaries = str(self._settings.python.absolute().parent)  # vLLM starts compilers of its environment
        environment["PATH"] = os.pathsep.join([binaries, environment.get("PATH", os.defpath)])
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # for the endpoints that load other weights
        environment["VLLM_RPC_BASE_PATH"] = str(self._socket_dir)  # vLLM leaves the sockets of its own processes
        environment["VLLM_NO_USAGE_STATS"] = "1"
        environment["HF_HUB_OFFLINE"] = "1"
        environment["PYTHONUNBUFFERED"] = "1"
        if self._settings.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._settings.devices)
        return environment


def vllm_python_path(python: str) -> Path:
    """Return the path of ``--vllm_python`` for a process that starts in any folder.

    A link is kept: it belongs to the environment, and its target, the Python that created the environment, does not.
    """
    return Path(python).expanduser().absolute()


def check_environment(python: Path) -> str:
    """Return the version of vLLM that a Python has.

    Raises:
        InputError: there is no such Python, or it has no vLLM, or an old one.
    """
    oldest = ".".join(map(str, _OLDEST))
    how_to = "make install-vllm creates an environment with vLLM, see docs/rl.md"
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InputError(f"--vllm_python {python}: there is no such program; {how_to}")
    try:
        ended = subprocess.run(
            [str(python), "-I", "-c", _FIND_VERSION], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        raise InputError(f"--vllm_python {python} is no Python; give the Python of an environment with vLLM") from None
    version = ended.stdout.strip()
    if not version:
        raise InputError(f"--vllm_python {python}: this environment has no vLLM; {how_to}")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise InputError(f"--vllm_python {python} has vLLM {version}, which is too old; install {oldest} or newer")
    return version
