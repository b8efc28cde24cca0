"""Scenarios: what is replayed, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..engine.attention import QKV
from ..engine.checks import check_tensors
from ..engine.entry import make_problem
from ..engine.prepare import Options
from ..plan.build import make_plan
from ..plan.problem import Problem
from ..plan.steps import Plan, Side
from .machine import find_device

_SEED = 0


@dataclass(frozen=True)
class Scenario:
    """What a rank of many computes, and on which device.

    Attributes:
        world_size: number of ranks.
        ranks: those that are replayed.
        layout, route, kernel: as in `ring_attention`.
        lengths: tokens of each document in a rank's shard; over all ranks it has `world_size` times
            as many. One document in a batch of equal sequences.
        packed: whether these are packed documents rather than a batch.
        batch, nheads, nheads_k, headdim, dtype: of q, k and v.
        causal: queries see no later keys.
        heads_k_stride: KV heads that travel together; None: all.
        sources_per_launch: ranks whose keys one launch takes; None: not for this route.
        device: where it runs.
    """

    world_size: int
    ranks: tuple[int, ...]
    layout: str
    route: str
    kernel: str
    lengths: tuple[int, ...]
    packed: bool
    batch: int
    nheads: int
    nheads_k: int
    headdim: int
    dtype: torch.dtype
    causal: bool
    heads_k_stride: int | None
    sources_per_launch: int | None
    device: torch.device

    @property
    def options(self) -> Options:
        """What all functions share."""
        return Options(causal=self.causal, kernel=self.kernel)

    @property
    def tokens(self) -> int:
        """Of a rank's shard, on average."""
        return sum(self.lengths)

    @cached_property
    def problem(self) -> Problem:
        """Of all ranks together."""
        lengths = tuple(length * self.world_size for length in self.lengths)
        return make_problem(
            self.layout,
            self.route,
            lengths,
            lengths,
            self.world_size,
            self.options,
            self.nheads_k,
            self.heads_k_stride,
            self.sources_per_launch,
        )

    def alone(self, lengths: tuple[int, ...], causal: bool) -> Problem:
        """Documents of these lengths on one device."""
        opts = replace(self.options, causal=causal)
        return make_problem("contiguous", "ring", lengths, lengths, 1, opts, self.nheads_k)

    def pairs(self, plan: Plan) -> int:
        """Allowed (query, key) pairs of a plan, summed over query heads."""
        return plan.pairs * (self.nheads // self.nheads_k)

    @cached_property
    def base_pairs(self) -> int:
        """Pairs of one rank's own tokens, summed over query heads."""
        return self.pairs(make_plan("ring", self.alone(self.lengths, self.causal), 0))

    @property
    def full_pairs(self) -> int:
        """Pairs of as many queries and keys without a mask, summed over query heads."""
        return self.nheads * self.tokens**2

    def shard(self, tokens: int) -> tuple[QKV, Tensor]:
        """Random (q, k, v) of a shard, and dout."""
        generator = torch.Generator(self.device).manual_seed(_SEED)

        def make(nheads: int) -> Tensor:
            shape = (self.batch, tokens, nheads, self.headdim)
            return torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)

        qkv = make(self.nheads), make(self.nheads_k), make(self.nheads_k)
        return qkv, make(self.nheads)

    @property
    def busiest_rank(self) -> int:
        """The one with most pairs to compute; of several the last, which merges most."""
        plans = {rank: make_plan(self.route, self.problem, rank) for rank in range(self.world_size)}
        return max(plans, key=lambda rank: (plans[rank].pairs, rank))

    def size(self, rank: int) -> int:
        """Tokens in the shard of a rank."""
        return self.problem.size(Side.QUERY, rank)


def make_scenario(
    *,
    world_size: int,
    ranks: Sequence[int] | None,
    layout: str,
    route: str,
    kernel: str,
    seqlen: int,
    cu_seqlens: Sequence[int] | None,
    batch: int,
    nheads: int,
    nheads_k: int,
    headdim: int,
    dtype: torch.dtype,
    causal: bool,
    heads_k_stride: int | None,
    sources_per_launch: int | None,
    device: str | torch.device | None,
) -> Scenario:
    """The scenario that a user describes; ValueError where it makes no sense."""
    numbers = {"world_size": world_size, "seqlen": seqlen, "batch": batch}
    numbers |= {"nheads": nheads, "nheads_k": nheads_k, "headdim": headdim}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be positive, not {value}")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"batch {batch}: packed documents have batch 1")
    scenario = Scenario(
        world_size,
        _check_ranks(ranks, world_size),
        layout,
        route,
        kernel,
        (seqlen,) if cu_seqlens is None else _lengths(cu_seqlens),
        cu_seqlens is not None,
        batch,
        nheads,
        nheads_k,
        headdim,
        dtype,
        bool(causal),
        heads_k_stride,
        sources_per_launch,
        find_device(device, "a replay"),
    )
    heads = (nheads, nheads_k, nheads_k)
    q, k, v = (torch.empty((batch, 1, h, headdim), dtype=dtype, device="meta") for h in heads)
    check_tensors(q, k, v, packed=False)
    problem = scenario.problem  # layout, route and head groups make sense
    if route == "ring":
        return replace(scenario, sources_per_launch=problem.sources_per_launch)
    return scenario


def _check_ranks(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    if not ranks:
        return tuple(range(world_size))
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 … {world_size - 1}")
    return tuple(dict.fromkeys(ranks))


def _lengths(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    lengths = tuple(b - a for a, b in pairwise(cu_seqlens))
    if not lengths or cu_seqlens[0] != 0 or min(lengths) < 0 or not sum(lengths):
        shown = ",".join(map(str, cu_seqlens))
        raise ValueError(f"cu_seqlens {shown} must start at 0 and go up")
    return lengths
