"""Compile the pretended devices once for this machine, this torch and these sources."""

import fcntl
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent
_CACHE = _SOURCES.parents[2] / ".cache" / "pretended_cuda"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")
_SHOWN_CHARACTERS = 2000


class BuildError(RuntimeError):
    """The devices cannot be built here; the message says why."""


@cache
def build() -> Path:
    """Return the library of the devices; the first call on a machine compiles it, which takes about a minute.

    Raises:
        BuildError: there is no C++ compiler, or this version of torch has other internals.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler: neither g++ nor clang++ is installed")
    torch = _torch_folder()
    if "cuda: Optional[str] = None" not in (torch / "version.py").read_text():
        raise BuildError("this torch is built with CUDA, whose kernels cannot be replaced; install torch's CPU build")
    sources = sorted(_SOURCES.glob("*.cpp"))
    library = _CACHE / _key(compiler, torch, [*sources, *_SOURCES.glob("*.h")]) / "devices.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes at once: the second waits and finds the library
        if not library.exists():
            _compile(compiler, torch, sources, library)
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _key(compiler: str, torch: Path, files: list[Path]) -> str:
    """Return a name for all that decides what the library is."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(" ".join((version, *_FLAGS, platform.node(), str(torch))).encode())
    for file in sorted([*files, torch / "version.py"]):
        digest.update(file.read_bytes())
    return f"{sysconfig.get_platform()}-{digest.hexdigest()[:16]}"


def _compile(compiler: str, torch: Path, sources: list[Path], library: Path) -> None:
    """Compile all sources at once: reading torch's headers takes longer than the rest."""
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    unfinished = library.with_suffix(".new")
    built = subprocess.run(
        [compiler, "-shared", *_FLAGS, *includes, "-x", "c++", "-", *libraries, "-o", str(unfinished)],
        input="".join(f'#include "{source}"\n' for source in sources),
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise BuildError(f"the devices do not compile with this torch: {built.stderr[:_SHOWN_CHARACTERS]}")
    unfinished.replace(library)
