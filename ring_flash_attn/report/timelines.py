"""Timelines that replays recorded: launches and transfers of the slowest rank, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..bench.replays.results import Replay, replay_rows
from .records import Source, shape


def timelines(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """One for each replay that has bars; with what the page's filters ask for."""
    return [found for source in sources for found in _of_source(source)]


def _of_source(source: Source) -> Iterator[dict[str, Any]]:
    replays = source.results.details.get("replays", {})
    if not isinstance(replays, Mapping):
        raise ValueError(f"{source.name}: damaged: 'replays' holds no names")
    for name, values in replays.items():
        try:
            replay = Replay.from_dict(values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source.name}: replay {name!r} is damaged: {error!r}") from None
        if replay.timeline:
            yield _timeline(source, str(name), replay)


def _timeline(source: Source, name: str, replay: Replay) -> dict[str, Any]:
    row = next(replay_rows(replay))
    rank = replay.ours.slowest(both=True).rank
    link = "communication removed" if replay.link is None else f"emulated link {replay.link}"
    return {
        "name": f"{name}, rank {rank} of {replay.ours.world_size}",
        "file": source.name,
        "kind": row.kind,
        "implementation": row.implementation,
        "device": source.device,
        "shape": shape(row.workload),
        "note": f"A replay on one device ({replay.device}); {link}.",
        "bars": [
            [bar.lane, bar.direction, bar.label, round(bar.start, 6), round(bar.end, 6)]
            for bar in replay.timeline
        ],
    }
