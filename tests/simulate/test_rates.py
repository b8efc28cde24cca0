"""Rates: blocks of bands, closed forms of launches, and the points that they are fitted from."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring_flash_attn.simulate.fit import fit, predicted
from ring_flash_attn.simulate.gpus import find_gpu, gpu_names
from ring_flash_attn.simulate.points import Point, points_of_results, read_points
from ring_flash_attn.simulate.rates import (
    COLUMNS,
    ROWS,
    Band,
    Rate,
    _blocks,
    causal,
    full,
    seconds,
    turned,
)

RESULTS = Path(__file__).parents[2] / "results"
KNOWN = sorted({(p.gpu, p.kernel, p.passes, max(p.headdim, p.headdim_v)) for p in read_points()})


def counted(band: Band) -> list[tuple[int, int]]:
    """Whole and cut blocks of each half of a program, pair by pair."""
    rows, columns, low, high = band
    found = []
    for first in range(0, rows, ROWS):
        whole = cut = 0
        for begin in range(0, columns, COLUMNS):
            pairs = sum(
                low <= j - i <= high
                for i in range(first, min(first + ROWS, rows))
                for j in range(begin, min(begin + COLUMNS, columns))
            )
            whole += pairs == ROWS * COLUMNS
            cut += 0 < pairs < ROWS * COLUMNS
        if whole + cut:
            found.append((whole, cut))
    return found


@given(st.integers(1, 200), st.integers(1, 300), st.integers(-250, 350), st.integers(0, 400))
def test_blocks_are_those_that_have_pairs(rows: int, columns: int, low: int, width: int) -> None:
    low = max(low, 1 - rows)
    band = rows, columns, low, min(low + width, columns - 1)
    found = list(_blocks(*band))
    expected = counted(band)
    assert sum(whole for whole, _ in found) == sum(whole for whole, _ in expected)
    # A band may miss the corner of a block between its first and its last column of a half.
    assert sum(map(sum, found)) >= sum(map(sum, expected))
    if width >= ROWS + COLUMNS:
        assert sum(map(sum, found)) == sum(map(sum, expected))


def test_a_launch_of_equal_programs() -> None:
    """Without a mask the work is rows × columns, shared by all SMs."""
    rate = Rate(block=2e-6, launch=1e-5)
    found = seconds(rate, [[full(4096, 4096)]], heads=8, sms=4)
    assert found == pytest.approx(1e-5 + 8 * 32 * 32 * 2e-6 / 4)


def test_a_launch_of_one_program_takes_as_long_as_it() -> None:
    rate = Rate(block=2e-6, launch=0.0)
    assert seconds(rate, [[full(128, 4096)]], heads=1, sms=132) == pytest.approx(32 * 2e-6)
    waiting = Rate(block=2e-6, launch=0.0, ordered=False)  # two share an SM
    assert seconds(waiting, [[full(128, 4096)]], heads=1, sms=132) == pytest.approx(64 * 2e-6)


def test_a_launch_without_pairs_is_none() -> None:
    assert seconds(Rate(1e-6, 1e-5), [], 8, 132) == 0


def test_cut_blocks_and_long_work_cost_more() -> None:
    rate = Rate(block=2e-6, launch=0.0, slower=1e-6, cut=4e-6)
    cut = seconds(rate, [[causal(128, 128)]], 132, 1) - seconds(
        Rate(2e-6, 0.0), [[causal(128, 128)]], 132, 1
    )
    assert cut == pytest.approx(132 * 2 * 4e-6)
    plain = Rate(block=2e-6, launch=0.0, slower=1e-6)
    times = [seconds(plain, [[full(4096, 4096)]], 8, 4, each) for each in (False, True)]
    assert times[1] == pytest.approx(1.5 * times[0])


def test_turning_a_band_keeps_its_pairs() -> None:
    band = causal(100, 260)
    rows, columns, low, high = turned(band)
    pairs = {(i, j) for i in range(rows) for j in range(columns) if low <= j - i <= high}
    assert pairs == {(j, i) for i in range(100) for j in range(260) if j - i <= band[3]}


def test_points_of_the_h200_are_those_of_the_results() -> None:
    stored = [point for point in read_points() if point.gpu == "H200"]
    assert stored == points_of_results(RESULTS)


def test_a_fit_finds_the_rate_that_made_its_points() -> None:
    rate = Rate(block=3e-6, launch=2e-5, slower=4e-7, cut=1e-6)
    points = []
    shapes = ((2048, False), (3000, False), (4096, True), (8192, False), (8192, True))
    for length, hot in shapes:
        for masked in (True, False):
            sizes = (1, 32, 8, 128, 128, (length,))
            point = Point("", "", "forward", *sizes, masked, 0.0, hot, "made")
            points.append(point._replace(ms=predicted(rate, point, 132, 3e12, 4e-6) * 1e3))
    found = fit(points, 132, 3e12, 4e-6, ordered=True)
    for name in ("block", "launch", "slower", "cut"):
        assert getattr(found, name) == pytest.approx(getattr(rate, name), rel=1e-3)


@pytest.mark.parametrize(("name", "kernel", "passes", "headdim"), KNOWN)
def test_rates_meet_their_points(name: str, kernel: str, passes: str, headdim: int) -> None:
    gpu = find_gpu(name)
    rate = gpu.rate(kernel, passes, headdim)
    errors = [
        abs(predicted(rate, each, gpu.sms, gpu.bandwidth, gpu.launch) / (each.ms * 1e-3) - 1)
        for each in read_points()
        if (each.gpu, each.kernel, each.passes) == (name, kernel, passes)
        and max(each.headdim, each.headdim_v) == headdim
    ]
    # Few points of another head dimension scale the rate of the one that is known best.
    assert statistics.median(errors) < (0.06 if len(errors) > 5 else 0.18)
    assert rate.source
    assert not rate.estimated


@pytest.mark.parametrize("name", gpu_names())
def test_every_number_has_a_source(name: str) -> None:
    gpu = find_gpu(name.lower())
    assert gpu.rates
    for key, rate in gpu.rates.items():
        assert rate.source.startswith("estimate") is rate.estimated is (key in gpu.estimated)


def test_unknown_gpus_and_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown GPU 'P100'; choose one of H200, H100"):
        find_gpu("P100")
    with pytest.raises(ValueError, match="no rate of kernel 'triton' forward with head dim"):
        find_gpu("A100").rate("triton", "forward", 128)
