"""Step 13: the ring, all ranks at once; shards of one sequence, rank after rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..virtual import run_ranks
from .backward import backward_suspects, gradients, judge_backward
from .compare import Compare, Judgement
from .forward import forward, forward_suspects, judge_forward
from .learner import Cases, CheckCase, Learner
from .masks import seen, wrong_masks
from .merge import wrong_merges
from .setting import FLAT, INF, Mistake, Setting, Suspect, random

MISTAKES = {
    "source": Mistake(
        "wrong source rank",
        "keys are taken for those of another rank",
        "If everybody sends to rank + 1, then after t steps a rank holds the keys of rank − t "
        "(mod world size), and passes on what it has received.",
    ),
    "ring_mask": Mistake(
        "wrong mask for a ring step",
        "whole shards are masked, or hidden ones are seen",
        "Step 0 is causal within the shard; shards of lower ranks are seen whole, those of "
        "higher ranks not at all.",
    ),
    "missing_step": Mistake(
        "a ring step is missing",
        "the keys of one rank never took part",
        "With world_size ranks there are world_size steps, the first on the rank's own keys.",
    ),
    "home": Mistake(
        "gradients not sent home",
        "dK and dV are not those of the rank's own keys",
        "dK and dV travel with their keys. After the last step they are one hop from home: send "
        "them on once more.",
    ),
}

Source = Callable[[int, int], int]  # a rank, of rank and step
_HELD: tuple[Source, ...] = (  # whose keys rank r has at step t, if everybody sends …
    lambda r, t: r - t,  # to rank + 1
    lambda r, t: r + t,  # to rank − 1
    lambda r, t: r - min(t, 1),  # its own to rank + 1
    lambda r, t: r + min(t, 1),  # its own to rank − 1
)
_BELIEVED: tuple[Source, ...] = (  # whose keys rank r takes them for
    lambda r, t: r - t,
    lambda r, t: r + t,
    lambda r, t: r - t - 1,
    lambda r, t: r - t + 1,
    lambda r, t: t,
)


# How often pairs count.


def ring_counts(
    setting: Setting,
    held: Source = _HELD[0],
    believed: Source = _HELD[0],
    mask: str = "",
    steps: int | None = None,
) -> Tensor:
    """(rows, keys): how often a pair counts if keys of `held` are masked as those of `believed`."""
    ranks = setting.world_size
    each = setting.rows // ranks
    counts = torch.zeros(setting.rows, setting.keys, dtype=torch.float64)
    ones = torch.ones(each, each, dtype=torch.float64)
    for rank in range(ranks):
        for step in range(ranks if steps is None else steps):
            source, taken = held(rank, step) % ranks, believed(rank, step) % ranks
            part = ones
            if setting.causal and mask != "none":
                if taken > rank and not mask.startswith("unskipped"):
                    part = ones * 0
                elif taken == rank or mask.endswith("local"):
                    part = ones.tril()
            rows, keys = (slice(i * each, (i + 1) * each) for i in (rank, source))
            counts[rows, keys] += part
    return counts


def _wrong_counts(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    """Each mistake of the ring with how often pairs count then."""
    right, ranks = ring_counts(setting), setting.world_size
    for held in _HELD:
        for believed in _BELIEVED:
            counts = ring_counts(setting, held, believed)
            if not torch.equal(counts, right):
                yield "source", counts
    if setting.causal:
        for mask in ("none", "local", "unskipped", "unskipped local"):
            yield "ring_mask", ring_counts(setting, mask=mask)
        yield from (each for each in wrong_masks(setting) if each[0] == "edge")
    for steps in (ranks - 1, ranks + 1, 1):
        yield "missing_step", ring_counts(setting, steps=steps)


# Results after each mistake, all ranks' one after the other.


def _wrong_forward(setting: Setting) -> Iterator[Suspect]:
    for mistake, counts in _wrong_counts(setting):
        yield mistake, forward(setting, counts)
    if setting.world_size > 1:
        of_ranks = [_merged_wrongly(setting, rank) for rank in range(setting.world_size)]
        for parts in zip(*of_ranks):
            mistake = next((name for name, _, _ in parts if name), "")
            out, lse = (torch.cat([part[i] for part in parts], 2) for i in (1, 2))
            yield mistake, {"out": out, "lse": lse}
    yield from forward_suspects(setting)


def _merged_wrongly(setting: Setting, rank: int) -> list[tuple[str, Tensor, Tensor]]:
    """What a rank has after its steps with each mistake of a merge; "" if it merges nothing."""
    ranks = setting.world_size
    sources = [(rank - t) % ranks for t in range(ranks)]
    first, *others = (
        _shard(setting, rank, source) for source in sources if source <= rank or not setting.causal
    )
    found = [("", *first)] * len(list(wrong_merges(*first, *first)))
    for part in others:
        found = [list(wrong_merges(out, lse, *part))[i] for i, (_, out, lse) in enumerate(found)]
    last = (first, *others)[-1][0]  # the lse stays −inf: each part replaces what was before
    found.append(("carried", last, torch.full_like(last[..., 0], -INF)))
    return found


def _shard(setting: Setting, rank: int, source: int) -> tuple[Tensor, Tensor]:
    each = setting.rows // setting.world_size
    rows, keys = (slice(i * each, (i + 1) * each) for i in (rank, source))
    q, k, v = setting.q[:, :, rows], setting.k[:, :, keys], setting.v[:, :, keys]
    own = Setting(q, k, v, causal=setting.causal and rank == source)
    found = forward(own, seen(own))
    return found["out"], found["lse"]


def _wrong_backward(setting: Setting) -> Iterator[Suspect]:
    counts = seen(setting)
    right = gradients(setting, counts)
    ranks, each = setting.world_size, setting.rows // setting.world_size
    for hops in (1, -1, 2, -2):
        yield "home", {name: right[name].roll(hops * each, 2) for name in ("dk", "dv")}
    of_rank = torch.arange(setting.rows) // each
    rank, source = of_rank[:, None], of_rank[None, :]
    kept = [rank == source]  # only a rank's own queries; all but those of one rank
    kept += [(rank - source) % ranks != step for step in range(1, ranks)]
    for part in kept:
        wrong = gradients(setting, counts * part)
        yield "home", {"dk": wrong["dk"], "dv": wrong["dv"]}
    shares = [gradients(setting, counts * (rank == r)) for r in range(ranks)]
    summed = {  # what a rank computed, all sources in one sum
        name: torch.cat([x[name].unflatten(2, (ranks, each)).sum(2) for x in shares], 2)
        for name in ("dk", "dv")
    }
    yield "home", summed
    for mistake, wrong_count in _wrong_counts(setting):
        yield mistake, gradients(setting, wrong_count)
    yield from backward_suspects(setting)


# Cases.


def ring_attention(learner: Learner) -> Cases:
    """Forward and backward on 4, 3 and 1 ranks."""
    for ranks, each, d in ((4, 6, 24), (3, 5, 20), (1, 5, 8)):
        for causal in (False, True):
            tensors = [random(ranks * each, d, seed=i) for i in range(3)]
            setting = FLAT.setting(*tensors, causal=causal, world_size=ranks)
            words = f"{ranks} ranks, {each} rows each, d {d}, {'causal' if causal else 'full'}"
            judge = judge_forward(FLAT, setting, _wrong_forward)
            yield _case(learner, "ring_forward", words, judge, ranks, tensors, causal)
            judge, given = judge_backward(FLAT, tensors, setting, _wrong_backward)
            yield _case(learner, "ring_backward", words, judge, ranks, given, causal)


def _case(
    learner: Learner,
    name: str,
    words: str,
    compare: Compare,
    ranks: int,
    tensors: Sequence[Tensor],
    causal: bool,
) -> CheckCase:
    """Each rank gets its shards; what they return is judged as one tensor."""
    function = learner.get(name)
    shards = [x.chunk(ranks) for x in tensors]

    def body(rank: int, send: Any, recv: Any) -> Any:
        mine = (learner.put(shard[rank]) for shard in shards)
        found = function(rank, ranks, *mine, send, recv, causal)
        return found if isinstance(found, tuple) else (found,)

    def judge(found: list[tuple[Any, ...]]) -> Judgement:
        for rank, values in enumerate(found):
            if len(values) != len(compare.truth):
                names = ", ".join(compare.truth)
                return Judgement([f"rank {rank}: {len(values)} values; not {names}"])
            for (name, true), value in zip(compare.truth.items(), values):
                if not isinstance(value, Tensor):
                    return Judgement([f"rank {rank}: {name} is a {type(value).__name__}"])
                got, shape = tuple(value.shape), (true.shape[0] // ranks, *true.shape[1:])
                if got != shape:
                    return Judgement([f"rank {rank}: {name} has shape {got}, expected {shape}"])
        return compare(tuple(torch.cat(values) for values in zip(*found)))

    return CheckCase(name, words, lambda: run_ranks(ranks, body), judge)
