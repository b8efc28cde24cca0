"""Cutting shards for verification by plain list slicing, without the library's layout code.

A mistake in `layout.py` would hide if the same code cut the inputs and the expected results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Cut = Callable[[list[int], int, int], list[int]]


def _part(tokens: list[int], part: int, parts: int) -> list[int]:
    """One of `parts` pieces, whose ends are the whole numbers below part / parts of the length."""
    ends = [len(tokens) * i // parts for i in range(parts + 1)]
    return tokens[ends[part] : ends[part + 1]]


def _contiguous(tokens: list[int], rank: int, world_size: int) -> list[int]:
    return _part(tokens, rank, world_size)


def _zigzag(tokens: list[int], rank: int, world_size: int) -> list[int]:
    early = _part(tokens, rank, 2 * world_size)
    late = _part(tokens, 2 * world_size - 1 - rank, 2 * world_size)
    return early + late


def _stripe(tokens: list[int], rank: int, world_size: int) -> list[int]:
    return tokens[rank::world_size]


_CUTS: dict[str, Cut] = {"contiguous": _contiguous, "zigzag": _zigzag, "stripe": _stripe}


def cut_names() -> tuple[str, ...]:
    """The layouts that can be cut here."""
    return (*_CUTS, *(f"flat_{name}" for name in _CUTS))


def cut(layout: str, lengths: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Places in the whole stream of a rank's tokens, in local order; lengths are documents'."""
    stream = list(range(sum(lengths)))
    if layout.startswith("flat_"):
        return _CUTS[layout.removeprefix("flat_")](stream, rank, world_size)
    tokens: list[int] = []
    for length in lengths:
        document, stream = stream[:length], stream[length:]
        tokens += _CUTS[layout](document, rank, world_size)
    return tokens
