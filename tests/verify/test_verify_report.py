"""The precision report of `rfa verify`: what it says is what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ring_flash_attn.bench.results import load
from ring_flash_attn.cli.app import app
from ring_flash_attn.verify.catalogue import VerifyCall, VerifyOptions, make_calls
from ring_flash_attn.verify.check import Result, Status
from ring_flash_attn.verify.expected import Error
from ring_flash_attn.verify.report import (
    accepted_in_words,
    by_place,
    precision_lines,
    verify_results,
    write_markdown,
)


def call(function: str, feature: str = "causal", dtype: str = "bfloat16") -> VerifyCall:
    options = VerifyOptions(names=(function,), features=(feature,), dtypes=(dtype,), world_size=2)
    return next(each for each in make_calls(options) if each.function.name == function)


def error(tensor: str, rank: int, size: float, relative: float) -> Error:
    return Error(tensor, rank, size, size / 4, size / 2, relative, plain=size, limit=2 * size)


def passed(asked: VerifyCall, *errors: Error) -> Result:
    return Result(asked, Status.PASS, "reference", errors)


RING, ALONE = "ring_flash_attn_func", "flash_attn_func"
RESULTS = [
    passed(call(RING), error("out", 0, 1.0, 0.002), error("out", 1, 2.0, 0.003)),
    passed(call(RING, "full"), error("out", 0, 4.0, 0.001), error("dq", 1, 0.5, 0.049)),
    passed(call(RING, dtype="float32"), error("out", 0, 3.0, 0.5)),
    passed(call(ALONE), error("out", 0, 7.0, 0.01), error("out", 1, 7.0, 0.01)),
]


def test_lines_have_the_worst_of_cases_and_ranks() -> None:
    alone, exact, out, dq = precision_lines(RESULTS, by_rank=False)
    assert (alone.function, alone.rank, alone.world_size) == (ALONE, "", 1)
    assert (out.tensor, out.rank, out.cases, out.dtype) == ("out", "all", 2, "bf16")
    assert (out.max, out.mean, out.rmse, out.relative) == (4.0, 1.0, 2.0, 0.003)
    assert (dq.tensor, dq.max) == ("dq", 0.5)
    assert (exact.dtype, exact.max) == ("fp32", 3.0)


def test_what_is_accepted_is_a_matter_of_the_tensor_and_the_dtype() -> None:
    lines = precision_lines(RESULTS, by_rank=False)
    assert [line.accepted for line in lines] == [1e-2, None, 1e-2, 5e-2]
    assert [line.verdict for line in lines] == ["above", "", "within", "within"]  # 0.01 is not less


def test_each_rank_has_lines_of_its_own() -> None:
    lines = precision_lines(RESULTS[:1] + RESULTS[3:], by_rank=True)
    assert [(line.function, line.rank, line.max) for line in lines] == [
        (ALONE, "", 7.0),  # the same on every rank
        (RING, "all", 2.0),
        (RING, "0", 1.0),
        (RING, "1", 2.0),
    ]
    titles = [title for title, _ in by_place(lines)]
    assert titles == ["Precision on one device", "Precision on 2 ranks"]


def test_the_largest_errors_in_half_precision_in_a_sentence() -> None:
    (line,) = accepted_in_words(RESULTS)
    assert "outputs 1.0e-02 (accepted: < 1e-02), gradients 4.9e-02 (accepted: < 5e-02)" in line
    assert list(accepted_in_words(RESULTS[2:3])) == []


def test_markdown_names_what_was_not_measured(tmp_path: Path) -> None:
    broken = Result(call(RING), Status.ERROR, reason="rank 1: Traceback\nKeyError: 'a mistake'")
    options = VerifyOptions(world_size=2)
    write_markdown(tmp_path / "new" / "report.md", [*RESULTS, broken], options, 1.5, by_rank=True)
    text = (tmp_path / "new" / "report.md").read_text()
    assert "5 cases: 4 pass, 1 error (1.5 s)" in text
    row = f"| `{RING}` | contiguous × ring × reference | bf16 | 2 | out | 1 | 2.00e+00 | 5.00e-01 "
    assert row + "| 1.00e+00 | 3.00e-03 | < 1e-02 | within |" in text
    assert "bf16, causal, batch: error: KeyError: 'a mistake'" in text


def test_infinities_can_be_written(tmp_path: Path) -> None:
    wrong = replace(RESULTS[0].errors[0], max=float("inf"))
    result = Result(call(RING), Status.FAIL, "reference", (wrong,))
    verify_results([result], VerifyOptions(), 1.0).save(tmp_path / "report.json")
    (row,) = load(tmp_path / "report.json").rows
    assert (row.errors["out"]["max"], row.errors["out"]["passed"]) == ("inf", False)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What one command prints, and the folder that it writes to."""
    folder = tmp_path_factory.mktemp("verify")
    files = ("--markdown", str(folder / "report.md"), "--json", str(folder / "report.json"))
    names = ("flash_attn_qkvpacked_func", "zigzag_ring_flash_attn_varlen_func")
    options = ("--virtual", "--world-size", "2", "--dtype", "float16", "--report", "-v")
    options = (*options, "--device", "cpu")
    result = CliRunner().invoke(app, ["verify", *names, *options, *files], env={"COLUMNS": "180"})
    assert result.exit_code == 0, result.output
    return result.output, folder


LINE = r"\| `(\w+)` \| [^|]+ \| fp16 \| \d+ \| (\w+) \| (\d*) \| ([^ ]+) "


def test_the_command_prints_and_writes_the_same_numbers(command: tuple[str, Path]) -> None:
    output, folder = command
    found = load(folder / "report.json")
    worst: dict[tuple[str, ...], float] = {}
    for row in found.rows:
        for tensor, each in row.errors.items():
            key = row.placement["function"], tensor, str(row.placement["rank"])
            worst[key] = max(worst.get(key, 0.0), each["max"])
    text = (folder / "report.md").read_text().split("## Difference")[0]
    lines = re.findall(LINE, text)
    assert {(name, tensor, rank or "0") for name, tensor, rank, _ in lines} == set(worst)
    for name, tensor, rank, largest in lines:
        assert f"{worst[name, tensor, rank or '0']:.2e}" == largest
        assert largest in output
    assert "Precision on one device" in output
    assert "Precision on 2 ranks" in output
    assert "above" not in output


def test_ranks_are_compared_with_one_device(command: tuple[str, Path]) -> None:
    output, folder = command
    cases = load(folder / "report.json").details["verify"]["cases"]
    worst: dict[tuple[str, ...], float] = {}
    for case in cases:
        spread = bool(case["layout"])
        assert set(case["differences"]) == ({"one device"} if spread else set())
        for each in case["differences"].get("one device", ()):
            key = case["function"], each["tensor"], str(each["rank"])
            worst[key] = max(worst.get(key, 0.0), each["max"])
            assert each["mean"] <= each["rmse"] <= each["max"] <= each["limit"]
    assert max(worst.values()) > 0, "sums in another order"
    assert {tensor for _, tensor, _ in worst} == {"out", "lse", "dq", "dk", "dv"}
    assert {rank for *_, rank in worst} == {"0", "1"}
    text = (folder / "report.md").read_text().split("## Difference from one device on 2 ranks")[1]
    assert {(n, t, r): f for n, t, r, f in re.findall(LINE, text)} == {
        key: f"{largest:.2e}" for key, largest in worst.items()
    }
    assert "Difference from one device on 2 ranks" in output


def test_help_has_examples() -> None:
    for name in ("verify", "replay"):
        output = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "120"}).output
        assert output.count(f" rfa {name} --world-size") > 0
