"""From a user's arguments to a job: check, agree with the other ranks, plan, run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from . import checks, comm
from . import routes as _routes  # registers them
from .attention import QKV, Job, Local, attention
from .checks import CuSeqlens, document_lengths
from .kernels.base import Call, choose_kernel
from .layout import get_layout
from .llama3 import Llama3Problem
from .plan import Plan, Problem, Side, check_route, make_plan
from .tiles import Mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AnyProblem = Problem | Llama3Problem
Output = Tensor | tuple[Tensor, Tensor, None]

del _routes


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments that all functions share, as the user gave them."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    softcap: float | None = 0.0
    sink: Tensor | None = None
    kernel: str = "auto"

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(bool(self.causal), checks.check_window(self.window_size))


def run_batch(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    heads_k_stride: int | None = None,
    **options: Any,
) -> Output:
    """Sequences of one length, spread over the group; shards are equal unless seqlen is given."""
    _, world_size = comm.rank_and_size(group)
    opts = Options(**options)
    q, k, v = _prepare(q, k, v, packed=False)
    lengths_q = (q.shape[1] * world_size if seqlen is None else int(seqlen),)
    lengths_k = (k.shape[1] * world_size if seqlen_k is None else int(seqlen_k),)
    same = {"seqlen_q": lengths_q, "seqlen_k": lengths_k, "batch": q.shape[0]}
    problem = _problem(
        layout, route, lengths_q, lengths_k, world_size, opts, k.shape[2], heads_k_stride
    )
    return _run(route, problem, q, k, v, opts, group, same, packed=False)


def run_local_documents(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Output:
    """Packed documents, each spread over the group; cu_seqlens is that of a shard, equal on all."""
    _, world_size = comm.rank_and_size(group)
    opts = Options(**options)
    q, k, v = _prepare(q, k, v, packed=True)
    local = document_lengths(cu_seqlens, q.device)
    checks.check_max_seqlen("max_seqlen", max_seqlen, local)
    for name, tensor in (("q", q), ("k", k)):
        checks.check_total(local, tensor[0], name, "cu_seqlens")
    lengths = tuple(length * world_size for length in local)
    same = {"total": q.shape[1], "documents": len(lengths), **_values(cu_seqlens=lengths)}
    problem = _problem(layout, route, lengths, lengths, world_size, opts, k.shape[2], None)
    return _run(route, problem, q, k, v, opts, group, same, packed=True)


def run_documents(
    layout: str,
    route: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    max_seqlen: int | None = None,
    heads_k_stride: int | None = None,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Output:
    """Packed documents, spread over the group; cu_seqlens is that of the whole stream."""
    _, world_size = comm.rank_and_size(group)
    opts = Options(**options)
    q, k, v = _prepare(q, k, v, packed=True)
    lengths_q = document_lengths(cu_seqlens, q.device)
    lengths_k = lengths_q
    if cu_seqlens_k is not None:
        lengths_k = document_lengths(cu_seqlens_k, q.device, "cu_seqlens_k")
    if max_seqlen is not None:
        checks.check_max_seqlen("max_seqlen", max_seqlen, lengths_q)
    same = {
        "tokens": (sum(lengths_q), sum(lengths_k)),
        "documents": len(lengths_q),
        **_values(cu_seqlens=lengths_q, cu_seqlens_k=lengths_k),
    }
    problem = _problem(
        layout, route, lengths_q, lengths_k, world_size, opts, k.shape[2], heads_k_stride
    )
    return _run(route, problem, q, k, v, opts, group, same, packed=True)


def run_llama3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Output:
    """Packed documents in a stream that is split evenly; each rank knows its own part."""
    rank, world_size = comm.rank_and_size(group)
    opts = Options(**options)
    q, k, v = _prepare(q, k, v, packed=True)
    lengths_q = document_lengths(cu_seqlens_q, q.device, "cu_seqlens_q")
    lengths_k = document_lengths(cu_seqlens_k, q.device, "cu_seqlens_k")
    checks.check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths_q)
    checks.check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths_k)
    checks.check_total(lengths_q, q[0], "q", "cu_seqlens_q")
    _check_documents(lengths_q, lengths_k)
    gathered = range(k.shape[1] * world_size)[local_k_slice]
    if gathered.step != 1 or len(gathered) != sum(lengths_k):
        raise ValueError(
            f"local_k_slice = {local_k_slice} takes {len(gathered)} of {k.shape[1] * world_size} "
            f"gathered keys in steps of {gathered.step}, but cu_seqlens_k ends at {sum(lengths_k)}"
        )
    problem = Llama3Problem(
        lengths_q,
        lengths_k,
        gathered.start,
        rank,
        world_size,
        q.shape[1],
        k.shape[1],
        opts.mask,
        bottom_right=bool(opts.causal) or q.shape[1] != k.shape[1],
        nheads_k=k.shape[2],
        heads_k_stride=checks.check_heads_k_stride(heads_k_stride, k.shape[2]),
    )
    same = {"total_q": q.shape[1], "total_k": k.shape[1], "heads_k_stride": heads_k_stride}
    return _run("all_gather", problem, q, k, v, opts, group, same, packed=True)


def run_single(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
    """Sequences of one length on one device."""
    opts = Options(**options)
    q, k, v = _prepare(q, k, v, packed=False)
    problem = _problem(
        "contiguous", "ring", (q.shape[1],), (k.shape[1],), 1, opts, k.shape[2], None
    )
    return _run_virtual("ring", problem, [(q, k, v)], opts, packed=False)[0]


def run_single_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None = None,
    **options: Any,
) -> Output:
    """Packed documents on one device."""
    if block_table is not None:
        raise NotImplementedError("block_table: paged keys and values are not supported")
    opts = Options(**options)
    q, k, v = _prepare(q, k, v, packed=True)
    lengths_q = document_lengths(cu_seqlens_q, q.device, "cu_seqlens_q")
    lengths_k = document_lengths(cu_seqlens_k, q.device, "cu_seqlens_k")
    checks.check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths_q)
    checks.check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths_k)
    checks.check_total(lengths_q, q[0], "q", "cu_seqlens_q")
    checks.check_total(lengths_k, k[0], "k", "cu_seqlens_k")
    problem = _problem("contiguous", "ring", lengths_q, lengths_k, 1, opts, k.shape[2], None)
    return _run_virtual("ring", problem, [(q, k, v)], opts, packed=True)[0]


def run_virtual(
    layout: str,
    route: str,
    shards: Sequence[QKV],
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    packed: bool,
    heads_k_stride: int | None,
    **options: Any,
) -> list[Output]:
    """All ranks in this process, one shard (q, k, v) each."""
    opts = Options(**options)
    shards = [_prepare(*shard, packed=packed) for shard in shards]
    problem = _problem(
        layout,
        route,
        lengths_q,
        lengths_k,
        len(shards),
        opts,
        shards[0][1].shape[2],
        heads_k_stride,
    )
    return _run_virtual(route, problem, shards, opts, packed)


def _prepare(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> QKV:
    """Checked, in autocast's dtype, as (batch, seqlen, nheads, headdim)."""
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        lower = (torch.float32, torch.float16, torch.bfloat16)
        q, k, v = (x.to(dtype) if x.dtype in lower else x for x in (q, k, v))
    checks.check_tensors(q, k, v, packed)
    return (q[None], k[None], v[None]) if packed else (q, k, v)


