"""The page: one HTML file with its style, its scripts, plotly's JavaScript and the data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .palette import styles
from .records import records
from .schedules import scenes
from .sources import Source, header
from .timelines import timelines

_SCRIPTS = (
    "elements",
    "plot",
    "charts",
    "errors",
    "timeline",
    "schedule",
    "scene",
    "table",
    "page",
)
_MISSING = 'rfa report needs plotly: pip install "ring-flash-attn[report]"'
# What could end the script, or a line of it, as JSON writes it otherwise.
_ESCAPES = {each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def plotly_script() -> str:
    """Plotly's JavaScript; ValueError if the package is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(_MISSING) from None
    return str(get_plotlyjs())


def page_data(sources: Sequence[Source]) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    rows = records(sources)
    lines = timelines(sources)
    return {
        "sources": [header(source) for source in sources],
        "records": rows,
        "styles": styles(each["implementation"] for each in (*rows, *lines)),
        "timelines": lines,
        **scenes(),
    }


def json_for_script(values: Any) -> str:
    """JSON that may stand between <script> and </script>, whatever its texts hold."""
    text = json.dumps(_plain(values), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escaped in _ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def make_page(sources: Sequence[Source], title: str, plotly: str) -> str:
    """The whole file.

    Args:
        sources: what to show.
        title: of the page.
        plotly: its JavaScript.
    """
    script = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    for name, text in (("plotly", plotly), ("the page's script", script)):
        if "</script" in text.lower():
            raise ValueError(f"{name} cannot be put into a page: it holds the end of a script")
    return Template(_read("page.html")).substitute(
        policy=_policy(plotly, script),
        title=escape(title),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        style=_read("page.css"),
        data=json_for_script(page_data(sources)),
        plotly=plotly,
        script=script,
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """What the browser may do: run these scripts and nothing else, and fetch nothing at all."""
    hashes = [hashlib.sha256(script.encode()).digest() for script in scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _plain(value: Any) -> Any:
    """NaN and infinities as words, and what JSON does not know as its text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return str(value)
