"""An adapter in a bundle: its files beside those of its base, and what a run that begins with both needs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fabric_train.bundle.recipe import ADAPTER, MODEL, Recipe
from fabric_train.checkpoint import find_base, is_adapter, read_base_name, read_trainer_json
from fabric_train.checkpoint.adapter_folder import CONFIG, WEIGHTS, check_files, fingerprint
from fabric_train.cli.errors import InputError
from fabric_train.export.hub import text_files
from fabric_train.files.regular_file import read_json
from fabric_train.model.weight_files import open_weights


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