def _values(**lengths: tuple[int, ...]) -> dict[str, object]:
    """What of cu_seqlens the ranks compare beyond its size: nothing, or all."""
    if comm.check_mode() != "values":
        return {}
    return {
        name: hashlib.sha1(repr(value).encode()).hexdigest()[:12] + f" of {value[:8]}"
        for name, value in lengths.items()
    }


def _check_documents(lengths_q: Sequence[int], lengths_k: Sequence[int]) -> None:
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"cu_seqlens of the queries delimits {len(lengths_q)} documents, that of the keys "
            f"{len(lengths_k)}"
        )


def _problem(
    layout: str,
    route: str,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    world_size: int,
    opts: Options,
    nheads_k: int,
    heads_k_stride: int | None,
) -> Problem:
    check_route(route)
    _check_documents(lengths_q, lengths_k)
    if heads_k_stride is None:
        heads_k_stride = nheads_k
    elif route != "all_gather":
        raise ValueError(
            f"heads_k_stride = {heads_k_stride}: route {route!r} takes all heads at once"
        )
    checks.check_heads_k_stride(heads_k_stride, nheads_k)
    return Problem(
        get_layout(layout), lengths_q, lengths_k, world_size, opts.mask, nheads_k, heads_k_stride
    )


def _check_shard(problem: AnyProblem, rank: int, q: Tensor, k: Tensor) -> None:
    """The shard has the rows that the layout gives this rank."""
    for name, tensor, side in (("q", q, Side.QUERY), ("k", k, Side.KEY)):
        size = problem.size(side, rank)
        if tensor.shape[1] != size:
            assert isinstance(problem, Problem), "equal shards by construction"
            lengths = problem.lengths_q if side is Side.QUERY else problem.lengths_k
            raise ValueError(
                f"rank {rank} of {problem.world_size} holds {size} tokens of documents of "
                f"{_short(lengths)} tokens in layout {problem.layout.name!r}, but {name} has "
                f"{tensor.shape[1]} (see ring_flash_attn.shard)"
            )


