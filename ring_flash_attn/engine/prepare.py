"""From checked arguments to a result: choose the kernel, agree with the other ranks, plan, run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import comm
from ..kernels.base import Call, check_kernel, choose_kernel
from ..plan.buffers import BufferPlan
from ..plan.build import make_plan
from ..plan.llama3 import Llama3Problem, check_parts
from ..plan.problem import Problem
from ..plan.steps import Side
from ..plan.tiles import Mask
from . import checks
from .attention import QKV, LocalRank, PreparedCall, attention
from .executor import Pool

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AnyProblem = Problem | Llama3Problem
Output = Tensor | tuple[Tensor, Tensor, None]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that all functions share: checked, and as plain Python objects."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    softcap: float = 0.0
    sink: Tensor | None = None
    kernel: str = "auto"

    def __post_init__(self) -> None:
        checked = {
            "dropout_p": checks.check_dropout(self.dropout_p),
            "softmax_scale": checks.check_scale(self.softmax_scale),
            "window_size": checks.check_window(self.window_size),
            "softcap": checks.check_softcap(self.softcap),
        }
        for name in ("causal", "deterministic", "return_attn_probs"):
            checked[name] = checks.check_flag(name, getattr(self, name))
        for name in ("alibi_slopes", "sink"):
            if getattr(self, name) is not None:
                checks.check_tensor(name, getattr(self, name))
        check_kernel(self.kernel)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(self.causal, self.window_size)


def _check_shard(problem: AnyProblem, local: LocalRank, q: Tensor, k: Tensor) -> None:
    """The shard has the rows that the layout gives this rank."""
    rank = local.forward.plan.rank
    for name, tensor, side in (("q", q, Side.QUERY), ("k", k, Side.KEY)):
        size = local.forward.sizes[side, rank]
        if tensor.shape[1] != size:
            assert isinstance(problem, Problem), "equal shards by construction"
            lengths = problem.lengths_q if side is Side.QUERY else problem.lengths_k
            raise ValueError(
                f"rank {rank} of {problem.world_size} holds {size} tokens of documents of "
                f"{_short(lengths)} tokens in layout {problem.layout.name!r}, but {name} has "
                f"{tensor.shape[1]}: cu_seqlens and seqlen are those of all ranks together, and "
                "ring_flash_attn.shard makes the shards"
            )


def _short(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"{shown}, … ({len(lengths)} documents)" if len(lengths) > 8 else shown


def _call(q: Tensor, k: Tensor, v: Tensor, opts: Options, problem: AnyProblem) -> Call:
    """Everything but dropout's seed; ValueError for slopes or a sink that do not fit q."""
    checks.check_alibi(opts.alibi_slopes, q)
    checks.check_sink(opts.sink, q)
    return Call(
        device=q.device,
        dtype=q.dtype,
        nheads=q.shape[2],
        nheads_k=k.shape[2],
        headdim=q.shape[3],
        headdim_v=v.shape[3],
        softmax_scale=q.shape[3] ** -0.5 if opts.softmax_scale is None else opts.softmax_scale,
        mask=opts.mask,
        softcap=opts.softcap,
        alibi_slopes=opts.alibi_slopes,
        dropout_p=opts.dropout_p,
        sink=opts.sink is not None,
        deterministic=opts.deterministic,
        packed=not isinstance(problem, Problem) or len(problem.lengths_q) > 1,
        with_lse=opts.return_attn_probs,
    )


