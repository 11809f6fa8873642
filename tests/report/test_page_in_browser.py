"""The page in a real browser: no error, all sections and charts, hover, zoom, axes, dark, narrow, printed, axe."""

import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from fabric_train.report.__main__ import main
from tests.report.conftest import ReportedRuns
from tests.report.test_report import write_metrics
from tests.report.test_rollouts_section import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def open_page(browser: Browser, file: Path, width: int = 1100, colours: str = "light") -> tuple[Page, list[str]]:
    """Return the page once its charts are drawn, and a list of its errors and of all that it loads."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=colours)  # type: ignore[arg-type]
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    return page, faults


def test_every_section_and_chart_is_there_without_an_error(browser: Browser, reported: ReportedRuns) -> None:
    page, faults = open_page(browser, reported.trunk / "report.html")
    titles = page.locator("section > h2").all_text_contents()
    assert titles[:5] == ["Summary", "Results", "Health", "Curves", "What happened"]
    assert page.locator("nav a").all_text_contents() == titles
    charts = page.locator(".chart canvas")
    assert charts.count() == page.locator(".chart").count() >= 9
    assert all(size > 100 for size in charts.evaluate_all("all => all.map(one => one.width)"))
    assert faults == []
    page.close()


def test_charts_of_an_objectives_metrics_are_drawn(browser: Browser, tmp_path: Path) -> None:
    values = np.linspace(2, 1, 5)
    metrics: dict[str, np.ndarray] = {}
    for name in ("agreement", "my-métrique"):
        metrics |= {f"val_{name}{source}": values for source in ("", "/es", "/ca")}
    run = write_metrics(tmp_path / "run", train_loss=values, **metrics)
    main([str(run.folder)])
    page, faults = open_page(browser, run.folder / "report.html")
    assert faults == []
    assert page.locator(".chart canvas").count() == page.locator(".chart").count() == 4
    page.close()


def test_the_report_of_sampled_completions_is_drawn(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "rl")
    main([str(run.folder)])
    page, faults = open_page(browser, run.folder / "report.html", width=390)
    assert faults == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for key in ("rewards", "sources-reward", "rollout-time"):
        assert page.locator(f"#chart-{key} canvas").count() == 1
    assert page.locator("#rollouts pre").first.inner_text().startswith("⟨0⟩⟨5⟩")
    page.close()


def test_a_chart_answers_the_mouse_and_the_controls(browser: Browser, reported: ReportedRuns) -> None:
    page, faults = open_page(browser, reported.trunk / "report.html")
    chart = page.locator("#chart-loss canvas")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    tooltip = page.locator("#vg-tooltip-element")
    tooltip.wait_for(state="visible")
    assert "optimizer step" in tooltip.inner_text()
    assert "nats per token" in tooltip.inner_text()
    assert any(name in tooltip.inner_text() for name in ("training", "validation"))

    page.mouse.move(box["x"] + box["width"] * 0.3, middle)  # drag: all charts show this part
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.wait_for_function("state.domain !== null")
    first, last = page.evaluate("state.domain")
    assert 0 < first < last < 6
    page.evaluate("drawing")
    page.get_by_role("button", name="whole run").click()
    page.evaluate("drawing")
    assert page.evaluate("state.domain") is None

    tokens = page.evaluate("axes[0].tokens")
    page.get_by_label("tokens").check()
    page.evaluate("drawing")
    assert page.evaluate("specification(charts[0]).datasets.points.at(-1).x") == tokens[-1]
    for label in ("log scale", "smooth"):
        page.get_by_label(label).click()
        page.evaluate("drawing")
    assert page.evaluate("state.log") is True
    assert page.evaluate("state.smooth") is False
    assert faults == []
    page.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 390])
def test_it_can_be_read_on_a_phone_and_in_the_dark(
    browser: Browser, reported: ReportedRuns, width: int, colours: str
) -> None:
    page, faults = open_page(browser, reported.trunk / "report.html", width, colours)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in serious] == []
    assert faults == []
    page.close()


def test_it_is_printed_with_all_that_is_folded(browser: Browser, reported: ReportedRuns, tmp_path: Path) -> None:
    page, _ = open_page(browser, reported.trunk / "report.html")
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.locator("details:not([open])").count() == 0
    page.close()


@pytest.mark.parametrize(("width", "abreast"), [(1600, 2), (1000, 1)])
def test_charts_stand_two_abreast_on_a_wide_screen(
    browser: Browser, reported: ReportedRuns, width: int, abreast: int
) -> None:
    page, faults = open_page(browser, reported.trunk / "report.html", width)
    figures = page.locator("section#curves figure")
    tops = figures.evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert tops.count(tops[0]) == abreast
    widths = page.locator(".chart canvas").evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
    assert max(widths) <= width
    assert faults == []
    page.close()


def test_the_axis_of_a_short_run_has_whole_steps(browser: Browser, reported: ReportedRuns) -> None:
    page, _ = open_page(browser, reported.trunk / "report.html", 1600)
    labels = page.evaluate(
        """() => { const texts = [];
        const visit = item => { if (item.role === "axis-label") item.items.forEach(one => texts.push(one.text));
          (item.items || []).forEach(visit); };
        visit(views.get("loss").view.scenegraph().root); return texts; }"""
    )
    assert {"1", "2", "3"} <= set(labels)
    assert not {"0.5", "1.5", "2.5", "3.5"} & set(labels)
    page.close()


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_table_that_goes_on_has_a_shadow_at_that_edge(browser: Browser, reported: ReportedRuns, colours: str) -> None:
    page, _ = open_page(browser, reported.trunk / "report.html", 390, colours)
    wide = page.locator(".wide").evaluate_all("all => all.findIndex(one => one.scrollWidth > one.clientWidth + 40)")
    assert wide >= 0
    table = page.locator(".wide").nth(wide)
    table.scroll_into_view_if_needed()

    def edge() -> tuple[int, ...]:
        """Return the colour of a pixel at the right edge, below the last line of the table's text."""
        box = table.bounding_box()
        assert box is not None
        clip = {"x": box["x"] + box["width"] - 2, "y": box["y"] + 1, "width": 1, "height": 1}
        picture = Image.open(BytesIO(page.screenshot(clip=clip)))  # type: ignore[arg-type]
        return tuple(picture.convert("RGB").getpixel((0, 0)))  # type: ignore[arg-type]

    begun = edge()
    table.evaluate("one => { one.scrollLeft = one.scrollWidth; }")
    page.wait_for_timeout(100)
    assert sum(abs(one - other) for one, other in zip(begun, edge(), strict=True)) > 60
    page.close()
