"""Predictions of published measurements: the page, the limits, and the schedules below them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ring_flash_attn.simulate.published import table
from ring_flash_attn.simulate.published.all_gather import RingAllGather
from ring_flash_attn.simulate.published.burst import Burst
from ring_flash_attn.simulate.published.constants import FITTED, LISTED, Constants
from ring_flash_attn.simulate.published.fit import fitted_rows, loss
from ring_flash_attn.simulate.published.limits import limit, missed, orders
from ring_flash_attn.simulate.published.predict import (
    communicators,
    of_documents,
    predict,
    setting_of,
)
from ring_flash_attn.simulate.published.rows import (
    PACKS,
    SOURCES,
    PublishedRow,
    documents,
    read_rows,
)
from ring_flash_attn.simulate.published.stages import RunSetting

PAGE = Path(__file__).parents[2] / "docs" / "predictions.md"
ROWS = read_rows()


def find(source: str, scheme: str, passes: str, tokens: int, **others: object) -> PublishedRow:
    """The only row with these values."""
    wanted = {"scheme": scheme, "passes": passes, "tokens": tokens, **others}
    (row,) = (
        row
        for row in read_rows(source)
        if all(getattr(row, name) == value for name, value in wanted.items())
    )
    return row


@pytest.mark.slow
def test_page_has_the_tables_that_the_command_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table.written(page) == page, (
        "python -m ring_flash_attn.simulate.published --write docs/predictions.md"
    )


# Rows that miss their limit, each with its reason on the page.
BEYOND = {
    ("A800 4 nodes", "double ring", "both", "causal", 1048576),
    ("A800 4 nodes", "burst single ring", "both", "causal", 262144),
}


def key(row: PublishedRow) -> tuple[str, str, str, str, int]:
    """What tells rows apart that have a limit."""
    return row.machine, row.scheme, row.passes, row.mask, row.tokens


@pytest.mark.slow
def test_every_row_with_a_limit_keeps_it_but_those_that_the_page_explains() -> None:
    held = [row for row in ROWS if limit(row) is not None]
    assert len(held) == 24 + 28
    assert {key(row) for row in held if missed(row, predict(row))} == BEYOND


@pytest.mark.slow
def test_schemes_of_ring_flash_attn_are_in_their_order() -> None:
    pairs, wrong = orders(read_rows("ring_flash_attention"))
    assert pairs == 24
    assert wrong == []


@pytest.mark.slow
def test_schemes_of_burst_engine_are_in_their_order_but_those_that_the_page_names() -> None:
    pairs, wrong = orders(read_rows("burst_engine"))
    assert pairs == 30
    named = [(fast, slow) for fast, slow in wrong if not {key(fast), key(slow)} & BEYOND]
    assert len(named) <= 3
    for fast, slow in named:
        assert slow.scheme == "USP head first"
        assert predict(fast) < predict(slow) * 1.06


@pytest.mark.slow
def test_the_best_degree_of_ulysses_is_higher_on_nvlink_than_on_pcie() -> None:
    def best(machine: str, scheme: str, tokens: int) -> int:
        rows = [
            row
            for row in read_rows("yunchang")
            if (row.machine, row.scheme, row.tokens) == (machine, scheme, tokens)
        ]
        return min(rows, key=predict).ulysses

    for scheme in ("basic", "zigzag", "stripe"):
        for tokens in (32768, 131072):
            if (scheme, tokens) != ("basic", 131072):
                assert best("L20 PCIe", scheme, tokens) == 2
        assert best("A100-80GB NVLink", scheme, 131072) >= 4


@pytest.mark.slow
def test_constants_are_where_the_fit_ends() -> None:
    rows, constants = fitted_rows("ring_flash_attention"), Constants()
    least = loss(constants, rows)
    for each in LISTED:
        if each.source != "ring_flash_attention":
            continue
        for move in (0.9, 1.1):
            value = min(max(getattr(constants, each.name) * move, each.low), each.high)
            other = replace(constants, **{each.name: value})
            assert loss(other, rows) > least * 0.97, each.name


def test_fitted_rows_are_every_other_one_and_more_than_twice_the_constants() -> None:
    for source in SOURCES:
        usable = [row for row in read_rows(source) if row.usable]
        if source == "yunchang":
            usable = [row for row in usable if row.machine == "L20 PCIe"]
        fitted = fitted_rows(source)
        constants = [each for each in LISTED if each.source == source]
        assert fitted == (tuple(usable[::2]) if constants else ())
        assert 2 * len(constants) <= len(fitted)


def test_flops_are_those_that_the_sources_count() -> None:
    # BurstEngine prints milliseconds and TFLOP/s of the same run.
    row = find("burst_engine", "USP head first", "both", 131072)
    assert row.flops / 0.14066 / 1e12 == pytest.approx(136.79, rel=1e-4)
    assert row.published(0.14066) == pytest.approx(136.79, rel=1e-4)
    forward = find("burst_engine", "burst", "forward", 524288)
    assert forward.flops / 0.46533 / 1e12 == pytest.approx(189.03, rel=1e-4)


def test_flops_of_packed_rows_are_those_of_the_drawn_documents() -> None:
    row = find(
        "magi_attention", "Ulysses", "forward", 65536, machine="H100 NVLink", mask="documents full"
    )
    packs = documents(65536)
    assert all(sum(pack) == 65536 and max(pack) <= 16384 for pack in packs)
    squares = [sum(length * length for length in pack) for pack in packs]
    assert row.flops == pytest.approx(4 * 64 * 128 / 8 * sum(squares) / len(squares))


def test_documents_are_padded_to_two_halves_for_each_rank_of_a_ring() -> None:
    def of(scheme: str, ranks: int) -> RunSetting:
        row = find(
            *("magi_attention", scheme, "forward", 8192 * ranks), ranks=ranks, mask="documents full"
        )
        return of_documents(row, setting_of(row, FITTED), (5, 8192))

    assert of("ring p2p", 8).lengths == (2, 1024)
    assert of("USP", 16).lengths == (4, 4096)
    assert of("Ulysses", 16).lengths == (5, 8192)


def test_errors_are_to_the_nearer_end_of_the_span() -> None:
    row = find("burst_engine", "burst", "forward", 131072)
    assert row.span == pytest.approx((0.0489, 0.0491))
    assert row.error(0.0490) == 0
    assert row.error(0.0489 * 0.9) == pytest.approx(-0.1)
    assert row.error(0.0491 * 1.2) == pytest.approx(0.2)


def pairs(bands: list[tuple[int, int, int, int]]) -> int:
    """Queries and keys that see each other."""
    return sum(
        low <= j - i <= high
        for rows, columns, low, high in bands
        for i in range(rows)
        for j in range(columns)
    )


def bands_of(row: PublishedRow, tokens: int, lengths: tuple[int, ...] = ()) -> Iterator[list]:
    """Of each call of all ranks, forward; and backward, where it is another."""
    from ring_flash_attn.simulate.published.predict import passes_of

    setting = replace(setting_of(row, FITTED), tokens=tokens)
    for rank in range(row.ranks):
        for one in passes_of(row, setting, rank, lengths):
            ring = one.__self__  # type: ignore[attr-defined]
            if isinstance(ring, RingAllGather):
                yield [band for bands in ring.calls() for band in bands]
            elif isinstance(ring, Burst) and one.__name__ == "backward":
                yield [b for s in range(row.ranks) for b in ring.bands_back(s)[0]]
            elif hasattr(ring, "rounds"):
                yield ring.bands()
            elif hasattr(ring, "source"):
                yield [b for s in range(row.ranks) for b in ring.bands(s)]
            else:
                yield [b for s in range(row.ranks) for b in ring.bands(s)]


SCHEDULES = [
    find("ring_flash_attention", scheme, "both", 65536, machine="H800 NVLink", mask="causal")
    for scheme in ("ring", "zigzag", "stripe")
]
SCHEDULES += [
    find("ring_flash_attention", "llama3", "both", 65536, machine="H800 NVLink"),
    find("burst_engine", "burst", "both", 131072),
    find("burst_engine", "double ring", "both", 131072),
    find("burst_engine", "Megatron p2p", "both", 131072),
    find("magi_attention", "ring all-gather", "backward", 65536, mask="causal"),
]


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: row.scheme)
def test_all_ranks_together_compute_each_pair_once(row: PublishedRow) -> None:
    tokens = 4
    whole = row.ranks * tokens
    counted = sum(pairs(bands) for bands in bands_of(row, tokens))
    assert counted == 2 * whole * (whole + 1) // 2  # forward and backward


@pytest.mark.parametrize("scheme", ["ring", "zigzag", "llama3"])
def test_documents_of_a_pack_are_computed_once(scheme: str) -> None:
    row = find("ring_flash_attention", scheme, "both", 65536, machine="H800 NVLink", mask="packed")
    lengths = (6, 2, 4)  # of each rank
    documents = [length * row.ranks for length in lengths]
    counted = sum(pairs(bands) for bands in bands_of(row, sum(lengths), lengths))
    assert counted == sum(length * (length + 1) for length in documents)


def sent(row: PublishedRow, passes: str, rank: int = 0) -> int:
    """Bytes of one rank."""
    from ring_flash_attn.simulate.published.predict import passes_of

    setting = replace(setting_of(row, FITTED), several=1.0)
    forward, backward = passes_of(row, setting, rank, ())
    stages = forward() if passes == "forward" else backward()
    return sum(size for stage in stages for _, size in stage.sends)


def test_bytes_of_a_ring_are_those_of_its_tensors() -> None:
    zigzag = SCHEDULES[1]
    keys = 2 * 8192 * 8 * 128  # elements of k and v of a rank
    assert sent(zigzag, "forward") == 7 * keys * 2
    assert sent(zigzag, "backward") == 7 * keys * 2 + 8 * keys * 4
    llama3 = SCHEDULES[3]
    assert sent(llama3, "forward") == 7 * keys * 2
    assert sent(llama3, "backward") == 2 * 7 * keys * 2


def test_bytes_of_burst_are_keys_forward_and_queries_backward() -> None:
    burst = SCHEDULES[4]
    shard = 131072 // 32 * 40 * 128  # elements of q of a rank
    rows = 131072 // 32 * 40
    assert sent(burst, "forward") == 31 * 2 * shard * 2
    queries, sums = 2 * shard * 2 + 2 * rows * 4, shard * 2
    # dq goes round once more than queries, and its last hop is one between nodes and one inside.
    assert sent(burst, "backward") == 31 * queries + (31 + 2) * sums


def test_gradients_have_a_communicator_of_their_own_backward_only() -> None:
    row = find("burst_engine", "double ring", "both", 131072)
    assert communicators(replace(row, passes="backward")) == 2
    assert communicators(replace(row, passes="forward")) == 1
    flat = find("burst_engine", "Megatron p2p", "both", 131072)
    assert communicators(replace(flat, passes="backward")) == 1


def test_iterations_that_run_into_each_other_cost_what_the_busiest_rank_has_to_do() -> None:
    # Basic ring: rank 0 has one block, the last one all; its blocks bound an iteration from below.
    row = find(
        "ring_flash_attention", "ring", "forward", 65536, machine="H800 NVLink", mask="causal"
    )
    alone = find(
        "ring_flash_attention", "one GPU", "forward", 8192, machine="H800 NVLink", mask="causal"
    )
    assert predict(alone) == pytest.approx(alone.seconds, rel=1e-6)
    assert predict(row) > 13 * predict(alone)
    assert sum(map(sum, PACKS)) == 4 * 8192


@pytest.mark.parametrize("missing", ["scheme", "machine"])
def test_a_row_that_nobody_wrote_a_schedule_for_is_an_error(missing: str) -> None:
    row = replace(SCHEDULES[0], **{missing: "unknown"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown"):
        predict(row)
