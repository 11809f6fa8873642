"""Plant defects one at a time, run the nearest tests, and list the defects that no test notices."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.defect_server import DefectServer, Outcome
from benchmarks.measure import ROOT
from benchmarks.mutants import Mutant, compiles, mutants_by_place
from benchmarks.nearest_tests import RecordedTest, Recordings, place_of
from benchmarks.report import RESULTS, Report
from fabric_train.cli.errors import InputError
from fabric_train.sample_data import real_data

SAMPLE = 150
SEED = 25
PACKAGES = (
    *(f"fabric_train/{name}" for name in ("training", "data", "checkpoint", "optim", "model", "distributed", "export")),
    "fabric_train/token_dataset",
)
LEFT_OUT = ("fabric_train/distributed/xla.py",)  # its tests need another torch: make test-xla
# of recorded time, for one defect
NEAR_SECONDS = 20.0
WIDE_SECONDS = 120.0
NEAR_TESTS = 60
# how much longer than recorded the tests may take
_SLOWER = 3
_START_SECONDS = 60
_FOLDER = real_data.CACHE / "defects"


@dataclass(frozen=True)
class Tried:
    """A planted defect.

    Attributes:
        module: path of the module from the project's root.
        function: the function that the defect is in.
        line: number of the line in the module.
        text: the line, without white space around it.
        operator: kind of defect.
        before: the text that was replaced.
        after: the text that replaced it.
        caught_by: the test that failed, or None.
        reason: the end of what pytest says about the failure.
        stage: near or wide, whose tests caught it; none.
        num_tests: how many tests ran.
        seconds: duration.
    """

    module: str
    function: str
    line: int
    text: str
    operator: str
    before: str
    after: str
    caught_by: str | None
    reason: str
    stage: str
    num_tests: int
    seconds: float


@dataclass(frozen=True)
class DefectsSummary:
    """All defects: how many, out of how many places, how many were caught in each stage and survived, by kind."""

    seed: int
    places: int
    defects: int
    caught_by_near_tests: int
    caught_by_wider_tests: int
    survived: int
    survived_of_kind: Mapping[str, str]


def measure(work: Path, sample: int = SAMPLE, survivors: bool = False) -> Report:
    """Plant a seeded sample of defects; a run that was stopped goes on where it was.

    Args:
        work: folder for temporary files, relative to the project's root.
        sample: how many.
        survivors: instead plant the survivors of the newest result again, with the present tests.

    Raises:
        InputError: mutmut is not installed, or there is no result to take survivors from.
    """
    if find_spec("mutmut") is None:
        raise InputError("mutmut is not installed; run: .venv/bin/python -m pip install -e '.[defects]'")
    if survivors:
        return _measure_survivors(ROOT / work)
    drawn, num_places = draw(sample)
    sources = "".join(hashlib.sha256((ROOT / module).read_bytes()).hexdigest() for module, _ in drawn)
    done = _FOLDER / f"tried-{sample}-{hashlib.sha256(sources.encode()).hexdigest()[:12]}.jsonl"
    return _report(num_places, _try_all(drawn, done, ROOT / work))


def _measure_survivors(work: Path) -> Report:
    results = sorted(RESULTS.glob("defects-*.json"))
    if not results:
        raise InputError(f"no result in {RESULTS}; run python -m benchmarks defects first")
    content = json.loads(results[-1].read_text(encoding="utf-8"))
    tried = [Tried(**each) for each in content["runs"]["defects"]]
    found = {index: _find(each) for index, each in enumerate(tried) if each.caught_by is None}
    there = {index: mutant for index, mutant in found.items() if mutant is not None}
    for index in found.keys() - there.keys():
        print(f"defects: {tried[index].module} has no such line now: {tried[index].text}", flush=True)
    again = [(tried[index].module, mutant) for index, mutant in there.items()]
    for index, each in zip(there, _try_all(again, work / "tried.jsonl", work), strict=True):
        tried[index] = each
    return _report(content["summary"]["places"], tried)


def table(report: Report) -> Table:
    """Return a table of the survivors, with the number of those that were caught in its title."""
    summary: DefectsSummary = report.summary
    title = (
        f"Defects: {summary.defects} of {summary.places} places; {summary.caught_by_near_tests} caught by the nearest "
        f"tests, {summary.caught_by_wider_tests} by wider ones, {summary.survived} survived"
    )
    shown = Table(title=title, title_justify="left", box=box.SIMPLE)
    for header in ("survivor", "kind", "in", "before → after", "tests"):
        shown.add_column(header, overflow="fold", justify="right" if header == "tests" else "left")
    for each in report.runs["defects"]:
        if each.caught_by is None:
            where = f"{each.module.removeprefix('fabric_train/')}:{each.line}"
            changed = f"{_one_line(each.before)} → {_one_line(each.after)}"
            shown.add_row(where, each.operator, each.text, changed, str(each.num_tests))
    return shown


def _modules() -> list[str]:
    """Return the paths of the modules that defects are planted in, from the project's root."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [name for name in (str(file.relative_to(ROOT)) for file in files) if name not in LEFT_OUT]


