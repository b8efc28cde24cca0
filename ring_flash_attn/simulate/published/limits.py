"""What predictions are held to, and the rows that miss it."""

from __future__ import annotations

from itertools import combinations

from .constants import FITTED, Constants
from .predict import predict
from .rows import PublishedRow

# Relative errors; of span to the nearer end. Rows of other sources are shown and held to nothing.
BATCH, PACKED, SPANS = 0.05, 0.08, 0.10


def limit(row: PublishedRow) -> float | None:
    """Of the error of a prediction; None: it is held to nothing."""
    if not row.usable:
        return None
    if row.source == "burst_engine":
        return SPANS
    if row.source == "ring_flash_attention":
        return PACKED if row.mask == "packed" else BATCH
    return None


def missed(row: PublishedRow, seconds: float) -> bool:
    """Is there a limit, and is the prediction beyond it?"""
    bound = limit(row)
    return bound is not None and abs(row.error(seconds)) > bound


def same_run(row: PublishedRow) -> tuple[object, ...]:
    """What rows have in common whose schemes can be compared."""
    heads = (row.batch, row.nheads, row.nheads_k, row.headdim)
    return row.source, row.machine, row.ranks, row.passes, row.tokens, row.mask, heads


def orders(
    rows: tuple[PublishedRow, ...], constants: Constants = FITTED
) -> tuple[int, list[tuple[PublishedRow, PublishedRow]]]:
    """Pairs of schemes whose spans do not overlap, and those that are predicted the wrong way."""
    pairs, wrong = 0, []
    for one, two in combinations([row for row in rows if row.usable], 2):
        if same_run(one) != same_run(two):
            continue
        fast, slow = sorted((one, two), key=lambda row: row.span)
        if fast.span[1] >= slow.span[0]:
            continue
        pairs += 1
        if predict(fast, constants) > predict(slow, constants):
            wrong.append((fast, slow))
    return pairs, wrong
