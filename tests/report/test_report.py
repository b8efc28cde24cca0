"""Reports: what reaches the page is what the files say, and nothing in them becomes markup."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from reports import EVIL, FAST, PEAK, all_results, replayed, results, workload, write_all
from typer.testing import CliRunner, Result

from ring_flash_attn.bench.results import Row, load
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli.report import report
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.report.page import json_for_script, make_page, page_data, styles
from ring_flash_attn.report.records import (
    placement_words,
    read,
    records,
    roof,
    shape,
    timelines,
)
from ring_flash_attn.report.schedules import WORLD_SIZES, scenes

REPOSITORY = Path(__file__).parents[2]


def rfa_report(*arguments: object) -> Result:
    """Run the command."""
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})


def data_of(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


@pytest.fixture(scope="module")
def all_scenes() -> list[dict[str, Any]]:
    """Made once."""
    found: list[dict[str, Any]] = scenes()["scenes"]
    return found


def record(row: Row, **machine: Any) -> dict[str, Any]:
    """Of a single row."""
    (found,) = records({"one.json": results(FAST, iter([row]), **machine)})
    return found


# The command


def test_the_command_writes_a_page_with_every_row(tmp_path: Path) -> None:
    page = tmp_path / "folder" / "page.html"
    result = rfa_report(*write_all(tmp_path), "-o", page, "--title", "Half <b> & more")
    assert result.exit_code == 0, result.output
    rows = sum(len(each.rows) for each in all_results().values())
    assert f"{rows} rows of 5 files" in result.output
    text = page.read_text(encoding="utf-8")
    assert "<title>Half &lt;b&gt; &amp; more</title>" in text
    data = data_of(text)
    assert len(data["records"]) == rows
    assert [each["file"] for each in data["sources"]] == list(all_results())
    assert data["sources"][0]["commit"] == "abc1234"
    assert data["sources"][0]["peak"] == PEAK
    raw = [row.to_dict() for each in all_results().values() for row in each.rows]
    assert [each["row"] for each in data["records"]] == json.loads(json.dumps(raw))


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    page = make_page(page_data(all_results()), "title", "/* plotly */")
    own = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", own)
    assert "src=" not in own.replace(json_for_script(EVIL)[1:-1], "")
    assert "default-src 'none'" in page


def test_files_of_the_repository_are_read() -> None:
    data = page_data(read(sorted((REPOSITORY / "results").glob("*.json"))))
    names = {each["implementation"] for each in data["records"]}
    assert {"triton", "cudnn", "fa2"} <= names
    assert any(each["efficiency"] for each in data["records"])


def test_the_same_file_counts_once_and_equal_names_keep_their_folder(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        all_results()["ring.json"].save(tmp_path / folder / "ring.json")
    paths = [tmp_path / "a" / "ring.json", tmp_path / "b" / "ring.json"]
    found = read([*paths, paths[0], tmp_path / "a" / ".." / "a" / "ring.json"])
    assert len(found) == 2
    assert [list(read([path])) for path in paths] == [["ring.json"], ["ring.json"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "holds no results"),
        ('{"a": 1}', "not in the format"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    text: str | None, message: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    if text is not None:
        broken.write_text(text)
    result = rfa_report(broken, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "broken.json" in result.output
    assert message in result.output
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": 3}, "'workload' of row 0 holds no names, but 3"),
        ({"errors": {"out": 1.0}}, "error 'out' of row 0 holds no names"),
        ({"workload": {"lengths": 7}}, "row 0 is damaged"),
    ],
)
def test_damaged_rows_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    good = all_results()["compare.json"].to_dict()
    good["rows"][0] |= change
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(good))
    result = rfa_report(path, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "damaged.json" in result.output
    assert message in result.output


def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (path, *_) = write_all(tmp_path)
    assert "cannot write" in rfa_report(path, "-o", tmp_path).output
    assert "cannot write" in rfa_report(path, "-o", path / "page.html").output
    assert "also an input" in rfa_report(path, "-o", path).output
    assert rfa_report(path, "-o", tmp_path).exit_code == 2
    assert json.loads(path.read_text())["rows"], "the input was overwritten"


def test_without_plotly_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    (path, *_) = write_all(tmp_path)
    result = rfa_report(path, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert 'pip install "ring-flash-attn[report]"' in result.output


# Escaping


@pytest.mark.parametrize("text", [EVIL, "<!--<script>", "a\u2028b", "]]>", "\\u003c", '"'])
def test_json_in_a_script_holds_no_markup_and_reads_back(text: str) -> None:
    written = json_for_script({text: [text, float("inf")]})
    assert not set(written) & set("<>&\u2028\u2029")
    assert json.loads(written) == {text: [text, "inf"]}


def test_names_of_files_and_rows_never_become_markup() -> None:
    evil = replace(all_results()["bench.json"], command=EVIL, commit=EVIL, versions={EVIL: EVIL})
    page = make_page(page_data({EVIL: evil}), EVIL, "/* plotly */")
    assert "onerror=" in page
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert data_of(page)["sources"][0]["command"] == EVIL


# Records


def test_a_record_has_the_numbers_of_its_row() -> None:
    row = Row(
        "replay",
        "triton",
        "both",
        workload(512, lengths=[300, 212]),
        {"world_size": 4, "layout": "zigzag", "route": "ring", "sources_per_launch": 2, "rank": 3},
        (5.0, 1.0, 2.0),
        123.0,
        1 << 21,
        {"efficiency_percent": 93.0, "slowest": 1.0},
        {"out": {"max": 2e-3, "limit": 1e-2}, "dq": {"max": 3e-3, "limit": 6e-3}},
    )
    found = record(row)
    wanted = {
        "file": "one.json",
        "device": FAST,
        "shape": "8/2 heads × 64, causal, bf16, 2 documents",
        "placement": "zigzag × ring, 2 in a launch",
        "world_size": 4,
        "rank": 3,
        "seqlen": 512,
        "ms": 2.0,
        "runs": 3,
        "tflops": 123.0,
        "peak_mib": 2.0,
        "efficiency": 93.0,
        "slowest": 1.0,
        "error_share": pytest.approx(0.5),
        "roof": None,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_a_time_on_one_device_gives_its_throughput() -> None:
    row = Row("compare", "x", "backward", workload(256), samples_ms=(2.0,))
    want = 2.5 * Workload(1, 256, 8, 2, 64, causal=True).flops() / 2.0 / 1e9
    assert record(row)["tflops"] == pytest.approx(want)
    assert record(replace(row, placement={"world_size": 2}))["tflops"] is None
    assert record(replace(row, workload={}))["tflops"] is None


def test_numbers_that_are_words_are_none() -> None:
    row = Row("bench", "x", "forward", workload(8), samples_ms=("nan", 2.0), tflops="inf")  # type: ignore[arg-type]
    assert record(row)["ms"] == 2.0
    assert record(replace(row, placement={"world_size": 1}))["tflops"] is None


def test_ranks_of_a_case_share_its_number() -> None:
    found = [each for each in records(all_results()) if each["kind"] == "verify"]
    assert len({each["case"] for each in found}) == 4
    assert found[0]["case"] == found[1]["case"] != found[2]["case"]


def test_words_for_shapes_and_placements() -> None:
    assert shape(workload(8, nheads_k=8, causal=False)) == "8 heads × 64, full, bf16"
    assert (
        shape(workload(8, "float16", window=[4, 0])) == "8/2 heads × 64, causal, window 4, 0, fp16"
    )
    assert shape(workload(8, sink=True)) == "8/2 heads × 64, causal, bf16, sink True"
    assert placement_words({}) == ""
    assert placement_words({"function": "f", "rank": 1, "link": "ib"}) == "f"
    assert (
        placement_words({"layout": "a", "route": "b", "heads_k_stride": 2})
        == "a × b, 2 KV heads at a time"
    )


def test_implementations_have_a_colour_each() -> None:
    names = ["x", "triton", "fa2", *(f"kernel {i}" for i in range(30))]
    found = styles(names)
    assert len({tuple(each.values()) for each in found.values()}) == len(names)
    assert len({each["colour"] for each in styles(names[:15]).values()}) == 15
    assert styles(["fa2", "triton"])["triton"] == found["triton"]


# The roofline


@pytest.mark.parametrize("passes", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, [-1, -1]), (False, [-1, -1]), (True, [3, 0])]
)
def test_flops_are_those_of_a_workload(passes: str, causal: bool, window: list[int]) -> None:
    given = workload(24, causal=causal, window=window)
    left, right = window
    want = Workload(1, 24, 8, 2, 64, causal, (left, right)).flops()
    factor = {"forward": 1, "backward": 2.5, "both": 3.5}[passes]
    assert Workload.from_dict(given).flops(passes) == pytest.approx(factor * want)


def test_packed_documents_do_not_see_each_other() -> None:
    parts = [Workload.from_dict(workload(n)).flops() for n in (3, 5)]
    assert Workload.from_dict(workload(8, lengths=[3, 0, 5])).flops() == sum(parts)


def test_the_roof_is_memory_for_short_sequences_and_the_peak_for_long_ones() -> None:
    short, long = workload(128, causal=False), workload(8192, causal=False)
    # 4 · 8 heads · 128² pairs · 64 FLOPs over q, out (8 heads) and k, v (2) in bf16, lse in fp32
    assert Workload.from_dict(short).bytes() == 2 * 2 * (8 + 2) * 128 * 64 + 4 * 8 * 128
    want = 4 * 8 * 128 * 128 * 64 / (2 * 2 * 10 * 128 * 64 + 4 * 8 * 128) * 3000 / 1000
    assert roof(short, "forward", PEAK) == pytest.approx(want)
    assert want < 600
    assert roof(long, "forward", PEAK) == 600
    assert roof(long, "forward", {"tflops": 600.0}) == 600
    assert roof(long, "forward", {}) is None
    assert roof(workload(8192, "float32"), "forward", PEAK) is None
    spread = Row("ring", "x", "forward", short, {"world_size": 2})
    assert record(spread, peak=PEAK)["roof"] == 600  # nobody's memory holds all of it


# Timelines and schedules


def test_timelines_have_the_bars_of_the_replay() -> None:
    (found,) = timelines(all_results())
    (replay,) = replayed().details["replays"].values()
    assert len(found["bars"]) == len(replay["timeline"]) > 0
    for got, want in zip(found["bars"], replay["timeline"], strict=True):
        assert got[:3] == [want["lane"], want["direction"], want["label"]]
        assert got[3:] == pytest.approx([want["start"], want["end"]], abs=1e-6)
    assert found["implementation"] == "reference"
    assert " of 3" in found["name"]
    broken = replace(replayed(), details={"replays": {"mine": {"scenario": 1}}})
    with pytest.raises(ValueError, match="replay 'mine' is damaged"):
        list(timelines({"x.json": broken}))


def test_scenes_cover_every_layout_route_and_size(all_scenes: list[dict[str, Any]]) -> None:
    found = all_scenes
    assert {each["layout"] for each in found} == set(layout_names())
    assert {each["route"].split(",")[0] for each in found} == set(route_names())
    assert {each["world_size"] for each in found} == set(WORLD_SIZES)
    keys = ("layout", "route", "documents", "world_size", "passes")
    assert len({tuple(each[key] for key in keys) for each in found}) == len(found)


def test_scenes_compute_every_allowed_pair_where_they_say(
    all_scenes: list[dict[str, Any]],
) -> None:
    for scene in all_scenes:
        size = len(scene["owners"])
        documents = [0] * size
        if scene["documents"] != "one sequence":
            first, second = 5 * size // 16, 9 * size // 16
            documents = [(i >= first) + (i >= second) for i in range(size)]
        pairs = [[0] * scene["world_size"] for _ in scene["steps"]]
        for head, fill in enumerate(scene["fills"]):
            for query in range(size):
                for key in range(size):
                    mark = fill[query * size + key]
                    allowed = key <= query and documents[query] == documents[key]
                    assert (mark != ".") == allowed
                    if allowed:
                        rank = scene["owners"][key if scene["by_key"] else query]
                        if scene["by_head"]:
                            rank = rank - rank % scene["by_head"] + head
                        pairs[int(mark, 36)][rank] += 1
        assert pairs == [step["pairs"] for step in scene["steps"]]


def test_what_a_scene_computes_with_has_arrived(all_scenes: list[dict[str, Any]]) -> None:
    """Every shard that a rank works on is its own, or was sent to it in an earlier step."""
    for scene in all_scenes:
        held = {(rank, f"{side}{rank}") for rank in range(scene["world_size"]) for side in "QK"}
        for step in scene["steps"]:
            for rank, queries, keys, _ in step["work"]:
                assert all((rank, f"Q{owner}") in held for owner in queries)
                assert all((rank, f"K{owner}") in held for owner in keys)
            for what, source, target in step["moves"]:
                assert source != target
                held.add((target, what.split(" ")[0]))


def test_the_data_of_the_page_as_a_file(tmp_path: Path) -> None:
    (path, *_) = write_all(tmp_path)
    found = tmp_path / "new" / "data.json"
    options = ("-o", str(tmp_path / "page.html"), "--json", str(found))
    result = rfa_report(path, *options)
    assert result.exit_code == 0, result.output
    data = json.loads(found.read_text())
    assert len(data["records"]) == len(load(path).rows)
    result = rfa_report(path, "-o", tmp_path / "page.html", "--json", path)
    assert result.exit_code == 2
    assert "is also an input" in result.output