def draw(sample: int) -> tuple[list[tuple[str, Mutant]], int]:
    """Draw places, and one defect that compiles of each; return them and the number of places."""
    print("defects: list the places", flush=True)
    sources = {module: (ROOT / module).read_text(encoding="utf-8") for module in _modules()}
    places = [(module, place) for module, source in sources.items() for place in mutants_by_place(source)]
    random_ = random.Random(SEED)
    drawn: list[tuple[str, Mutant]] = []
    for module, place in random_.sample(places, len(places)):
        mutant = random_.choice(place)
        if len(drawn) < sample and compiles(mutant.plant(sources[module])):
            drawn.append((module, mutant))
    return drawn, len(places)


def _find(earlier: Tried) -> Mutant | None:
    """Return an earlier defect in the module as it is now, None if its line is no longer there."""
    file = ROOT / earlier.module
    if not file.is_file():
        return None
    source = file.read_text(encoding="utf-8")
    same = [
        mutant
        for place in mutants_by_place(source)
        for mutant in place
        if (mutant.before, mutant.after, mutant.operator) == (earlier.before, earlier.after, earlier.operator)
        and source.splitlines()[mutant.line - 1].strip() == earlier.text
        and place_of(earlier.module, source, mutant.line).function == earlier.function
    ]
    return min(same, key=lambda mutant: abs(mutant.line - earlier.line), default=None)


def _try_all(drawn: Sequence[tuple[str, Mutant]], done: Path, work: Path) -> list[Tried]:
    """Try the defects that are not in the file of those that were tried, and add them to it."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    tried = [Tried(**json.loads(line)) for line in done.read_text().splitlines()] if done.is_file() else []
    if tried:
        print(f"defects: {len(tried)} of {len(drawn)} were tried before", flush=True)
    tree = _copy_tree(work / "tree")
    recordings = Recordings(_FOLDER / "recordings", tree, PACKAGES)
    server = DefectServer(tree, work)
    try:
        _record(recordings, server)
        for module, mutant in drawn[len(tried) :]:
            each = _try(module, mutant, recordings, server)
            tried.append(each)
            with done.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(each)) + "\n")
            survivors = sum(one.caught_by is None for one in tried)
            result = f"caught by {each.caught_by}" if each.caught_by else "SURVIVED"
            where = f"{module}:{each.line} {_one_line(each.before)} → {_one_line(each.after)}"
            print(f"defects {len(tried)}/{len(drawn)}, {survivors} survived: {where}: {result}", flush=True)
    finally:
        server.close()
    return tried


def _copy_tree(tree: Path) -> Path:
    """Copy the project without what git ignores; downloads and the environment are links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    for name in (".cache", ".venv"):
        (tree / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "."], cwd=tree, check=False, stdout=subprocess.DEVNULL)
    return tree


def _record(recordings: Recordings, server: DefectServer) -> None:
    missing = recordings.missing()
    for number, file in enumerate(missing, 1):
        print(f"defects: record what the tests run, {number}/{len(missing)}: {file}", flush=True)
        for failed in recordings.record(server, file):
            print(f"  fails without a defect, left out: {failed}", flush=True)


