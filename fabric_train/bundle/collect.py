"""Collect model, adapter, token datasets, wheels, source and a configuration in a folder that is complete or absent."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fabric_train.bundle.recipe import (
    ADAPTER,
    CONFIGURATION,
    MODEL,
    Recipe,
    Target,
    download_wheels,
    estimated_bytes,
    installed_bytes,
)
from fabric_train.checkpoint import read_trainer_json
from fabric_train.checkpoint.adapter_folder import (
    CONFIG,
    WEIGHTS,
    check_files,
    find_base,
    fingerprint,
    is_adapter,
    read_base_name,
)
from fabric_train.checkpoint.manager import free_bytes
from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, print_errors
from fabric_train.cli.output import open_console
from fabric_train.data.token_dataset import open_dataset
from fabric_train.evaluation.arguments import files_of, is_task_file, read_tasks
from fabric_train.export.hub import download, text_files
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder, nearest_existing
from fabric_train.files.regular_file import check_links, read_json
from fabric_train.model.hf_model import quiet_transformers, read_shape
from fabric_train.model.weight_files import check_weight_files, open_weights, safetensors_files
from fabric_train.preflight.dataset_check import check_dataset
from fabric_train.tokenization.packing.parts import is_of_parts, open_parts, write_record
from fabric_train.tokenization.reading.listing import sha256
from fabric_train.tokenization.workers import ThrottledLog

_ROOT = Path(__file__).resolve().parents[2]
_INSTALLER = "install.sh"
_CHECKSUMS = "SHA256SUMS"
_PARTS = "parts"  # folder of the parts of a token dataset
_OF_A_RUN = ("trainer.json", "checksums.json", "manifest.json", "stream.json")
_SOURCE = (
    "pyproject.toml", "requirements.txt", "LICENSE", "README.md", ".dockerignore", "arguments.py",
    "tokenize_dataset.py", "convert_to_hf.py", "evaluate.py", "generate.py", "download_model.py",
    "fabric_train", "configs", "docker", "launch", "docs",
)  # fmt: skip
"""The parts of this project that are copied if they are there: an image has no docs, docker and launch."""


@dataclass(frozen=True)
class BundledAdapter:
    """An adapter with which the run of a bundle begins.

    ``base`` is the place of the model that it was trained on, ``identity`` the fingerprint of its weights, None if it
    is not known. ``base_weights`` is nf4 if these were in 4 bits.
    """

    folder: Path
    base: str
    identity: str | None = None
    base_weights: str | None = None

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield the files of the adapter and of its tokenizer, and their places in the bundle."""
        yield self.folder / WEIGHTS, f"{ADAPTER}/{WEIGHTS}"
        saved = self.folder / "tokenizer"
        tokenizer = saved if saved.is_dir() else self.folder
        for name in text_files(path.name for path in tokenizer.iterdir() if path.is_file()):
            if name != CONFIG:
                yield tokenizer / name, f"{ADAPTER}/{name}"

    def finish(self, bundle: Path) -> None:
        """Write the configuration, which names the bundle's model, and check that this is the adapter's base."""
        config = read_json(self.folder / CONFIG, dict, "save it again") | {"base_model_name_or_path": MODEL}
        config.pop("revision", None)
        (bundle / ADAPTER / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.identity and fingerprint(open_weights(bundle / MODEL)) != self.identity:
            raise InputError(f"--model {self.folder}: {self.base} has other weights now than those it was trained on")


@dataclass(frozen=True)
class Request:
    """What to collect, and the machine that it is for."""

    model: str  # a hub name, a Hugging Face folder, or a full checkpoint
    data: tuple[Path, ...]  # token datasets
    target: Target
    recipe: Recipe  # arguments of a run; the bundle's replace model, data and output
    tasks: str | None = None  # file of ``evaluate.py --tasks``
    adapter: BundledAdapter | None = None  # of the model

    @property
    def of_adapter(self) -> dict[str, str]:
        """The arguments of a run that begins with the adapter; the recipe may have another ``base_weights``."""
        if self.adapter is None:
            return {}
        return {"init_adapter": ADAPTER, **({"base_weights": kind} if (kind := self.adapter.base_weights) else {})}

    @property
    def extras(self) -> list[str]:
        """The extras of this program that the run and what follows it need."""
        given = {**self.of_adapter, **self.recipe.given}
        trains_adapter = any(given.get(name) is not None for name in ("adapter", "lora_rank", "init_adapter"))
        needed = {"eval": self.tasks, "peft": trains_adapter, "bitsandbytes": given.get("base_weights")}
        return [name for name, is_needed in needed.items() if is_needed]

    @property
    def places(self) -> list[str]:  # of the token datasets in the bundle
        return [f"data/{folder.absolute().name}" for folder in self.data]


@dataclass(frozen=True)
class Part:
    name: str
    description: str
    num_files: int
    num_bytes: int


def find_adapter(model: str, recipe: Recipe) -> BundledAdapter | None:
    """Return the adapter that ``--model`` is, or that the recipe begins with on that model; None without one."""
    folder = Path(model)
    if not is_adapter(folder):
        begins_with = recipe.given.get("init_adapter")
        if begins_with is None:
            return None
        check_files(Path(begins_with))
        return BundledAdapter(Path(begins_with), model)
    if recipe.given.get("init_adapter"):
        raise InputError(f"--recipe {recipe.path}: init_adapter, and --model {model} is an adapter too; leave one out")
    check_files(folder)
    if not (folder / "trainer.json").is_file():
        return BundledAdapter(folder, read_base_name(folder))
    given = read_trainer_json(folder).arguments
    base = find_base(given["model_name"], folder)
    return BundledAdapter(folder, base.place, base.fingerprint, given.get("base_weights"))


def collect(request: Request, output: Path) -> tuple[list[Part], list[str], str]:
    """Write the bundle, or nothing; return its parts, notes, and the SHA-256 of install.sh, which checks the rest."""
    check_not_taken(output)
    if not (_ROOT / "pyproject.toml").is_file():
        raise InputError(f"{_ROOT} has no pyproject.toml: bundles are made from this project's own folder")
    with with_own_names():
        notes = _check(request, output)
    is_local = Path(request.model).is_dir()
    model = list(_model_files(Path(request.model))) if is_local else []
    data: list[tuple[Path, str]] = []
    for source, place in zip(request.data, request.places, strict=True):
        data += _files_of_data(source, Path(place))
    tasks = list(files_of_tasks(request.tasks)) if request.tasks else []
    needed = sum(source.stat().st_size for source, _ in (*model, *data)) + estimated_bytes(request.target)
    parent = nearest_existing(output.absolute())
    if (free := free_bytes(parent)) < needed:
        raise InputError(
            f"--output {output}: the bundle takes about {show_size(needed)}, and {parent} has {show_size(free)} left; "
            "choose a folder on another disk"
        )
    with complete_folder(output) as folder:
        print_errors(f"[1/5] model {request.model}")
        if is_local:
            _copy(model, folder)
        else:
            with with_own_names():
                download(request.model, folder / "model")
        if request.adapter:
            _copy(list(request.adapter.files()), folder)
            request.adapter.finish(folder)
        print_errors("[2/5] token datasets and source")
        tops = [(_ROOT / name, Path("source", name)) for name in _SOURCE]
        program = [file for top, place in tops for file in _files_in(top, place)]
        _copy([*data, *program, *tasks], folder)
        for source, place in zip(request.data, request.places, strict=True):
            if is_of_parts(source):
                write_record(folder / place, open_parts(source).moved_to(_PARTS))
        request.recipe.write(request.places, folder, request.of_adapter)
        print_errors(f"[3/5] check a run with {CONFIGURATION} in the bundle")
        _check_inside(request.target, folder)
        print_errors(f"[4/5] wheels for {request.target}")
        with _spinner() as show:
            download_wheels(request.target, _ROOT / "requirements.txt", folder / "wheels", show, request.extras)
        print_errors(f"[5/5] {_CHECKSUMS}")
        num_files = _write_checksums(folder)
        installer = Path(__file__).with_name(_INSTALLER).read_text(encoding="utf-8")
        for name, value in {
            "PYTHON": request.target.python,
            "MACHINE": request.target.machine,
            "SOURCE": f"source[{','.join(request.extras)}]" if request.extras else "source",
            "CHECKSUMS_SHA256": sha256(folder / _CHECKSUMS),
            "NUM_FILES": num_files,
            "INSTALLED_BYTES": installed_bytes(folder / "wheels"),
        }.items():
            installer = installer.replace(f"@{name}@", str(value))
        (folder / _INSTALLER).write_text(installer, encoding="utf-8")
        (folder / _INSTALLER).chmod(0o755)
        parts = _parts(request, folder)
    return parts, notes, hashlib.sha256(installer.encode()).hexdigest()


def _check(request: Request, output: Path) -> list[str]:
    """Check data and model as the run will do; return its notes."""
    if len({folder.absolute().name for folder in request.data}) < len(request.data):
        raise InputError("--data: two of the folders have the same name; rename one of them")
    opened = [open_dataset(str(folder)) for folder in request.data]
    for folder in request.data:
        check_not_inside(output, folder)
    quiet_transformers()
    shape = read_shape(request.model)
    checked = [check_dataset(dataset, shape, isolate_documents=True) for dataset in opened]
    if faults := [fault for one in checked for fault in one.faults]:
        raise InputError(*faults)
    notes = [note for one in checked for note in one.notes]
    tasks = read_tasks(request.tasks) if request.tasks else []
    if on_hub := [task.source for task in tasks if not is_task_file(task.source)]:
        notes.append(
            f"{request.tasks}: the data of {', '.join(on_hub)} is on the hub: fill a cache (HF_HOME) and copy it too"
        )
    return notes


def _check_inside(target: Target, folder: Path) -> None:
    """Check the bundle's run as the other machine will: with the bundle's source, in its folder, without the hub."""
    command = [sys.executable, "-m", "fabric_train", "--config", CONFIGURATION, "--plan", "check"]
    command += ["--accelerator", "cpu"] if target.cuda == "none" else []
    env = {**os.environ, "PYTHONPATH": "source", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if finished.returncode:
        last = finished.stderr.strip().splitlines()[-1:] or [f"exit code {finished.returncode}"]
        found = [line.removeprefix("error: ") for line in finished.stderr.splitlines() if line.startswith("error: ")]
        raise InputError(*(f"a run of the bundle would not begin: {fault}" for fault in found or last))


def _model_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a Hugging Face folder and their places, or those that make one of a full checkpoint."""
    weights = safetensors_files(folder)
    if not weights:
        raise InputError(
            f"--model {folder}: no model.safetensors in it; pickles and sharded checkpoints are not bundled: "
            "export it with convert_to_hf.py"
        )
    check_weight_files(folder)
    texts = text_files(path.name for path in folder.iterdir() if path.is_file())
    index = [path.name for path in folder.glob("model.safetensors.index.json")]
    for name in sorted({*texts, *index, *(path.name for path in weights)} - set(_OF_A_RUN)):
        yield folder / name, f"model/{name}"
    if (folder / "trainer.json").is_file():
        for file in sorted((folder / "tokenizer").glob("*")):
            yield file, f"model/{file.name}"


def _files_of_data(folder: Path, place: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a token dataset and their places; its parts, if it has some, lie inside of it."""
    check_links(folder)
    yield from _files_in(folder, place)
    if is_of_parts(folder):
        parts = open_parts(folder)
        for number, to in enumerate(parts.moved_to(_PARTS).parts):
            check_links(parts.folder_of(number))
            yield from _files_in(parts.folder_of(number), place / to.path)


def _files_in(folder: Path, place: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder and their places, or a file itself."""
    for path in [folder, *sorted(folder.rglob("*"))]:
        if path.is_file() and path.suffix != ".pyc":
            yield path, str(place / path.relative_to(folder))


def files_of_tasks(tasks: str) -> Iterator[tuple[Path, str]]:
    """Yield a file of tasks and the task files that it names, which must be in this folder, and their places in it."""
    of_tasks = (files_of(Path(task.source)) for task in read_tasks(tasks) if is_task_file(task.source))
    for path in dict.fromkeys((Path(os.path.abspath(tasks)), *chain.from_iterable(of_tasks))):
        if not path.is_relative_to(Path.cwd()):
            raise InputError(f"--tasks {tasks}: {path} is not in this folder; start the program in the one that has it")
        yield path, str(path.relative_to(Path.cwd()))


def _copy(files: Iterable[tuple[Path, str]], folder: Path) -> None:
    """Copy files to their places in ``folder``; new files get permissions from the umask."""
    files = list(files)
    with _progress("copying", sum(source.stat().st_size for source, _ in files)) as advance:
        for source, place in files:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / place)
            advance((folder / place).stat().st_size)


def _write_checksums(folder: Path) -> int:
    """Write SHA256SUMS, in the format of sha256sum, and return the number of files in it."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in files:
        if not name.isprintable() or "\\" in name:
            raise InputError(f"{name!r}: a file with such a name cannot be listed in {_CHECKSUMS}; rename it")
    sizes, lines = [path.stat().st_size for path in files.values()], []
    with _progress("hashing", sum(sizes)) as advance, ThreadPoolExecutor(4) as pool:
        for name, size, digest in zip(files, sizes, pool.map(sha256, files.values()), strict=True):
            advance(size)
            lines.append(f"{digest}  {name}\n")
    (folder / _CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return len(files)


def _parts(request: Request, folder: Path) -> list[Part]:
    described = {
        "model": request.model,
        **({ADAPTER: str(request.adapter.folder)} if request.adapter else {}),
        **{place: str(path) for place, path in zip(request.places, request.data, strict=True)},
        "wheels": str(request.target),
        "source": "this project, with configs/, docker/ and launch/",
        CONFIGURATION: request.recipe.path or "the defaults",
        **({"recipe": "the files that it names"} if (folder / "recipe").exists() else {}),
    }
    parts = []
    for name, description in described.items():
        place = folder / name
        sizes = [path.stat().st_size for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file()]
        parts.append(Part(name, description, len(sizes), sum(sizes)))
    return parts


@contextmanager
def with_own_names() -> Iterator[None]:
    """Let errors name the arguments of this program instead of training's."""
    try:
        yield
    except InputError as error:
        faults = (fault.replace("--model_name ", "--model ") for fault in error.faults)
        raise InputError(*(fault.replace("--train_data_dir ", "--data ") for fault in faults)) from error


@contextmanager
def _progress(doing: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    console = open_console(stderr=True)
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_bytes)
        yield lambda done: progress.advance(task, done)


@contextmanager
def _spinner() -> Iterator[Callable[[str], None]]:
    """Show the package that pip has come to; every few seconds if this is no terminal."""
    console, log = open_console(stderr=True), ThrottledLog()
    if not console.is_terminal:
        yield lambda name: log(f"      {name}")
        return
    with console.status("pip") as status:
        yield lambda name: status.update(f"pip: {name}")
