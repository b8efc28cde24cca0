"""`replay`: what a rank of many costs, found on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..inputs import resolve
from ..link import NONE, Link, find_link
from ..machine import device_name, find_device, versions
from ..timing import Samples, Stopwatch, Work, interleaved, on_device, peak_bytes
from ..workload import Placement, Workload
from .baseline import BaselineRanks, BlockAttention, NativeAttention, Passes
from .emulated import check_link
from .rank import LibraryRanks, ReplayedRank
from .results import Bar, ByPass, Design, Measured, PassCost, RankResult, Replay, Times

_SEQLEN = 8192  # of a rank, if the user does not say
_BASE, _FULL = "one device", "one device without a mask"
_MISSING = ("seqlen_k", "cu_seqlens_k", "dropout_p", "alibi", "sink", "lse_grad")
Baseline = bool | str | BlockAttention
Ranks = LibraryRanks | BaselineRanks
Report = Callable[[str], None]


def replay(
    *,
    world_size: int = 8,
    ranks: Sequence[int] | None = None,
    layout: str = "zigzag",
    route: str = "ring",
    kernel: str = "auto",
    seqlen: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    batch: int = 1,
    nheads: int = 32,
    nheads_k: int = 8,
    headdim: int = 128,
    dtype: torch.dtype | str = torch.bfloat16,
    causal: bool = True,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    link: Link | str | None = None,
    repeats: int = 9,
    device: str | torch.device | None = None,
    baseline: Baseline = False,
    existing: Baseline = False,
    timeline: bool = False,
    report: Report = lambda line: None,
) -> Replay:
    """Run ranks of a group, one at a time and without the others, and time them.

    Kernels, merges, buffers and streams are those of the real rank. What it would receive is random
    data, which is there at once (`link=None`) or after as long as a link would take. The base is
    the same kernel on one rank's own tokens on this device; `world_size` times as long is what a
    rank would take if scaling were ideal.

    Args:
        world_size: number of ranks.
        ranks: those to replay; by default all. The slowest is what counts.
        layout, route, kernel: as in `ring_attention`.
        seqlen: tokens of a rank; by default 8192.
        cu_seqlens: packed documents instead: offsets in the whole stream over all ranks. They end
            at `seqlen * world_size` if both are given.
        batch, nheads, nheads_k, headdim, dtype: of q, k and v.
        causal: queries see no later keys.
        heads_k_stride: KV heads that travel together, for route "all_gather".
        sources_per_launch: ranks whose keys one launch takes, for route "ring"; by default as many
            as in `ring_attention`.
        link: one of `LINKS` by name, or a `Link`; None or "none": communication costs nothing.
        repeats: rounds of the medians.
        device: by default the GPU, if there is one.
        baseline: replay ring-flash-attn 0.1.8's zigzag design as well: on torch's FlashAttention-2
            (True), on another library by its name, such as "fa4", or on a block of your own.
        existing: the old name of `baseline`.
        timeline: record when each launch and transfer of the slowest rank began and ended.
        report: gets lines that say what is being done.

    Raises:
        ValueError: a wrong argument.
        NotImplementedError: the kernel cannot do it; with every reason.
    """
    if baseline is not False and existing is not False:
        raise ValueError("existing is the old name of baseline: give one of them")
    found = link if isinstance(link, Link) else find_link(NONE if link is None else link)
    placement = Placement(
        world_size, layout, route, kernel, heads_k_stride, sources_per_launch, found
    )
    workload = Workload(
        batch=batch,
        seqlen=_SEQLEN if seqlen is None else seqlen,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        causal=bool(causal),
        dtype=dtype,  # type: ignore[arg-type]  # any name of it
        cu_seqlens=None if cu_seqlens is None else tuple(cu_seqlens),
    )
    if cu_seqlens is None:
        workload = replace(workload, seqlen=workload.seqlen * world_size)
    elif seqlen is not None and seqlen * world_size != workload.seqlen:
        raise ValueError(
            f"seqlen {seqlen} and cu_seqlens {','.join(map(str, cu_seqlens))}: offsets are those "
            "of the whole stream over all ranks, no longer those of a rank, and must end at "
            f"{world_size} × {seqlen} = {world_size * seqlen}"
        )
    return replay_ranks(
        workload,
        placement,
        device=find_device(device, "a replay"),
        ranks=ranks,
        repeats=repeats,
        baseline=existing if baseline is False else baseline,
        timeline=timeline,
        report=report,
    )


def replay_ranks(
    workload: Workload,
    placement: Placement,
    *,
    device: torch.device,
    ranks: Sequence[int] | None = None,
    repeats: int = 9,
    baseline: Baseline = False,
    timeline: bool = False,
    report: Report = lambda line: None,
) -> Replay:
    """The same for a workload of all ranks together; see `replay`."""
    if repeats < 1:
        raise ValueError(f"repeats must be positive, not {repeats}")
    placement = check_replay(workload, placement, device)
    chosen = check_ranks(ranks, placement.world_size)
    ours = LibraryRanks(workload, placement, device)
    theirs = None if baseline is False else BaselineRanks(ours, _block(baseline))
    session = _Session(ours, chosen, repeats, report)
    with on_device(device):
        session.add(ours)
        if theirs is not None:
            session.add(theirs)
        watch = Stopwatch(device)
        session.time(watch)
        found = session.design(ours)
        bars = session.record(found, watch) if timeline else ()
    return Replay(
        workload,
        placement,
        device_name(device),
        versions(),
        repeats,
        found,
        None if theirs is None else session.design(theirs),
        bars,
    )


def _block(baseline: Baseline) -> BlockAttention:
    """What the baseline runs on."""
    if isinstance(baseline, bool):
        return NativeAttention("fa2")
    return NativeAttention(baseline) if isinstance(baseline, str) else baseline


def check_replay(workload: Workload, placement: Placement, device: torch.device) -> Placement:
    """The placement with the library's choices made (`inputs.resolve`).

    Raises:
        ValueError: this makes no sense, or cannot be replayed.
        NotImplementedError: the kernel cannot do it; with every reason.
    """
    if workload.window != (-1, -1):
        raise ValueError(f"window {workload.window}: replayed ranks have no windows")
    for name in _MISSING:
        if getattr(workload, name):
            raise ValueError(f"{name} {getattr(workload, name)}: not for replayed ranks")
    if workload.seqlen < placement.world_size:
        raise ValueError(f"world_size {placement.world_size}: only {workload.seqlen} tokens")
    check_link(placement.link, device)
    return resolve(workload, placement, device)


def check_ranks(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Each once, by default all; ValueError for one that there is not."""
    if not ranks:
        return tuple(range(world_size))
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 … {world_size - 1}")
    return tuple(dict.fromkeys(ranks))


