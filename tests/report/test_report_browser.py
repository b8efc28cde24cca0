"""The page of `rfa report` in a real browser: charts, filters, downloads, animation, phones."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import Tab, start_browser
from reports import EVIL, FAST, SLOW, all_results, results, write_all

from ring_flash_attn.report.page import make_page, page_data, plotly_script
from ring_flash_attn.report.records import read, records
from ring_flash_attn.report.schedules import scenes

pytest.importorskip("plotly", reason="needs plotly")

pytestmark = pytest.mark.product(2)

CHARTS = ("throughput", "efficiency", "errors", "timelines")
FIELDS = ("implementation", "shape", "device", "passes", "kind")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests."""
    with start_browser() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a page of everything, and one of nothing."""
    where: Path = tmp_path_factory.mktemp("report")
    script = plotly_script()
    everything = make_page(page_data(read(write_all(where))), f"Title {EVIL}", script)
    (where / "all.html").write_text(everything, encoding="utf-8")
    nothing = make_page(page_data({"none.json": results(FAST, iter(()))}), "Nothing", script)
    (where / "nothing.html").write_text(nothing, encoding="utf-8")
    return where


class Watched(Tab):
    """The page, and what it shows."""

    def __init__(self, browser: Any, path: Path, width: int = 1400, **options: Any) -> None:
        address = path.as_uri()
        super().__init__(browser, width, lambda url: url == address, **options)
        self.page.goto(address)

    def traces(self, section: str) -> list[list[int]]:
        """Of each chart in a section, the number of points of its traces, but for limits."""
        found: list[list[int]] = self.page.evaluate(
            """section => {
                drawWaiting(document.getElementById(section));
                return [...document.querySelectorAll(`#${section} .js-plotly-plot`)].map(
                    chart => chart.data.filter(trace => trace.name !== 'limit').map(
                        trace => trace.x.length));
            }""",
            section,
        )
        return found

    def lines(self, section: str) -> int:
        """Traces of all charts of a section."""
        return sum(map(len, self.traces(section)))

    def choose(self, field: str, *values: str) -> None:
        """Only these, of one filter."""
        box = self.page.locator(f"#filters details[data-field={field}]")
        box.evaluate("each => { each.open = true }")
        box.get_by_role("button", name="None", exact=True).click()
        for value in values:
            box.get_by_label(value, exact=True).check()
        self.page.keyboard.press("Escape")

    def until(self, expression: str) -> None:
        """Wait for it; the page itself may not evaluate texts."""
        end = time.monotonic() + 10
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(20)

    def count(self) -> int:
        """Rows that the table says it has."""
        return int(self.page.inner_text("#count").split()[0])

    def column(self, name: str) -> list[str]:
        """The cells of a column of the table, from above."""
        heads = [text.split(" ▲")[0].split(" ▼")[0] for text in self.texts("#rows th")]
        place = heads.index(name) + 1
        return self.texts(f"#rows tbody td:nth-child({place})")

    def texts(self, selector: str) -> list[str]:
        """Of all elements that it finds."""
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found


@pytest.fixture(scope="module")
def shared(browser: Any, folder: Path) -> Iterator[Watched]:
    """The page of everything, loaded once."""
    watched = Watched(browser, folder / "all.html")
    yield watched
    watched.context.close()


@pytest.fixture
def page(shared: Watched) -> Iterator[Watched]:
    """The same without filters; nothing may go wrong in it."""
    shared.page.click("#reset")
    shared.page.evaluate("table.sort = null")
    shared.page.fill("#search", "")
    yield shared
    assert shared.wrong == []


def rows(keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Records that should be left."""
    found = records(all_results())
    return [each for each in found if keep(each)]


# Charts


def test_every_section_has_a_chart_with_data(page: Watched) -> None:
    for section in CHARTS:
        charts = page.traces(section)
        assert charts, section
        assert all(chart and min(chart) > 0 for chart in charts), section
    marks = "document.querySelectorAll('#throughput .main-svg .point').length"
    drawn = page.page.evaluate(marks)
    assert drawn > 10
    assert page.texts(".nothing") == []


def test_lines_of_throughput_end_at_the_roof(page: Watched) -> None:
    # forward and backward of two implementations on three lengths; then bars of single lengths
    assert page.traces("throughput")[:2] == [[3, 3], [3, 3]]
    assert [2] in page.traces("throughput")  # bars: cudnn and triton
    chart = "document.querySelectorAll('#throughput .js-plotly-plot')[0].data"
    names = page.page.evaluate(f"{chart}.map(trace => trace.name)")
    assert names[-1] == "limit"
    assert page.page.evaluate(f"{chart}[0].y") == pytest.approx([101.28, 110.24, 181.92])
    limit = page.page.evaluate(f"{chart}[2].y")
    assert limit[0] < limit[1] == limit[2] == 600
    symbols = page.page.evaluate(f"{chart}.slice(0, 2).map(trace => trace.line.color)")
    assert len(set(symbols)) == 2


