"""predict: seconds of a published row, by the schedule of the library that it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from ..timeline import Stage, run
from . import gpus
from .all_gather import RingAllGather
from .burst import Burst
from .constants import FITTED, Constants
from .double_ring import Windows
from .launches import Launches
from .llama3 import Llama3
from .machines import several, topology
from .megatron import RingP2P
from .ring_flash_attention import BasicRing, RingSchedule, Stripe, Zigzag
from .rows import PACKS, PublishedRow, documents
from .stages import RunSetting
from .ulysses import Ulysses, groups, inner

Pass = Callable[[], Iterator[Stage]]
Passes = tuple[Pass, Pass]  # forward, backward
RINGS: dict[str, type[RingSchedule]] = {
    "ring": BasicRing,
    "basic": BasicRing,
    "zigzag": Zigzag,
    "stripe": Stripe,
}
SCHEMES = {
    "ring_flash_attention": ("ring", "zigzag", "stripe", "llama3"),
    "yunchang": ("basic", "zigzag", "stripe"),
    "burst_engine": (
        *("Megatron p2p", "double ring", "USP head first", "USP ring first"),
        *("burst", "burst (first runs)", "burst single ring"),
    ),
    "magi_attention": ("Ulysses", "ring p2p", "ring all-gather", "USP", "LoongTrain"),
}
# Sources whose schemes give all ranks as much to do: iterations do not run into each other.
BALANCED = ("burst_engine", "magi_attention")


@cache
def predict(row: PublishedRow, constants: Constants = FITTED) -> float:
    """Of one iteration, when many follow each other."""
    if row.ranks == 1:
        return _alone(row, constants)
    if row.source == "burst_engine" and row.passes == "both":  # not on the same communicators
        passes = (replace(row, passes=each) for each in ("forward", "backward"))
        return sum(predict(each, constants) for each in passes)
    setting = setting_of(row, constants)
    if row.documents:
        packed = (of_documents(row, setting, lengths) for lengths in documents(row.tokens))
        return sum(_once(row, each) for each in packed) / len(documents(row.tokens))
    if row.source in BALANCED:
        return _once(row, setting)
    packs: Sequence[Sequence[int]] = PACKS if row.mask == "packed" else ((),)
    one: dict[int, list[Stage]] = {rank: [] for rank in range(row.ranks)}
    for rank, stages in one.items():
        for lengths in packs:
            forward, backward = passes_of(row, setting, rank, lengths)
            stages += forward() if setting.forward else ()
            stages += backward() if setting.backward else ()
    return steady(one, setting) / len(packs)


def _once(row: PublishedRow, setting: RunSetting) -> float:
    """Seconds of one iteration."""
    one: dict[int, list[Stage]] = {rank: [] for rank in range(row.ranks)}
    for rank, stages in one.items():
        forward, backward = passes_of(row, setting, rank, ())
        stages += forward() if setting.forward else ()
        stages += backward() if setting.backward else ()
    return run(one, setting.topology).seconds


def of_documents(row: PublishedRow, setting: RunSetting, lengths: Sequence[int]) -> RunSetting:
    """A rank of a ring has as many tokens of each document; two halves, for which it is padded."""
    ring = row.ranks // row.ulysses
    parts = lengths if ring == 1 else [2 * -(-length // (2 * ring)) for length in lengths]
    return replace(setting, lengths=tuple(parts), tokens=sum(parts) // row.ulysses)


def steady(one: dict[int, list[Stage]], setting: RunSetting) -> float:
    """Seconds of an iteration that follows another one, without a barrier between them."""
    two = {rank: stages * 2 for rank, stages in one.items()}
    first, both = (run(each, setting.topology).seconds for each in (one, two))
    return both - first


def _alone(row: PublishedRow, constants: Constants) -> float:
    return gpus.alone(gpus.find_gpu(row.machine.split()[0], constants, row.mask), row)


def setting_of(row: PublishedRow, constants: Constants) -> RunSetting:
    """The row's machine and shape."""
    name = row.machine.split()[0]
    gpu = gpus.find_gpu(name, constants, row.mask, row.scheme)
    kernel = "fa3" if row.source == "magi_attention" else "fa2"
    heads = row.nheads * row.batch, row.nheads_k * row.batch
    launches = Launches(gpu, kernel, *heads, row.headdim)
    between = topology(row, constants, communicators(row))
    tokens = row.tokens // row.ranks
    return RunSetting(
        launches,
        between,
        constants,
        row.ranks,
        tokens,
        row.passes,
        row.mask,
        row.ulysses,
        several(row, constants),
    )


def communicators(row: PublishedRow) -> int:
    """Of each GPU, at work at the same time: gradients may have one of their own."""
    alone = row.scheme in ("burst single ring", "Megatron p2p")
    return 2 if row.source == "burst_engine" and row.passes == "backward" and not alone else 1


def passes_of(row: PublishedRow, setting: RunSetting, rank: int, lengths: Sequence[int]) -> Passes:
    """The schedule of one rank; ValueError for a scheme that has none."""
    if row.scheme not in SCHEMES[row.source]:
        raise ValueError(f"unknown scheme {row.scheme!r} of {row.source}")
    if row.source == "ring_flash_attention":
        kind = RINGS.get(row.scheme, Llama3)
        ring = kind(setting, rank, lengths)
        return ring.forward, ring.backward
    if row.source == "yunchang":
        return _yunchang(row, setting, rank)
    return _others(row, setting, rank)


def _yunchang(row: PublishedRow, setting: RunSetting, rank: int) -> Passes:
    found = groups(rank, row.ranks, row.ulysses)
    ring = RINGS[row.scheme](inner(setting, row.ulysses), rank, (), found.ring)
    whole = Ulysses(setting, rank, found.heads, ring.forward, ring.backward)
    return whole.forward, whole.backward


def _others(row: PublishedRow, setting: RunSetting, rank: int) -> Passes:
    world = range(row.ranks)
    node = min(8, row.ranks)
    first = rank - rank % node
    local, across = range(first, first + node), range(rank % node, row.ranks, node)
    if row.scheme in ("Megatron p2p", "ring p2p"):
        flat = RingP2P(setting, rank, world, (rank,))
        return flat.forward, flat.backward
    if row.scheme.startswith("burst"):
        rings = (world, (rank,)) if row.scheme == "burst single ring" else (local, across)
        burst = Burst(setting, rank, *rings)
        return burst.forward, burst.backward
    if row.scheme == "double ring":
        double = Windows(setting, rank, local, across)
        return double.forward, double.backward
    if row.scheme == "ring all-gather":
        gathered = RingAllGather(setting, rank, local, across)
        return gathered.forward, gathered.backward
    found = groups(rank, row.ranks, row.ulysses, neighbours=row.scheme != "USP ring first")
    kind = RingP2P if row.source == "magi_attention" else Windows
    ring = kind(inner(setting, row.ulysses), rank, found.ring, (rank,))
    whole = Ulysses(setting, rank, found.heads, ring.forward, ring.backward)
    return whole.forward, whole.backward
