"""The structure of docs/architecture.md: its subpackages, and imports in one direction."""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fabric_train"
FROM_THE_TOP = (
    "programs",
    "report",
    "trace",
    "translate",
    "vocabulary",
    "preflight",
    "merge_models",
    "export",
    "evaluation",
    "run_folder",
    "training",
    "teacher_states",
    "rollouts",
    "inference",
    "checkpoint",
    "model",
    "data",
    "optim",
    "inspection",
    "tokenization",
    "cleaning",
    "reading",
    "token_dataset",
    "distributed",
    "sample_data",
    "pages",
    "workers",
    "arguments",
    "files",
    "cli",
)
"""A subpackage, or the module ``workers`` or ``arguments``, imports only those after it."""

TOP_LEVEL_MODULES = {"__init__", "__main__", "all_arguments", "api", "doctor", "launch_files", "replay", "runs"}
READ_ARGUMENTS_OF_TRAINING = {
    *("__main__", "all_arguments", "api", "replay", "export.model_card"),
    *("translate.__main__", "translate.method", "translate.translation", "translate.write_config"),
}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def read(path: Path) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(source: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield every absolute name that a module imports from, wherever the statement is."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def upward_imports(path: Path, source: str) -> list[str]:
    """Return the imports of a module that point to a subpackage above its own."""
    own_name = path.with_suffix("").parts[0]
    if own_name in TOP_LEVEL_MODULES:
        return []
    own = FROM_THE_TOP.index(own_name)
    names = [name.split(".") for name, _ in imports(source)]
    return [
        ".".join(name)
        for name in names
        if name[0] == "fabric_train" and len(name) > 1 and name[1] not in FROM_THE_TOP[own:]
    ]


def test_every_subpackage_has_a_place_in_the_import_order() -> None:
    folders = {path.parts[0] for path in MODULES if len(path.parts) > 1}
    modules = {path.stem for path in MODULES if len(path.parts) == 1}
    assert modules >= TOP_LEVEL_MODULES
    assert folders | modules - TOP_LEVEL_MODULES == set(FROM_THE_TOP)


def test_modules_import_only_from_their_own_subpackage_and_those_below() -> None:
    found = {dotted(path): upward_imports(path, read(path)) for path in MODULES}
    assert {module: names for module, names in found.items() if names} == {}


def test_an_upward_import_is_found_wherever_it_stands() -> None:
    source = (
        "from fabric_train.model import flops\n"
        "def late():\n"
        "    import fabric_train.preflight.prepare\n"
        "    from fabric_train import export\n"
    )
    found = ["fabric_train.preflight.prepare", "fabric_train.export"]
    assert sorted(upward_imports(Path("training/loop.py"), source)) == sorted(found)
    assert upward_imports(Path("__main__.py"), source) == []


def test_cleaning_steps_do_not_import_the_cleaner_that_imports_them() -> None:
    own = "fabric_train.cleaning"
    modules = [path for path in MODULES if path.parts[0] == "cleaning"]
    order = TopologicalSorter[str]()
    for path in modules:
        found = {name for name, _ in imports(read(path)) if name.startswith(own)}
        order.add(path.stem, *({part for name in found for part in name.removeprefix(own).split(".")[1:2]}))
    assert set(order.static_order()) >= {"cleaner", "dropped"}  # a circle raises CycleError


def test_every_subpackage_says_what_it_holds() -> None:
    for path in MODULES:
        if path.name == "__init__.py":
            assert ast.get_docstring(parsed(read(path))), path


def test_only_programs_import_the_arguments_of_training_at_run_time() -> None:
    for path in MODULES:
        imported = [node.module for node in parsed(read(path)).body if isinstance(node, ast.ImportFrom)]
        assert "fabric_train.arguments" not in imported or dotted(path) in READ_ARGUMENTS_OF_TRAINING, path


def test_the_package_imports_no_file_beside_it() -> None:
    """An installation has the package alone."""
    beside = {path.stem for path in PACKAGE.parent.glob("*.py")}
    assert beside >= {"arguments", "evaluate"}
    for path in MODULES:
        assert beside.isdisjoint(name.partition(".")[0] for name, _ in imports(read(path))), path


def at_import(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module imports from while it is imported: neither in functions nor for types."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try | ast.If) and "TYPE_CHECKING" not in ast.dump(node):
            yield from at_import(node.body)


def packages_behind(module: str) -> set[str]:
    """Return the packages of others that are imported together with a module of this one."""
    seen = set[str]()
    waiting = [module]
    found = set[str]()
    while waiting:
        parts = waiting.pop().split(".")
        if parts[0] != "fabric_train":
            found.add(parts[0])
            continue
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            path = Path(*parts[1:length])
            files = [path / "__init__.py", path.with_suffix(".py")] if length > 1 else [Path("__init__.py")]
            for file in files:
                if name not in seen and (PACKAGE / file).is_file():
                    seen.add(name)
                    waiting += at_import(parsed(read(file)).body)
    return found


def test_a_report_starts_without_what_trains() -> None:
    slow = {"torch", "lightning", "transformers", "datasets", "safetensors", "wandb", "lm_eval"}
    assert packages_behind("fabric_train.report.write").isdisjoint(slow)
    assert "transformers" in packages_behind("fabric_train.model.hf_model")
