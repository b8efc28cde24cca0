"""`replay`: what a rank of many costs, found on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..link import NONE, Link, find_link
from ..machine import device_name, find_device, versions
from ..timing import Samples, Stopwatch, Work, interleaved, on_device, peak_bytes
from ..workload import Placement, Workload, resolve
from .baseline import BaselinePasses, BaselineRanks, BlockAttention, NativeAttention
from .emulated import check_link
from .rank import LibraryRanks, ReplayedRank
from .results import Bar, ByPass, Design, Measured, PassCost, RankResult, Replay

_SEQLEN = 8192  # of a rank, if the user does not say
_MISSING = ("seqlen_k", "cu_seqlens_k", "dropout_p", "alibi", "sink", "lse_grad")
Baseline = bool | str | BlockAttention
Ranks = LibraryRanks | BaselineRanks
Passes = ReplayedRank | BaselinePasses
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
    designs: list[Ranks] = [ours]
    if baseline is not False:
        designs.append(BaselineRanks(ours, _block(baseline)))
    with on_device(device):
        runs = [_DesignRuns(design, ours, chosen, report) for design in designs]
        watch = Stopwatch(device)
        works = {name: work for each in runs for name, work in each.works()}
        samples = interleaved(works, watch, repeats, report)
        found = [each.design(samples) for each in runs]
        bars: tuple[Bar, ...] = ()
        if timeline:  # a run of its own, which changes nothing that is timed
            slowest = found[0].slowest(both=True)
            rank = runs[0].ranks[slowest.rank].passes[-1]
            assert isinstance(rank, ReplayedRank)
            watch.lead(slowest.measured.host.both)
            bars = rank.recorded()
    theirs = found[1] if len(found) > 1 else None
    where = device_name(device), versions()
    return Replay(workload, placement, *where, repeats, found[0], theirs, bars)


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


class _Timed(NamedTuple):
    """A rank, or one device.

    Attributes:
        name: in words.
        passes: with communication removed, and over the link if there is one.
        peak: bytes above inputs, outputs and gradients.
        in_a_row: a run does its work so often.
    """

    name: str
    passes: Sequence[Passes]
    peak: ByPass[int] | None
    in_a_row: int = 1

    def works(self) -> Iterator[tuple[str, Work]]:
        """What is timed, by name."""
        for passes, link in zip(self.passes, ("", ", with the link")):
            yield f"{self.name}, forward{link}", self._repeated(passes.forward)
            yield f"{self.name}, forward and backward{link}", self._repeated(passes.both)

    def _repeated(self, work: Work) -> Work:
        def run() -> None:
            for _ in range(self.in_a_row):
                work()

        return work if self.in_a_row == 1 else run

    def measured(self, found: Mapping[str, Samples]) -> Measured:
        """Medians of the samples."""
        samples = [found[name] / self.in_a_row for name, _ in self.works()]
        removed, counts = samples[:2], samples[-2:]
        times = ByPass(*(each.median.device for each in counts))
        return Measured(
            ByPass(*(each.median.device for each in removed)),
            times if len(self.passes) > 1 else None,
            ByPass(*(each.median.host for each in counts)),
            self.peak,
            ByPass(*(each.device for each in counts)),
        )


class _DesignRuns:
    """One device and ranks of a design: what is timed of it, and what that says.

    One device does its work as often in a row as it takes to equal a rank. A short run would have a
    higher clock than a long one, and be no measure for it.
    """

    def __init__(
        self, design: Ranks, ours: LibraryRanks, chosen: Sequence[int], report: Report
    ) -> None:
        self._design, self._ours, self._report = design, ours, report
        world_size, link = ours.placement.world_size, ours.placement.link
        at_full_rate = max(1, world_size * ours.base_pairs // ours.full_pairs)
        base, full = design.single_device(masked=True), design.single_device(masked=False)
        self._base = self._timed("one device", base, [base], world_size)
        self._full = self._timed("one device without a mask", full, [full], at_full_rate)
        self._described: dict[int, tuple[int, int, tuple[PassCost, ...]]] = {}
        self.ranks: dict[int, _Timed] = {}
        for rank in chosen:
            self._described[rank] = design.describe(rank)
            passes = [design.rank(rank, each) for each in dict.fromkeys((None, link))]
            fresh = design.rank(rank, None, keep_buffers=False)
            self.ranks[rank] = self._timed(f"rank {rank}", fresh, passes)

    def _timed(
        self, who: str, fresh: Passes, passes: Sequence[Passes], in_a_row: int = 1
    ) -> _Timed:
        """Measures the memory of `fresh` passes."""
        name, device = f"{self._design.name}, {who}", self._ours.device
        self._report(f"memory of {name}")
        forward, both = peak_bytes(fresh.forward, device), peak_bytes(fresh.both, device)
        peak = None if forward is None or both is None else ByPass(forward, both)
        return _Timed(name, passes, peak, in_a_row)

    def works(self) -> Iterator[tuple[str, Work]]:
        """What is timed, by name."""
        for each in (self._base, self._full, *self.ranks.values()):
            yield from each.works()

    def design(self, samples: Mapping[str, Samples]) -> Design:
        """What was found."""
        return Design(
            self._design.name,
            self._ours.placement.world_size,
            self._ours.flops_per_pair,
            self._ours.base_pairs,
            self._base.measured(samples),
            self._ours.full_pairs,
            self._full.measured(samples),
            tuple(
                RankResult(rank, *self._described[rank], each.measured(samples))
                for rank, each in self.ranks.items()
            ),
        )
