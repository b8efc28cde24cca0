"""From checked arguments to a result: choose the kernel, agree with the other ranks, plan, run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..cache import Cache
from ..kernels import costs
from ..kernels.base import Call, check_kernel, choose_kernels
from ..kernels.device_cache import capturing
from ..plan.buffers import BufferPlan
from ..plan.build import make_plan
from ..plan.llama3 import Llama3Problem, check_parts
from ..plan.problem import Problem
from ..plan.steps import Side
from ..plan.tiles import Mask
from . import checks
from .attention import QKV, LocalRank, PreparedCall, attention, needs_grad
from .executor import Pool

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Output = Tensor | tuple[Tensor, Tensor, None]


@dataclass(slots=True)
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
        check = checks.check_number
        self.dropout_p = check("dropout_p", self.dropout_p, 0, 1, "at least 0 and below 1")
        if self.softmax_scale is not None:
            self.softmax_scale = check("softmax_scale", self.softmax_scale)
        self.window_size = checks.check_window(self.window_size)
        softcap = 0.0 if self.softcap is None else self.softcap
        self.softcap = check("softcap", softcap, 0, math.inf, "0 (off) or positive")
        for name in ("causal", "deterministic", "return_attn_probs"):
            setattr(self, name, checks.check_flag(name, getattr(self, name)))
        for name in ("alibi_slopes", "sink"):
            if getattr(self, name) is not None:
                checks.check_tensor(name, getattr(self, name))
        check_kernel(self.kernel)

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal, self.window_size)


def prepare(
    route: str,
    problem: Problem,
    shards: Mapping[int, QKV],
    opts: Options,
    connect: Callable[[], Sequence[comm.Transport]] | None = None,
    pool: Pool | None = None,
    grad: bool | None = None,
) -> PreparedCall:
    """What runs some ranks in this process, on these shards by rank, or others of their shapes.

    `connect` makes their ends of the group; None if they are all there are. Buffers come from
    `pool`, if not from torch. `grad` says whether there will be a backward pass, where the shards
    do not.
    """
    pool = pool or Pool()
    ranks = tuple(LocalRank(*planned(route, problem, rank), pool) for rank in shards)
    for local, (q, k, _) in zip(ranks, shards.values(), strict=True):
        _check_shard(problem, local, q, k)
    if grad is None:
        flat = [x for shard in shards.values() for x in shard]
        grad = needs_grad(flat if opts.sink is None else [*flat, opts.sink])
    call = _call(*next(iter(shards.values())), opts, problem, grad)
    where = ("one device",) if problem.world_size == 1 else (problem.layout.name, route)
    ends = connect or functools.partial(comm.virtual_transports, len(ranks))
    size = None
    if costs.costs_file() is not None and not isinstance(problem, Llama3Problem):  # its own part
        lengths = problem.lengths_q, problem.lengths_k
        size = costs.size_of(len(next(iter(shards.values()))[0]), *lengths, problem.world_size)
    return PreparedCall(ranks, choose_kernels(opts.kernel, call, size), call, ends, where)


Plans = tuple[BufferPlan, BufferPlan]  # forward, backward

# Layers and backward passes share them. Those of old packs go; long packs have large plans: of 1000
# documents on 64 ranks in zigzag 500,000 pieces, 14 MB, and some are prepared ahead.
_plans: Cache[tuple[str, Problem, int], Plans] = Cache(
    64, weigh=lambda plans: sum(plan.pieces for plan in plans), most=1 << 22
)


def planned(route: str, problem: Problem, rank: int) -> Plans:
    """Both plans of a rank; made once, whatever thread asks first."""

    def make() -> Plans:
        # The cache keeps the problem it is asked with; so plan with one that can go.
        asked = replace(problem)
        forward, backward = (make_plan(route, asked, rank, way) for way in (False, True))
        return BufferPlan(forward, asked), BufferPlan(backward, asked)

    return _plans.get_or_make((route, problem, rank), make)


def _check_shard(problem: Problem, local: LocalRank, q: Tensor, k: Tensor) -> None:
    """The shard has the rows that the layout gives this rank."""
    rank = local.forward.plan.rank
    for name, tensor, side in (("q", q, Side.QUERY), ("k", k, Side.KEY)):
        size = local.forward.sizes[side, rank]
        if tensor.shape[1] != size:
            lengths = problem.lengths_q if side is Side.QUERY else problem.lengths_k
            shown = ", ".join(map(str, lengths[:8]))
            shown += f", … ({len(lengths)} documents)" if len(lengths) > 8 else ""
            raise ValueError(
                f"rank {rank} of {problem.world_size} holds {size} tokens of documents of "
                f"{shown} tokens in layout {problem.layout.name!r}, but {name} has "
                f"{tensor.shape[1]}: cu_seqlens and seqlen are those of all ranks together, and "
                "ring_flash_attn.shard makes the shards"
            )


def _call(q: Tensor, k: Tensor, v: Tensor, opts: Options, problem: Problem, grad: bool) -> Call:
    """Everything but dropout's seed; ValueError for slopes or a sink that do not fit q."""
    batch, _, nheads, headdim = q.shape
    documents = len(problem.lengths_q)
    shapes = [(nheads,), (batch, nheads), (documents, nheads)][: 3 if documents > 1 else 2]
    checks.check_for_heads("alibi_slopes", opts.alibi_slopes, q, *shapes)
    checks.check_for_heads("sink", opts.sink, q, (nheads,))
    if opts.alibi_slopes is not None and opts.alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes.requires_grad: there is no gradient for alibi_slopes")
    return Call(
        device=q.device,
        dtype=q.dtype,
        nheads=nheads,
        nheads_k=k.shape[2],
        headdim=headdim,
        headdim_v=v.shape[3],
        softmax_scale=headdim**-0.5 if opts.softmax_scale is None else opts.softmax_scale,
        mask=opts.mask,
        softcap=opts.softcap,
        alibi_slopes=opts.alibi_slopes,
        dropout_p=opts.dropout_p,
        sink=opts.sink is not None,
        deterministic=opts.deterministic,
        packed=isinstance(problem, Llama3Problem) or documents > 1,
        with_lse=opts.return_attn_probs,
        needs_grad=grad,
    )


