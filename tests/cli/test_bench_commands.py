"""`rfa bench` and `rfa compare`: what they print, write, and refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ring_flash_attn.bench.implementations import implementation_names
from ring_flash_attn.bench.results import Peak, Row, load
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli.app import app

HERE = {"reference", "torch standard", "SDPA flash", "SDPA math"}


def rfa(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


TINY = ("--batch", "1", "--nheads", "2", "--headdim", "8", "--dtype", "fp32", "--repeats", "2")


def test_bench_sweeps_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = rfa("bench", *TINY, "--seqlen", "16,32", "--causal", "--json", str(path))
    assert result.exit_code == 0, result.output
    for words in (
        "reference on cpu",
        "min ms",
        "median ms",
        "say little about GPUs",
    ):
        assert words in result.output
    found = load(path)
    assert [(row.workload["seqlen"], row.passes) for row in found.rows] == [
        (seqlen, way) for seqlen in (16, 32) for way in ("forward", "backward", "both")
    ]
    assert all(row.workload["causal"] and row.kind == "bench" for row in found.rows)
    assert found.settings == {"repeats": 2}
    assert "peak" not in found.machine
    assert "matmul" not in result.output
    assert found.versions["torch"]


def test_packs_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "packs.json"
    tiny = (*TINY[2:], "--repeats", "1", "--no-grad", "--json", str(path))
    drawn = ("--documents", "magi", "--seqlen", "512,600", "--seed", "1,2")
    result = rfa("bench", *tiny, *drawn)
    assert result.exit_code == 0, result.output
    found = [row.workload for row in load(path).rows]
    assert [(each["seqlen"], each["seed"]) for each in found] == [
        (tokens, seed) for tokens in (512, 600) for seed in (1, 2)
    ]
    assert all(each["batch"] == 1 and sum(each["lengths"]) == each["seqlen"] for each in found)
    assert found[0]["lengths"] != found[1]["lengths"]
    (head,) = (line.split() for line in result.output.splitlines() if " pass " in line)
    assert head[:3] == ["seqlen", "seed", "pass"]

    result = rfa("compare", "reference", "SDPA math", *tiny, "--cu-seqlens", "0,5,5,40")
    assert result.exit_code == 0, result.output
    assert "seqlen 40 in 3 documents" in result.output
    assert "SDPA math cannot: it is compared without packed documents only" in result.output
    assert [row.workload["lengths"] for row in load(path).rows] == [[5, 0, 35]] * 2


def test_bench_prints_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
        return [Row("bench", *names, "forward", of.to_dict(), {}, (1.0, 2.0, 6.0), 10.0, 3 << 20)]

    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
    monkeypatch.setattr("ring_flash_attn.bench.timing.measure_peak", lambda *_: Peak(40.0, 1.0))
    output = rfa("bench", *TINY).output
    (line,) = (line for line in output.splitlines() if line.strip().startswith("forward"))
    # min, avg, median, max; 10 TFLOP/s at 2 ms are 20 at 1 ms, and 6.667 at 3 ms; 10 of 40
    times = ["1.000", "3.000", "2.000", "6.000", "20", "6.667"]
    assert line.split()[1:] == [*times, "25.0", "needs", "work", "3.0"]
    assert "good: > 19.23 TFLOP/s, needs work: < 12.82 TFLOP/s" in output


def test_the_host_beside_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked where it is the limit; not shown unless it is asked for."""
    host = {"forward": 1.5, "both": 2.5}

    def measured(names: Any, of: Workload, *_: Any, **how: Any) -> list[Row]:
        return [
            Row(
                how["kind"],
                "reference",
                way,
                of.to_dict(),
                {},
                (2.0,),
                10.0,
                values={"host_ms": ms},
            )
            for way, ms in host.items()
        ]

    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
    for command in (("bench",), ("compare", "reference")):
        output = rfa(*command, *TINY, "--host").output
        assert "host ms" in output
        assert "1.500 " in output
        assert "2.500*" in output
        assert "host ms" not in rfa(*command, *TINY).output


