"""docs/lab/results.md: its tables are those of the files, and its formulas give their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median

import pytest
from documents import ROOT, table

from ring_flash_attn.bench.results import MISSING, Results, Row, load
from ring_flash_attn.lab.bench.attention import BEFORE_BACKWARD
from ring_flash_attn.lab.bench.config import IMPLEMENTATIONS, AttentionConfig

DOCUMENT = "docs/lab/results.md"
NO_MEMORY = "out of memory"
ATTENTION, BF16 = "lab_attention_h200", "lab_attention_bf16_h200"
Cells = dict[tuple[object, ...], Row]


def stored(name: str) -> Results:
    return load(ROOT / "results" / f"{name}.json")


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:#.3g}"


def attention_cells(name: str) -> Cells:
    return {
        (row.workload["headdim"], row.workload["seqlen"], row.implementation, row.passes): row
        for row in stored(name).rows
    }


def times(found: Cells, *place: object) -> str:
    """Forward / backward, ms."""
    both = [pass_time(found.get((*place, way))) for way in ("forward", "backward")]
    return " / ".join(dict.fromkeys(both) if both[0] == NO_MEMORY else both)


def pass_time(row: Row | None) -> str:
    if row is None:
        return MISSING
    if row.failed is not None:
        assert row.failed.startswith(NO_MEMORY), row.failed
        return NO_MEMORY
    return number(median(row.samples_ms))


def memory(found: Cells, *place: object) -> str:
    """MiB before the backward pass, or why it did not come to it."""
    row = found[(*place, "backward")]
    if BEFORE_BACKWARD not in row.values:
        assert (row.failed or "").startswith(NO_MEMORY), row.failed
        return NO_MEMORY
    return number(row.values[BEFORE_BACKWARD] / 2**20)


def attention_table(name: str, cell: Callable[..., str], heads: Iterable[int]) -> list[list[str]]:
    """A row for each size, a column for each implementation of the file."""
    found, settings = attention_cells(name), stored(name).settings
    return [
        [str(d), f"{n:,}", *(cell(found, d, n, each) for each in settings["implementation"])]
        for d in heads
        for n in settings["seqlen"]
    ]


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Every table of the document, as the files have it."""
    yield "attention", attention_table(ATTENTION, times, AttentionConfig().d_model)
    yield "memory", attention_table(ATTENTION, memory, (64,))
    yield "bf16", attention_table(BF16, times, (64,))
    yield "bf16 memory", attention_table(BF16, memory, (64,))


def test_the_files_have_every_cell() -> None:
    sizes = AttentionConfig()
    assert set(attention_cells(ATTENTION)) == {
        (each.headdim, each.seqlen, name, way)
        for each in sizes.workloads()
        for name in IMPLEMENTATIONS
        for way in ("forward", "backward")
    }


@pytest.mark.parametrize(
    ("mark", "expected"), [pytest.param(*each, id=each[0]) for each in tables()]
)
def test_tables_are_those_of_the_files(mark: str, expected: list[list[str]]) -> None:
    assert table(DOCUMENT, mark) == expected


@pytest.mark.parametrize(("d", "n"), [(16, 256), (64, 4096), (64, 16384), (128, 16384)])
def test_memory_is_as_predicted(d: int, n: int) -> None:
    """Five tensors of b · n · d; the matrix of P; or one number for each row."""
    found = attention_cells(ATTENTION)
    b = AttentionConfig().batch
    held = {name: found[d, n, name, "backward"].values[BEFORE_BACKWARD] for name in IMPLEMENTATIONS}
    assert held["standard"] == held["compiled"] == 4 * b * (5 * n * d + n * n)
    for name in ("tiled", "triton"):
        assert held[name] == 4 * b * (5 * n * d + n)
    assert held["ours"] == pytest.approx(held["triton"], rel=2e-3)