def draw_seed() -> Tensor:
    """From torch's generator, so that seeded runs repeat and checkpoints redraw the same mask."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")


def run_on_group(
    route: str,
    problem: AnyProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    opts: Options,
    group: ProcessGroup | None,
    same: Mapping[str, object],
    packed: bool,
) -> Output:
    """Run on this rank of a group; `same` is what else has to be equal on all ranks."""
    group = comm.resolve_group(group)
    transport = functools.partial(comm.DistributedTransport, group, q.device)
    local = LocalRank(*_planned(route, problem, comm.rank_and_size(group)[0]), transport)
    prepared = _prepared(problem, (local,), [(q, k, v)], opts, (_layout_name(problem), route))
    inputs = (q, k, v) if opts.sink is None else (q, k, v, opts.sink)
    signature = _signature(prepared, problem, inputs, same)
    if isinstance(problem, Llama3Problem) and comm.check_mode() == "values":
        signature += (("RFA_CHECK", "values"),)
        parts = comm.agree(signature, group, problem.documents)
        if problem.size_q == problem.size_k:
            check_parts(parts, problem.size_k)
    else:
        comm.agree(signature, group)
    comm.connect(group, q.device)  # whether or not this rank has anything to send
    if opts.dropout_p:
        prepared = prepared.changed(seed=comm.share_seed(draw_seed(), group, q.device))
    ((out, lse),) = attention(prepared, [(q, k, v)], opts.sink)
    return _output(out, lse, opts.return_attn_probs, packed)


def prepare_virtual(
    route: str, problem: Problem, shards: Sequence[QKV], opts: Options
) -> PreparedCall:
    """What runs all ranks in this process on these shards, or others of the same shapes."""
    transports = _VirtualTransports(len(shards))
    ranks = tuple(
        LocalRank(*_planned(route, problem, rank), functools.partial(transports.make, rank))
        for rank in range(len(shards))
    )
    where = ("one device",) if len(ranks) == 1 else (problem.layout.name, route)
    return _prepared(problem, ranks, shards, opts, where)


def prepare_rank(
    route: str,
    problem: Problem,
    rank: int,
    shard: QKV,
    opts: Options,
    transport: Callable[[], comm.Transport],
    pool: Pool,
) -> PreparedCall:
    """What runs one rank of many on this shard, or others of its shape, whoever the others are.

    `transport` makes this rank's end of the group for each pass, and buffers come from `pool`.
    """
    local = LocalRank(*_planned(route, problem, rank), transport, pool)
    return _prepared(problem, (local,), [shard], opts, (problem.layout.name, route))


def _prepared(
    problem: AnyProblem,
    ranks: tuple[LocalRank, ...],
    shards: Sequence[QKV],
    opts: Options,
    where: tuple[str, ...],
) -> PreparedCall:
    """A call on these shards: they have the rows of their ranks, and there is a kernel for it."""
    for local, (q, k, _) in zip(ranks, shards, strict=True):
        _check_shard(problem, local, q, k)
    call = _call(*shards[0], opts, problem)
    return PreparedCall(ranks, choose_kernel(opts.kernel, call), call, where)


def run_prepared(
    prepared: PreparedCall, shards: Sequence[QKV], sink: Tensor | None, with_lse: bool, packed: bool
) -> list[Output]:
    """Run all ranks in this process."""
    if prepared.call.dropout_p:
        prepared = prepared.changed(seed=draw_seed().to(prepared.call.device))
    results = attention(prepared, shards, sink)
    return [_output(out, lse, with_lse, packed) for out, lse in results]


class _VirtualTransports:
    """Fresh transports that share a mail, each time rank 0 asks for its own."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._transports: list[Any] = []

    def make(self, rank: int) -> comm.Transport:
        if rank == 0:
            self._transports = list(comm.virtual_transports(self._world_size))
        transport: comm.Transport = self._transports[rank]
        return transport


@functools.lru_cache(maxsize=64)  # plans of long packs are large; layers and backward share them
def _planned(route: str, problem: AnyProblem, rank: int) -> tuple[BufferPlan, BufferPlan]:
    # The cache keeps the problem it is asked with; so plan with one that can go.
    asked = replace(cast(Problem, problem))  # a Llama3Problem answers the same questions
    forward, backward = (make_plan(route, asked, rank, direction) for direction in (False, True))
    return BufferPlan(forward, asked), BufferPlan(backward, asked)


def _layout_name(problem: AnyProblem) -> str:
    return problem.layout.name if isinstance(problem, Problem) else "llama3"


def _signature(
    prepared: PreparedCall,
    problem: AnyProblem,
    inputs: Sequence[Tensor],
    same: Mapping[str, object],
) -> tuple[tuple[str, object], ...]:
    """What has to be equal on all ranks, hashable."""
    call, (layout, route) = prepared.call, prepared.where
    sources = problem.sources_per_launch if isinstance(problem, Problem) else 1
    slopes = None if call.alibi_slopes is None else tuple(call.alibi_slopes.shape)
    return (
        ("layout", layout),
        ("route", route),
        ("kernel", prepared.kernel.name),
        ("device", call.device.type),
        ("dtype", str(call.dtype)),
        ("nheads, nheads_k", (call.nheads, call.nheads_k)),
        ("headdim, headdim_v", (call.headdim, call.headdim_v)),
        ("softmax_scale", call.softmax_scale),
        ("mask (left, right)", (call.mask.left, call.mask.right)),
        ("softcap", call.softcap),
        ("alibi_slopes", slopes),
        ("dropout_p", call.dropout_p),
        ("sink", call.sink),
        ("deterministic", call.deterministic),
        ("heads_k_stride", problem.heads_k_stride),
        ("sources_per_launch", sources),
        ("needs gradients", torch.is_grad_enabled() and any(x.requires_grad for x in inputs)),
        *same.items(),
    )


def _output(out: Tensor, lse: Tensor, with_lse: bool, packed: bool) -> Output:
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse, None) if with_lse else out
