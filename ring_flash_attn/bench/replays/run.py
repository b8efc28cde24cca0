"""`replay`: what a rank of many costs, found on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...plan.build import make_plan
from ..documents import Histogram, pack_of
from ..links import Link, Topology, find_link
from ..machine import device_name, find_device, versions
from ..timing import Samples, Stopwatch, Work, interleaved, on_device, peak_bytes
from ..workload import BOTH, FORWARD, Placement, Workload, problem_of, rank_tokens, resolve
from .baseline import BaselinePasses, BaselineRanks, BlockAttention, NativeAttention
from .emulated import check_link
from .rank import LibraryRanks, ReplayedRank
from .results import Bar, Design, Measured, PassCost, RankResult, Replay

_SEQLEN = 8192  # of a rank, if the user does not say
_MISSING = ("seqlen_k", "cu_seqlens_k", "dropout_p", "alibi", "sink", "lse_grad")
_PASSES = (FORWARD, BOTH)
Baseline = bool | str | BlockAttention
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
    documents: str | Path | Histogram | None = None,
    seed: int | None = None,
    document_cap: float | None = None,
    batch: int = 1,
    nheads: int = 32,
    nheads_k: int = 8,
    headdim: int = 128,
    dtype: torch.dtype | str = torch.bfloat16,
    causal: bool = True,
    heads_k_stride: int | None = None,
    sources_per_launch: int | None = None,
    ranks_per_node: int | None = None,
    link: Link | Topology | str | None = None,
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
        documents: packed documents that are drawn: a histogram of lengths by its name, "magi", or
            a CSV file. They fill `seqlen * world_size` tokens.
        seed: of these; by default 42.
        document_cap: none of them is longer than this part of all tokens; by default a quarter.
        batch, nheads, nheads_k, headdim, dtype: of q, k and v.
        causal: queries see no later keys.
        heads_k_stride: KV heads that travel together, for routes "all_gather" and "all_to_all".
        sources_per_launch: ranks whose keys one launch takes at most, for route "ring" (nodes for
            "mesh" and "double_ring"); by default as many as in `ring_attention`.
        ranks_per_node: for routes "mesh" and "double_ring"; by default all.
        link: a `Link` or a `Topology`, or what `find_link` knows by name, such as "nvlink4" or
            "h100-ib400"; None or "none": communication costs nothing.
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
    found = find_link(link) if link is None or isinstance(link, str) else link
    placement = Placement(
        world_size,
        layout,
        route,
        kernel,
        heads_k_stride,
        sources_per_launch,
        found,
        ranks_per_node,
    )
    tokens = world_size * (_SEQLEN if seqlen is None else seqlen)
    workload = Workload(
        batch=batch,
        seqlen=tokens,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        causal=bool(causal),
        dtype=dtype,  # type: ignore[arg-type]  # any name of it
        **pack_of(tokens, cu_seqlens, documents, seed, document_cap),
    )
    if cu_seqlens is not None:
        rank_tokens(cu_seqlens, world_size, seqlen)
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
    designs: list[LibraryRanks | BaselineRanks] = [ours]
    if baseline is not False:
        block = "fa2" if baseline is True else baseline
        block = NativeAttention(block) if isinstance(block, str) else block
        designs.append(BaselineRanks(ours, block))
    with on_device(device):
        timed = [list(_timed(each, ours, chosen, report)) for each in designs]
        watch = Stopwatch(device)
        works = {name: work for each in timed for one in each for name, work in one.works()}
        samples = interleaved(works, watch, repeats, report)
        found = []
        for design, each in zip(designs, timed, strict=True):
            base, full, *results = (one.result(samples) for one in each)
            single = base.pairs, base.measured, full.pairs, full.measured
            sizes = placement.world_size, ours.flops_per_pair
            found.append(Design(design.name, *sizes, *single, tuple(results)))
        bars: tuple[Bar, ...] = ()
        if timeline:  # a run of its own, which changes nothing that is timed
            slowest = found[0].slowest(BOTH)
            rank = timed[0][2 + chosen.index(slowest.rank)].runs[-1]
            assert isinstance(rank, ReplayedRank)
            watch.lead(slowest.measured.host[BOTH])
            bars = rank.recorded()
    theirs = found[1] if len(found) > 1 else None
    where = device_name(device), versions()
    return Replay(workload, placement, *where, repeats, found[0], theirs, bars)


def check_replay(workload: Workload, placement: Placement, device: torch.device) -> Placement:
    """The placement with the library's choices made (`workload.resolve`).

    Raises:
        ValueError: this makes no sense, or cannot be replayed.
        NotImplementedError: the kernel cannot do it; with every reason.
    """
    if workload.window != (-1, -1):
        raise ValueError(f"window {workload.window}: replayed ranks have no windows")
    for name in _MISSING:
        if getattr(workload, name):
            raise ValueError(f"{name} {getattr(workload, name)}: not for replayed ranks")
    check_link(placement.link, device)
    return resolve(workload, placement, device)


def check_ranks(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Each once, by default all; ValueError for one that there is not."""
    for rank in ranks or ():
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 … {world_size - 1}")
    return tuple(dict.fromkeys(ranks or range(world_size)))


