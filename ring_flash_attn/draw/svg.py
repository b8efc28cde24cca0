"""Pictures as SVG: schedules, and timelines of replays.

A schedule is the mask, coloured by rank and numbered by step, and a timeline below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from ..bench.replays.results import LANES, NETWORK, Bar, Replay
from ..bench.workload import BACKWARD, FORWARD
from ..plan.layout import SplitLayout
from .schedule import LONGER, Patch, Schedule, colour, percent

_TEXT = "#768390"  # can be read on white and on black
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_PICTURE = 256.0  # width and height of a mask
_GUTTER = 16.0  # left of and above a mask, for the ranks of queries and keys
_GAP = 36.0  # between panels
_MARGIN = 16.0
_LANE = 20.0  # height of a rank's timeline
_PANEL = _PICTURE + _GUTTER
_WIDTH, _LABELS, _TOP, _BAR = 960.0, 76.0, 78.0, 34.0  # of a timeline; a lane's height
# Idle time: thin diagonal lines.
_HATCH = (
    '<defs><pattern id="idle" width="5" height="5" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="{_TEXT}" '
    'stroke-opacity="0.45" stroke-width="1.2"/></pattern></defs>'
)


def draw_svg(schedules: Sequence[Schedule]) -> str:
    """The panels of some schedules, side by side, on one time scale."""
    width = 2 * _MARGIN + len(schedules) * (_PANEL + _GAP) - _GAP
    ranks = max(schedule.world_size for schedule in schedules)
    swatches = [(colour(rank, ranks), 12.0, f"rank {rank}") for rank in range(ranks)]
    steps = ("", 0.0, "numbers: the step in which a pair is computed")
    idle = ("url(#idle)", 24.0, "waiting for the busiest rank of the step")
    legend, end = _legend([*swatches, steps, idle], width, 24.0)
    packed = any(len(schedule.documents) > 1 for schedule in schedules)
    parts, top = [_HATCH, *legend], end + (98 if packed else 84)
    longest = max(sum(schedule.step_times) for schedule in schedules) or 1
    for number, schedule in enumerate(schedules):
        x, layout = _MARGIN + number * (_PANEL + _GAP), schedule.problem.layout
        title = f"{layout.name} × {schedule.route}"
        split = layout if not isinstance(layout, SplitLayout) else layout.split
        says = (split.__doc__ or "").split(".")[0].split(":")[0]
        parts.append(_write(x, top - (64 if packed else 50), title, 16, extra='font-weight="600"'))
        parts.append(_write(x, top - (46 if packed else 32), says, 11))
        if packed and isinstance(layout, SplitLayout):
            scope = "of the whole stream" if layout.flat else "of each document by itself"
            parts.append(_write(x, top - 32, scope, 11))
        parts += _mask(schedule, x + _GUTTER, top)
        parts += _timeline(schedule, x + _GUTTER, top + _PICTURE + 40, _PICTURE / longest)
    names = ", ".join(f"{s.problem.layout.name} × {s.route}" for s in schedules)
    title = f"Who computes what, and when: {names}, {schedules[0].world_size} ranks"
    return _frame(width, top + _PICTURE + 40 + ranks * _LANE + 58, title, parts)


def _write(
    x: float, y: float, text: str, size: float = 11, anchor: str = "start", extra: str = ""
) -> str:
    fill = "" if "fill=" in extra else f' fill="{_TEXT}"'
    return (
        f'<text x="{x:.4g}" y="{y:.4g}" font-size="{size:g}" text-anchor="{anchor}"{fill}'
        f"{' ' + extra if extra else ''}>{escape(text)}</text>"
    )


def _box(x: float, y: float, width: float, height: float, fill: str, extra: str = "") -> str:
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" fill="{fill}"'
        f"{' ' + extra if extra else ''}/>"
    )


def _frame(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{_FONT}" role="img">\n'
        f"<title>{escape(title)}</title>\n{body}\n</svg>\n"
    )


def _legend(
    entries: Iterable[tuple[str, float, str]], width: float, y: float
) -> tuple[list[str], float]:
    """Swatches (fill, width) and what they mean, in as many lines as it takes; where they end."""
    parts, x = [], _MARGIN
    for fill, swatch, text in entries:
        space = swatch + 5 + 6.7 * len(text)
        if x + space > width and x > _MARGIN:
            x, y = _MARGIN, y + 20
        if fill:
            parts.append(_box(x, y - 10, swatch, 12, fill, 'rx="2"'))
        parts.append(_write(x + swatch + (5 if fill else 0), y, text, 12))
        x += space + 12
    return parts, y


def _mask(schedule: Schedule, x: float, y: float) -> Iterator[str]:
    """Queries downwards, keys to the right; edges show the ranks that hold them.

    Each of several documents has a frame.
    """
    owners = schedule.owners()
    cell = _PICTURE / max(1, len(owners))
    yield _write(x, y - 15, "keys →", 10)
    turned = f'transform="rotate(90 {x - 21:.4g} {y:.4g})"'
    yield _write(x - 21, y, "queries →", 10, extra=turned)
    yield _box(x, y, _PICTURE, _PICTURE, _TEXT, 'fill-opacity="0.10"')
    if len(schedule.documents) > 1:
        frame = f'stroke="{_TEXT}" stroke-opacity="0.6" stroke-width="0.8"'
        for document in schedule.documents:
            start, side = document.start * cell, len(document) * cell
            yield _box(x + start, y + start, side, side, "none", frame)
    for rank, run in groupby(range(len(owners)), key=owners.__getitem__):
        held = list(run)
        fill, start, length = colour(rank, schedule.world_size), held[0] * cell, len(held) * cell
        yield _box(x + start, y - 10, length, 6, fill)
        yield _box(x - 10, y + start, 6, length, fill)
    for patch in schedule.patches():
        yield from _patch(patch, x, y, cell, colour(patch.rank, schedule.world_size))


def _patch(patch: Patch, x: float, y: float, cell: float, fill: str) -> Iterator[str]:
    """One area with a number in it, or single cells with a number each."""
    gap = min(1.0, cell / 8)
    if not patch.solid:
        for query, key in patch.pairs:
            left, top = x + key * cell, y + query * cell
            yield _box(left, top, cell - gap, cell - gap, fill)
            yield from _number_in(left + cell / 2, top + cell / 2, patch.step, cell)
        return
    left_side, right_side = [], []  # the outline, a little smaller than the cells
    last = patch.pairs[-1][0]
    for query, row in groupby(patch.pairs, key=lambda pair: pair[0]):
        keys = [key for _, key in row]
        start, end = x + keys[0] * cell, x + (keys[-1] + 1) * cell - gap
        for edge in (y + query * cell, y + (query + 1) * cell - (gap if query == last else 0)):
            left_side.append((start, edge))
            right_side.append((end, edge))
    corners = " ".join(f"{a:.5g},{b:.5g}" for a, b in [*right_side, *reversed(left_side)])
    yield f'<polygon points="{corners}" fill="{fill}"/>'
    query, key, side = _largest_square(patch.pairs)
    room = side * cell
    yield from _number_in(x + key * cell + room / 2, y + query * cell + room / 2, patch.step, room)


def _largest_square(pairs: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """First query, first key and side of the largest square; the lowest and leftmost of several."""
    sides: dict[tuple[int, int], int] = {}  # of the square whose last corner is here
    for query, key in pairs:
        before = ((query - 1, key), (query, key - 1), (query - 1, key - 1))
        sides[query, key] = 1 + min(sides.get(corner, 0) for corner in before)
    query, key = max(sides, key=lambda corner: (sides[corner], corner[0], -corner[1]))
    side = sides[query, key]
    return query - side + 1, key - side + 1, side


def _number_in(x: float, y: float, number: int, room: float) -> Iterator[str]:
    """A number in the middle of something, if there is room for it."""
    size = min(15.0, room * 0.62 / (1 + 0.4 * (len(str(number)) - 1)))
    if size >= 5:
        yield _write(x, y + size * 0.36, str(number), size, "middle", 'fill="#fff"')


def _bar(x: float, y: float, width: float, height: float, fill: str, step: int) -> Iterator[str]:
    """A step in a lane."""
    yield _box(x, y, max(0.5, width - 1), height, fill, 'rx="2"')
    yield from _number_in(x + width / 2, y + height / 2, step, min(width, 18))


def _timeline(schedule: Schedule, x: float, y: float, scale: float) -> Iterator[str]:
    """A lane for each rank; a step begins when the busiest rank has ended the one before."""
    yield _write(x, y - 10, "time →", 10)
    for rank in range(schedule.world_size):
        top, start = y + rank * _LANE, x
        fill = colour(rank, schedule.world_size)
        for step, time in enumerate(schedule.step_times):
            work = schedule.turns[step][rank].pairs * scale
            if time:
                yield _box(start, top, time * scale, _LANE - 4, "url(#idle)", 'rx="2"')
            if work:
                yield from _bar(start, top, work, _LANE - 4, fill, step)
            start += time * scale
    bottom = y + schedule.world_size * _LANE + 14
    time, tokens = sum(schedule.step_times), LONGER * len(schedule.owners())
    pairs = sum(schedule.rank_pairs)
    share = f"{pairs} pairs in {schedule.world_size} × {time} slots of time"
    longer = f"{percent(schedule.longer().busy, 1)} with {tokens:,} tokens"
    yield _write(x, bottom, f"{percent(schedule.busy)} busy", 14, extra='font-weight="600"')
    yield _write(x, bottom + 17, share, 11)
    yield _write(x, bottom + 32, longer, 11)


def draw_timeline(replay: Replay) -> str:
    """The picture of what `replay(…, timeline=True)` recorded."""
    if not replay.timeline:
        raise ValueError("nothing was recorded: replay(…, timeline=True)")
    return draw_bars(f"{replay.ours.name}, {replay.title}", replay.note, replay.timeline)


def draw_bars(title: str, note: str, bars: Sequence[Bar]) -> str:
    """The picture of one rank: what it computes, and what travels meanwhile."""
    end = max(bar.end for bar in bars)
    used = {bar.lane for bar in bars}
    left, lanes = _MARGIN + _LABELS, [lane for lane in LANES if lane in used or lane != NETWORK]
    scale = (_WIDTH - left - _MARGIN) / end
    fills = {name: colour(rank, 2) for rank, name in enumerate((FORWARD, BACKWARD))}
    swatches = [(fill, 12.0, name) for name, fill in fills.items()]
    parts = [
        _write(_MARGIN, 26, title, 16, extra='font-weight="600"'),
        _write(_MARGIN, 44, note, 11),
        *_legend([*swatches, ("", 0.0, "numbers: steps")], _WIDTH, 63.0)[0],
    ]
    below = _TOP + len(lanes) * _BAR
    for part, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        time = end * part / 4
        parts.append(_write(left + time * scale, below + 14, f"{time:.3g} ms", 10, anchor))
    tops = {lane: _TOP + number * _BAR for number, lane in enumerate(lanes)}
    parts += [_write(_MARGIN, top + 17, lane, 12) for lane, top in tops.items()]
    for bar in bars:
        x, width = left + bar.start * scale, (bar.end - bar.start) * scale
        fill = fills[bar.direction]
        parts += _bar(x, tops[bar.lane], width, _BAR - 8, fill, int(bar.label))
    return _frame(_WIDTH, below + 34, f"Timeline of {title}", parts)
