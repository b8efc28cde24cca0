"""Timelines of replays as SVG: a lane for launches and one for transfers, numbered by step."""

from __future__ import annotations

from collections.abc import Iterator

from ..bench.replays.results import COMPUTE, TRANSFERS, Bar, Replay
from ..bench.workload import FORWARD
from .schedule import colour
from .svg import box, frame, number_in, write

_WIDTH, _LABELS, _MARGIN = 960.0, 76.0, 16.0
_LANE, _TOP = 34.0, 78.0
_LANES = (COMPUTE, TRANSFERS)
_COLOURS = 8  # of the palette: forward is the first of them, backward the second


def draw_timeline(replay: Replay) -> str:
    """The picture of what `replay(…, timeline=True)` recorded."""
    if not replay.timeline:
        raise ValueError("nothing was recorded: replay(…, timeline=True)")
    end = max(bar.end for bar in replay.timeline)
    scale = (_WIDTH - _LABELS - 2 * _MARGIN) / end
    parts = [*_header(replay), *_axis(end, scale)]
    for number, lane in enumerate(_LANES):
        top = _TOP + number * _LANE
        parts.append(write(_MARGIN, top + 17, lane, 12))
        for bar in replay.timeline:
            if bar.lane == lane:
                parts += _bar(bar, top, scale)
    height = _TOP + len(_LANES) * _LANE + 34
    return frame(_WIDTH, height, f"Timeline of {_title(replay)}", "\n".join(parts))


def _title(replay: Replay) -> str:
    rank = replay.ours.slowest(both=True).rank
    return f"{replay.ours.name}, rank {rank} of {replay.ours.world_size}"


def _header(replay: Replay) -> Iterator[str]:
    yield write(_MARGIN, 26, _title(replay), 16, extra='font-weight="600"')
    link = "communication removed" if replay.link is None else f"emulated link {replay.link}"
    yield write(_MARGIN, 44, f"A replay on one device ({replay.device}); {link}.", 11)
    x = _MARGIN
    for number, text in enumerate(("forward", "backward")):
        yield box(x, 53, 12, 12, colour(number, _COLOURS), 'rx="2"')
        yield write(x + 17, 63, text, 12)
        x += 76
    yield write(x, 63, "numbers: steps", 12)


def _bar(bar: Bar, top: float, scale: float) -> Iterator[str]:
    x, width = _MARGIN + _LABELS + bar.start * scale, (bar.end - bar.start) * scale
    fill = colour(0 if bar.direction == FORWARD else 1, _COLOURS)
    yield box(x, top, max(0.5, width - 0.5), _LANE - 8, fill, 'rx="2"')
    yield from number_in(x + width / 2, top + (_LANE - 8) / 2, int(bar.label), min(width, 18.0))


def _axis(end: float, scale: float) -> Iterator[str]:
    """Times in ms, below the lanes."""
    y = _TOP + len(_LANES) * _LANE + 14
    for part in range(5):
        time = end * part / 4
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        yield write(_MARGIN + _LABELS + time * scale, y, f"{time:.3g} ms", 10, anchor)
