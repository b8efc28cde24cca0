"""`measure_links`: what lies between real ranks, and the topology that this comes to."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from ...comm import DistributedTransport, Message, gather_shards, launch, resolve_group
from ..links import INSIDE, OUTSIDE, Link, Topology
from ..timing import WARM_UP, Stopwatch
from .measure import Group, Report, Settings

_IN_A_ROW = 5  # posts of a run, each after the one before it
_HOST = 5.0  # ms, in which they are queued at the latest
_NAME = 256  # bytes of a host's name
Seconds = dict[int, tuple[float, ...]]  # of a post, in each run, by bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Ranks that send at the same time."""

    level: str  # INSIDE or OUTSIDE
    targets: Mapping[int, int]  # of each rank that takes part; each receives from one, too


@dataclass(frozen=True, slots=True)
class MeasuredTraffic:
    """What a post took: of each run the slowest rank's."""

    traffic: Traffic
    seconds: Seconds

    def median(self, size: int) -> float:
        return statistics.median(self.seconds[size])

    def rate(self, size: int) -> float:
        """Bytes a second each way."""
        return size / self.median(size)

    def fit(self) -> tuple[float, float]:
        """Latency and bandwidth; see `fit`."""
        return fit({size: self.median(size) for size in self.seconds})


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """All that was measured between ranks."""

    hosts: tuple[str, ...]  # of each rank
    ranks_per_node: int
    sizes: tuple[int, ...]  # bytes, ascending
    pairs: tuple[MeasuredTraffic, ...]
    together: Mapping[str, MeasuredTraffic]  # by level: every rank sends to the next one

    def topology(self, name: str, backend: str) -> Topology:
        """Of each level what a rank gets while all send; a level that nobody uses is as the other.

        ValueError where times do not grow with size.
        """
        links = {}
        for level, each in self.together.items():
            latency, bandwidth = each.fit()
            links[level] = Link(f"{backend} {level}", bandwidth, latency)
        if OUTSIDE not in links:
            return Topology(name, links[INSIDE])
        outside = links[OUTSIDE]
        return Topology(name, links.get(INSIDE, outside), outside, self.ranks_per_node)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ms of every run, by bytes."""

        def times(each: MeasuredTraffic) -> dict[str, Any]:
            runs = {str(n): [1e3 * s for s in runs] for n, runs in each.seconds.items()}
            traffic = each.traffic
            return {"ranks": sorted(traffic.targets), "level": traffic.level, "ms": runs}

        return {
            "hosts": list(self.hosts),
            "pairs": [times(each) for each in self.pairs],
            "together": [times(each) for each in self.together.values()],
        }


def fit(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Latency and bytes a second of posts: the least squares of relative errors.

    ValueError where larger posts do not take longer.
    """
    ones = [1 / s for s in seconds.values()]
    sizes = [size / s for size, s in seconds.items()]
    aa, ab, bb = (
        sum(x * y for x, y in zip(*each, strict=True))
        for each in ((ones, ones), (ones, sizes), (sizes, sizes))
    )
    a, b = sum(ones), sum(sizes)
    determinant = aa * bb - ab * ab
    latency, inverse = ((bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant)
    if latency < 0:
        latency, inverse = 0.0, b / bb
    if inverse <= 0:
        raise ValueError(f"sizes {', '.join(map(str, seconds))}: larger ones do not take longer")
    return latency, 1 / inverse


def node_size(hosts: Sequence[str], gpus_per_node: int | None = None) -> int:
    """Ranks of a node: of one host, or as the user says; ValueError if nodes differ."""
    if gpus_per_node is None:
        gpus_per_node = hosts.count(hosts[0])
        for first in range(0, len(hosts), gpus_per_node):
            host, *others = hosts[first : first + gpus_per_node]
            if {*others} - {host} or hosts.count(host) != gpus_per_node:
                raise ValueError(
                    f"ranks are on hosts {', '.join(hosts)}: a topology needs as many on each, "
                    "one after the other"
                )
    if len(hosts) % gpus_per_node:
        raise ValueError(f"gpus_per_node {gpus_per_node} does not divide {len(hosts)} ranks")
    return gpus_per_node


def all_pairs(world_size: int, ranks_per_node: int) -> list[Traffic]:
    """Two ranks alone, both ways at once."""

    def level(a: int, b: int) -> str:
        return INSIDE if a // ranks_per_node == b // ranks_per_node else OUTSIDE

    return [Traffic(level(a, b), {a: b, b: a}) for a, b in combinations(range(world_size), 2)]


def all_together(world_size: int, ranks_per_node: int) -> list[Traffic]:
    """Every rank sends to the next one of its node, then to its like in the next node."""
    size, ranks = ranks_per_node, range(world_size)
    inside = {rank: rank // size * size + (rank + 1) % size for rank in ranks}
    outside = {rank: (rank + size) % world_size for rank in ranks}
    found = [(INSIDE, inside)] * (size > 1) + [(OUTSIDE, outside)] * (size < world_size)
    return [Traffic(*each) for each in found]


def measure_links(
    settings: Settings, sizes: Sequence[int], gpus_per_node: int | None, report: Report
) -> MeasuredLinks:
    """Time posts of so many bytes: of all pairs of ranks, and of all ranks together.

    Raises:
        ValueError: nodes differ in their number of ranks.
        launch.RanksFailed: a new rank died.
    """
    args = (sizes, settings.repeats, settings.device.type, gpus_per_node)
    arriving = settings.start(measure_links_on_rank, args)
    report("starting ranks")
    hosts = next(arriving)
    nodes = len(hosts), node_size(hosts, gpus_per_node)
    pairs, everybody, found = all_pairs(*nodes), all_together(*nodes), []
    for number, traffic in enumerate((*pairs, *everybody), 1):
        of = f"{number} of {len(pairs) + len(everybody)}"
        report(f"{of}: {traffic.level} a node, {len(traffic.targets)} ranks")
        ranks = [each for each in next(arriving) if each]
        slowest = {n: tuple(map(max, *(each[n] for each in ranks))) for n in sizes}
        found.append(MeasuredTraffic(traffic, slowest))
    for _ in arriving:  # until the ranks have ended
        pass
    alone, together = found[: len(pairs)], found[len(pairs) :]
    by_level = {each.traffic.level: each for each in together}
    return MeasuredLinks(tuple(hosts), nodes[1], tuple(sizes), tuple(alone), by_level)


# One rank's part.


def measure_links_on_rank(
    rank: int,
    world_size: int,
    sizes: Sequence[int],
    repeats: int,
    device: str,
    gpus_per_node: int | None,
) -> Iterator[str | Seconds]:
    """The name of the host, and what each post took; nothing where this rank takes no part."""
    yield socket.gethostname()
    posts = _Posts(launch.rank_device(device, rank), repeats)
    try:
        nodes = world_size, node_size(posts.hosts(), gpus_per_node)
    except ValueError:  # whoever gets the names says so
        return
    for traffic in all_pairs(*nodes) + all_together(*nodes):
        sources = {target: source for source, target in traffic.targets.items()}
        if rank in traffic.targets:
            yield {n: posts.time(n, sources[rank], traffic.targets[rank]) for n in sizes}
        else:
            for _ in range(repeats * len(sizes)):
                posts.group.wait_for_all()
            yield {}


class _Posts:
    """Posts of this rank, timed: each run begins when all ranks of the group are there."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        self._watch, self.group = Stopwatch(device), Group(device)
        self._transport = DistributedTransport(resolve_group(None), device)

    def hosts(self) -> list[str]:
        """The host's name, of each rank."""
        name = socket.gethostname().encode()[:_NAME].ljust(_NAME, b"\0")
        local = torch.tensor(list(name), dtype=torch.uint8, device=self._device)
        names = gather_shards(local, [(_NAME,)] * self.group.size, resolve_group(None))
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in names]

    def time(self, size: int, source: int, target: int) -> tuple[float, ...]:
        """Seconds of a post, to one rank and from one, in each run."""
        inbox, outbox = (
            torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        messages = [Message(inbox, source, receive=True), Message(outbox, target, receive=False)]

        def work() -> None:
            for _ in range(_IN_A_ROW):
                self._transport.post(messages)
                self._transport.wait()

        for _ in range(WARM_UP):
            work()
        ready = self.group.wait_for_all
        runs = (self._watch.time(work, _HOST, ready).device for _ in range(self._repeats))
        return tuple(ms / 1e3 / _IN_A_ROW for ms in runs)
