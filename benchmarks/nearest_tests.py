"""Record once which functions each test runs, and choose the tests nearest to a line."""

import ast
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.defect_server import DefectServer

RECORD_SECONDS = 1500  # of one file of tests
_RC = """[run]
data_file = {folder}/data
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
include =
{include}
"""


@dataclass(frozen=True)
class RecordedTest:
    """A test that passes; ``lines`` has the lines that it runs by module and function, counted from the function's."""

    name: str
    seconds: float
    lines: Mapping[str, Mapping[str, list[int]]]


@dataclass(frozen=True)
class Place:
    """A line of a function, counted from the function's first line; a function is named with its class."""

    module: str
    function: str
    line: int


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, first and last line of each function, an inner function after the one that it is in."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*path, child.name)
                if not isinstance(child, ast.ClassDef):
                    assert child.end_lineno is not None
                    yield ".".join(inner), child.body[0].lineno, child.end_lineno
            yield from walk(child, inner)

    yield from walk(ast.parse(source), ())


def place_of(module: str, source: str, line: int) -> Place:
    """Return the innermost function that has a line in its body; its name is empty outside functions."""
    inside = [(name, first) for name, first, last in functions(source) if first <= line <= last]
    name, first = inside[-1] if inside else ("", 1)
    return Place(module, name, line - first)


class Recordings:
    """The recorded tests; a file of tests is recorded again when it has changed."""

    def __init__(self, folder: Path, tree: Path, packages: Iterable[str]) -> None:
        """``folder`` keeps the recordings, ``tree`` has the tests, ``packages`` are the folders that are recorded."""
        self._folder = folder
        self._tree = tree
        self._packages = tuple(packages)
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self) -> list[str]:
        """Return the files of tests that have to be recorded."""
        return [file for file in self.files() if not self._recording(file).is_file()]

    def files(self) -> list[str]:
        """Return the files of tests in the packages' folders, and those that import from a package."""
        names = [package.replace("/", ".") for package in self._packages]
        found = []
        for file in sorted(self._tree.glob("tests/**/test_*.py")):
            relative = file.relative_to(self._tree)
            folders = [f"fabric_train/{parent}" for parent in relative.relative_to("tests").parents]
            near = any(folder in self._packages for folder in folders)
            if near or any(name in file.read_text(encoding="utf-8") for name in names):
                found.append(str(relative))
        return found

    def record(self, server: DefectServer, file: str) -> list[str]:
        """Run a file of tests and keep what each runs; return the tests that fail."""
        work = self._folder / f"{_slug(file)}.coverage"
        work.mkdir(exist_ok=True)
        include = "\n".join(f"  {self._tree}/{package}/*" for package in self._packages)
        (work / "coveragerc").write_text(_RC.format(folder=work, include=include), encoding="utf-8")
        outcomes = server.run([file], RECORD_SECONDS, coverage=work)
        lines = _read_coverage(work, self._tree)
        passed = [each for each in outcomes if each.outcome == "passed"]
        self.keep(file, [RecordedTest(each.test, each.seconds, lines.get(each.test, {})) for each in passed])
        for part in work.iterdir():
            part.unlink()
        work.rmdir()
        return [each.test for each in outcomes if each.outcome == "failed"]

    def keep(self, file: str, tests: Iterable[RecordedTest]) -> None:
        """Write the recording of a file of tests."""
        self._recording(file).write_text(json.dumps(list(map(asdict, tests))), encoding="utf-8")

    def nearest(self, place: Place) -> list[RecordedTest]:
        """Return the tests that run a line, the fastest first.

        If there are none, return the tests that run its function, then the tests in the file that is named after the
        module (for kernels, which no tracer sees), then the tests that run anything in the module.
        """
        tests = self._tests()
        own = f"/test_{Path(place.module).stem}.py::"
        choices = [
            [test for test in tests if place.line in test.lines.get(place.module, {}).get(place.function, [])],
            [test for test in tests if place.function in test.lines.get(place.module, {})],
            [test for test in tests if own in test.name],
            [test for test in tests if any(test.lines.get(place.module, {}))],
        ]
        if not place.function:  # when a module is imported no test runs yet
            choices = choices[2:][::-1]
        return sorted(next(filter(None, choices), []), key=lambda test: test.seconds)

    def _tests(self) -> list[RecordedTest]:
        if not hasattr(self, "_read"):
            files = [self._recording(file) for file in self.files()]
            self._read = [
                RecordedTest(**test) for file in files for test in json.loads(file.read_text(encoding="utf-8"))
            ]
        return self._read

    def _recording(self, file: str) -> Path:
        content = hashlib.sha256((self._tree / file).read_bytes()).hexdigest()[:12]
        return self._folder / f"{_slug(file)}-{content}.json"


def _slug(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def _read_coverage(folder: Path, tree: Path) -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return the lines by test, module and function, from all files that coverage.py wrote into a folder."""
    from coverage import CoverageData
    from coverage.exceptions import DataError

    found: dict[str, dict[str, dict[str, set[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    spans: dict[str, list[tuple[str, int, int]]] = {}
    for file in folder.glob("data*"):
        data = CoverageData(str(file))
        try:
            data.read()
        except DataError:  # a test killed the process that wrote it
            continue
        for measured in data.measured_files():
            module = str(Path(measured).relative_to(tree))
            if module not in spans:
                spans[module] = list(functions((tree / module).read_text(encoding="utf-8")))
            for line, contexts in data.contexts_by_lineno(measured).items():
                inside = [(name, first) for name, first, last in spans[module] if first <= line <= last]
                name, first = inside[-1] if inside else ("", 1)
                for context in contexts:
                    found[context.split(" (")[0]][module][name].add(line - first)
    return {
        test: {module: {name: sorted(lines) for name, lines in of.items()} for module, of in modules.items()}
        for test, modules in found.items()
    }
