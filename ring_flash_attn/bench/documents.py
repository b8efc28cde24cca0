"""Packs of documents, drawn from a histogram of lengths.

Importing it loads no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

SEED, CAP = 42, 0.25  # what packs are drawn with by default
_COLUMNS = ("low", "high", "weight")


@dataclass(frozen=True, slots=True)
class Bin:
    """Documents of `low` to `high` tokens, all equally likely, and how many there are of them."""

    low: int
    high: int
    weight: float  # beside that of other bins

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"low {self.low} and high {self.high}: 1 <= low <= high is needed")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight {self.weight:g} must be 0 or more, and finite")


@dataclass(frozen=True, slots=True)
class Histogram:
    """How long documents are."""

    name: str
    bins: tuple[Bin, ...]

    def draw(self, tokens: int, seed: int = SEED, cap: float = CAP) -> tuple[int, ...]:
        """Lengths of documents that fill `tokens`: the same for the same seed, everywhere.

        None is longer than `cap` times `tokens`; the last one is cut where the pack ends.
        """
        if not 0 < cap <= 1 or tokens * cap < 1:
            raise ValueError(
                f"document_cap {cap:g} must be above 0 and at most 1, and leave at least one of "
                f"{tokens} tokens"
            )
        if seed < 0:
            raise ValueError(f"seed {seed} must not be negative")
        rng, weights = random.Random(seed), [each.weight for each in self.bins]
        longest, left = int(tokens * cap), tokens
        lengths = []
        while left:
            (found,) = rng.choices(self.bins, weights)
            lengths.append(min(rng.randint(found.low, found.high), longest, left))
            left -= lengths[-1]
        return tuple(lengths)


@dataclass(frozen=True, slots=True)
class Drawn:
    """How documents were drawn."""

    documents: str  # the histogram's name
    seed: int
    document_cap: float


def pack_of(
    tokens: int,
    cu_seqlens: Sequence[int] | None = None,
    documents: str | Path | Histogram | None = None,
    seed: int | None = None,
    document_cap: float | None = None,
) -> dict[str, Any]:
    """What a `Workload` takes of packed documents: `cu_seqlens`, given or `drawn`.

    Nothing for a batch. ValueError for arguments that do not go together.
    """
    if documents is None:
        for name, value in (("seed", seed), ("document_cap", document_cap)):
            if value is not None:
                raise ValueError(f"{name} {value}: only for documents from a histogram")
        return {} if cu_seqlens is None else {"cu_seqlens": tuple(cu_seqlens)}
    histogram = documents if isinstance(documents, Histogram) else find_histogram(str(documents))
    if cu_seqlens is not None:
        offsets = ",".join(map(str, cu_seqlens))
        raise ValueError(f"documents {histogram.name!r} and cu_seqlens {offsets}: give one of them")
    drawn = Drawn(
        histogram.name,
        SEED if seed is None else seed,
        CAP if document_cap is None else document_cap,
    )
    lengths = histogram.draw(tokens, drawn.seed, drawn.document_cap)
    return {"cu_seqlens": tuple(accumulate(lengths, initial=0)), "drawn": drawn}


# Files.


def histogram_names() -> tuple[str, ...]:
    """Those that come with the package."""
    names = (Path(each.name) for each in (files(__package__) / "histograms").iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".csv"))


def find_histogram(name: str) -> Histogram:
    """One that comes with the package, by its name, or else a CSV file.

    Raises:
        ValueError: there is neither, or the file is wrong; with the line.
    """
    if name in histogram_names():
        file = files(__package__) / "histograms" / f"{name}.csv"
        return Histogram(name, tuple(_bins(name, file.read_text(encoding="utf-8"))))
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        known = ", ".join(histogram_names())
        raise ValueError(f"there is no file {name}, and no histogram but {known}") from None
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name} is no text") from None
    return Histogram(Path(name).name, tuple(_bins(name, text)))


def _bins(name: str, text: str) -> Iterator[Bin]:
    """Lines of a CSV file; empty ones and those that begin with # say nothing."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ValueError(f"{name} is empty; its first line must be {','.join(_COLUMNS)}")
    (number, columns), *rows = lines
    above, weights = 0, 0.0
    try:
        if _cells(columns) != _COLUMNS:
            raise ValueError(f"{columns!r} must be {','.join(_COLUMNS)}")
        for row in rows:
            number, line = row
            found = _parse(line)
            if found.low <= above:
                raise ValueError(f"low {found.low} must be above {above}, where the last bin ends")
            above, weights = found.high, weights + found.weight
            yield found
        if not weights:
            raise ValueError("no bin up to here has a weight")
    except ValueError as error:
        raise ValueError(f"{name}, line {number}: {error}") from None


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split(","))


def _parse(line: str) -> Bin:
    cells = _cells(line)
    if len(cells) != len(_COLUMNS):
        raise ValueError(f"{line!r} must have {len(_COLUMNS)} numbers: {','.join(_COLUMNS)}")
    try:
        low, high, weight = int(cells[0]), int(cells[1]), float(cells[2])
    except ValueError:
        message = f"{line!r} must be two whole numbers and a weight, as 201,500,28.19"
        raise ValueError(message) from None
    return Bin(low, high, weight)
