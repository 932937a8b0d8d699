"""The report in a real browser: charts drawn, nothing asked of a network, no errors, phone width,
dark mode, keyboard. Skips where playwright or Chromium is not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reread.evaluation.report import write_report
from tests.unit.report_folder import write_folder

pytest.importorskip("plotly", reason="plotly is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
DRAWN = "html[data-drawn=yes]"
LOCAL = ("file:", "data:", "blob:")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("reports")
    return {
        name: write_report(write_folder(base / name, cases=6, hostile=name == "hostile"))
        for name in ("calm", "hostile")
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


class Opened:
    """A page that is drawn, and what it complained about or asked for meanwhile."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(DRAWN, timeout=60_000)

    def calm(self) -> bool:
        """Whether there was no complaint and no request but for the file itself."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(LOCAL)] == []
        assert len([url for url in self.requests if url.startswith("file:")]) == 1
        return True


@pytest.fixture(scope="module")
def desktop(browser: Any, reports: dict[str, Path]) -> dict[str, Opened]:
    return {name: Opened(browser, path) for name, path in reports.items()}


def until(page: Any, expression: str) -> None:
    """Wait for a condition; playwright's own way needs eval, which the page forbids."""
    for _ in range(300):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"never true: {expression}")


@pytest.mark.parametrize("name", ["calm", "hostile"])
def test_every_chart_is_drawn_without_errors_or_requests(
    desktop: dict[str, Opened], name: str
) -> None:
    page = desktop[name].page
    charts = json.loads(page.locator("#charts").text_content())
    assert len(charts) >= 12
    for chart in charts:
        counts = {
            part: page.locator(f"#{chart['name']} {part}").count()
            for part in (".heatmaplayer image", ".point", ".js-line")
        }
        scatters = [trace for trace in chart["data"] if trace["type"] == "scatter"]
        marks = sum(y is not None for t in scatters if "marker" in t for y in t["y"])
        assert sum(counts.values()) > 0, chart["name"]
        assert counts[".point"] >= marks, chart["name"]
        maps = sum(trace["type"] == "heatmap" for trace in chart["data"])
        assert counts[".heatmaplayer image"] == maps, chart["name"]
    assert desktop[name].calm()
    assert page.evaluate("window.hacked") is None


def test_headings_captions_and_words_carry_what_colour_shows(desktop: dict[str, Opened]) -> None:
    page = desktop["calm"].page
    levels = page.eval_on_selector_all(
        "h1, h2, h3", "found => found.map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - one <= 1 for one, later in pairwise(levels))
    tables = page.locator("table").count()
    assert page.locator("table > caption").count() == tables
    assert page.locator(".scroll[tabindex='0'][aria-labelledby]").count() == tables
    worse = page.locator("#table-kinds td.worse").all_inner_texts()
    assert len(worse) > 3
    assert all("▼ −" in text for text in worse)
    failed = page.locator("#table-kinds td.failed").all_inner_texts()
    assert len(failed) == 2
    assert all(text.startswith("failed") for text in failed)


def test_hovering_shows_numbers(desktop: dict[str, Opened]) -> None:
    page = desktop["calm"].page
    place = page.locator("#picture-0")
    place.scroll_into_view_if_needed()
    box = place.locator(".heatmaplayer image").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.6)
    hover = place.locator(".hoverlayer .hovertext").first
    hover.wait_for(timeout=30_000)
    assert "keys from" in hover.text_content()
    assert "mass" in hover.text_content()
    assert desktop["calm"].calm()


def luminance(colour: str) -> float:
    parts = colour[colour.index("(") + 1 : -1].split(",")[:3]
    red, green, blue = (int(part) / 255 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("name", "scheme"), [("calm", "light"), ("hostile", "dark")])
def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Any, reports: dict[str, Path], name: str, scheme: str
) -> None:
    opened = Opened(browser, reports[name], viewport=PHONE, color_scheme=scheme)
    page = opened.page
    page.eval_on_selector_all("details", "found => found.forEach((d) => { d.open = true; })")
    width = page.evaluate("document.scrollingElement.scrollWidth")
    assert width <= page.evaluate("innerWidth") == PHONE["width"]
    wide = page.locator(".scroll:has(#table-kinds)")
    assert wide.evaluate("e => e.scrollWidth > e.clientWidth")
    head = page.locator("#table-kinds tbody th").first
    left = head.bounding_box()["x"]
    wide.evaluate("e => { e.scrollLeft = 200; }")
    assert head.bounding_box()["x"] == pytest.approx(left, abs=1)
    assert opened.calm()
    opened.context.close()


def test_dark_mode_reaches_page_and_charts_and_can_change(desktop: dict[str, Opened]) -> None:
    page = desktop["calm"].page
    paper = "getComputedStyle(document.body).backgroundColor"
    # dense is drawn in the colour of the text
    mark = "getComputedStyle(document.querySelector('.chart .scatter .point')).fill"
    assert luminance(page.evaluate(paper)) > 0.9
    assert luminance(page.evaluate(mark)) < 0.2
    page.emulate_media(color_scheme="dark")
    until(page, f"{mark} === 'rgb(236, 235, 230)'")
    assert luminance(page.evaluate(paper)) < 0.1
    page.emulate_media(color_scheme="light")
    until(page, f"{mark} === 'rgb(29, 29, 27)'")
    assert desktop["calm"].calm()


def test_keys_alone_hide_a_method_sort_a_table_and_save_the_numbers(
    desktop: dict[str, Opened], tmp_path: Path
) -> None:
    page = desktop["calm"].page
    before = page.locator(".chart .point").count()
    button = page.locator(".legend button", has_text="paper").first
    button.focus()
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('.chart .point').length < {before}")
    assert button.get_attribute("aria-pressed") == "false"
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('.chart .point').length === {before}")

    page.locator("#table-kinds thead button", has_text="snapkv").focus()
    page.keyboard.press("Enter")
    cells = page.locator("#table-kinds tbody td:nth-child(8)").all()
    values = [float(cell.get_attribute("data-sort")) for cell in cells]
    assert values == sorted(values)
    assert page.locator("#table-kinds th[aria-sort=ascending]").inner_text().startswith("snapkv")

    with page.expect_download() as download:
        page.locator("#download").focus()
        page.keyboard.press("Enter")
    download.value.save_as(tmp_path / "sums.json")
    sums = json.loads((tmp_path / "sums.json").read_text())
    assert {line["method"] for line in sums["lines"]} >= {"dense", "default", "snapkv@3%"}
    assert desktop["calm"].complaints == []
