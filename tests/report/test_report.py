"""A report has every section from the files of a run, leaves out one whose file is damaged, and never ends a run."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.cli.code_commit import checked_out_commit
from fabric_train.cli.errors import InputError
from fabric_train.evaluation.loss_changes import CHANGES
from fabric_train.export.card_facts import ExportRecord
from fabric_train.pages import charts, drawing_process
from fabric_train.pages.charts import Chart, Series, draw, moving_average, sample_points
from fabric_train.pages.markdown import Section, library
from fabric_train.report.__main__ import main
from fabric_train.report.comparison import comparison_sections
from fabric_train.report.health import find_unusual
from fabric_train.report.reported_run import ReportedRun, open_runs
from fabric_train.report.sections import run_sections
from fabric_train.training.metric_charts import metric_charts
from tests.report.conftest import HOSTILE, ReportedRuns
from tests.support.forked_runs import ForkedRuns
from tests.support.short_runs import argv

KEYS = (
    *("summary", "results", "health", "curves", "events", "time", "samples", "data", "lineage", "checkpoints"),
    *("repeat", "configuration"),
)


def sections_of(run: Path) -> dict[str, Section]:
    return {section.key: section for section in run_sections(ReportedRun(run))}


@pytest.fixture
def copy(reported: ReportedRuns, tmp_path: Path) -> Path:
    """The trunk in another place, without the files that it was made from."""
    return Path(shutil.copytree(reported.trunk, tmp_path / "copied"))


def test_every_section_is_there_also_in_a_copied_folder(copy: Path) -> None:
    sections = sections_of(copy)
    assert tuple(sections) == KEYS
    assert not any(section.fault for section in sections.values())
    charts = {chart.key: chart for chart in sections["curves"].charts}
    assert {"loss", "sources", "trained", "learning_rate", "grad_norm", "tokens_per_second", "data_wait"} <= set(charts)
    kinds = {(mark.kind, mark.x) for mark in charts["loss"].marks}
    (step,) = map(int, re.findall(r"stopped by SIGTERM after step (\d)", (copy / "run.log").read_text()))
    assert {("resume", step), ("signal", step)} <= kinds
    rows = [float(line.split(",")[2] or "nan") for line in (copy / "metrics.csv").read_text().splitlines()[1:]]
    assert charts["loss"].series[0].y.tolist() == [value for value in rows if value == value]
    assert "after step 3: `branch`" not in sections["lineage"].body
    for step in (2, 4, 6):
        assert f"| {step} | " in sections["checkpoints"].body
    assert "fabric run fabric_train --devices" in sections["repeat"].body
    assert "max_step: 6" in sections["configuration"].body
    commit = "[0-9a-f]{12}(-dirty)?" if checked_out_commit() else "unknown"
    assert re.search(rf"\| code of fabric-train \| [\d.]+, commit {commit} \|", sections["summary"].body)


def distill(run: Path) -> None:
    """Change the checkpoints of a run as if it had been distilled."""
    for folder in (run / "checkpoints").iterdir():
        trainer = json.loads((folder / "trainer.json").read_text())
        origin = {"name": "owner/Teacher", "repository": "owner/Teacher", "revision": "0123456789abcdef" * 2}
        stored = {"fingerprint": "0" * 64, "stored_as": "last hidden states"}
        trainer["teacher"] = {"location": "/models/teacher", "origin": origin, **stored}
        trainer["arguments"] |= {"objective": "distill", "divergence": "jsd", "jsd_beta": 0.3, "sft_weight": 0.5}
        trainer["arguments"] |= {"distill_temperature": 2.0, "distill_on": "all"}
        for name in ("evaluation", "first_evaluation"):
            evaluation = trainer[name]
            if evaluation:  # a signal saves without an evaluation
                for loss in (evaluation["whole"], *evaluation["sources"].values()):
                    loss |= {"has_own_unit": True, "further": {"divergence": 0.25, "agreement": 0.5}}
        (folder / "trainer.json").write_text(json.dumps(trainer))


def test_a_distilled_run_shows_its_teacher_and_no_perplexity(copy: Path) -> None:
    distill(copy)
    sections = sections_of(copy)
    assert not any(section.fault for section in sections.values())
    teacher = "owner/Teacher at 0123456789ab, stored as last hidden states"
    assert f"| teacher | {teacher} |" in sections["summary"].body
    settings = "jsd, temperature 2.0, beta 0.3, plus 0.5 × cross entropy, on all tokens"
    assert f"| divergence | {settings} |" in sections["summary"].body
    results = sections["results"].body
    assert "| divergence | agreement |" in results
    assert results.endswith("Loss in nats per token.")
    assert "perplexity" not in results


def test_a_distilled_run_is_not_compared_with_a_cross_entropy(reported: ReportedRuns, copy: Path) -> None:
    distill(copy)
    sections = comparison_sections(open_runs([str(reported.trunk), str(copy)]))
    body = {section.key: section for section in sections}["fair"].body
    assert "is not a plain cross entropy: only compare losses if both use the same objective" in body


def test_the_metrics_of_a_distilled_run_are_shown_by_source(tmp_path: Path) -> None:
    columns: dict[str, np.ndarray] = {}
    for name in ("divergence", "cross_entropy", "agreement", "margin"):
        columns |= {f"val_{name}{source}": np.ones(3) for source in ("", "/es", "/ca")}
        columns[f"train_{name}"] = np.ones(3)
    run = write_metrics(tmp_path / "distilled", **columns)
    charts = {chart.key: chart for chart in metric_charts([("distilled", run.metrics)])}
    assert [series.name for series in charts["sources-agreement"].series] == ["es", "ca"]
    assert charts["sources-cross_entropy"].title == "Cross entropy by source"
    assert (charts["metric-divergence"].y_title, charts["metric-agreement"].y_title) == (
        "nats per token",
        "share of tokens",
    )
    assert "sources-margin" not in charts


def test_a_branch_shows_its_trunk_and_the_trunk_its_branch(reported: ReportedRuns) -> None:
    branch = sections_of(reported.branch)
    (loss,) = (chart for chart in branch["curves"].charts if chart.key == "loss")
    assert loss.series[0].x.tolist() == [1, 2, 3, 4, 5, 6]
    assert ("branch", 4) in {(mark.kind, mark.x) for mark in loss.marks}
    assert "- `trunk`\n  - after step 4: `branch`" in branch["lineage"].body
    assert "`lr`: 0.001 → 0.0005" in branch["lineage"].body
    assert "after step 4: `branch`" in sections_of(reported.trunk)["lineage"].body


def test_a_branch_of_a_branch_is_below_that_branch_alone(reported: ReportedRuns, tmp_path: Path) -> None:
    for run, name in ((reported.trunk, "trunk"), (reported.branch, "branch"), (reported.branch, "second")):
        shutil.copytree(run, tmp_path / name)
    for folder in (tmp_path / "second" / "checkpoints").iterdir():
        trainer = json.loads((folder / "trainer.json").read_text())
        trainer["lineage"].append(trainer["lineage"][-1] | {"run": str(tmp_path / "branch"), "step": 5})
        (folder / "trainer.json").write_text(json.dumps(trainer))
    below = {run: sections_of(tmp_path / run)["lineage"].body for run in ("trunk", "branch", "second")}
    assert "second" not in below["trunk"]
    assert "after step 5: `second`" in below["branch"]
    assert "- `trunk`\n  - after step 4: `branch`\n    - after step 5: `second`" in below["second"]


def test_duration_and_cost_are_of_all_sessions_and_devices(copy: Path) -> None:
    for folder in (copy / "checkpoints").iterdir():
        trainer = json.loads((folder / "trainer.json").read_text())
        trainer["sessions"] = [one | {"seconds": 5400.0, "num_devices": 4} for one in trainer["sessions"]]
        (folder / "trainer.json").write_text(json.dumps(trainer))
    assert len(ReportedRun(copy).newest.sessions) == 2
    summary, results, *_ = run_sections(ReportedRun(copy), price_per_hour=2.5)
    assert "| duration | 3.00 h of training |" in summary.body
    assert "| cost | 30.00 at 2.5 per device-hour |" in summary.body  # of 2 × 1.5 × 4 hours
    assert "before the arrows, after step 0" in results.body


def test_the_run_wrote_its_report_after_its_last_save(reported: ReportedRuns) -> None:
    page, text = ((reported.trunk / f"report.{end}").read_text() for end in ("html", "md"))
    assert re.search(r"http-equiv=.Content-Security-Policy. content=.default-src 'none'", page)
    assert "![Report of trunk](report.png)" in text
    assert (reported.trunk / "report.png").read_bytes().startswith(b"\x89PNG")
    for title in ("Summary", "Results", "What happened", "Samples", "Checkpoints"):
        assert f"\n## {title}\n" in text
    assert "step-00000006" in (reported.trunk / "run.log").read_text().split("written")[0]
    assert "| cost | " in (reported.branch / "report.md").read_text()


def test_no_text_of_the_run_is_markup(reported: ReportedRuns) -> None:
    page = (reported.trunk / "report.html").read_text()
    assert HOSTILE not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    markdown = (reported.trunk / "report.md").read_text()
    assert "\\<img" in markdown
    assert not re.search(r"^<img|[^\\`]<img(?! src=x onerror=alert\(1\)>$)", markdown, re.M)


DIRECTING = "\x1b[31m\u202egnp.exe\u2066\u200f"
"""A name with the code of a colour and marks that turn the direction of text."""


def test_a_source_that_is_named_with_control_characters_shows_them(copy: Path) -> None:
    (copy / "metrics.csv").write_text((copy / "metrics.csv").read_text().replace("other_texts", DIRECTING))
    for file in copy.glob("checkpoints/*/*.json"):
        file.write_text(file.read_text().replace("other_texts", json.dumps(DIRECTING)[1:-1]))
    with (copy / "run.log").open("a") as log:
        log.write(f"2026-01-01 00:00:00+0000 {DIRECTING} rank 0: error: {DIRECTING} was lost in step 3\n")
    drawn: list[str] = []
    run = drawing_process.run

    def keep_and_draw(what: str, text: str, output: Path) -> None:
        drawn.append(text)
        run(what, text, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing_process, "run", keep_and_draw)
        main([str(copy)])
    page = (copy / "report.html").read_text()
    of_charts = page.partition('id="chart-data">')[2].partition("</script>")[0]
    before_scripts = page.partition("<script")[0]
    in_charts = ["".join(texts_in(json.loads(content))) for content in (of_charts, *drawn)]
    for shown in (before_scripts, (copy / "report.md").read_text(), *in_charts):
        assert not set(shown) & {"\x1b", "\u202e", "\u2066", "\u200f"}
        assert "\\x1b[31m\\u202egnp.exe\\u2066\\u200f" in shown.replace("\\[", "[").replace("\\\\", "\\")


def texts_in(content: Any) -> Iterator[str]:
    """Yield all texts in what JSON holds, the names of objects included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for item in content:
            yield from texts_in(item)
        for value in content.values() if isinstance(content, dict) else ():
            yield from texts_in(value)


