"""Files of results: there and back, and what two of them differ in."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ring_flash_attn.bench.results import Results, Row, check_output, load
from ring_flash_attn.cli.app import app
from ring_flash_attn.cli.diff import Outcome, compare

STORED = sorted((Path(__file__).parents[2] / "results").glob("*.json"))
WORK = {"batch": 1, "seqlen": 8, "nheads": 2, "nheads_k": 1, "headdim": 4, "dtype": "float32"}
RUNS = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01)


def row(**changes: Any) -> Row:
    given = {"samples_ms": RUNS, "tflops": 2.0, "peak_bytes": 100 << 20, **changes}
    return replace(Row("bench", "triton", "forward", WORK), **given)


def results(*rows: Row, device: str = "a GPU", torch: str = "2.11") -> Results:
    return Results("rfa bench", {"device": device}, {"torch": torch}, "abc", {"repeats": 8}, rows)


def times(factor: float) -> tuple[float, ...]:
    return tuple(factor * each for each in RUNS)


# The format.


def test_there_and_back(tmp_path: Path) -> None:
    errors = {"out": {"max": 1e-3, "relative": 0.5, "passed": True}}
    rows = (
        row(),
        row(implementation="fa2", failed="out of memory", samples_ms=(), tflops=None),
        row(passes="both", errors=errors, values={"host_ms": 0.5}, placement={"world_size": 8}),
    )
    written = replace(results(*rows), details={"more": [1, 2]})
    written.save(tmp_path / "new" / "a.json")
    assert load(tmp_path / "new" / "a.json") == written
    assert rows[0].ms == 1.0
    assert rows[1].ms is None


def test_what_json_cannot_hold_becomes_a_word(tmp_path: Path) -> None:
    results(row(values={"a": math.inf, "b": math.nan})).save(tmp_path / "a.json")
    values = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert values["rows"][0]["values"] == {"a": "inf", "b": "nan"}


def test_the_key_is_what_was_measured_not_what_was_found() -> None:
    assert row().key == row(samples_ms=(7.0,), peak_bytes=1, failed="no").key
    others = (
        {"kind": "compare"},
        {"implementation": "fa2"},
        {"passes": "both"},
        {"workload": {**WORK, "seqlen": 9}},
        {"placement": {"world_size": 2}},
    )
    assert len({row(**each).key for each in others} | {row().key}) == len(others) + 1
    swapped = dict(reversed(WORK.items()))
    assert row(workload=swapped).key == row().key


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_results_can_be_read(path: Path) -> None:
    found = load(path)
    assert found.rows
    assert "H200" in found.machine["device"]
    assert found.commit
    for each in found.rows:
        assert each.ms or each.peak_bytes or each.failed
        assert {"batch", "seqlen"} <= set(each.workload)
        if "model" not in each.workload:
            assert {"nheads", "nheads_k", "headdim"} <= set(each.workload)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no results"),
        ("{}", "not in the format"),
        ('{"format": "something"}', "not in the format"),
        ('{"format": "ring_flash_attn results", "version": 99}', "version 99"),
        ('{"format": "ring_flash_attn results", "version": 1}', "damaged"),
        ('{"format": "ring_flash_attn results", "version": 1, "rows": [{"a": 1}]}', "damaged"),
        (
            '{"format": "ring_flash_attn results", "version": 1, "rows": [], "command": "",'
            '"machine": 3, "versions": {}, "commit": null}',
            "damaged: 'machine' holds no names, but 3",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        load(path)
    assert "some.json" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.json"):
        load(tmp_path / "none.json")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "a.json"):
        with pytest.raises(ValueError, match="cannot write"):
            check_output(path)
    check_output(tmp_path / "new" / "a.json")
    check_output(None)


# Differences.

WIDE = (0.8, 1.0, 1.2) * 3
WILD = (0.4, 3.0, 6.0) * 3


def error(relative: float | str) -> dict[str, Any]:
    return {"errors": {"out": {"relative": relative}}}


def verdict(old: Row | None, new: Row | None, limit: float = 5.0) -> Outcome:
    always = row(implementation="always")
    both = [results(always, *([each] if each else [])) for each in (old, new)]
    (found,) = (each for each in compare(*both, limit) if each.row.implementation != "always")
    return found.verdict


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ({}, {}, Outcome.SAME),
        ({}, {"samples_ms": times(1.02)}, Outcome.SAME),
        ({}, {"samples_ms": times(1.04)}, Outcome.NOISY),  # 1.5 % to 6.6 %
        ({}, {"samples_ms": times(1.06)}, Outcome.SLOWER),
        ({}, {"samples_ms": times(0.9)}, Outcome.FASTER),
        # with runs that are 20 % apart, neither 6 % nor 0 % says anything
        ({"samples_ms": WIDE}, {"samples_ms": (0.86, 1.06, 1.26) * 3}, Outcome.NOISY),
        ({"samples_ms": WIDE}, {"samples_ms": WIDE}, Outcome.NOISY),
        ({"samples_ms": WIDE}, {"samples_ms": WILD}, Outcome.NOISY),  # +200 % ± 59 %
        ({"samples_ms": WILD}, {"samples_ms": WIDE}, Outcome.NOISY),
        ({"samples_ms": WIDE}, {"samples_ms": tuple(3 * x for x in WIDE)}, Outcome.SLOWER),
        ({"samples_ms": (1.0,)}, {"samples_ms": (1.06,)}, Outcome.NOISY),
        ({"samples_ms": (1.0,) * 3}, {"samples_ms": (1.0,) * 3}, Outcome.NOISY),
        ({}, {"samples_ms": (1.0,) * 5 + (9e3,) * 3}, Outcome.NOISY),
        ({"samples_ms": WIDE}, {"samples_ms": WIDE, "peak_bytes": 110 << 20}, Outcome.FATTER),
        ({"samples_ms": ()}, {"samples_ms": ()}, Outcome.SAME),
        ({}, {"peak_bytes": 110 << 20}, Outcome.FATTER),
        ({}, {"peak_bytes": 90 << 20}, Outcome.SAME),
        ({"peak_bytes": 0}, {"peak_bytes": 2 << 20}, Outcome.FATTER),
        ({"peak_bytes": 0}, {"peak_bytes": 1 << 10}, Outcome.SAME),
        ({}, {"samples_ms": times(0.5), "peak_bytes": 110 << 20}, Outcome.FATTER),
        ({}, {"failed": "no"}, Outcome.FAILED),
        ({"failed": "no"}, {"failed": "no"}, Outcome.SAME),
        ({"failed": "no"}, {}, Outcome.WORKS),
        (error(0.01), error(0.03), Outcome.SAME),
        (error(0.01), error(0.05), Outcome.WRONG),
        (error(0.01), error("nan"), Outcome.WRONG),
        (error("nan"), error("nan"), Outcome.SAME),
        ({}, {"errors": {"out": {"passed": False}}}, Outcome.WRONG),
        (None, {}, Outcome.NEW),
        ({}, None, Outcome.MISSING),
    ],
)
def test_verdicts(old: dict[str, Any] | None, new: dict[str, Any] | None, want: Outcome) -> None:
    rows = [None if each is None else row(**each) for each in (old, new)]
    assert verdict(*rows) is want


def test_numbers_of_a_change() -> None:
    (found,) = compare(results(row()), results(row(samples_ms=times(1.1), peak_bytes=150 << 20)), 5)
    assert found.percent == pytest.approx(10)
    assert found.memory_percent == pytest.approx(50)
    # quartiles 0.9925 and 1.01 (exclusive method); the same relative spread in both files
    each = 1.2533 * (1.01 - 0.9925) / 1.349 / math.sqrt(8)
    assert found.spread == pytest.approx(100 * math.sqrt(2) * each)
    factor = math.exp(3 * math.sqrt(2) * each)
    assert found.interval == pytest.approx((110 / factor - 100, 110 * factor - 100))


def test_intervals_hold_the_true_change() -> None:
    """Of 400 pairs of equal runs with 5 % noise, all but a few intervals hold 0."""
    draw = random.Random(0)
    missed = 0
    for number in (4, 8, 30):
        for _ in range(400):
            runs = [tuple(draw.gauss(1, 0.05) for _ in range(number)) for _ in range(2)]
            old, new = (replace(results(row(samples_ms=each)), settings={}) for each in runs)
            (found,) = compare(old, new, 5)
            assert found.interval is not None
            missed += not found.interval[0] <= 0 <= found.interval[1]
    assert missed <= 8, "0.3 % is 4"


def test_runs_of_one_round_are_alike() -> None:
    """Two runs in each of 4 rounds: what varies is the rounds."""
    runs = (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0)
    alone = replace(results(row(samples_ms=runs)), settings={"repeats": 4})
    plain = replace(alone, settings={})
    (found,), (unknown,) = compare(alone, alone, 5), compare(plain, plain, 5)
    each = 1.2533 * (3.75 - 1.25) / 1.349 / math.sqrt(4) / 2.5  # quartiles of 1, 2, 3, 4
    assert found.spread == pytest.approx(100 * math.sqrt(2) * each)
    assert unknown.spread is not None
    assert found.spread > 1.2 * unknown.spread


def test_the_worst_comes_first() -> None:
    names = ("same", "slow", "slower", "fails")
    old = results(*(row(implementation=name) for name in names))
    changes = ({}, {"samples_ms": times(1.2)}, {"samples_ms": times(1.5)}, {"failed": "no"})
    new = results(*(row(implementation=n, **c) for n, c in zip(names, changes, strict=True)))
    found = [each.row.implementation for each in compare(old, new, 5)]
    assert found == ["fails", "slower", "slow", "same"]


def diff(tmp_path: Path, old: Results, new: Results, *options: str) -> tuple[int, str]:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, each in zip(paths, (old, new), strict=True):
        each.save(path)
    found = CliRunner().invoke(app, ["diff", *map(str, paths), *options])
    return found.exit_code, found.output


def test_the_exit_code_is_for_regressions(tmp_path: Path) -> None:
    slower = results(row(samples_ms=times(1.1)))
    assert diff(tmp_path, results(row()), results(row()))[0] == 0
    code, output = diff(tmp_path, results(row()), slower)
    assert (code, "+10.0 %" in output, "1 slower" in output) == (1, True, True)
    assert diff(tmp_path, results(row()), slower, "--fail-above", "12%")[0] == 0
    assert diff(tmp_path, results(row()), slower, "--fail-above", "9.5")[0] == 1
    assert diff(tmp_path, slower, results(row()))[0] == 0
    more = results(row(), row(implementation="fa2"))
    assert diff(tmp_path, more, results(row()))[0] == 0
    assert diff(tmp_path, more, results(row()), "--require-all")[0] == 1


def test_noise_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """So that CI can measure again instead of failing."""
    old, new = results(row(samples_ms=WIDE)), results(row(samples_ms=WILD))
    code, output = diff(tmp_path, old, new)
    assert code == 0
    for words in ("too noisy to tell", "+200.0 %", "-49.1 to +1667.6 %", "more --repeats"):
        assert words in output, words
    assert diff(tmp_path, old, new, "--fail-on-noisy")[0] == 3
    assert diff(tmp_path, results(row()), results(row()), "--fail-on-noisy")[0] == 0
    slower = row(implementation="fa2", samples_ms=times(1.1))
    both = (
        replace(old, rows=(*old.rows, replace(slower, samples_ms=RUNS))),
        results(*new.rows, slower),
    )
    assert diff(tmp_path, *both, "--fail-on-noisy")[0] == 1, "a regression is more than noise"
    assert "unknown" in diff(tmp_path, old, results(row(samples_ms=(1.0,))))[1]


def test_rows_that_did_not_move_are_shown_if_asked_for(tmp_path: Path) -> None:
    assert "triton" not in diff(tmp_path, results(row()), results(row()))[1]
    path = tmp_path / "diff.json"
    output = diff(tmp_path, results(row()), results(row()), "--all", "--json", str(path))[1]
    assert "triton" in output
    (change,) = json.loads(path.read_text())
    assert (change["verdict"], change["percent"], change["before"]) == ("same", 0.0, 1.0)


def test_what_makes_a_comparison_doubtful_is_said(tmp_path: Path) -> None:
    other = results(row(), device="another GPU", torch="2.13")
    output = diff(tmp_path, results(row()), other)[1]
    assert "not the same device: a GPU, another GPU" in output
    assert "not the same torch: 2.11, 2.13" in output


@pytest.mark.parametrize("limit", ["much", "-1%", "nan", "inf"])
def test_wrong_limits_are_refused(limit: str, tmp_path: Path) -> None:
    code, output = diff(tmp_path, results(row()), results(row()), "--fail-above", limit)
    assert code == 2
    assert "--fail-above" in output


def test_files_without_a_common_row_are_refused(tmp_path: Path) -> None:
    code, output = diff(tmp_path, results(row()), results(row(implementation="fa2")))
    assert code == 2
    assert "no row in common" in output
