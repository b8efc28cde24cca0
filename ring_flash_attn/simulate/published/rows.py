"""PublishedRow, read_rows: what others have measured, from the tables beside this file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...bench.documents import find_histogram

TABLES = Path(__file__).parent / "tables"
SOURCES = {
    "ring_flash_attention": "ring-flash-attn",
    "burst_engine": "BurstEngine",
    "yunchang": "yunchang",
    "magi_attention": "MagiAttention",
}
# The local documents of each call of ring-flash-attn's packed benchmark, one after the other.
PACKS = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
# Rows that contradict others: USP ring first takes twice as long as head first at any length,
# though both compute the same; the first runs of burst take longer than later ones, which have
# more heads.
UNUSABLE = ("USP ring first", "burst (first runs)")
DRAWN = 4
FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # of a forward pass


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One line of a published table: what was run, and every value that was published of it."""

    source: str  # a key of SOURCES
    scheme: str  # as the source calls it
    passes: str  # "forward", "backward" or "both"
    machine: str
    ranks: int
    tokens: int  # of one sequence, on all ranks together
    batch: int
    nheads: int
    nheads_k: int
    headdim: int
    mask: str  # "full", "causal", "packed": causal within PACKS, "documents full" or "causal"
    ulysses: int  # ranks that share heads
    unit: str  # "it/s", "ms", or "TFLOP/s" of one GPU
    values: tuple[float, ...]

    @property
    def full(self) -> bool:
        """Do queries see later keys, too?"""
        return self.mask in ("full", "documents full")

    @property
    def documents(self) -> bool:
        """Were documents drawn?"""
        return self.mask.startswith("documents")

    @property
    def usable(self) -> bool:
        """Is it to be fitted or held to? Neither `UNUSABLE` ones nor those of one GPU are."""
        return self.scheme != "one GPU" and self.scheme not in UNUSABLE

    @property
    def flops(self) -> float:
        """Of one GPU, as the field counts: 4 for each pair that the mask keeps, and dimension."""
        packs = documents(self.tokens) if self.documents else ((self.tokens,),)
        pairs = sum(length**2 for pack in packs for length in pack) / len(packs)
        pairs /= 1 if self.full else 2
        one = 4 * self.batch * self.nheads * self.headdim * pairs
        return one * FLOPS[self.passes] / self.ranks

    @property
    def span(self) -> tuple[float, float]:
        """The fastest and the slowest published value, in seconds."""
        seconds = sorted(self.in_unit(value) for value in self.values)
        return seconds[0], seconds[-1]

    @property
    def seconds(self) -> float:
        """The middle of what was published."""
        return sum(self.span) / 2

    def in_unit(self, value: float) -> float:
        """Seconds as the row's unit, and the other way round."""
        if self.unit == "ms":
            return value / 1e3
        return 1 / value if self.unit == "it/s" else self.flops / value / 1e12

    def published(self, seconds: float) -> float:
        """Seconds in the unit of the row."""
        return seconds * 1e3 if self.unit == "ms" else self.in_unit(seconds)

    def error(self, seconds: float) -> float:
        """Of a prediction: how much slower it is than the nearer end of the span, relative."""
        fastest, slowest = self.span
        near = min(max(seconds, fastest), slowest)
        return seconds / near - 1

    def __str__(self) -> str:
        heads = f"{self.nheads}/{self.nheads_k}"
        size = f"{self.tokens >> 10} k" if self.tokens % 1024 == 0 else str(self.tokens)
        degree = f", Ulysses {self.ulysses}" if self.source == "yunchang" else ""
        return f"{self.scheme}{degree}, {self.mask}, {size}, {heads} heads"


@cache
def documents(tokens: int) -> tuple[tuple[int, ...], ...]:
    """Packs of documents as MagiAttention draws them: here the first `DRAWN`, there twenty."""
    histogram = find_histogram("magi")
    return tuple(histogram.draw(tokens, seed) for seed in range(DRAWN))


def read_rows(*sources: str) -> tuple[PublishedRow, ...]:
    """All rows of some sources, by default of all, in the order of the tables."""
    return tuple(row for source in sources or SOURCES for row in _read(source))


@cache
def _read(source: str) -> tuple[PublishedRow, ...]:
    return tuple(_parse(source))


def _parse(source: str) -> Iterator[PublishedRow]:
    lines = (TABLES / f"{source}.csv").read_text(encoding="utf-8").splitlines()
    for line in csv.DictReader(each for each in lines if not each.startswith("#")):
        numbers = {
            name: int(line[name])
            for name in ("ranks", "tokens", "batch", "nheads", "nheads_k", "headdim", "ulysses")
        }
        words = {name: line[name] for name in ("scheme", "passes", "machine", "mask", "unit")}
        values = tuple(float(value) for value in line["values"].split())
        yield PublishedRow(source=source, **words, **numbers, values=values)  # type: ignore[arg-type]
