"""The page: one HTML file with its style, its scripts, plotly's JavaScript and the data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ..bench.results import plain_json
from .records import Sources, records, timelines
from .schedules import scenes

_MISSING = 'rfa report needs plotly: pip install "ring-flash-attn[report]"'
# What could end the script, or a line of it, as JSON writes it otherwise.
_ESCAPES = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}
# Colours of implementations, which people who see few colours can tell apart: after Okabe and Ito,
# without yellow and black (lost on white and on dark), and more that differ from these in lightness
# as well as in hue.
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
_FIXED = ("triton", "cudnn", "fa2", "fa3", "fa4", "reference", "cute")


def plotly_script() -> str:
    """Plotly's JavaScript; ValueError if the package is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(_MISSING) from None
    return str(get_plotlyjs())


def page_data(sources: Sources) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    rows, lines = records(sources), list(timelines(sources))
    return {
        "sources": [
            {
                "file": file,
                "device": results.device,
                "command": str(results.command),
                "created": str(results.created),
                "commit": None if results.commit is None else str(results.commit),
                "versions": {str(name): str(each) for name, each in results.versions.items()},
                "settings": {str(name): str(each) for name, each in results.settings.items()},
                "peak": dict(results.peak),
                "rows": len(results.rows),
            }
            for file, results in sources.items()
        ],
        "records": rows,
        "styles": styles(each["implementation"] for each in (*rows, *lines)),
        "timelines": lines,
        **scenes(),
    }


def json_for_script(values: Any) -> str:
    """JSON that may stand between <script> and </script>, whatever its texts hold."""
    plain, compact = plain_json(values), (",", ":")
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=compact)
    return text.translate(_ESCAPES)


def make_page(data: Mapping[str, Any], title: str, plotly: str) -> str:
    """The whole file, with what `page_data` made and plotly's JavaScript."""
    found = (each.name for each in files(__package__).iterdir() if each.name.endswith(".js"))
    names = sorted(found, key=lambda name: (name == "page.js", name))  # which runs the others
    script = "\n".join(map(_read, names))
    for name, text in (("plotly", plotly), ("the page's script", script)):
        if "</script" in text.lower():
            raise ValueError(f"{name} cannot be put into a page: it holds the end of a script")
    # The browser may run these scripts and nothing else, and fetch nothing at all.
    hashes = [hashlib.sha256(each.encode()).digest() for each in (plotly, script)]
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return Template(_read("page.html")).substitute(
        policy=policy,
        title=escape(title),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        style=_read("page.css"),
        data=json_for_script(data),
        plotly=plotly,
        script=script,
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a symbol for each implementation; no two have both in common."""
    found = list(dict.fromkeys(names))
    places = {name: place for place, name in enumerate(_FIXED) if name in found}
    free = (place for place in range(len(_FIXED) + len(found)) if place not in places.values())
    chosen = {}
    for name in found:
        turn, colour = divmod(places[name] if name in places else next(free), len(_COLOURS))
        symbol = (colour + 3 * turn) % len(_SYMBOLS)
        chosen[name] = {"colour": _COLOURS[colour], "symbol": _SYMBOLS[symbol]}
    return chosen