def test_efficiency_is_that_of_the_slowest_rank(page: Watched) -> None:
    page.choose("kind", "ring")
    assert page.traces("efficiency") == [[3, 3]], "two layouts on 1, 2 and 4 ranks"
    data = "document.querySelector('#efficiency .js-plotly-plot').data"
    assert page.page.evaluate(f"{data}.map(trace => trace.y)") == [
        [98, 96, 92],
        [88, 76, 52],
        [100, 100, 100],
    ]
    assert page.page.evaluate(f"{data}[0].x") == [1, 2, 4]


def test_errors_are_those_of_the_worst_rank_with_their_limits(page: Watched) -> None:
    data = "(drawWaiting(), document.querySelector('#errors .js-plotly-plot').data)"
    limits, points = page.page.evaluate(f"{data}.map(trace => trace.y)")
    assert set(limits) == {1e-3}
    assert sorted(points) == [1e-7] + [1e-6] * 4 + [4e-4, 2e-3]  # an exact 0 lies at the bottom
    symbols = page.page.evaluate(f"{data}[1].marker.symbol")
    assert symbols.count("x") == 1  # beyond its limit
    assert sum(symbol.endswith("-open") for symbol in symbols) == 1
    assert "1 errors are not finite" in page.page.inner_text("#errors .warning")
    page.page.select_option("#error-measure", "share")
    assert max(page.page.evaluate(f"{data}[1].y")) == pytest.approx(2)
    page.page.select_option("#error-measure", "relative")
    assert len(page.page.evaluate(data)) == 1  # limits are not those of relative errors
    page.page.select_option("#error-measure", "max")


def test_timelines_show_the_bars_of_the_chosen_pass(page: Watched) -> None:
    (bars,) = (each for each in page.traces("timelines"))
    (replay,) = all_results()["replay.json"].details["replays"].values()
    directions = [bar["direction"] for bar in replay["timeline"]]
    assert bars == [directions.count("forward"), directions.count("backward")]
    page.choose("passes", "forward")
    assert page.traces("timelines") == [[directions.count("forward")]]


# Filters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("implementation", EVIL),
        ("device", SLOW),
        ("passes", "backward"),
        ("kind", "verify"),
        ("shape", "8/2 heads × 64, causal, bf16"),
    ],
)
def test_a_filter_acts_on_charts_and_table(page: Watched, field: str, value: str) -> None:
    before = {section: page.lines(section) for section in CHARTS}
    page.choose(field, value)
    left = rows(lambda each: each[field] == value)
    assert 0 < page.count() == len(left) < len(rows(lambda each: True))
    has = {
        "throughput": any(each["tflops"] for each in left),
        "efficiency": any(each["efficiency"] for each in left),
        "errors": any(each["row"].get("errors") for each in left),
    }
    for section, expected in has.items():
        assert (page.lines(section) > 0) == expected, section
        assert page.lines(section) <= before[section]
        empty = page.page.locator(f"#{section} .nothing").count()
        assert empty == (0 if expected else 1), section
    assert sum(page.lines(section) for section in has) < sum(before[section] for section in has)


def test_filters_add_up_and_can_be_reset(page: Watched) -> None:
    everything = page.count()
    page.choose("implementation", "triton")
    page.choose("passes", "forward")
    page.choose("device", FAST)
    assert page.traces("throughput") == [[3]]
    assert page.count() == 3
    assert page.page.inner_text("#filters details[data-field=passes] summary span") == "1 of 3"
    page.page.click("#reset")
    assert page.count() == everything


def test_with_nothing_chosen_sentences_say_so(page: Watched) -> None:
    page.choose("kind")
    assert page.count() == 0
    assert sum(page.lines(section) for section in CHARTS) == 0
    for section in (*CHARTS, "rows"):
        assert page.page.inner_text(f"#{section} .nothing")


# The table


def test_search_finds_all_words_in_any_column(page: Watched) -> None:
    page.page.fill("#search", "TRITON contiguous")
    assert page.count() == 7
    assert set(page.column("placement")) == {"contiguous × ring"}
    page.page.fill("#search", "out of memory")
    assert page.column("implementation") == ["flex"]


def test_columns_sort_both_ways_and_empty_cells_come_last(page: Watched) -> None:
    page.choose("kind", "bench")
    button = page.page.get_by_role("button", name="TFLOP/s")
    button.click()
    cells = page.column("TFLOP/s")
    numbers = [float(cell) for cell in cells if cell]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 4
    assert cells[-1] == ""  # it ran out of memory
    assert page.page.locator("th[aria-sort=ascending]").count() == 1
    page.page.get_by_role("button", name="TFLOP/s").click()
    cells = page.column("TFLOP/s")
    assert [float(cell) for cell in cells if cell] == sorted(numbers, reverse=True)
    assert cells[-1] == ""
    assert page.page.locator("th[aria-sort=descending]").count() == 1


