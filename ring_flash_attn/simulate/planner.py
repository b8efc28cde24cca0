"""The planner: which layout, route, kernel and parameters a workload should take on a machine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.documents import Histogram, pack_of
from ..bench.links import Link, Topology, find_link
from ..bench.workload import BACKWARD, FORWARD, PRESETS, Placement, Workload, problem_of
from ..engine.checks import check_integer
from ..kernels.base import AUTO, check_kernel, kernel_names
from ..plan.build import BY_NODES
from ..plan.problem import Problem
from .candidates import candidates
from .forecast import ALL, Forecast, Passes, forecast, sample
from .gpus import INTERFERENCE, find_gpu
from .machine import Gpu, Machine
from .plans import is_hot, seconds_alone
from .ranking import Ranking, Refused

_SEQLEN = 8192  # tokens of a rank, if the user does not say
_FEW = 3  # ranks of a candidate that are priced first
_FINALISTS = 6  # that are priced in full, at least
_NODE = 8  # ranks, where the topology has no nodes
_OTHERS = 2  # of the best, priced with other kernels, too
_MIB = 2**20
Report = Callable[[str], None]


def plan_for(
    *,
    world_size: int,
    topology: Topology | Link | str,
    gpu: str = "H200",
    preset: str | None = None,
    seqlen: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    documents: str | Path | Histogram | None = None,
    seed: int | None = None,
    document_cap: float | None = None,
    memory_limit: int | None = None,
    kernel: str | None = None,
    layouts: Sequence[str] = (),
    routes: Sequence[str] = (),
    report: Report = lambda line: None,
    **workload: Any,
) -> Ranking:
    """Rank layouts × routes × kernels × parameters by what they would take on a machine.

    Args:
        world_size: number of ranks.
        topology: what lies between them: a `Topology`, a `Link`, or the name of one.
        gpu: "H200", "H100", "H800", "A100" or "A800".
        preset: the name of a model's shape; other arguments change it.
        seqlen: tokens of a rank; by default 8192.
        cu_seqlens: packed documents: offsets in the whole stream over all ranks.
        documents, seed, document_cap: packed documents that are drawn from a histogram: its name or
            file, the seed, and the largest share of all tokens that a document may have.
        memory_limit: bytes that a rank may hold beside inputs, outputs and gradients.
        kernel: the only one to consider; by default every one that there are rates for.
        layouts, routes: the only ones to consider; by default all.
        report: gets lines that say what is being done.
        workload: batch, nheads, nheads_k, headdim, dtype, causal, … as in `Workload`.

    Raises:
        ValueError: a wrong argument; no placement is possible, or fits into `memory_limit`.
    """
    world_size = check_integer("world_size", world_size, 1)
    seqlen = None if seqlen is None else check_integer("seqlen", seqlen, 1)
    if memory_limit is not None:
        memory_limit = check_integer("memory_limit", memory_limit, 1)
    whole = _workload(
        world_size, preset, seqlen, cu_seqlens, workload, documents, seed, document_cap
    )
    found = find_link(topology) if isinstance(topology, str) else topology
    if found is None:
        raise ValueError("topology 'none': a plan needs to know what lies between ranks")
    machine = Machine(find_gpu(gpu), Topology.of(found), INTERFERENCE)
    return plan_workload(
        whole,
        world_size,
        machine,
        memory_limit=memory_limit,
        kernel=kernel,
        layouts=layouts,
        routes=routes,
        report=report,
    )


def _workload(
    world_size: int,
    preset: str | None,
    seqlen: int | None,
    cu_seqlens: Sequence[int] | None,
    changes: Mapping[str, Any],
    documents: str | Path | Histogram | None,
    seed: int | None,
    document_cap: float | None,
) -> Workload:
    """That of all ranks."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    start = PRESETS["llama3-8b" if preset is None else preset].to_dict()
    known = set(Workload.__dataclass_fields__) - {"seqlen", "cu_seqlens", "drawn"}
    for name in changes:
        if name not in known:
            raise TypeError(f"plan_for has no argument {name!r}")
    tokens = world_size * (_SEQLEN if seqlen is None else seqlen)
    pack = pack_of(tokens, cu_seqlens, documents, seed, document_cap)
    if seqlen is not None and cu_seqlens is not None and cu_seqlens[-1] != tokens:
        raise ValueError(
            f"cu_seqlens ends at {cu_seqlens[-1]}, but {world_size} ranks of {seqlen} have {tokens}"
        )
    batch = {"batch": 1} if pack else {}
    return Workload(**{**start, **batch, **changes, "seqlen": tokens, **pack})


