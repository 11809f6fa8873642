"""Read the recipe of a bundle, and write it for the bundle's folder: other places, and copies of the files it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import GivenShares, Shares, split_name
from fabric_train.cli.errors import InputError

CONFIGURATION, MODEL, ADAPTER = "train.yaml", "model", "adapter"
"""The names in a bundle: the configuration, the model's folder, the adapter's folder."""
_OF_SHARES = ("shares", "token_shares")
_NOT_IN_A_BUNDLE = {
    "streaming_dataset": "tokenize its texts, and give --data",
    "checkpoint": "give the checkpoint as --model, which begins a new run with its weights",
    "branch": "give the checkpoint as --model, which begins a new run with its weights",
}


@dataclass(frozen=True)
class Recipe:
    """Arguments of a run as a YAML file has them: its values by their names. Without a file there are none."""

    path: str | None
    given: Mapping[str, Any]

    @property
    def data(self) -> list[str]:
        named = self.given.get("train_data_dir") or []
        return [named] if isinstance(named, str) else list(named)

    @property
    def mixes(self) -> bool:
        """Whether a run of it reads all token datasets, and not one."""
        return len(self.data) > 1 or any(self.given.get(name) is not None for name in (*_OF_SHARES, "phases"))

    def check(self, data: Sequence[str]) -> None:
        """Raise an InputError unless all it names can be in a bundle, with these token datasets in place of its own."""
        faults = [
            f"--recipe {self.path}: {name} {self.given[name]} is not in a bundle; {advice}"
            for name, advice in _NOT_IN_A_BUNDLE.items()
            if self.given.get(name)
        ]
        if len(self.data) > 1 and len(self.data) != len(data):
            faults.append(
                f"--recipe {self.path} mixes {len(self.data)} token datasets, and --data gives {len(data)}; give as "
                "many, in the recipe's order, or leave --data out"
            )
        if path := self.given.get("phases"):
            faults += [
                f"--phases {path}: phase {number} has a train_data_dir of its own, which is not in a bundle; leave the "
                "phase out, and go on with --branch and the folder of that token dataset there"
                for number, phase in enumerate(_load_phases(self._read("phases"), path), 1)
                if "train_data_dir" in phase
            ]
        if faults:
            raise InputError(*faults)

    def write(self, data: Sequence[str], folder: Path, added: Mapping[str, Any]) -> None:
        """Write ``train.yaml`` and the files that it names.

        ``data`` are the bundle's token datasets, in its order; ``added`` are arguments of
        its run; of those, the recipe may have its own, but for ``init_adapter``.
        """
        places = dict(zip(self.data or data, data, strict=False))
        given = {**added, **self.given, **{name: added[name] for name in ("init_adapter",) if name in added}}
        for name in _OF_SHARES:
            if given.get(name) is not None:
                given[name] = _with_places(Shares(f"--recipe {self.path}: {name}", given[name]), places)
        for name in ("phases", "sample_prompts"):
            if path := given.get(name):
                text = self._read(name) if name == "sample_prompts" else _phases(self._read(name), path, places)
                given[name] = f"recipe/{name}{Path(path).suffix}"
                (folder / "recipe").mkdir(exist_ok=True)
                (folder / given[name]).write_text(text, encoding="utf-8")
        trained = list(data) if self.mixes and len(data) > 1 else data[0]
        given |= {"model_name": MODEL, "train_data_dir": trained, "output_dir": "runs/1"}
        more = [] if self.mixes else data[1:]
        others = f"# Other token datasets: {', '.join(more)}\n" if more else ""
        text = f"# python -m fabric_train --config {CONFIGURATION}, in this folder\n{others}{yaml_core.dump(given)}"
        (folder / CONFIGURATION).write_text(text, encoding="utf-8")

    def _read(self, name: str) -> str:
        path = self.given[name]
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"--recipe {self.path}: {name} {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"--recipe {self.path}: {name} {path}: it is not UTF-8; save it as UTF-8") from error


def read_recipe(path: str | None) -> Recipe:
    """Return the arguments in a YAML file, unchecked; raise an InputError if it cannot be read, or has none."""
    if path is None:
        return Recipe(None, {})
    loaded = yaml_core.load_file(path, "--recipe") or {}
    if not isinstance(loaded, dict):
        raise InputError(f"--recipe {path}: expected arguments such as 'lr: 1e-5', one on each line")
    return Recipe(path, {str(name).replace("-", "_"): value for name, value in loaded.items()})


def _phases(text: str, path: str, places: Mapping[str, str]) -> str:
    """Return a file of phases that names the bundle's token datasets."""
    content = _load_phases(text, path)
    for number, phase in enumerate(content, 1):
        for name in _OF_SHARES:
            if isinstance(phase.get(name), list):
                phase[name] = _with_places(Shares(f"{path}: phase {number}: {name}", phase[name]), places)
    return yaml_core.dump(content)


def _load_phases(text: str, path: str) -> Any:
    """Return a list of phases, each names with values."""
    try:
        content = yaml_core.load(text)
    except yaml_core.YamlFault as fault:
        raise InputError(f"--phases {path}: {fault}") from fault
    if not isinstance(content, list) or not all(isinstance(phase, dict) for phase in content):
        raise InputError(f"--phases {path}: expected a list of phases")
    return content


def _with_places(shares: Shares, places: Mapping[str, str]) -> GivenShares:
    """Return shares whose names are places in the bundle; numbers alone stay as they are."""
    named, renamed = shares.by_name(), []
    if named is None:
        assert shares.given is not None
        return shares.given
    for name, share in named.items():
        number, source = split_name(name, list(places), shares.option)
        place = list(places.values())[number]
        renamed.append({place if source is None else f"{place}:{source}": share})
    return renamed