def draw_seed() -> Tensor:
    """From torch's generator, so that seeded runs repeat and checkpoints redraw the same mask."""
    return torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")


def _check_dropout_not_captured(call: Call) -> None:
    if capturing(call.device):
        raise RuntimeError(
            f"dropout_p={call.dropout_p:g} cannot be captured in a CUDA graph: the seed is drawn "
            "on the host, so every replay would drop the same entries"
        )


def run_prepared(
    prepared: PreparedCall, shards: Sequence[QKV], sink: Tensor | None, with_lse: bool, packed: bool
) -> list[Output]:
    """Run the ranks of this process."""
    if prepared.call.dropout_p and prepared.call.seed is None:
        _check_dropout_not_captured(prepared.call)
        prepared = prepared.changed(seed=draw_seed().to(prepared.call.device))
    results = attention(prepared, shards, sink)
    if packed:
        results = [(out.squeeze(0), lse.squeeze(0)) for out, lse in results]
    return [(out, lse, None) if with_lse else out for out, lse in results]


class GroupCall(NamedTuple):  # which is made faster than a dataclass: at every call
    """What this rank of a group is asked to compute, checked.

    Attributes:
        shard: q, k and v as (batch, seqlen, nheads, headdim), whether or not they came `packed`.
        same: what has to be equal on all ranks, besides what all calls have.
    """

    route: str
    problem: Problem
    shard: QKV
    opts: Options
    group: ProcessGroup
    rank: int
    same: Mapping[str, object]
    packed: bool