class _Key(NamedTuple):
    """What is timed: whose, over the link or without communication, with the backward or not."""

    design: str
    who: str
    linked: bool = False
    both: bool = False

    def __str__(self) -> str:
        passes = "forward and backward" if self.both else "forward"
        return f"{self.design}, {self.who}, {passes}{', with the link' if self.linked else ''}"


class _Session:
    """Everything that one replay times, in turns.

    Args:
        ours: this library's ranks.
        ranks: those that are replayed.
        repeats: rounds of the medians.
        report: gets lines that say what is being done.
    """

    def __init__(
        self, ours: LibraryRanks, ranks: Sequence[int], repeats: int, report: Report
    ) -> None:
        self._ours, self._link, self._ranks = ours, ours.placement.link, ranks
        self._repeats, self._report = repeats, report
        share, nheads = ours.share, ours.workload.nheads
        self._base_pairs, self._full_pairs = nheads * share.pairs, nheads * share.seqlen**2
        self._passes: dict[_Key, ReplayedRank | Passes] = {}
        self._peaks: dict[_Key, ByPass[int] | None] = {}
        self._described: dict[tuple[str, int], tuple[int, int, tuple[PassCost, ...]]] = {}
        self._timings: Mapping[_Key, Samples] = {}

    def add(self, design: Ranks) -> None:
        """One device and ranks, without communication and over the link; measures their memory."""
        for who, masked in ((_BASE, True), (_FULL, False)):
            key = _Key(design.name, who)
            self._passes[key] = design.single_device(masked)
            self._measure_memory(key, self._passes[key])
        for rank in self._ranks:
            key = _Key(design.name, f"rank {rank}")
            self._described[design.name, rank] = design.describe(rank)
            self._passes[key] = design.rank(rank, None)
            if self._link is not None:
                self._passes[key._replace(linked=True)] = design.rank(rank, self._link)
            self._measure_memory(key, design.rank(rank, None, keep_buffers=False))

    def _measure_memory(self, key: _Key, passes: ReplayedRank | Passes) -> None:
        self._report(f"memory of {key}")
        device = self._ours.device
        forward, both = peak_bytes(passes.forward, device), peak_bytes(passes.both, device)
        self._peaks[key] = None if forward is None or both is None else ByPass(forward, both)

    def time(self, watch: Stopwatch) -> None:
        """One device does its work as often in a row as it takes to equal a rank.

        A short run would have a higher clock than a long one, and be no measure for it.
        """
        world_size = self._ours.placement.world_size
        times = {_BASE: world_size}
        times[_FULL] = max(1, world_size * self._base_pairs // self._full_pairs)
        works: dict[_Key, Work] = {}
        for key, passes in self._passes.items():
            often = times.get(key.who, 1)
            works[key] = _in_a_row(passes.forward, often)
            works[key._replace(both=True)] = _in_a_row(passes.both, often)
        found = interleaved(works, watch, self._repeats, self._report)
        self._timings = {key: each / times.get(key.who, 1) for key, each in found.items()}

    def _samples(self, key: _Key) -> tuple[Samples, Samples]:
        return self._timings[key], self._timings[key._replace(both=True)]

    def _measured(self, key: _Key) -> Measured:
        linked = key._replace(linked=True)
        is_linked = linked in self._timings
        removed, counts = self._samples(key), self._samples(linked if is_linked else key)
        times = Times(*(each.median.device for each in counts))
        return Measured(
            Times(*(each.median.device for each in removed)),
            times if is_linked else None,
            Times(*(each.median.host for each in counts)),
            self._peaks[key],
            ByPass(*(each.device for each in counts)),
        )

    def design(self, design: Ranks) -> Design:
        """What was found of it."""
        name = design.name
        return Design(
            name,
            self._ours.placement.world_size,
            self._ours.flops_per_pair,
            self._base_pairs,
            self._measured(_Key(name, _BASE)),
            self._full_pairs,
            self._measured(_Key(name, _FULL)),
            tuple(
                RankResult(rank, *described, self._measured(_Key(name, f"rank {rank}")))
                for (who, rank), described in self._described.items()
                if who == name
            ),
        )

    def record(self, design: Design, watch: Stopwatch) -> tuple[Bar, ...]:
        """A timeline of the slowest rank; a run of its own, which changes nothing that is timed."""
        slowest = design.slowest(both=True)
        linked = self._link is not None
        rank = self._passes[_Key(design.name, f"rank {slowest.rank}", linked)]
        assert isinstance(rank, ReplayedRank)
        watch.lead(slowest.measured.host.both)
        return rank.recorded()


def _in_a_row(work: Work, times: int) -> Work:
    def run() -> None:
        for _ in range(times):
            work()

    return work if times == 1 else run
