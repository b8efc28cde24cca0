"""Which tokens a rank holds, as tensors of indices on a device, cached by pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..cache import Cache
from ..kernels.device_cache import DeviceCache, to_device
from ..plan.problem import Problem
from ..plan.steps import Side
from .packing import numbers_of


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What a rank holds, as ranges; tables are cached by its identity."""

    tokens: tuple[range, ...]  # places in the stream
    positions: tuple[range, ...]  # in their documents


_MOST = 1 << 22  # numbers in all tables, of 8 bytes

_held: Cache[tuple[Problem, int], _Held] = Cache(
    256, weigh=lambda held: 2 * len(held.tokens), most=1 << 18
)
_orders: Cache[Problem, object] = Cache(16)  # what stands for a pack where all ranks are meant
_tables: DeviceCache[Tensor] = DeviceCache(weigh=Tensor.numel, heaviest=_MOST)


def held_tokens(problem: Problem, rank: int, device: torch.device) -> Tensor:
    """Places in the stream of the rank's tokens, in local order; do not write to it."""
    held = _of_rank(problem, rank)
    return _table(held, device, "tokens", lambda: numbers_of(held.tokens))


def held_positions(problem: Problem, rank: int, device: torch.device) -> Tensor:
    """Positions in their documents of the rank's tokens; do not write to it."""
    held = _of_rank(problem, rank)
    return _table(held, device, "positions", lambda: numbers_of(held.positions))


def order_of_shards(problem: Problem, device: torch.device) -> Tensor:
    """Where each token of the stream lies in all shards in a row; do not write to it."""

    def make() -> Tensor:
        ranks = range(problem.world_size)
        tokens = numbers_of([rows for rank in ranks for rows in _of_rank(problem, rank).tokens])
        found = torch.empty_like(tokens)
        found[tokens] = torch.arange(len(tokens), device="cpu")
        return found

    of = None
    if not torch.compiler.is_compiling():
        of = _orders.get_or_make(replace(problem), object)
    return _table(of, device, "order", make)


def _of_rank(problem: Problem, rank: int) -> _Held:
    def make() -> _Held:
        spans = problem.spans(Side.KEY, rank)
        tokens, positions = ([s.tokens for s in spans], [s.positions for s in spans])
        return _Held(tuple(tokens), tuple(positions))

    if torch.compiler.is_compiling():  # traced, with all else
        return make()
    # The key stays in the cache, and what a problem remembers must not.
    return _held.get_or_make((replace(problem), rank), make)


def _table(of: object, device: torch.device, kind: str, make: Callable[[], Tensor]) -> Tensor:
    def made() -> Tensor:
        with torch.inference_mode(False):  # autograd may save it
            return to_device(make(), device)

    if torch.compiler.is_compiling() or type(torch.empty(0, device="cpu")) is not Tensor:
        return make().to(device)  # fake tensors, of a graph: nothing to keep
    return _tables.get(of, device, kind, made)