def _try(module: str, mutant: Mutant, recordings: Recordings, server: DefectServer) -> Tried:
    """Plant a defect, run the nearest tests, then wider ones, and remove the defect."""
    started = time.monotonic()
    file = server.tree / module
    source = file.read_text(encoding="utf-8")
    times = file.stat()
    place = place_of(module, source, mutant.line)
    stages = choose_tests(module, recordings.nearest(place))
    caught_in = "none"
    caught = None
    num_tests = 0
    file.write_text(mutant.plant(source), encoding="utf-8")
    try:
        for stage, tests in stages.items():
            outcomes, caught = _run(server, tests)
            num_tests += len(outcomes)
            if caught is not None:
                caught_in = stage
                break
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # what Python has compiled is valid again
    return Tried(
        module=module,
        function=place.function,
        line=mutant.line,
        text=source.splitlines()[mutant.line - 1].strip(),
        operator=mutant.operator,
        before=mutant.before,
        after=mutant.after,
        caught_by=caught.test if caught else None,
        reason=caught.reason if caught else "",
        stage=caught_in,
        num_tests=num_tests,
        seconds=round(time.monotonic() - started, 1),
    )


def _run(server: DefectServer, tests: Sequence[RecordedTest]) -> tuple[list[Outcome], Outcome | None]:
    """Run tests; return those that ended, and the one that failed."""
    limit = _SLOWER * sum(test.seconds for test in tests) + _START_SECONDS
    outcomes = server.run([test.name for test in tests], limit)
    for outcome in outcomes:
        if outcome.outcome == "failed":
            return outcomes, outcome
    if len(outcomes) < len(tests):
        reason = f"hung, or ended the process, within {limit:.0f} s"
        return outcomes, Outcome(tests[len(outcomes)].name, "failed", limit, reason)
    return outcomes, None


def choose_tests(module: str, tests: Sequence[RecordedTest]) -> dict[str, list[RecordedTest]]:
    """Return the nearest tests and the wider ones, each as many as their time allows.

    Near are the fastest ones, of the module's own folder first, and two of each function with parameters. Each stage
    runs the tests of a file together, so that they share their fixtures.
    """
    own = "tests" + os.path.dirname(module).removeprefix("fabric_train")

    def nearness(test: RecordedTest) -> tuple[bool, bool, float]:
        return test.seconds > 2, os.path.dirname(test.name.split("::")[0]) != own, test.seconds

    near: list[RecordedTest] = []
    of_function: Counter[str] = Counter()
    for test in sorted(tests, key=nearness):
        function = test.name.split("[")[0]
        of_function[function] += 1
        fits = sum(one.seconds for one in near) + test.seconds <= NEAR_SECONDS or not near
        if of_function[function] <= 2 and fits and len(near) < NEAR_TESTS:
            near.append(test)
    chosen = set(map(id, near))
    wide: list[RecordedTest] = []
    for test in sorted((test for test in tests if id(test) not in chosen), key=nearness):
        if sum(one.seconds for one in wide) + test.seconds <= WIDE_SECONDS:
            wide.append(test)
    return {name: _by_file(stage) for name, stage in (("near", near), ("wide", wide)) if stage}


def _by_file(tests: Sequence[RecordedTest]) -> list[RecordedTest]:
    order = {file: number for number, file in enumerate(dict.fromkeys(test.name.split("::")[0] for test in tests))}
    return sorted(tests, key=lambda test: order[test.name.split("::")[0]])


def _report(num_places: int, tried: Sequence[Tried]) -> Report:
    settings = {
        "packages": PACKAGES,
        "left out": LEFT_OUT,
        "seconds of tests": {"near": NEAR_SECONDS, "wide": WIDE_SECONDS},
    }
    return Report("defects", settings, {}, {"defects": tried}, summarize(num_places, tried))


def summarize(num_places: int, tried: Sequence[Tried]) -> DefectsSummary:
    """Count the defects that were caught."""
    stages = Counter(each.stage for each in tried)
    kinds = Counter(each.operator for each in tried)
    survived = Counter(each.operator for each in tried if each.caught_by is None)
    return DefectsSummary(
        seed=SEED,
        places=num_places,
        defects=len(tried),
        caught_by_near_tests=stages["near"],
        caught_by_wider_tests=stages["wide"],
        survived=survived.total(),
        survived_of_kind={kind: f"{survived[kind]} of {number}" for kind, number in kinds.most_common()},
    )


def _one_line(code: str) -> str:
    """Return code in one line of at most 60 characters."""
    line = " ".join(code.split())
    return line if len(line) <= 60 else line[:59] + "…"
