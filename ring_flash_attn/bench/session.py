"""One replay: all contenders made, timed in turns, and put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from .contenders import Contender, OneRank, Stage
from .existing import Block
from .holdings import Walked, walk_through
from .link import Link
from .machine import device_name, versions
from .report import Design, Measured, Peak, RankResult, Replay, Runs, Times
from .rival import BlockAlone, Recycler, RivalRank, design_name, rival_pairs
from .scenario import Scenario
from .timeline import Bar
from .timing import Samples, Stopwatch, Work, interleaved, on_device, peak_bytes

_BASE, _FULL = "one device", "one device without a mask"


class Key(NamedTuple):
    """What is timed: whose, over the link or without communication, with the backward or not."""

    design: str
    who: str
    linked: bool = False
    both: bool = False

    def __str__(self) -> str:
        passes = "forward and backward" if self.both else "forward"
        return f"{self.design}, {self.who}, {passes}{', with the link' if self.linked else ''}"


class Session:
    """All contenders of a scenario.

    Args:
        scenario: what is replayed; its kernel is chosen.
        link: what is emulated; None: communication is removed.
        repeats: rounds of the medians.
        report: is told what is being done.
    """

    def __init__(
        self, scenario: Scenario, link: Link | None, repeats: int, report: Callable[[str], None]
    ) -> None:
        self._scenario, self._link, self._repeats = scenario, link, repeats
        self._report, self._stage = report, Stage(scenario)
        self._contenders: dict[Key, Contender] = {}
        self._peaks: dict[tuple[str, str], Peak | None] = {}
        self._timings: Mapping[Key, Samples] = {}

    def run(self, block: Block | None, with_timeline: bool) -> Replay:
        """Time everything; `block` is for the existing design."""
        with on_device(self._scenario.device):
            ours = self._add_ours()
            if block is not None:
                self._add_rival(block)
            watch = Stopwatch(self._scenario.device)
            self._time(watch)
            design = self._design(*ours)
            existing = None if block is None else self._rival(block)
            bars = self._record(design, watch) if with_timeline else ()
        return Replay(
            _plain(self._scenario),
            device_name(self._scenario.device),
            versions(),
            self._link,
            self._repeats,
            design,
            existing,
            bars,
        )

    # Contenders.

    def _add_ours(self) -> tuple[str, dict[int, int], dict[int, int], dict[int, Any]]:
        """Returns name, and for each rank tokens, pairs, and what its passes come to."""
        scenario, stage = self._scenario, self._stage
        name = f"{scenario.layout} × {scenario.route} × {scenario.kernel}"
        self._add(name, _BASE, stage.alone(scenario.causal, scenario.lengths))
        self._add(name, _FULL, stage.alone(False, (scenario.tokens,)))
        sizes, pairs, walked = {}, {}, {}
        for rank in scenario.ranks:
            free = stage.rank(rank, None)
            sizes[rank] = scenario.size(rank)
            pairs[rank] = scenario.pairs(free.prepared.ranks[0].forward.plan)
            walked[rank] = walk_through(free.prepared, free.shard, stage.bank)
            linked = None if self._link is None else stage.rank(rank, self._link)
            self._add(name, _who(rank), free, linked, stage.rank(rank, None, keeps_buffers=False))
        return name, sizes, pairs, walked

    def _add_rival(self, block: Block) -> None:
        stage, link = self._stage, self._link
        name = design_name(block)
        self._add(name, _BASE, BlockAlone(stage, block, True))
        self._add(name, _FULL, BlockAlone(stage, block, False))
        recycler = Recycler()
        for rank in self._scenario.ranks:
            free, bare = (RivalRank(stage, block, rank, None, kept) for kept in (recycler, None))
            linked = None if link is None else RivalRank(stage, block, rank, link)
            self._add(name, _who(rank), free, linked, bare)

    def _add(
        self,
        design: str,
        who: str,
        free: Contender,
        linked: Contender | None = None,
        bare: Contender | None = None,
    ) -> None:
        """Without communication, and over the link; `bare` is for memory if `free` keeps some."""
        self._report(f"memory of {Key(design, who)}")
        held = free if bare is None else bare
        device = self._scenario.device
        forward, both = peak_bytes(held.forward, device), peak_bytes(held.both, device)
        self._peaks[design, who] = None if forward is None or both is None else Peak(forward, both)
        self._contenders[Key(design, who)] = free
        if linked is not None:
            self._contenders[Key(design, who, linked=True)] = linked

    # Results.

    def _time(self, watch: Stopwatch) -> None:
        """One device does its work as often in a row as it takes to equal a rank.

        A short run would have a higher clock than a long one, and be no measure for it.
        """
        scenario = self._scenario
        times = {_BASE: scenario.world_size}
        times[_FULL] = max(1, scenario.world_size * scenario.base_pairs // scenario.full_pairs)
        works: dict[Key, Work] = {}
        for key, contender in self._contenders.items():
            often = times.get(key.who, 1)
            works[key] = _in_a_row(contender.forward, often)
            works[key._replace(both=True)] = _in_a_row(contender.both, often)
        found = interleaved(works, watch, self._repeats, self._report)
        self._timings = {key: each / times.get(key.who, 1) for key, each in found.items()}

    def _times(self, key: Key, host: bool = False) -> Times:
        forward, both = (self._timings[key._replace(both=both)].median for both in (False, True))
        if host:
            return Times(forward.host, both.host)
        return Times(forward.device, both.device)

    def _measured(self, design: str, who: str) -> Measured:
        key = Key(design, who)
        over = key._replace(linked=True)
        is_linked = over in self._timings
        counts = over if is_linked else key
        runs = (self._timings[counts._replace(both=both)].device for both in (False, True))
        return Measured(
            self._times(key),
            self._times(over) if is_linked else None,
            self._times(counts, host=True),
            self._peaks[design, who],
            Runs(*runs),
        )

    def _design(
        self,
        name: str,
        sizes: Mapping[int, int],
        pairs: Mapping[int, int],
        walked: Mapping[int, tuple[Walked, ...]],
    ) -> Design:
        scenario = self._scenario
        ranks = tuple(
            RankResult(
                rank,
                sizes[rank],
                pairs[rank],
                walked.get(rank, ()),
                self._measured(name, _who(rank)),
            )
            for rank in scenario.ranks
        )
        return Design(
            name,
            scenario.world_size,
            4 * scenario.batch * scenario.headdim,
            scenario.base_pairs,
            self._measured(name, _BASE),
            scenario.full_pairs,
            self._measured(name, _FULL),
            ranks,
        )

    def _rival(self, block: Block) -> Design:
        scenario = self._scenario
        sizes = dict.fromkeys(scenario.ranks, scenario.tokens)
        pairs = dict.fromkeys(scenario.ranks, rival_pairs(scenario))
        return self._design(design_name(block), sizes, pairs, {})

    def _record(self, design: Design, watch: Stopwatch) -> tuple[Bar, ...]:
        """A run of its own, so that recording does not change what is timed."""
        who = _who(design.slowest(both=True).rank)
        slowest = self._contenders[Key(design.name, who, self._link is not None)]
        assert isinstance(slowest, OneRank)
        watch.lead(self._times(Key(design.name, who, self._link is not None), host=True).both)
        return slowest.recorded()


def _in_a_row(work: Work, times: int) -> Work:
    def run() -> None:
        for _ in range(times):
            work()

    return work if times == 1 else run


def _who(rank: int) -> str:
    return f"rank {rank}"


def _plain(scenario: Scenario) -> dict[str, Any]:
    """What JSON can hold."""
    values = asdict(scenario)
    values |= {name: list(values[name]) for name in ("ranks", "lengths")}
    values["dtype"] = str(scenario.dtype).removeprefix("torch.")
    return {**values, "device": str(scenario.device)}