def test_downloads_hold_what_is_chosen_and_found(page: Watched, tmp_path: Path) -> None:
    page.choose("kind", "bench", "compare")
    page.page.fill("#search", "forward")
    saved = {}
    for name in ("csv", "json"):
        with page.page.expect_download() as download:
            page.page.click(f"#{name}")
        saved[name] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[name])
    want = rows(lambda each: each["passes"] == "forward" and each["kind"] in ("bench", "compare"))
    with saved["csv"].open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    key = ("implementation", "seqlen")
    by_key = {tuple(str(each[name]) for name in key): each for each in table}
    assert len(by_key) == len(table) == len(want)
    for each in want:
        found = by_key[each["implementation"], str(int(each["seqlen"]))]
        assert (found["TFLOP/s"] == "") == (each["tflops"] is None)
        assert found["failed"] == (each["failed"] or "")
        assert (found["device"], found["file"]) == (each["device"], each["file"])
        if each["tflops"] is not None:
            assert float(found["TFLOP/s"]) == pytest.approx(each["tflops"], rel=1e-12)
    listed = json.loads(saved["json"].read_text(encoding="utf-8"))
    assert listed == [
        {"file": each["file"], "device": each["device"], **each["row"]} for each in want
    ]


def test_cells_that_look_like_formulas_are_defused(page: Watched) -> None:
    cell = page.page.evaluate("['=1+1', '-2', -2, 'a,\"b'].map(csvCell)")
    assert cell == ["'=1+1", "'-2", "-2", '"a,""b"']


# Schedules


def fresh(page: Watched) -> int:
    """Cells that this step computes."""
    return page.page.locator("#schedules .fresh").count()


def test_the_animation_goes_through_the_steps(page: Watched) -> None:
    choice = {
        "documents": "one sequence",
        "layout": "zigzag",
        "route": "ring, one source a launch",
        "world_size": "4",
        "passes": "forward",
    }
    for field, value in choice.items():
        page.page.select_option(f"#scene-{field}", value)
    (scene,) = (
        each
        for each in scenes()["scenes"]
        if all(str(each[field]) == value for field, value in choice.items())
    )
    page.page.fill("#scene-step", "0")
    for number, step in enumerate(scene["steps"]):
        assert page.page.input_value("#scene-step") == str(number)
        assert f"Step {number + 1} of 4" in page.page.inner_text("#scene-text")
        assert fresh(page) == sum(step["pairs"]) == scene["fills"][0].count(str(number))
        moves = page.page.locator("#schedules .way").count()
        assert moves == len(step["moves"])
        page.page.click("#scene-forward")
    assert page.page.input_value("#scene-step") == "0"  # round
    page.page.click("#scene-back")
    assert page.page.input_value("#scene-step") == "3"


def test_play_moves_the_keys_and_stops_at_pause(page: Watched) -> None:
    page.page.fill("#scene-step", "0")
    where = "document.querySelector('#schedules .way + g').getAttribute('transform')"
    page.page.click("#scene-play")
    assert page.page.inner_text("#scene-play") == "Pause"
    before = page.page.evaluate(where)
    page.until(f"{where} !== {json.dumps(before)}")
    page.until("scene.step >= 1")
    page.page.click("#scene-play")
    assert page.page.inner_text("#scene-play") == "Play"
    stopped = page.page.evaluate("[scene.step, scene.part]")
    page.page.wait_for_timeout(120)
    assert page.page.evaluate("[scene.step, scene.part]") == stopped


def test_every_scene_can_be_drawn(page: Watched) -> None:
    drawn = page.page.evaluate(
        """() => data.scenes.map(each => {
            scene.now = each;
            goTo(each.steps.length - 1);
            return document.querySelectorAll('#schedules .matrix .empty').length;
        })"""
    )
    assert len(drawn) > 100
    assert set(drawn) == {0}  # at the end nothing is left
    page.page.evaluate("chooseScene()")


# The page as a whole


def test_names_are_shown_and_never_run(page: Watched) -> None:
    assert page.page.inner_text("h1") == f"Title {EVIL}"
    assert EVIL in page.texts("#throughput .legend li")
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator("img").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_the_page_fits_the_screen(browser: Any, folder: Path, width: int, scheme: str) -> None:
    watched = Watched(browser, folder / "all.html", width, color_scheme=scheme)
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for field in FIELDS:
        page.click(f"#filters details[data-field={field}] summary")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.chart, .scene svg')].map(each => "
        "each.getBoundingClientRect().right))"
    )
    assert widest <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background[4:-1].split(","))
    assert (brightness > 600) == (scheme == "light")
    assert watched.wrong == []
    watched.context.close()


def test_a_page_of_nothing_says_so_in_every_section(browser: Any, folder: Path) -> None:
    watched = Watched(browser, folder / "nothing.html")
    for section in (*CHARTS, "rows"):
        assert watched.page.inner_text(f"#{section} .nothing").endswith(".")
    assert watched.page.locator(".js-plotly-plot").count() == 0
    assert watched.texts("#sources tbody td")[0] == "none.json"
    assert watched.wrong == []
    watched.context.close()


def test_controls_have_names(page: Watched) -> None:
    unnamed = page.page.evaluate(
        """() => [...document.querySelectorAll('button, select, input')].filter(each =>
            !each.textContent.trim() && !each.getAttribute('aria-label') && !each.closest('label'))
            .length"""
    )
    assert unnamed == 0
    charts = page.page.locator(".chart").count()
    assert charts == page.page.locator(".chart[role=img][aria-label]").count() > 0