@pytest.mark.parametrize(
    "damage, lost",
    [
        (lambda run: (run / "metrics.csv").write_text("nothing,of,this\n1,2,3\n"), {"curves", "health", "checkpoints"}),
        (lambda run: (run / "metrics.csv").unlink(), {"curves", "health"}),
        (lambda run: (run / "config.yaml").write_text("- a\n: b\n"), {"configuration", "repeat"}),
        (lambda run: (run / "samples.jsonl").write_text("{\n"), {"samples"}),
        (lambda run: shutil.rmtree(run / "checkpoints"), {"results", "data", "lineage"}),
        (lambda run: (run / "run.log").unlink(), {"events"}),
        (lambda run: damage_changes(run), {"changes"}),
        (lambda run: (run / "exports.jsonl").write_text("{}\n"), {"exports"}),
        (lambda run: (run / "times.jsonl").write_text("{}\n"), {"time"}),
        (lambda run: replace_bytes(run / "metrics.csv", b"val_loss/es", b"val_loss/\xe9"), {"curves", "health"}),
    ],
)
def test_a_damaged_file_leaves_its_sections_out_with_a_reason(
    copy: Path, damage: Callable[[Path], object], lost: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy)
    faults = {key: section.fault for key, section in sections_of(copy).items() if section.fault}
    assert lost <= set(faults), faults
    assert all("\n" not in fault for fault in faults.values())
    main([str(copy)])
    assert "Left out: " in (copy / "report.html").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not in the report: ")]
    assert lines
    assert len(lines) == len(set(lines))  # once, of however many sections


