"""The report of a run that sampled completions: its section, and the charts of its metrics."""

from pathlib import Path

import numpy as np
import pytest

from fabric_train.pages.markdown import Section, markdown_to_html
from fabric_train.report.comparison import comparison_sections
from fabric_train.report.health import find_unusual
from fabric_train.report.reported_run import ReportedRun
from fabric_train.report.sections import run_sections
from fabric_train.training.metric_charts import metric_charts
from tests.report.conftest import HOSTILE
from tests.report.test_report import write_metrics
from tests.support.stored_completions import Answer, write_step

NUM_STEPS = 30


def write_run(folder: Path) -> ReportedRun:
    """Write the metrics of a run, and the completions of its last two steps."""
    values = np.linspace(0, 1, NUM_STEPS)
    metrics = {f"train_{name}": values for name in ("reward", "reward_exact", "reward_brief", "flat_groups")}
    metrics |= {"train_reward/math": values, "train_reward/es": values, "train_completions": np.full(NUM_STEPS, 4)}
    run = write_metrics(
        folder,
        train_loss=values,
        step_time=np.full(NUM_STEPS, 3.0),
        data_wait=np.full(NUM_STEPS, 0.8),
        **metrics,
    )
    write_step(run.folder, 28, {"math:1": [Answer("uno", exact=1.0), Answer("dos")]}, sampling_seconds=1.0)
    groups = {
        "math:7": [Answer(f"a\n\n{HOSTILE}\x1b[31m", exact=1.0), Answer("7b", exact=1.0, brief=0.5)],
        "math:8": [Answer("8a"), Answer("8b")],
        "math:9": [Answer("", brief=-1.0, error="exact: no number"), Answer("9b")],
        "math:10": [Answer("10a", exact=1.0, brief=1.0), Answer("10b", exact=1.0, brief=1.0)],
        "math:11": [Answer("11a", exact=1.0, brief=1.0), Answer("11b", brief=0.5)],
    }
    write_step(run.folder, 29, groups, sampling_seconds=2.0)
    return run


@pytest.fixture
def run(tmp_path: Path) -> ReportedRun:
    return write_run(tmp_path / "rl")


def rollouts_of(run: ReportedRun) -> Section:
    (section,) = (section for section in run_sections(run) if section.key == "rollouts")
    return section


def test_the_section_has_steps_and_samples(run: ReportedRun) -> None:
    body = rollouts_of(run).body
    assert "| 28 | 2 | 0.5 | 0.5 | 0 | 4.0 | 0.0% | 0.0% | 0 | 0 | 1.0 | 0.2 |" in body
    assert "fabric-train rollouts" in body
    # of equal rewards, the one of a harder prompt comes first; the third best prompt is not shown
    best, worst = body.partition("### Best of step 29")[2].split("### Worst of step 29")
    assert best.index("**math:11**: reward 1.5 (exact 1, brief 1), advantage +0.625") < best.index("**math:10**")
    assert "math:7" not in best
    assert worst.index("**math:9**: reward -0.5 (exact 0, brief -1)") < worst.index("**math:8**")
    assert "Reward error: exact: no number" in worst
    assert "*empty*" in worst


def test_texts_of_completions_are_no_markup(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "rl", train_loss=np.ones(3))
    write_step(run.folder, 2, {f"{HOSTILE}:1": [Answer(f"a\n\n{HOSTILE}\x1b[31m\n# no title"), Answer("b", exact=1.0)]})
    section = rollouts_of(run)
    assert f"    a\n    \n    {HOSTILE}⟨U+001B⟩[31m\n    # no title" in section.body
    html = markdown_to_html(section.body)
    assert "<img" not in html
    assert "<h1" not in html


def test_the_chart_of_times_has_weights_sampling_rewards_and_steps(run: ReportedRun) -> None:
    (chart,) = rollouts_of(run).charts
    curves = {series.name: (series.x.tolist(), series.y.tolist()) for series in chart.series}
    assert curves == {
        "weights": ([28, 29], [0.5, 0.5]),
        "sampling": ([28, 29], [1.0, 2.0]),
        "rewards": ([28, 29], [0.25, 0.25]),
        "whole step": ([28, 29], [3.0, 3.0]),
    }


def test_a_run_without_metrics_yet_has_samples(tmp_path: Path) -> None:
    (tmp_path / "rl").mkdir()
    write_step(tmp_path / "rl", 1, {"math:1": [Answer("uno", exact=1.0), Answer("dos")]})
    section = rollouts_of(ReportedRun(tmp_path / "rl"))
    assert "**math:1**" in section.body
    assert section.charts == ()


def test_damaged_completions_leave_out_their_section(run: ReportedRun) -> None:
    (file,) = (run.folder / "rollouts" / "step-000029").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "has changed since it was written" in rollouts_of(run).fault


def test_rewards_share_a_chart(run: ReportedRun) -> None:
    charts = {chart.key: chart for chart in metric_charts([("rl", run.metrics)])}
    assert [series.name for series in charts["rewards"].series] == ["weighted sum", "exact", "brief"]
    assert [series.name for series in charts["sources-reward"].series] == ["math", "es"]
    assert not {"metric-reward", "metric-reward_exact"} & set(charts)
    assert charts["metric-flat_groups"].y_title == "share of completions, in groups of equal rewards"


def test_a_single_reward_has_one_curve(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "rl", train_reward=np.ones(3), train_reward_exact=np.ones(3))
    charts = {chart.key: chart for chart in metric_charts([("rl", run.metrics)])}
    assert [series.name for series in charts["rewards"].series] == ["reward"]


def test_rewards_of_a_preference_keep_their_charts(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "dpo", train_reward_chosen=np.ones(3), train_reward_rejected=np.zeros(3))
    keys = {chart.key for chart in metric_charts([("dpo", run.metrics)])}
    assert {"metric-reward_chosen", "metric-reward_rejected"} <= keys


def test_runs_with_rewards_are_compared(run: ReportedRun, tmp_path: Path) -> None:
    sections = {section.key: section for section in comparison_sections([run, write_run(tmp_path / "other")])}
    charts = {chart.key: chart for chart in sections["curves"].charts}
    names = [series.name for series in charts["rewards"].series]
    assert names[:4] == ["rl: weighted sum", "other: weighted sum", "rl: exact", "other: exact"]


def test_a_wait_for_data_is_unusual_beside_sampling_too(run: ReportedRun) -> None:
    assert any("wait for data 80.0%" in finding.text for finding in find_unusual(run))
