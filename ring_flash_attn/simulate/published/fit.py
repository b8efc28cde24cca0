"""Computes the constants: `python -m ring_flash_attn.simulate.published --fit`, some minutes.

Pattern search from the values in `Constants`: each constant in turn is moved up and down
while that makes the loss smaller, by steps that are halved four times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .constants import FITTED, LISTED, Constants
from .limits import limit
from .predict import predict
from .rows import SOURCES, PublishedRow, read_rows

HALVINGS = 4
_MACHINES = {"yunchang": "L20"}  # of whose rows only these depend on the constants
LOOSE = 0.5  # in place of a limit, where there is none


def fitted_rows(source: str) -> tuple[PublishedRow, ...]:
    """Every other row that the constants of a source concern, in the order of its table."""
    concerned = [
        row for row in read_rows(source) if row.usable and _MACHINES.get(source, "") in row.machine
    ]
    return tuple(concerned[::2]) if any(each.source == source for each in LISTED) else ()


def fit(constants: Constants, source: str) -> Constants:
    """The constants of one source."""
    rows = fitted_rows(source)
    ranges = {each.name: (each.low, each.high) for each in LISTED if each.source == source}
    best, least = constants, loss(constants, rows)
    for halving in range(1, HALVINGS + 1):
        for name, (low, high) in ranges.items():
            step = (high - low) / 2 ** (halving + 1)
            for move in (step, -step):
                while True:
                    value = getattr(best, name) + move
                    if not low <= value <= high:
                        break
                    other = replace(best, **{name: value})
                    found = loss(other, rows)
                    if found >= least:
                        break
                    best, least = other, found
    return best


def loss(constants: Constants, rows: Sequence[PublishedRow]) -> float:
    """Fourth powers of errors over their limits, summed: what is near its limit counts most."""
    return sum((row.error(predict(row, constants)) / (limit(row) or LOOSE)) ** 4 for row in rows)


def fit_all(*sources: str) -> Constants:
    """One source after the other, and print what was found."""
    constants = FITTED
    for source in sources or SOURCES:
        if any(each.source == source for each in LISTED):
            constants = fit(constants, source)
    for each in LISTED:
        print(f"{each.name}: {getattr(constants, each.name):.6g} {each.unit}")
    return constants
