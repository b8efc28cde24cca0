"""Colours of implementations: one each, which people who see few colours can tell apart."""

from __future__ import annotations

from collections.abc import Iterable

# After Okabe and Ito, without yellow and black (lost on white and on dark), and more that differ
# from these in lightness as well as in hue.
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#aa4499",
    "#999933",
    "#8073ac",
    "#7f8c8d",
    "#7fb2d6",
    "#8c4a1a",
    "#5fc9a8",
    "#b03a5b",
    "#c9b458",
    "#4c6fb1",
    "#c7a0dc",
    "#5e7d3a",
    "#d98880",
    "#4d9aa5",
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
# These have the same colour in every report; all others take what is left, in order.
_FIXED = ("triton", "cudnn", "fa2", "fa3", "fa4", "reference")


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a symbol for each implementation; no two have both in common."""
    found = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(_FIXED) if name in found}
    free = (place for place in range(len(_FIXED) + len(found)) if place not in places.values())
    for name in found:
        if name not in places:
            places[name] = next(free)
    return {name: _style(places[name]) for name in found}


def _style(place: int) -> dict[str, str]:
    turn, colour = divmod(place, len(_COLOURS))
    symbol = (colour + 3 * turn) % len(_SYMBOLS)
    return {"colour": _COLOURS[colour], "symbol": _SYMBOLS[symbol]}
