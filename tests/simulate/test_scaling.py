"""docs/scaling.md: its file is what the simulator says, and its text what the file says."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ring_flash_attn.simulate.scaling import (
    BEST,
    COLUMNS,
    FABRICS,
    RANKS,
    WORKLOADS,
    SchemePoint,
    price,
)

DOCS = Path(__file__).parents[2] / "docs"
IB400 = FABRICS[0]
SEQUENCE, _, FULL, PACKS, DOCUMENTS = WORKLOADS


@pytest.fixture(scope="module")
def points() -> dict[tuple[str, str, int], dict[str, SchemePoint]]:
    """By workload, fabric and ranks: of each scheme."""
    with (DOCS / "scaling.csv").open() as lines:
        head, *rows = csv.reader(lines)
    assert head == COLUMNS
    found: dict[tuple[str, str, int], dict[str, SchemePoint]] = {}
    for each in map(SchemePoint.from_cells, rows):
        found.setdefault((each.workload, each.fabric, each.ranks), {})[each.scheme] = each
    return found


def test_every_size_is_there(points: dict[tuple[str, str, int], dict[str, SchemePoint]]) -> None:
    assert set(points) == {(w, f, n) for w in WORKLOADS for f in FABRICS for n in RANKS}
    every = {BEST, "zigzag ring", "double ring", "llama3 all-gather", "Ulysses", "USP"}
    for (workload, _, ranks), schemes in points.items():
        best = schemes[BEST].per_token
        crumbs = workload in (PACKS, DOCUMENTS) and ranks > 64
        assert set(schemes) == every - ({"zigzag ring", "double ring"} if crumbs else set())
        assert all(best < 1.011 * each.per_token for each in schemes.values()), schemes


def test_the_text_has_its_numbers(
    points: dict[tuple[str, str, int], dict[str, SchemePoint]],
) -> None:
    text = (DOCS / "scaling.md").read_text()

    def times(workload: str, scheme: str) -> float:
        schemes = points[workload, IB400, 64]
        return schemes[scheme].per_token / schemes[BEST].per_token

    assert f"zigzag ring pays for the\n  network: {times(SEQUENCE, 'zigzag ring'):.2f} ×" in text
    assert f"takes {times(FULL, 'zigzag ring'):.1f} × the best at 64 ranks" in text
    ring, gather, ulysses = (
        f"{times(PACKS, name):.1f} ×" for name in ("zigzag ring", "llama3 all-gather", "Ulysses")
    )
    assert f"zigzag ring takes {ring} the best, all-gather {gather}, Ulysses {ulysses}." in text


@pytest.mark.parametrize(
    ("workload", "ranks"),
    [
        (SEQUENCE, 8),
        *(pytest.param(workload, 64, marks=pytest.mark.slow) for workload in WORKLOADS),
    ],
)
def test_the_file_is_what_the_simulator_says(
    points: dict[tuple[str, str, int], dict[str, SchemePoint]], workload: str, ranks: int
) -> None:
    found = {each.scheme: each.cells() for each in price(workload, IB400, ranks)}
    assert found == {name: each.cells() for name, each in points[workload, IB400, ranks].items()}