def replace_bytes(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


def test_a_number_of_5000_digits_in_the_log_ends_no_report(copy: Path) -> None:
    before = sections_of(copy)["events"].body
    with (copy / "run.log").open("a") as log:
        log.write(f"2026-01-01 00:00:00+0000 host rank {'9' * 5000}: warning: stopped by a signal\n")
        log.write(f"2026-01-01 00:00:00+0000 host rank 0: warning: stopped by a signal in step {'9' * 5000}\n")
    events = sections_of(copy)["events"]
    assert not events.fault
    assert events.body.count("stopped by") == before.count("stopped by") + 2  # a mark and a line of the log


def test_a_line_of_times_without_a_part_counts_as_0_seconds(copy: Path) -> None:
    file = copy / "times.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["seconds"].pop("starting", None)
        line["seconds"].pop("saving", None)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "| starting | 0 s | 0.0% |" in sections_of(copy)["time"].body
    lines[-1]["seconds"]["training"] = 1e300
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"times.jsonl, line {len(lines)}: damaged" in sections_of(copy)["time"].fault


def test_the_time_of_all_starts_is_divided_and_an_old_run_says_why_not(copy: Path) -> None:
    body = sections_of(copy)["time"].body
    shares = [float(share) for share in re.findall(r"\| ([\d.]+)% \|$", body, re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    for part in ("training", "evaluation", "saving", "starting", "restarting"):
        assert float(re.findall(rf"^\| {part} \| .* \| ([\d.]+)% \|$", body, re.M)[0]) > 0, part
    assert "median of 2)" in body  # starts
    assert re.search(r"^goodput +[\d.]+% of .* 2 starts; ", (copy / "run.log").read_text(), re.M)
    (copy / "times.jsonl").unlink()
    assert "an earlier version" in sections_of(copy)["time"].body


def test_saves_and_failures_that_cost_much_are_said(tmp_path: Path) -> None:
    def write(stall: float, first_step: int) -> list[str]:
        """Write an hour with a save at step 100 of 200, and a second start from ``first_step``."""
        run = write_metrics(tmp_path / "run", train_loss=np.ones(9))
        lines = [("start", 0, 0, 0, 0), ("save", 1000, 100, 990, 0), ("saved", 1000 + stall, 100, 990, stall)]
        lines += [("step", 1990 + stall, 200, 1980, stall), ("start", 90_000, first_step, 0, 0)]
        lines.append(("end", 91_600, 200, 1590, 0))
        text = ""
        for event, when, step, trained, saved in lines:
            seconds = {"starting": 10.0, "training": trained, "saving": saved} if event != "start" else {}
            line = {"event": event, "time": when, "step": step, "num_devices": 1, "seconds": seconds}
            text += json.dumps(line) + "\n"
        (run.folder / "times.jsonl").write_text(text)
        return [finding.text for finding in find_unusual(run) if "Saves and failures" in finding.text]

    assert write(10, 200) == []
    assert "cost 12.5% of the time, more than 5%: saving 12.2%, restarting 0.2%. --plan" in write(500, 200)[0]
    assert "repeated steps 27.6%" in write(1, 100)[0]


def damage_changes(run: Path) -> None:
    (run / "evaluation").mkdir()
    (run / "evaluation" / CHANGES).write_text('{"first": 1}')


def test_a_run_without_a_checkpoint_yet_is_reported(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    lines = (copy / "metrics.csv").read_text().splitlines(keepends=True)
    (copy / "metrics.csv").write_text("".join(lines[:3]) + lines[3][:9])  # a row that is being written
    sections = sections_of(copy)
    assert sections["curves"].charts[0].series[0].x.tolist() == [1]
    assert "no checkpoint yet" in sections["summary"].body


def test_what_is_no_run_is_refused_in_a_line(tmp_path: Path, reported: ReportedRuns) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        open_runs([str(tmp_path / "empty"), str(tmp_path / "gone"), str(reported.trunk / "best")])
    first, second = caught.value.faults
    assert first.endswith(": not a run folder (no config.yaml, metrics.csv or checkpoints)")
    assert "no such folder" in second
    for words, fault in (
        ([str(reported.trunk), "--output", "x.pdf"], r"\.html"),
        ([str(reported.trunk), "--output", str(tmp_path / "none" / "x.html")], "create it first"),
    ):
        with pytest.raises(InputError, match=fault):
            main(words)


def test_several_runs_are_compared_with_their_differences_first(reported: ReportedRuns, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    main([str(reported.trunk), str(reported.branch), "--output", str(page)])
    sections = {one.key: one for one in comparison_sections(open_runs([str(reported.trunk), str(reported.branch)]))}
    assert list(sections)[:4] == ["differences", "data", "fair", "results"]
    assert re.search(r"\| `lr` \| 0\.001 \| 0\.0005 \|", sections["differences"].body)
    assert "max_step" not in sections["differences"].body
    assert "same token datasets" in sections["data"].body
    names = [series.name for series in sections["curves"].charts[0].series]
    assert names == ["trunk: training", "branch: training", "trunk: validation", "branch: validation"]
    assert "trunk: training" in page.read_text()


def test_a_run_without_steps_is_compared_too(reported: ReportedRuns, tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    shutil.copy(reported.trunk / "config.yaml", started)
    page = tmp_path / "both.html"
    main([str(started), str(reported.branch), "--output", str(page)])
    found = re.search(r'id="chart-data">(.*?)</script>', page.read_text())
    assert found
    content = json.loads(found[1])
    assert {one["axis"] for chart in content["charts"] for one in chart["series"]} == {0}
    assert content["axes"][0]["step"][-1] == 6
    assert "Left out: started, metrics.csv" in page.read_text()


def test_an_unfair_comparison_is_said_and_why(reported: ReportedRuns, copy: Path) -> None:
    for folder in (copy / "checkpoints").iterdir():
        trainer = json.loads((folder / "trainer.json").read_text())
        for name in ("evaluation", "first_evaluation"):
            if trainer[name]:  # a signal saves without an evaluation
                trainer[name]["rows"] = "0" * 32
        (folder / "trainer.json").write_text(json.dumps(trainer))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["tokenizer"]["name"] = "another"
        (folder / "manifest.json").write_text(json.dumps(manifest))
    body = {one.key: one for one in comparison_sections(open_runs([str(reported.trunk), str(copy)]))}["fair"].body
    assert "different validation rows than trunk" in body
    assert "a different tokenizer than trunk: compare bits per byte" in body


def write_metrics(run: Path, **columns: np.ndarray) -> ReportedRun:
    """Write a run that has only metrics.csv."""
    run.mkdir(exist_ok=True)
    length = len(next(iter(columns.values())))
    table = {"step": np.arange(length), "epoch": np.zeros(length, int), **columns}
    names = ["train_loss", "val_loss", "learning_rate", "grad_norm", "num_tokens", "tokens_per_second", "data_wait"]
    names = [name for name in names if name not in columns]
    with (run / "metrics.csv").open("w") as file:
        file.write(",".join([*table, *names]) + "\n")
        for row in zip(*(values.tolist() for values in table.values()), strict=True):
            file.write(",".join(["" if value != value else str(value) for value in row] + [""] * len(names)) + "\n")
    return ReportedRun(run)


def test_what_is_unusual_is_said_and_a_usual_run_gets_no_sentence(tmp_path: Path) -> None:
    steps = np.arange(400)
    rng = np.random.default_rng(0)
    usual = {
        "train_loss": 2 + np.exp(-steps / 100) + rng.normal(0, 0.05, 400),
        "val_loss": np.where(steps % 50 == 0, 2 + np.exp(-steps / 100), np.nan),
        "val_loss/es": np.where(steps % 50 == 0, 2 + np.exp(-steps / 100), np.nan),
        "grad_norm": rng.lognormal(0, 0.2, 400),
        "tokens_per_second": rng.normal(1000, 30, 400),
        "data_wait": rng.uniform(0, 0.02, 400),
        "skipped_steps": np.zeros(400, int),
        "step_time": np.full(400, 0.5),
        "slowest_rank": rng.integers(0, 4, 400),
        "rank_lag": rng.uniform(0, 0.02, 400),
    }
    assert find_unusual(write_metrics(tmp_path / "usual", **usual)) == []
    spike = usual["grad_norm"].copy()
    spike[217] = 60.0
    rising = np.where(steps % 50 == 0, 2 + np.abs(steps - 150) / 1000, np.nan)
    unusual = {
        "data_wait": ("wait for data 1", usual["data_wait"] + 0.1),
        "grad_norm": ("1 spike above .* step 217", spike),
        "val_loss/es": ("validation loss of es rises, from 2.0000 at step 150 to 2.2000", rising),
        "tokens_per_second": ("became slower", usual["tokens_per_second"] - steps),
        "rank_lag": ("wait for rank 2, whose steps take 2", np.full(400, 0.12)),
        "skipped_steps": ("3 steps were skipped", np.minimum(steps, 3)),
    }
    for column, (sentence, values) in unusual.items():
        columns = {**usual, column: values}
        if column == "rank_lag":
            columns["slowest_rank"] = np.where(steps % 4, 2, columns["slowest_rank"])
        texts = [finding.text for finding in find_unusual(write_metrics(tmp_path / "run", **columns))]
        assert any(re.search(sentence, text) for text in texts), (column, texts)
        assert len(texts) <= 2  # a source that rises may be above its first loss, too


def test_a_step_skipped_before_the_first_logged_row_has_a_mark(copy: Path) -> None:
    run = write_metrics(copy, skipped_steps=np.array([1, 1, 2]))
    assert [mark.x for mark in run.marks if mark.kind == "skipped"] == [0, 2]


def test_what_is_within_the_usual_gets_no_sentence_at_its_border(tmp_path: Path) -> None:
    first_waits = np.where(np.arange(21) == 0, 1.0, 0.01)  # the first step starts the workers
    of_es = np.array([2.0, 1.0, 1.0, 1.005, 1.009])  # 1 % above the lowest
    for columns in ({"data_wait": first_waits}, {"val_loss": of_es, "val_loss/es": of_es}):
        assert find_unusual(write_metrics(tmp_path / "run", **columns)) == []
    rising = {"val_loss": of_es, "val_loss/es": np.array([2.0, 1.0, 1.0, 1.005, 1.011])}
    assert "of es rises" in find_unusual(write_metrics(tmp_path / "run", **rising))[0].text
    late = np.where(np.arange(90) < 70, 1000.0, 700.0)  # the last quarter alone is slower
    texts = [finding.text for finding in find_unusual(write_metrics(tmp_path / "run", tokens_per_second=late))]
    assert texts == [
        "The run became slower: 1,000 tokens/s in its first quarter, 700 in its last: look for another program on "
        "the machine, a hot GPU or a slow disk."
    ]


def test_a_spike_has_its_own_step_although_rows_before_have_no_norm(tmp_path: Path) -> None:
    norms = np.where(np.arange(100) < 30, np.nan, 1.0)
    norms[[57, 80]] = 60.0, 20.0
    findings = find_unusual(write_metrics(tmp_path / "run", train_loss=np.full(100, 2.0), grad_norm=norms))
    said = "has 2 spikes above 8 times its median; the highest, 60, is at step 57. "
    assert any(said in finding.text for finding in findings)


def test_a_reward_of_held_out_prompts_that_falls_by_more_than_its_noise_is_said(tmp_path: Path) -> None:
    """The difference of two means has √2 times their standard error."""
    falling = np.array([0.5, 0.45, 0.4])
    clear = write_metrics(tmp_path / "clear", val_reward=falling, val_stderr_reward=np.full(3, 0.03))
    (finding,) = find_unusual(clear)
    assert finding.text.startswith("The validation reward has fallen from 0.5000 at step 0 to 0.4000 at step 2:")
    unclear = write_metrics(tmp_path / "unclear", val_reward=falling, val_stderr_reward=np.full(3, 0.04))
    assert find_unusual(unclear) == []


def test_forgetting_no_evaluation_guessing_and_lost_ranks_are_said(copy: Path) -> None:
    steps = np.arange(400)
    learned = {"train_loss": 2 + np.exp(-steps / 100)}

    def said(**columns: np.ndarray) -> str:
        return " ".join(finding.text for finding in find_unusual(write_metrics(copy, **columns)))

    evaluated = np.where(steps % 100 == 0, 2 + steps / 1000, np.nan)
    assert "forgets ca: its validation loss is 2.3000, up from 2.0000 before training" in said(
        **learned, **{"val_loss/ca": evaluated}
    )
    assert "The run has no evaluation" in said(**learned)
    assert "random guessing gives 6.91, ln 1,000" in said(train_loss=np.full(400, 6.9))  # of the tiny model
    assert "guesses" not in said(**learned)
    with (copy / "run.log").open("a") as log:
        log.write("2026-01-02 03:04:05+0000 node-2 rank 0: error: rank 5 was lost in step 7\n")
        # what the report itself has written there after that
        log.write("2026-01-02 03:05:05+0000 node-2 rank 0: A rank was lost 1 time: error: rank 5 was lost in step 7\n")
    assert "A rank was lost 1 time: error: rank 5 was lost in step 7" in said(**learned)


def test_pages_that_findings_name_exist() -> None:
    root = Path(__file__).parents[2]
    source = (root / "fabric_train" / "report" / "health.py").read_text()
    pages = re.findall(r'"(docs/[^"]+)"', source)
    assert len(pages) > 5
    for page in pages:
        file, _, anchor = page.partition("#")
        heads = re.findall(r"^#+ (.*)$", (root / file).read_text(), re.M)
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, page


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 60))
def test_a_sampled_curve_keeps_its_ends_and_extremes(values: list[float], most: int) -> None:
    y = np.array(values)
    x = np.arange(len(values), dtype=np.float64)
    chosen = sample_points(x, y, most)
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) <= max(most, 2) + 2
    assert {y[chosen].min(), y[chosen].max()} == {y.min(), y.max()}
    assert (chosen[0], chosen[-1]) == (0, len(values) - 1)


def test_a_smooth_curve_is_the_mean_of_the_last_values() -> None:
    y = np.array([1.0, 3.0, np.nan, 5.0, 9.0])
    np.testing.assert_allclose(moving_average(y, 2), [1, 2, 3, 5, 7])


def test_a_long_run_has_a_small_page_with_all_extremes(tmp_path: Path) -> None:
    length = 30_000
    rng = np.random.default_rng(1)
    steps = np.arange(length)
    columns = {f"train_loss/source {number}": rng.normal(3, 0.2, length) for number in range(20)}
    columns |= {"train_loss": rng.normal(3, 0.1, length), "grad_norm": rng.lognormal(0, 0.3, length)}
    columns["grad_norm"][12_345] = 77.5
    run = write_metrics(tmp_path / "long", step_time=np.full(length, 0.5), num_tokens=steps * 1000, **columns)
    charts = {chart.key: chart for chart in metric_charts([("long", run.metrics)])}
    (norm,) = charts["grad_norm"].series
    assert norm.y.max() == 77.5
    assert norm.x[norm.y.argmax()] == 12_345
    assert sum(len(series.x) for chart in charts.values() for series in chart.series) < 60_000
    main([str(run.folder)])
    assert (run.folder / "report.html").stat().st_size < 3_000_000


def test_a_report_that_cannot_be_written_ends_no_run(
    tmp_path: Path, forked_runs: ForkedRuns, tiny_model_dir: Path, tiny_tokens_dir: Path
) -> None:
    words = argv(tiny_model_dir, tiny_tokens_dir, tmp_path / "run", max_step=1, report="true")
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    run = forked_runs.start(words, 1)
    run.finish()
    (line,) = (line for line in run.lines() if "no report" in line)
    assert "report.html" in line
    assert "write it later with fabric-train report " in line
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_evaluations_beside_the_run_are_shown(copy: Path) -> None:
    folder = copy / "evaluation"
    folder.mkdir()
    lines = [
        {"model": name, "weights": name, "source": "es", "text": "t", "document": f"es.jsonl:{number}", "tokens": 10}
        | {"bytes": 40, "nats": nats + number % 3}
        for name, nats in (("base", 30.0), ("step-00000006", 20.0))
        for number in range(40)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = [
        ("model", "step", "language", "task", "metric", "value", "stderr", "higher_is_better"),
        ("base", "", "ca", "mean", "accuracy", "0.25", "0.01", "True"),
        ("step-00000006", "6", "ca", "mean", "accuracy", "0.5", "", "True"),
    ]
    (folder / "scores.csv").write_text("".join(",".join(line) + "\n" for line in scores))
    sections = sections_of(copy)
    assert re.search(r"\| es \| step-00000006 \| 40 \| 400 \| 2\.\d+ .* better \|", sections["evaluation"].body)
    (chart,) = sections["scores"].charts
    assert [(one.name, one.kind, one.y.tolist()) for one in chart.series] == [
        ("checkpoints", "points", [0.5]),
        ("base", "level", [0.25]),
    ]
    assert chart.y_title == "accuracy (higher is better)"
    assert "| base | 0.2500 ± 0.0100 |" in sections["scores"].body
    main([str(copy)])  # also drawn without an error
    (folder / "scores.csv").write_text("model,task,value\nbase,mean,much\n")
    assert "damaged" in sections_of(copy)["scores"].fault


def test_exports_are_shown_with_their_verification(copy: Path) -> None:
    weights = {"w": "ab" * 32}
    record = ExportRecord("2026-01-02", "step 6", "model|1", "bfloat16", 9, 0.0, weights, "")
    failed = replace(record, num_tensors=0, weights={}, logit_difference=None, faults="weights differ")
    lines = [json.dumps(asdict(one)) + "\n" for one in (record, failed)]
    (copy / "exports.jsonl").write_text("".join(lines) + lines[0][:50])  # a line that is being written
    rows = sections_of(copy)["exports"].body.splitlines()[2:]
    assert [len(re.split(r"(?<!\\)\|", row)) for row in rows] == [8, 8]
    assert "| model\\|1 | bfloat16 | 9 tensors bit-identical; logits differ by 0 at most | w `abab" in rows[0]
    assert "not exported: weights differ" in rows[1]


@pytest.mark.parametrize("steps", [(2.0, 3.0), (2.0, 4.0), (0.0, 5.0)])
def test_the_axes_of_pictures_have_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[float, float]
) -> None:
    import vl_convert

    figures: list[str] = []

    def keep_figure(kind: str, text: str, output: Path) -> None:
        figures.append(text)
        output.touch()

    monkeypatch.setattr(drawing_process, "run", keep_figure)
    chart = Chart("one", "title", "unit", (Series("a", np.array(steps), np.arange(2.0)),))
    draw([chart, chart], tmp_path / "picture.png", heights=[90, 90])
    svg = vl_convert.vegalite_to_svg(figures[0])
    assert svg.count("X-axis") == 2
    assert len(re.findall(r'transform="translate\([\d.]+,1\d\)"[^>]*>\d+</text>', svg)) == 2 * (steps[1] - steps[0] + 1)


def test_a_title_with_control_characters_is_drawn(tmp_path: Path) -> None:
    chart = Chart("one", "ti\x1btle", "unit", (Series("a\x00\ud800", np.arange(3.0), np.arange(3.0)),))
    assert draw([chart], tmp_path / "picture.png", title="\x1b[31mred\x07\x85", heights=[90])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_without_a_picture_is_written_with_a_note(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing_process._drawing_process.cache_clear()
    library.cache_clear()
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the process that draws ends at once
    (copy / "report.png").unlink(missing_ok=True)
    started = time.monotonic()
    main([str(copy)])
    assert time.monotonic() - started < 60
    library.cache_clear()
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [line.rpartition(": ")[0] for line in notes] == ["note: no pictures and charts: drawing failed"]
    assert "![" not in (copy / "report.md").read_text()
    assert "chart-data" not in (copy / "report.html").read_text()


def test_drawing_goes_on_when_the_process_that_draws_has_ended(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    chart = Chart("one", "title", "unit", (Series("a", np.arange(3.0), np.arange(3.0)),))
    draw([chart], picture, heights=[90])
    first = drawing_process._drawing_process(os.getpid())
    first.kill()
    first.wait()
    picture.unlink()
    draw([chart], picture, heights=[90])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert drawing_process._drawing_process(os.getpid()).pid != first.pid
    assert not charts.write_png({"mark": "no such mark"}, picture, "")
    assert picture.read_bytes().startswith(b"\x89PNG")  # the file stays as it was