def plan_workload(
    workload: Workload,
    world_size: int,
    machine: Machine,
    *,
    memory_limit: int | None = None,
    kernel: str | None = None,
    layouts: Sequence[str] = (),
    routes: Sequence[str] = (),
    report: Report = lambda line: None,
) -> Ranking:
    """The same for a workload of all ranks together; see `plan_for`."""
    with _no_collections():
        return _ranked(workload, world_size, machine, memory_limit, kernel, layouts, routes, report)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage stays for some seconds: plans are millions of small objects, and looking through them
    again and again for what is unreachable took a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _ranked(
    workload: Workload,
    world_size: int,
    machine: Machine,
    memory_limit: int | None,
    kernel: str | None,
    layouts: Sequence[str],
    routes: Sequence[str],
    report: Report,
) -> Ranking:
    kernels = kernels_for(workload, machine.gpu, kernel)
    every, impossible = candidates(
        workload, world_size, machine.topology, kernels[0], layouts, routes
    )
    search = _Search(workload, machine, report)
    rough = search.rough(every)
    rough, too_large = _that_fit(rough, memory_limit)
    ranked: list[Forecast] = []
    while rough and (
        len(ranked) < _FINALISTS or rough[0].seconds < min(each.seconds for each in ranked)
    ):
        ranked.append(search.price(rough.pop(0).placement))
    for best in sorted(ranked, key=_seconds)[:_OTHERS]:
        others = (replace(best.placement, kernel=name) for name in kernels[1:])
        ranked += [search.price(other) for other in others]
    ranked, more = _that_fit(ranked, memory_limit)
    refused = [Refused(placement, why) for placement, why in impossible]
    refused += [*too_large, *more]
    if not ranked:
        reasons = "; ".join(f"{each.placement}: {each.why}" for each in refused[:3])
        raise ValueError(f"no placement is possible: {reasons}")
    ranked.sort(key=_seconds)
    return Ranking(workload, machine, tuple(ranked), tuple(rough), tuple(refused))


def price_placement(workload: Workload, placement: Placement, machine: Machine) -> Forecast:
    """One placement of a workload of all ranks together."""
    return _Search(workload, machine, lambda line: None).price(placement)


def _seconds(found: Forecast) -> float:
    return found.seconds


