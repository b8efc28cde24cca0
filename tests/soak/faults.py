"""Ranks that die, come late or disagree: nobody hangs, all ranks raise, the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import torch.distributed as dist
from ranks import Ranks
from samples import Results
from torch.distributed import ProcessGroup

from ring_flash_attn.comm import agreement

from . import mortal
from .cases import Case
from .doors import call, check_results

GROUP_TIMEOUT = 10.0  # seconds
SLACK = 15.0  # seconds on a busy machine beyond the group's own
WHEN = ("before", "in the forward pass of", "in the backward pass of")  # a call

# What one rank does differently: arguments of the call.
OTHER = {
    "causal": {"causal": True},
    "window_size": {"window_size": (3, 1)},
    "softmax_scale": {"softmax_scale": 0.7},
    "softcap": {"softcap": 3.0},
    "dropout_p": {"dropout_p": 0.5},
    "deterministic": {"deterministic": True},
    "layout": {"layout": "stripe"},
    "route": {"route": "all_gather", "sources_per_launch": None},
    "sources_per_launch": {"sources_per_launch": 7},
}


def _case(world_size: int, seed: int, **changes: Any) -> Case:
    """Packed documents in a ring of neighbours: on every rank as many launches as ranks."""
    arguments = {"kernel": "reference", "lengths_q": (9, 4 * world_size), "seed": seed, **changes}
    return Case(
        function="ring_attention",
        world_size=world_size,
        layout="zigzag",
        batch=None,
        lengths_k=arguments["lengths_q"],
        nheads=4,
        nheads_k=2,
        headdim=8,
        headdim_v=8,
        sources_per_launch=1,
        **arguments,
    )


def _new_group(ranks: list[int], timeout: float = GROUP_TIMEOUT) -> ProcessGroup:
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True)


def _error_of(action: Callable[[], object]) -> tuple[str, float]:
    """What an action raises, "" if nothing, and how long it takes."""
    started = time.monotonic()
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


def _lose(
    rank: int, n: int, victim: int, when: str, launch: int, seed: int
) -> tuple[str, float, Results]:
    """A rank is lost in a call; the others then make one among themselves, in a new group."""
    mortal.register()
    group = _new_group(list(range(n)))
    call(_case(n, seed, kernel=mortal.NAME), rank, group)  # makes the connections
    if rank == victim:
        if when == WHEN[0]:
            mortal.die()
        mortal.left["forward" if when == WHEN[1] else "backward"] = launch
    new = _case(n, seed, kernel=mortal.NAME, lengths_q=(5, 6 * n))
    error, seconds = _error_of(lambda: call(new, rank, group))
    others = [r for r in range(n) if r != victim]
    # Some learn it at once, some when the group's time is up.
    rest = _new_group(others, 2 * (GROUP_TIMEOUT + SLACK))
    return error, seconds, call(_case(n - 1, seed), others.index(rank), rest)


def lost(world_size: int, victim: int, when: str, launch: int, seed: int) -> None:
    """A rank is killed: the others get an error within the group's timeout, then a new group works.

    Args:
        world_size: at least 2.
        victim: who is killed.
        when: one of WHEN.
        launch: how many launches of that pass the victim still makes, below world_size.
        seed: of the inputs.
    """
    pool = Ranks(world_size, over_tcp=True)
    limit = GROUP_TIMEOUT + SLACK
    outcomes = pool.outcomes(
        _lose, victim, when, launch, seed, timeout=2 * limit + SLACK, grace=2 * limit
    )
    pool.stop()
    assert outcomes.pop(victim) == (False, "died"), f"the victim: {outcomes}"
    for rank, (ok, value) in outcomes.items():
        assert ok, f"rank {rank}: {value}"
        error, seconds, _ = value
        assert error, f"rank {rank} noticed nothing"
        assert seconds < limit, f"rank {rank} waited for {seconds:.0f} s: {error}"
    parts = [value[2] for _, (_, value) in sorted(outcomes.items())]
    check_results(_case(world_size - 1, seed), parts)


def _be_late(rank: int, n: int, who: int, seconds: float, seed: int) -> Results:
    agreement.PATIENCE = timedelta(seconds=0.3)  # shorter than anybody is late
    group = _new_group(list(range(n)))
    if rank == who:
        time.sleep(seconds)
    return call(_case(n, seed), rank, group)


def late(world_size: int, who: int, seconds: float, seed: int) -> None:
    """A rank comes late to a call that is new to the group: the others wait."""
    pool = Ranks(world_size, over_tcp=True)
    try:
        parts = pool.run(_be_late, who, seconds, seed)
    finally:
        pool.stop()
    check_results(_case(world_size, seed), parts)


def _differ(rank: int, n: int, who: int, seed: int) -> tuple[dict[str, str], Results]:
    group = _new_group(list(range(n)))
    said = {}
    case = _even_case(n, seed)
    for name, change in OTHER.items():
        changes = change if rank == who else {}
        said[name], _ = _error_of(lambda c=changes: call(case, rank, group, **c))
    return said, call(case, rank, group)


def _even_case(world_size: int, seed: int) -> Case:
    """With shards that every layout could have: all ranks come as far as the comparison."""
    return _case(world_size, seed, lengths_q=(2 * world_size, 4 * world_size))


def disagree(world_size: int, who: int, seed: int) -> None:
    """One rank's arguments differ: every rank gets a ValueError, and then the right call works."""
    pool = Ranks(world_size, over_tcp=True)
    try:
        found = pool.run(_differ, who, seed)
    finally:
        pool.stop()
    for rank, (said, _) in enumerate(found):
        for name, error in said.items():
            assert error.startswith("ValueError"), f"rank {rank}, other {name}: {error!r}"
    check_results(_even_case(world_size, seed), [results for _, results in found])


Fault = tuple[Callable[..., None], dict[str, Any]]
KINDS = (*(f"lost {when} a call" for when in WHEN), "late", "with other arguments")


def draw(kind: str, random: Random) -> Fault:
    """A fault of one of KINDS, and its arguments."""
    world_size = random.randint(2, 5)
    arguments: dict[str, Any] = {"world_size": world_size, "seed": random.randrange(100)}
    who = random.randrange(world_size)
    if kind == "late":
        return late, {**arguments, "who": who, "seconds": round(random.uniform(0.5, 4), 1)}
    if kind == "with other arguments":
        return disagree, {**arguments, "who": who}
    when = kind.removeprefix("lost ").removesuffix(" a call")
    launch = random.randrange(world_size)
    return lost, {**arguments, "victim": who, "when": when, "launch": launch}
