"""Replays in words and tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from ..bench import Replay
from ..bench.report import Design, Measured, RankResult

_MIB = 2**20
_WAYS = ("forward", "both")  # fields of Times and Peak


def explain(replay: Replay) -> Iterator[str]:
    """What was run, what was emulated, and what was not there."""
    s = replay.scenario
    tokens = f"{sum(s['lengths'])} tokens" + (
        f" in {len(s['lengths'])} documents" if s["packed"] else ""
    )
    yield (
        f"A replay of {replay.ours.name}: ranks of {s['world_size']}, one at a time, on one device "
        f"({replay.device}). No other rank is there."
    )
    yield (
        f"Each rank: {tokens}, batch {s['batch']}, heads {s['nheads']}/{s['nheads_k']}, "
        f"headdim {s['headdim']}, {s['dtype']}, {'causal' if s['causal'] else 'full'}."
    )
    if s["sources_per_launch"] is not None and s["world_size"] > 1:
        sources = s["sources_per_launch"]
        others = "one other rank" if sources == 1 else f"up to {sources} other ranks"
        yield f"A launch takes the keys of {others}."
    yield "Kernels, merges, buffers and streams are a real rank's; what it receives is random data."
    if replay.link is None:
        yield "Communication is removed: messages cost nothing."
    else:
        yield (
            f"Communication is emulated, {replay.link}: a copy within the device, and waiting. "
            "Other ranks never come late."
        )
    yield f"Medians of {replay.repeats} interleaved rounds, in ms."


def tables(replay: Replay) -> Iterator[Table]:
    """For each design a row for each rank, the slowest, and what one device takes."""
    for design in (replay.ours, replay.existing):
        if design is not None:
            yield _table(design)


def _table(design: Design) -> Table:
    shown = Table(box=box.SIMPLE, padding=(0, 1), title=design.name, title_justify="left")
    shown.add_column("", no_wrap=True)
    for name in ("forward ms", "fwd+bwd ms"):
        for column in (name, "TFLOP/s", "eff. %", "full %", "exposed", "MiB"):
            shown.add_column(column, justify="right", no_wrap=True)
    for each in design.ranks:
        shown.add_row(f"rank {each.rank}", *_row(design, each, each))
    if len(design.ranks) > 1:
        cells = _row(design, design.slowest(both=False), design.slowest(both=True))
        shown.add_row("slowest", *cells, style="bold")
    for name, pairs, measured in (
        ("base", design.base_pairs, design.base),
        ("no mask", design.full_pairs, design.full),
    ):
        cells = [cell for way in _WAYS for cell in _alone(design, pairs, measured, way)]
        shown.add_row(name, *cells)
    theoretic = (f"{getattr(design.theoretic, way):.3f}" for way in _WAYS)
    shown.add_row(
        f"{design.world_size} × base", *(cell for time in theoretic for cell in (time, *[""] * 5))
    )
    return shown


def _row(design: Design, first: RankResult, second: RankResult) -> list[str]:
    """Forward of one rank, both passes of another (or the same)."""
    cells = []
    for each, way in zip((first, second), _WAYS, strict=True):
        measured = each.measured
        time, rate, _, _, _, peak = _alone(design, each.pairs, measured, way)
        shares = (design.efficiency(each), design.full_rate_efficiency(each))
        exposed = "n/a" if measured.exposed is None else f"{getattr(measured.exposed, way):.3f}"
        cells += [time, rate, *(f"{getattr(share, way):.1f}" for share in shares), exposed, peak]
    return cells


def _alone(design: Design, pairs: int, measured: Measured, way: str) -> list[str]:
    """Time, rate and memory; no shares."""
    time, rate = measured.times, design.rate(pairs, measured.times)
    peak = "n/a" if measured.peak is None else f"{getattr(measured.peak, way) / _MIB:.0f}"
    return [f"{getattr(time, way):.3f}", f"{getattr(rate, way):.4g}", "", "", "", peak]


def held_table(replay: Replay) -> Table:
    """What the slowest rank sends and holds, by name; computed from its walk, not measured."""
    result = replay.ours.slowest(both=True)
    shown = Table(
        box=box.SIMPLE,
        padding=(0, 1),
        title=f"rank {result.rank}: what it sends and holds (computed)",
        title_justify="left",
    )
    for column in ("", "launches", "posts", "sent MiB", "received MiB"):
        shown.add_column(column, justify="right" if column else "left")
    shown.add_column("held beside inputs, outputs and gradients, MiB")
    for name, walked in zip(("forward", "backward"), result.walked, strict=True):
        held = "\n".join(f"{size / _MIB:9.2f}  {what}" for what, size in walked.held.items())
        numbers = (walked.launches, walked.posts)
        moved = (f"{size / _MIB:.2f}" for size in (walked.sent, walked.received))
        shown.add_row(name, *map(str, numbers), *moved, held or "nothing")
    return shown


def notes(replay: Replay) -> Iterator[str]:
    """How to read the columns."""
    yield "base: the same kernel on one rank's own tokens, on one device; no mask: in full."
    yield "eff.: world size × base / measured. full: the same with the base's pairs at the rate of "
    yield "      'no mask'. exposed: ms with the link less ms with communication removed."
    yield "MiB: most memory above inputs, outputs and gradients; n/a on the CPU."
    if replay.device.startswith("cpu"):
        yield "On the CPU these are times of the host, and say little about GPUs."
        return
    for design in (replay.ours, replay.existing):
        ranks = [] if design is None else design.ranks
        bound = [str(each.rank) for each in ranks if each.measured.is_host_bound]
        if design is not None and bound:
            yield (
                f"{design.name}: the host took longer to queue the work of ranks "
                f"{', '.join(bound)} than the device to do it. It had a lead here; a real rank "
                "that has none waits for its host."
            )