class _Search:
    """Prices candidates; what problems of one layout know, they share.

    A few ranks of each candidate are priced first. They are never slower than all ranks together,
    which wait for each other: so who is slower than another in full, by a few ranks, is out.
    """

    def __init__(self, workload: Workload, machine: Machine, report: Report) -> None:
        self._workload, self._machine, self._report = workload, machine, report
        self._known: dict[str, tuple[Problem, tuple[int, ...]]] = {}
        self._problems: dict[Placement, Problem] = {}
        self._priced: dict[Placement, dict[int, Passes]] = {}
        self._hot: dict[str, bool] = {}  # of kernels

    def rough(self, every: Sequence[Placement]) -> list[Forecast]:
        """A few ranks of each, the best first; of many ranks, parameters for the best alone.

        Routes that know nodes are priced with the topology's, or with as large ones as divide the
        ranks: with one node they are other routes.
        """
        if every and every[0].world_size > ALL:
            size, most = every[0].world_size, self._machine.topology.ranks_per_node or _NODE
            ranks = max(n for n in range(1, most + 1) if size % n == 0)
            node = {"ranks_per_node": ranks} if ranks > 1 else {}
            plain = [p for p in every if p.parameters == (node if p.route in BY_NODES else {})]
            first = self.rough_of(plain)
            best = {(each.placement.layout, each.placement.route) for each in first[:_OTHERS]}
            rest = [each for each in every if (each.layout, each.route) in best]
            return self.distinct([*first, *self.rough_of([p for p in rest if p not in plain])])
        return self.distinct(self.rough_of(every))

    def rough_of(self, every: Sequence[Placement]) -> list[Forecast]:
        """A few ranks of each, the best first."""
        return sorted((self.price(each, few=True) for each in every), key=_seconds)

    def price(self, placement: Placement, few: bool = False) -> Forecast:
        """All chosen ranks of a placement, or a few."""
        self._report(str(placement) + ("" if few else ", all chosen ranks"))
        problem = self._problem(placement)
        if placement.layout not in self._known:
            self._known[placement.layout] = problem, sample(problem)
        _, ranks = self._known[placement.layout]
        if few:
            ranks = ranks[:_FEW]
        priced, kernel = self._priced.setdefault(placement, {}), placement.kernel
        if kernel not in self._hot:
            share = self._workload.share(placement.world_size)
            self._hot[kernel] = is_hot(share, kernel, self._machine.gpu)
        hot = self._hot[kernel]
        return forecast(self._workload, placement, self._machine, problem, ranks, hot, priced)

    def _problem(self, placement: Placement) -> Problem:
        """That of a placement, whatever the kernel; with what is known of its layout."""
        key = replace(placement, kernel=AUTO)
        if key not in self._problems:
            problem = self._problems[key] = problem_of(self._workload, placement)
            if placement.layout in self._known:
                problem.share(self._known[placement.layout][0])
        return self._problems[key]

    @staticmethod
    def distinct(found: Sequence[Forecast]) -> list[Forecast]:
        """The best first, without those that are another one by another name."""
        seen: dict[tuple[object, ...], Forecast] = {}
        for each in sorted(found, key=_seconds):
            times = round(each.forward * 1e7), round(each.backward * 1e7)  # 0.1 microseconds
            seen.setdefault((*times, each.memory, each.received, each.slowest), each)
        return list(seen.values())


def _that_fit(found: Sequence[Forecast], limit: int | None) -> tuple[list[Forecast], list[Refused]]:
    """Those that hold no more than the limit, and the others."""
    if limit is None:
        return list(found), []
    why = "holds {:.0f} MiB, more than the limit of {:.0f}"
    large = [each for each in found if each.memory > limit]
    refused = [
        Refused(each.placement, why.format(each.memory / _MIB, limit / _MIB)) for each in large
    ]
    return [each for each in found if each.memory <= limit], refused


def kernels_for(workload: Workload, gpu: Gpu, kernel: str | None) -> tuple[str, ...]:
    """Those with rates for the head dimension, the fastest on 8192 tokens first.

    ValueError where there is none, or not for the one that is asked for.
    """
    headdim = max(workload.headdim, workload.headdim_v or 0)
    if kernel is not None and kernel != AUTO:
        check_kernel(kernel)
        for way in (FORWARD, BACKWARD):
            gpu.rate(kernel, way, headdim)
        return (kernel,)
    known = {
        name
        for name, way, dim in gpu.rates
        if dim == headdim and way == FORWARD and name in kernel_names()
    }
    if not known:
        dims = ", ".join(sorted({str(dim) for _, _, dim in gpu.rates}))
        raise ValueError(
            f"headdim {headdim}: no kernel has a rate for it on {gpu.name}; there are {dims}"
        )
    share = replace(workload, batch=1, cu_seqlens=None, drawn=None, seqlen=_SEQLEN)
    return tuple(sorted(known, key=lambda name: (seconds_alone(share, name, gpu), name)))