def busiest_rank(workload: Workload, placement: Placement) -> int:
    """The rank with most pairs; of several the last, which merges most."""
    problem = problem_of(workload, placement)
    ranks = range(placement.world_size)
    return max(ranks, key=lambda rank: (make_plan(placement.route, problem, rank).pairs, rank))


def repeated(work: Work, times: int) -> Work:

    def run() -> None:
        for _ in range(times):
            work()

    return work if times == 1 else run


@dataclass(frozen=True, slots=True)
class _Timed:
    """A rank, or one device."""

    name: str
    about: tuple[int, int, int, tuple[PassCost, ...]]  # the beginning of a `RankResult`
    runs: Sequence[Passes]  # with communication removed, and over the link if there is one
    peak: dict[str, int] | None
    in_a_row: int = 1  # a run does its work so often

    def works(self) -> Iterator[tuple[str, Work]]:
        for passes, link in zip(self.runs, ("", ", with the link")):
            for what, work in (("forward", passes.forward), ("forward and backward", passes.both)):
                yield f"{self.name}, {what}{link}", repeated(work, self.in_a_row)

    def result(self, found: Mapping[str, Samples]) -> RankResult:
        samples = [found[name] / self.in_a_row for name, _ in self.works()]
        removed, counts = (dict(zip(_PASSES, each)) for each in (samples, samples[-2:]))
        times = {passes: each.median.device for passes, each in counts.items()}
        measured = Measured(
            {passes: each.median.device for passes, each in removed.items()},
            times if len(self.runs) > 1 else None,
            {passes: each.median.host for passes, each in counts.items()},
            self.peak,
            {passes: list(each.device) for passes, each in counts.items()},
        )
        return RankResult(*self.about, measured)


def _timed(
    design: LibraryRanks | BaselineRanks, ours: LibraryRanks, chosen: Sequence[int], report: Report
) -> Iterator[_Timed]:
    """One device with the mask and without, and the ranks of a design.

    One device does its work as often in a row as it takes to equal a rank. A short run would have a
    higher clock than a long one, and be no measure for it.
    """

    def peak(name: str, fresh: Passes) -> dict[str, int] | None:
        report(f"memory of {name}")
        forward, both = (peak_bytes(run, ours.device) for run in (fresh.forward, fresh.both))
        return None if forward is None or both is None else {FORWARD: forward, BOTH: both}

    world_size, nheads, tokens = ours.placement.world_size, ours.workload.nheads, ours.share.seqlen
    pairs, full_pairs = nheads * ours.share.pairs, nheads * tokens**2
    at_full_rate = max(1, world_size * pairs // full_pairs)
    for who, masked, own, often in (
        ("one device", True, pairs, world_size),
        ("one device without a mask", False, full_pairs, at_full_rate),
    ):
        name, single = f"{design.name}, {who}", design.single_device(masked)
        yield _Timed(name, (0, tokens, own, ()), [single], peak(name, single), often)
    for rank in chosen:
        name, about = f"{design.name}, rank {rank}", (rank, *design.describe(rank))
        runs = [design.rank(rank, link) for link in dict.fromkeys((None, ours.placement.link))]
        fresh = design.rank(rank, None, keep_buffers=False)
        yield _Timed(name, about, runs, peak(name, fresh))