def test_a_cpu_has_no_peak_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product in fp16 takes minutes there, and kernels are several times as fast."""
    monkeypatch.setattr(torch, "mm", lambda *_: pytest.fail("a product of large matrices"))
    options = ("--batch", "1", "--nheads", "2", "--headdim", "8", "--repeats", "2")
    for dtype in ("fp16", "bf16"):
        result = rfa("bench", *options, "--seqlen", "16", "--dtype", dtype, "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert "matmul" not in result.output
        assert "%" not in result.output


def test_presets_and_options_that_change_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    options = ("--preset", "batch-inference", "--batch", "1", "--seqlen", "16", "--repeats", "1")
    assert rfa("bench", *options, "--json", str(path)).exit_code == 0
    (row,) = load(path).rows
    assert row.passes == "forward", "inference has no gradients"
    assert (row.workload["batch"], row.workload["seqlen"]) == (1, 16)
    assert (row.workload["nheads"], row.workload["headdim"]) == (8, 64)


def test_compare_says_who_is_best_and_who_is_not_here(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    result = rfa("compare", *TINY, "--seqlen", "16", "--json", str(path))
    assert result.exit_code == 0, result.output
    for words in (
        "fastest, forward:",
        "fastest, both:",
        "1.00x",
        "error of out",
        "xFormers cannot be imported",
        "flash-attn 4 cannot: it needs an NVIDIA GPU",
    ):
        assert words in result.output
    rows = load(path).rows
    assert {row.implementation for row in rows} == set(implementation_names())
    assert {row.implementation for row in rows if row.failed is None} == set(HERE)


def test_compare_prints_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
        found = {"torch standard": (6.0, 9 << 20), "reference": (2.0, 5 << 20)}
        errors = {"out": {"relative": 1e-3}, "dq": {"relative": 2e-3}, "dk": {"relative": 4e-3}}
        rows = [
            Row("compare", name, "both", of.to_dict(), {}, (ms,), 12 / ms, size, errors=errors)
            for name, (ms, size) in found.items()
        ]
        return [*rows, Row("compare", "fa2", "both", of.to_dict(), failed="out of memory: [9 GiB]")]

    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
    result = rfa("compare", *TINY)
    assert result.exit_code == 0, result.output
    (line,) = (x for x in result.output.splitlines() if x.strip().startswith("reference"))
    assert line.split()[1:] == ["2.000", "6", "3.00x", "5.0", "1.0e-03", "4.0e-03"]
    assert "fastest, both: reference (2.000 ms)" in result.output
    assert "leanest: reference (5.0 MiB)" in result.output
    assert "fa2: out of memory: [9 GiB]" in result.output
    (line,) = (x for x in result.output.splitlines() if x.strip().startswith("fa2 "))
    assert line.split() == ["fa2", "out", "of", "memory"], "a row that says so"


def test_compare_shows_what_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
        errors = {name: {"relative": 1e-3} for name in ("out", "dq", "dk")}
        errors["dk"] = {"relative": math.nan}
        return [Row("compare", "fa2", "both", of.to_dict(), {}, (1.0,), 1.0, 0, errors=errors)]

    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
    output = rfa("compare", *TINY).output
    (line,) = (line for line in output.splitlines() if line.strip().startswith("fa2"))
    assert line.split()[-2:] == ["1.0e-03", "nan"]


def test_what_is_there_is_written_if_the_user_has_had_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("bench", "compare"):
        path, calls = tmp_path / f"{command}.json", []

        def measured(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
            calls.append(of)  # noqa: B023
            if len(calls) > 1:  # noqa: B023
                raise KeyboardInterrupt
            return [Row("bench", "fa2", "forward", of.to_dict(), {}, (1.0,), 1.0)]

        monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
        result = rfa(command, *TINY, "--seqlen", "16,32", "--json", str(path))
        assert result.exit_code != 0
        (row,) = load(path).rows
        assert row.workload["seqlen"] == 16


def test_a_failed_row_leaves_the_others_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
        row = Row("bench", "fa2", "forward", of.to_dict(), {}, (1.0,), 1.0)
        return [row if of.seqlen == 16 else replace(row, failed="a long story " * 9)]

    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
    lines = rfa("bench", *TINY, "--seqlen", "16,32").output.splitlines()
    (good,) = (line for line in lines if line.strip().startswith("16"))
    assert good.split()[2:6] == ["1.000"] * 4
    (bad,) = (line for line in lines if line.strip().startswith("32"))
    assert bad.split() == ["32", "forward", "failed"]
    assert any(line.startswith("fa2: a long story a long story") for line in lines)


def test_a_file_that_cannot_be_written_after_all() -> None:
    result = rfa("bench", *TINY, "--seqlen", "16", "--json", "/dev/full")
    assert result.exit_code == 1
    assert "cannot write /dev/full" in result.output


def test_compare_against_another() -> None:
    names = ("reference", "SDPA math", "--versus", "SDPA math")
    result = rfa("compare", *names, *TINY, "--seqlen", "16", "--no-grad", "--no-errors")
    assert result.exit_code == 0, result.output
    line, beside = (x for x in result.output.splitlines() if x.strip().startswith("SDPA math"))
    assert "1.00x" in line
    assert beside.split()[2] == "forward"
    assert beside.split()[-3:] == ["n/a", "100.0", "n/a"], "GB, speed and memory"
    assert "backward" not in result.output
    assert "error of" not in result.output, "no errors were asked for"
    result = rfa("compare", "SDPA math", *TINY, "--seqlen", "16", "--versus", "auto", "--no-errors")
    line = next(x for x in result.output.splitlines() if x.strip().startswith("reference"))
    assert "1.00x" in line, "it runs too, by the name that it has"
    result = rfa("compare", "SDPA math", "reference", *TINY, "--seqlen", "16", "--no-errors")
    assert "speed-up: against SDPA math" in result.output


def test_native_that_cannot_run_is_left_out_with_the_reason() -> None:
    result = rfa("compare", "reference", "native", *TINY, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "kernel 'native' cannot do this call" in result.output
    assert "fastest, both: reference" in result.output
    for options in (("--versus", "native"), ("--gate",)):
        refused = rfa("compare", "reference", "native", *TINY, "--device", "cpu", *options)
        assert refused.exit_code == 2, refused.output


def test_a_gate_on_comparisons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
        found = {"SDPA math": 3.0, "reference": 6.0, "torch standard": 1.0}
        rows = [
            Row("compare", each, "both", of.to_dict(), {}, (found[each],), 1.0) for each in found
        ]
        return [*rows, Row("compare", "fa2", "both", of.to_dict(), failed="cannot: no GPU")]

    def without_baseline(names: Any, of: Workload, *_: Any, **__: Any) -> list[Row]:
        base = Row("compare", "SDPA math", "both", of.to_dict(), failed="out of memory")
        return [base, Row("compare", "reference", "both", of.to_dict(), {}, (1.0,), 1.0)]

    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", measured)
    path = tmp_path / "compare.json"
    beside = ("--versus", "SDPA math", "--device", "cpu")
    result = rfa("compare", *TINY, *beside, "--gate", "--json", str(path))
    assert result.exit_code == 1, result.output
    assert "1 of 2 rows miss it" in result.output, "what did not run is not judged"
    assert "  reference, both: speed 50.0 %, not > 60 %" in result.output
    shares = {row.implementation: row.values.get("versus_percent") for row in load(path).rows}
    assert shares == {"SDPA math": 100, "reference": 50, "torch standard": 300, "fa2": None}
    settings = load(path).settings
    assert (settings["versus"], settings["min_speed"]) == ("SDPA math", 0.6)
    assert rfa("compare", *TINY, *beside, "--min-speed", "0.4").exit_code == 0
    named = rfa("compare", "reference", "fa2", *TINY, *beside, "--min-speed", "0.4")
    assert named.exit_code == 1, named.output
    assert "fa2, both: cannot: no GPU" in named.output, "it was asked for"
    monkeypatch.setattr("ring_flash_attn.bench.measure.measure", without_baseline)
    failed = rfa("compare", *TINY, *beside, "--gate")
    assert failed.exit_code == 1, failed.output
    assert "reference, both: the baseline failed" in failed.output


@pytest.mark.parametrize("command", ["bench", "compare"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seqlen", "many"), "--seqlen"),
        (("--seqlen", "0"), "--seqlen"),
        (("--seqlen", ""), "--seqlen"),
        (("--nheads-k", "3"), "query heads"),
        (("--window", "5"), "--window"),
        (("--dtype", "int8"), "int8"),
        (("--preset", "gpt9"), "gpt9"),
        (("--device", "tpu"), "tpu"),
        (("--json", "/proc/none/a.json"), "cannot write"),
        (("--repeats", "0"), "--repeats"),
        (("--cu-seqlens", "0,5", "--seqlen", "5"), "--seqlen 5 and --cu-seqlens 0,5"),
        (("--cu-seqlens", "0,5", "--batch", "2"), "--batch 2: packed documents have batch 1"),
        (("--cu-seqlens", "1,5"), "must start at 0"),
        (("--cu-seqlens", "0,5", "--documents", "magi"), "give one of them"),
        (("--documents", "nowhere"), "nowhere"),
        (("--seed", "3"), "only for documents from a histogram"),
    ],
)
def test_wrong_options_are_refused(command: str, options: tuple[str, ...], words: str) -> None:
    result = rfa(command, *options)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "--kernel", "nobody"), "nobody"),
        (("bench", "--kernel", "fa2", "--device", "cpu"), "NVIDIA GPU"),
        (("compare", "nobody"), "nobody"),
        (("compare", "--versus", "nobody"), "nobody"),
        (("compare", "--gate", "--device", "cpu"), "--gate: say against what with --versus"),
        (("compare", "--versus", "fa2", "--gate", "--device", "cpu"), "NVIDIA GPU"),
        (("compare", "reference", "--versus", "reference", "--gate"), "nothing else is named"),
    ],
)
def test_who_is_not_there_is_refused(arguments: tuple[str, ...], words: str) -> None:
    result = rfa(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_results_are_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rfa("bench", *TINY, "--seqlen", "16", "--json", str(path))
    json.loads(path.read_text(), parse_constant=pytest.fail)