def _short(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"{shown}, … ({len(lengths)} documents)" if len(lengths) > 8 else shown


def _call(q: Tensor, k: Tensor, v: Tensor, opts: Options) -> Call:
    """Check what is left of the arguments; everything but dropout's seed."""
    slopes = checks.check_alibi(opts.alibi_slopes, q)
    scale = q.shape[-1] ** -0.5 if opts.softmax_scale is None else float(opts.softmax_scale)
    checks.check_sink(opts.sink, q)
    return Call(
        device=q.device,
        dtype=q.dtype,
        nheads=q.shape[2],
        nheads_k=k.shape[2],
        headdim=q.shape[3],
        headdim_v=v.shape[3],
        softmax_scale=scale,
        mask=opts.mask,
        softcap=checks.check_softcap(opts.softcap),
        alibi_slopes=slopes,
        dropout_p=checks.check_dropout(opts.dropout_p),
        sink=opts.sink is not None,
        deterministic=bool(opts.deterministic),
    )


def _draw_seed() -> Tensor:
    """From torch's generator, so that seeded runs repeat and checkpoints redraw the same mask."""
    return torch.randint(1 << 62, (), dtype=torch.int64)


def _run(
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
    rank, _ = comm.rank_and_size(group)
    _check_shard(problem, rank, q, k)
    call = _call(q, k, v, opts)
    kernel = choose_kernel(opts.kernel, call)
    comm.agree(_signature(route, problem, call, kernel.name, (q, k, v), same), group)
    if call.dropout_p:
        call = replace(call, seed=comm.share_seed(_draw_seed(), group, q.device))
    transport = functools.partial(comm.DistributedTransport, group, q.device)
    job = Job((_local(route, problem, rank, transport),), kernel, call)
    ((out, lse),) = attention(job, [(q, k, v)], opts.sink)
    return _output(out, lse, opts, packed)


def _run_virtual(
    route: str, problem: Problem, shards: Sequence[QKV], opts: Options, packed: bool
) -> list[Output]:
    """Run all ranks in this process."""
    for rank, (q, k, _) in enumerate(shards):
        _check_shard(problem, rank, q, k)
    call = _call(*shards[0], opts)
    kernel = choose_kernel(opts.kernel, call)
    if call.dropout_p:
        call = replace(call, seed=_draw_seed().to(call.device))
    walks = _Walks(len(shards))
    locals_ = tuple(
        _local(route, problem, rank, functools.partial(walks.transport, rank))
        for rank in range(len(shards))
    )
    results = attention(Job(locals_, kernel, call), shards, opts.sink)
    return [_output(out, lse, opts, packed) for out, lse in results]


class _Walks:
    """Fresh transports that share a mail, each time rank 0 asks for its own."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._transports: list[Any] = []

    def transport(self, rank: int) -> comm.Transport:
        if rank == 0:
            self._transports = list(comm.virtual_transports(self._world_size))
        transport: comm.Transport = self._transports[rank]
        return transport


def _local(route: str, problem: AnyProblem, rank: int, transport: Any) -> Local:
    return Local(*_planned(route, problem, rank), transport)


@functools.lru_cache(maxsize=64)  # plans of long packs are large; layers and backward share them
def _planned(
    route: str, problem: AnyProblem, rank: int
) -> tuple[Plan, Plan, dict[tuple[Side, int], int]]:
    asked = cast(Problem, problem)  # a Llama3Problem answers the same questions
    forward, backward = (make_plan(route, asked, rank, direction) for direction in (False, True))
    sizes = {
        (side, owner): problem.size(side, owner)
        for side in Side
        for owner in range(problem.world_size)
    }
    return forward, backward, sizes


def _signature(
    route: str, problem: AnyProblem, call: Call, kernel: str, qkv: QKV, same: Mapping[str, object]
) -> tuple[tuple[str, object], ...]:
    """What has to be equal on all ranks, hashable."""
    layout = problem.layout.name if isinstance(problem, Problem) else "llama3"
    slopes = None if call.alibi_slopes is None else tuple(call.alibi_slopes.shape)
    return (
        ("layout", layout),
        ("route", route),
        ("kernel", kernel),
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
        ("needs gradients", torch.is_grad_enabled() and any(x.requires_grad for x in qkv)),
        *same.items(),
    )


def _output(out: Tensor, lse: Tensor, opts: Options, packed: bool) -> Output:
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse, None) if opts.return_attn_probs else out
