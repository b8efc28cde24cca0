"""The precision report of `rfa verify`: what it says is what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ring_flash_attn.bench.results import load
from ring_flash_attn.cli.app import app
from ring_flash_attn.cli.verify import accepted_in_words, precision, verify_results, write_markdown
from ring_flash_attn.verify.catalogue import (
    ERROR,
    FAIL,
    ORACLE,
    PASS,
    Case,
    Error,
    VerifyOptions,
    make_cases,
)


def case(function: str, feature: str = "causal", dtype: str = "bfloat16") -> Case:
    options = VerifyOptions(names=(function,), features=(feature,), dtypes=(dtype,), world_size=2)
    return next(each for each in make_cases(options) if each.function.name == function)


def error(tensor: str, rank: int, size: float, relative: float) -> Error:
    return Error(tensor, rank, size, size / 4, size / 2, relative, plain=size, limit=2 * size)


def passed(asked: Case, *errors: Error) -> Case:
    return replace(asked, status=PASS, used_kernel="reference", compared={ORACLE: errors})


RING, ALONE = "ring_flash_attn_func", "flash_attn_func"
CASES = [
    passed(case(RING), error("out", 0, 1.0, 0.002), error("out", 1, 2.0, 0.003)),
    passed(case(RING, "full"), error("out", 0, 4.0, 0.001), error("dq", 1, 0.5, 0.049)),
    passed(case(RING, dtype="float32"), error("out", 0, 3.0, 0.5)),
    passed(case(ALONE), error("out", 0, 7.0, 0.01), error("out", 1, 7.0, 0.01)),
]


def test_rows_have_the_worst_of_cases_and_ranks() -> None:
    (_, (alone,)), (_, (exact, out, dq)) = precision(CASES, by_rank=False)
    assert (alone[0], alone[5]) == (ALONE, "")
    point = "contiguous × ring × reference"
    numbers = ["4.00e+00", "1.00e+00", "2.00e+00", "3.00e-03"]
    assert out[:10] == [RING, point, "bf16", "2", "out", "all", *numbers]
    assert (dq[4], dq[6]) == ("dq", "5.00e-01")
    assert (exact[2], exact[6]) == ("fp32", "3.00e+00")


def test_what_is_accepted_is_a_matter_of_the_tensor_and_the_dtype() -> None:
    rows = [row for _, own in precision(CASES, by_rank=False) for row in own]
    assert [row[10] for row in rows] == ["< 1e-02", "", "< 1e-02", "< 5e-02"]
    assert [row[11] for row in rows] == ["above", "", "within", "within"]  # 0.01 is not less


def test_each_rank_has_rows_of_its_own() -> None:
    (alone, first), (ranks, others) = precision(CASES[:1] + CASES[3:], by_rank=True)
    assert [(row[0], row[5], row[6]) for row in (*first, *others)] == [
        (ALONE, "", "7.00e+00"),  # the same on every rank
        (RING, "all", "2.00e+00"),
        (RING, "0", "1.00e+00"),
        (RING, "1", "2.00e+00"),
    ]
    assert (alone, ranks) == ("Precision on one device", "Precision on 2 ranks")


def test_the_largest_errors_in_half_precision_in_a_sentence() -> None:
    (line,) = accepted_in_words(CASES)
    assert "outputs 1.0e-02 (accepted: < 1e-02), gradients 4.9e-02 (accepted: < 5e-02)" in line
    assert list(accepted_in_words(CASES[2:3])) == []


def test_markdown_names_what_was_not_measured(tmp_path: Path) -> None:
    reason = "rank 1: Traceback\nKeyError: 'a mistake'"
    broken = replace(case(RING), status=ERROR, reason=reason)
    options = VerifyOptions(world_size=2)
    write_markdown(tmp_path / "new" / "report.md", [*CASES, broken], options, 1.5, by_rank=True)
    text = (tmp_path / "new" / "report.md").read_text()
    assert "5 cases: 1 error, 4 pass (1.5 s)" in text
    row = f"| `{RING}` | contiguous × ring × reference | bf16 | 2 | out | 1 | 2.00e+00 | 5.00e-01 "
    assert row + "| 1.00e+00 | 3.00e-03 | < 1e-02 | within |" in text
    assert "bf16, causal, batch: error: KeyError: 'a mistake'" in text


def test_infinities_can_be_written(tmp_path: Path) -> None:
    wrong = replace(CASES[0].errors[0], max=float("inf"))
    failed = replace(CASES[0], status=FAIL, compared={ORACLE: (wrong,)})
    verify_results([failed], VerifyOptions(), 1.0).save(tmp_path / "report.json")
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