def prepare_on_group(
    asked: GroupCall, grad: bool | None = None, agreed: bool = False
) -> PreparedCall:
    """What does the call, but for dropout's seed, once all ranks have agreed on it.

    `grad` says whether there will be a backward pass, where the shards do not.
    """
    problem, group, device = asked.problem, asked.group, asked.shard[0].device
    if device.type == "meta":
        raise ValueError("q, k and v are on meta: there is nothing to send to other ranks")
    check_capture(group, device)
    ends = on_group(group, device)
    prepared = prepare(asked.route, problem, {asked.rank: asked.shard}, asked.opts, ends, grad=grad)
    if agreed:
        return prepared
    signature = _signature(prepared, asked.route, problem, asked.same)
    if isinstance(problem, Llama3Problem) and comm.check_mode() == "values":
        signature += (("RFA_CHECK", "values"),)
        parts = comm.agree(signature, group, problem.documents)
        if problem.size_q == problem.size_k:
            check_parts(parts, problem.size_k)
    else:
        comm.agree(signature, group)
    comm.connect(group, device)  # whether or not this rank has anything to send
    return replace(prepared, signature=signature)


def check_capture(group: ProcessGroup, device: torch.device) -> None:
    """RuntimeError if a CUDA graph is being captured and the group cannot be part of one."""
    if capturing(device) and comm.is_gloo(group, device):
        raise RuntimeError(
            "a call on a gloo group cannot be captured in a CUDA graph: gloo's messages go through "
            "the host, which a graph does not do; use a group of NCCL"
        )


def on_group(group: ProcessGroup, device: torch.device) -> Callable[[], Sequence[comm.Transport]]:
    """What makes this rank's end of the group."""
    return lambda: [comm.DistributedTransport(group, device)]


def with_shared_seed(prepared: PreparedCall, seed: Tensor, group: ProcessGroup) -> PreparedCall:
    """With dropout's seed, that of the group's first rank."""
    return prepared.changed(seed=comm.share_seed(seed, group, prepared.call.device))


def run_on_group(
    prepared: PreparedCall, shard: QKV, sink: Tensor | None, group: ProcessGroup, packed: bool
) -> Output:
    """Run on this rank of a group."""
    call = prepared.call
    if call.dropout_p:
        _check_dropout_not_captured(call)
        prepared = with_shared_seed(prepared, draw_seed(), group)
    return run_prepared(prepared, [shard], sink, call.with_lse, packed)[0]


def _signature(
    prepared: PreparedCall,
    route: str,
    problem: Problem,
    same: Mapping[str, object],
) -> tuple[tuple[str, object], ...]:
    """What has to be equal on all ranks, hashable."""
    call = prepared.call
    return (
        ("layout", problem.layout.name),
        ("route", route),
        ("kernel", prepared.kernels.name),
        ("device", call.device.type),
        ("dtype", str(call.dtype)),
        ("nheads, nheads_k", (call.nheads, call.nheads_k)),
        ("headdim, headdim_v", (call.headdim, call.headdim_v)),
        ("softmax_scale", call.softmax_scale),
        ("mask (left, right)", (call.mask.left, call.mask.right)),
        ("softcap", call.softcap),
        ("alibi_slopes", _slopes(call, problem)),
        ("dropout_p", call.dropout_p),
        ("sink", call.sink),
        ("deterministic", call.deterministic),
        ("heads_k_stride", problem.heads_k_stride),
        ("sources_per_launch", problem.sources_per_launch or "by size"),
        ("ranks_per_node", problem.ranks_per_node),
        ("needs gradients", call.needs_grad),
        *same.items(),
    )


def _slopes(call: Call, problem: Problem) -> tuple[object, ...] | None:
    """The shape of ALiBi's slopes, as far as it has to be equal on all ranks."""
    if call.alibi_slopes is None:
        return None
    if isinstance(problem, Llama3Problem) and call.slopes_by_document:
        return "documents of the rank", call.nheads
    return tuple(call.alibi_slopes.shape)
