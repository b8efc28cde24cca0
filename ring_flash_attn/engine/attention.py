"""The autograd function in which all attention ends, on a group or on virtual ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..comm import Transport
from ..kernels.base import Call, Grads, Kernel, Kernels, Saved, State, as_block, as_direct
from ..kernels.merge import merge
from ..plan.buffers import BufferPlan, SingleLaunch
from ..plan.steps import Payload, Side
from ..trace import span
from .checks import autocast_dtype
from .executor import Executor, Pool, Program, RunKernel, Views, run_steps
from .host_copy import raise_if_stale
from .lowering import Field, Payloads, lower

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank of this process: its steps, and where its buffers come from."""

    forward: BufferPlan
    backward: BufferPlan
    pool: Pool


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call, ready to run: its ranks in this process, the kernels, what kernels must know.

    Attributes:
        kernels: of the forward and of the backward pass.
        connect: makes the ranks' ends of the group, for each pass fresh ones.
        where: for profilers, names of layout and route, or "one device".
        signature: what all ranks of a group have agreed on.
    """

    ranks: tuple[LocalRank, ...]
    kernels: Kernels
    call: Call
    connect: Callable[[], Sequence[Transport]]
    where: tuple[str, ...] = ("one device",)
    signature: tuple[tuple[str, object], ...] = ()

    def changed(self, **changes: Any) -> PreparedCall:
        """The same, with other values of `call`."""
        return replace(self, call=replace(self.call, **changes))


def needs_grad(inputs: Iterable[Tensor]) -> bool:
    """Whether autograd will ask for gradients of what is computed from these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def attention(
    prepared: PreparedCall, shards: Sequence[QKV], sink: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Exact attention over the shards of all ranks; differentiable in q, k, v and sink (nheads,).

    Takes q (batch, seqlen_q, nheads, headdim), k and v of each rank of this process, and returns
    out, like q, and lse (batch, nheads, seqlen_q).
    """
    flat = [tensor for shard in shards for tensor in shard]
    inputs = flat if sink is None else [*flat, sink]
    if (
        not needs_grad(inputs) and forward_ad._current_level < 0
    ):  # there is no forward mode: autograd
        return forward(prepared, shards, sink)  # says so
    results = _Attention.apply(prepared, sink, *flat)
    count = len(shards)
    return [(results[i], results[count + i]) for i in range(count)]


class _Attention(torch.autograd.Function):
    """All ranks of this process at once: apply(prepared, sink, q0, k0, v0, q1, …) → outs, lses."""

    @staticmethod
    def forward(
        ctx: Any, prepared: PreparedCall, sink: Tensor | None, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        results = forward(prepared, _by_rank(flat), sink)
        outs, lses = [out for out, _ in results], [lse for _, lse in results]
        slopes = prepared.call.alibi_slopes
        if slopes is not None:  # saved as a tensor, so that autograd notices if it is changed
            slopes = slopes.clone() if slopes.is_inference() else slopes
            prepared = prepared.changed(alibi_slopes=None)
        ctx.prepared = prepared
        ctx.save_for_backward(sink, slopes, *flat, *outs, *lses)
        ctx.set_materialize_grads(False)
        return *outs, *lses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True: attention is differentiable once, so what is computed from "
                "its gradients (a gradient penalty, a Hessian) would get no gradient. torch's "
                "scaled_dot_product_attention has second derivatives, with SDPBackend.MATH"
            )
        raise_if_stale()
        prepared = ctx.prepared
        count = len(prepared.ranks)
        sink, slopes, *saved = ctx.saved_tensors
        if slopes is not None:
            prepared = prepared.changed(alibi_slopes=slopes)
        outs, lses = saved[3 * count : 4 * count], saved[4 * count :]
        results = list(zip(outs, lses, strict=True))
        douts = list(zip(grads[:count], grads[count:], strict=True))
        dsink, found = backward(prepared, _by_rank(saved[: 3 * count]), sink, results, douts)
        return None, dsink, *(grad for shard in found for grad in shard)


def _by_rank(flat: Sequence[Tensor]) -> list[QKV]:
    """q0, k0, v0, q1, … → (q0, k0, v0), …"""
    return list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))


def forward(
    prepared: PreparedCall, shards: Sequence[QKV], sink: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each rank of this process, without autograd."""
    with no_autocast(prepared.call.device), span(_pass_name, "forward", prepared):
        single = prepared.ranks[0].forward.single_launch
        if len(prepared.ranks) == 1 and single is not None:
            result = _forward_single(prepared, single, shards[0], sink)
            if result is not None:
                return [result]
        passes = [
            _ForwardPass(prepared, local, shard, sink)
            for local, shard in zip(prepared.ranks, shards, strict=True)
        ]
        run_steps([Executor(*each) for each in zip(passes, prepared.connect(), strict=True)])
        return [each.result() for each in passes]


def backward(
    prepared: PreparedCall,
    shards: Sequence[QKV],
    sink: Tensor | None,
    results: Sequence[tuple[Tensor, Tensor]],
    douts: Sequence[tuple[Tensor | None, Tensor | None]],
) -> tuple[Tensor | None, list[QKV]]:
    """From the gradients of (out, lse) of each rank those of sink and of (q, k, v) of each rank."""
    ranks, call = prepared.ranks, prepared.call
    single = ranks[0].backward.single_launch if len(ranks) == 1 else None
    with no_autocast(call.device), span(_pass_name, "backward", prepared):
        dense = [
            torch.zeros_like(out) if dout is None else dout
            for (out, _), (dout, _) in zip(results, douts, strict=True)
        ]
        for _, dlse in douts:
            _check_dlse(prepared.kernels.backward, dlse)
        saved = [  # made when it is needed: the first keys leave before that
            functools.cache(
                functools.partial(_saved, prepared, single, out, lse, dout, dlse, sink is not None)
            )
            for (out, lse), dout, (_, dlse) in zip(results, dense, douts, strict=True)
        ]
        found = None
        if single is not None:
            grads = _backward_single(prepared, single, shards[0], dense[0], saved[0]())
            found = None if grads is None else [grads]
        if found is None:
            passes = [
                _BackwardPass(prepared, *of_rank)
                for of_rank in zip(ranks, shards, dense, saved, strict=True)
            ]
            run_steps([Executor(*each) for each in zip(passes, prepared.connect(), strict=True)])
            found = [each.result() for each in passes]
        if sink is None:
            return None, found
        parts = [_sink_part(sink, each().lse, each().delta) for each in saved]
        return -torch.stack(parts).sum(0).to(sink.dtype), found


def _pass_name(direction: str, prepared: PreparedCall) -> str:
    kernel: Kernel = getattr(prepared.kernels, direction)
    return f"{direction}: {' x '.join((*prepared.where, kernel.name))}"


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Kernels choose the precision of every product themselves."""
    if autocast_dtype(device.type) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _saved(
    prepared: PreparedCall,
    single: SingleLaunch | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    sink: bool,
) -> Saved:
    call, kernel = prepared.call, prepared.kernels.backward
    direct = as_direct(kernel)
    with span("delta"):
        if as_block(kernel) is not None:
            return Saved(lse, _delta(dout, out, call) if sink else lse.new_empty(0), out)
        if direct is not None and single is not None and dlse is None and not sink:
            return Saved(lse, lse.new_empty(0), out)
        delta = (_delta if direct is None else direct.delta)(dout, out, call)
        return Saved(lse, delta if dlse is None else delta - dlse)


def _check_dlse(kernel: Kernel, dlse: Tensor | None) -> None:
    if dlse is not None and as_block(kernel) is not None:
        raise NotImplementedError(
            f"kernel {kernel.name!r} cannot differentiate through lse: use another (triton, "
            "cute, reference), or detach lse"
        )


def _forward_single(
    prepared: PreparedCall, single: SingleLaunch, shard: QKV, sink: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """One launch for all: nothing is carried, and the kernel writes what the user gets.

    None for a kernel that cannot.
    """
    q, k, v = shard
    kernel = prepared.kernels.forward
    block = as_block(kernel)
    if block is not None and sink is None:
        with span("{.name} forward", kernel):
            return block.alone(q, k, v, single.tiles, prepared.call)
    if as_direct(kernel) is None:
        return None
    out, lse = _empty_state(q, prepared.call, prepared.call.dtype, sink, single.covers_queries)
    with span("{.name} forward", kernel):
        kernel.forward(q, k, v, single.tiles, State(out, lse), prepared.call)
    return out, lse


def _backward_single(
    prepared: PreparedCall, single: SingleLaunch, shard: QKV, dout: Tensor, saved: Saved
) -> QKV | None:
    """Likewise."""
    q, k, v = shard
    kernel = prepared.kernels.backward
    block = as_block(kernel)
    if block is not None:
        with span("{.name} backward", kernel):
            return block.alone_backward(dout, q, k, v, single.tiles, saved, prepared.call)
    if as_direct(kernel) is None:
        return None
    make_q = torch.empty_like if single.covers_queries else torch.zeros_like
    make_k = torch.empty_like if single.covers_keys else torch.zeros_like
    compact = torch.contiguous_format
    grads = (
        make_q(q, memory_format=compact),
        make_k(k, memory_format=compact),
        make_k(v, memory_format=compact),
    )
    fresh = Grads(*grads, fresh_q=True, fresh_k=True)
    with span("{.name} backward", kernel):
        kernel.backward(dout, q, k, v, single.tiles, saved, fresh, prepared.call)
    return grads


def _empty_state(
    q: Tensor, call: Call, dtype: torch.dtype, sink: Tensor | None, covered: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) before the first launch; not cleared if direct launches cover every row."""
    batch, length, nheads, _ = q.shape
    make = torch.empty if covered else torch.zeros
    out = make((batch, length, nheads, call.headdim_v), dtype=dtype, device=q.device)
    lse = torch.empty((batch, nheads, length), dtype=call.state_dtype, device=q.device)
    _begin_lse(lse, sink, covered)
    return out, lse


def _begin_lse(lse: Tensor, sink: Tensor | None, covered: bool) -> None:
    """Before the first launch, whatever its rows."""
    if sink is not None:
        lse.copy_(sink.to(lse.dtype)[:, None].expand_as(lse))
    elif not covered:
        lse.fill_(-torch.inf)


def _delta(dout: Tensor, out: Tensor, call: Call) -> Tensor:
    """(batch, nheads, seqlen_q): the sum of dout · out."""
    products = dout.to(call.state_dtype) * out.to(call.state_dtype)
    return products.sum(-1).transpose(1, 2).contiguous()


def _sink_part(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(nheads,): the sum over queries of (probability of the sink) · delta."""
    score = sink.to(lse.dtype)[:, None]
    return torch.where(score > -torch.inf, (score - lse).exp() * delta, 0.0).sum((0, 2))


def _needs_no_zeros(kernel: Kernel) -> bool:
    """Whether it writes what is first, instead of adding it to what was cleared."""
    return as_direct(kernel) is not None or as_block(kernel) is not None


class _ForwardPass:
    """q, k, v travel as the plan says; (out, lse) is the result of the query side."""

    def __init__(
        self, prepared: PreparedCall, local: LocalRank, shard: QKV, sink: Tensor | None
    ) -> None:
        self._q, *self._kv = shard
        self._kernel, self._call, self._sink = prepared.kernels.forward, prepared.call, sink
        self.buffer_plan, self.pool, self.device = local.forward, local.pool, self._q.device
        self._arrives_final = self.buffer_plan.final[Side.QUERY][0]
        what = self.buffer_plan, _forward_payloads, self._kernel, self._call
        self.program = _lowered(*what, len(self._q))

    def home(self, payload: Payload, side: Side) -> Views:
        if payload is Payload.INPUT:
            return (self._q,) if side is Side.QUERY else tuple(self._kv)
        assert side is Side.QUERY, "keys have no result"
        return (self.state.out, self.state.lse) if payload is Payload.RESULT else self.final

    @functools.cached_property
    def final(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries, where they arrive final."""
        plan = self.buffer_plan.plan
        here = any(work.queries == (plan.rank,) for step in plan.steps for work in step.work)
        covered = self.buffer_plan.final[Side.QUERY][1]
        covered = covered and (not here or _needs_no_zeros(self._kernel))
        return _empty_state(self._q, self._call, self._call.dtype, self._sink, covered)

    @functools.cached_property
    def state(self) -> State:
        """Of this rank's queries; empty at first."""
        call, complete = self._call, self.buffer_plan.plan.complete
        covered = complete and _needs_no_zeros(self._kernel)
        out, lse = _empty_state(self._q, call, call.state_dtype, self._sink, covered)
        final = complete and call.dtype is not call.state_dtype and not self._arrives_final
        return State(out, lse, torch.empty_like(out, dtype=call.dtype) if final else None)

    def launch(self, launch: RunKernel, tensors: Sequence[Tensor]) -> None:
        q, k, v, out, lse, *sums = tensors
        work, call = launch.work, self._call.of_heads(*launch.work.heads)
        heads = slice(call.head_start, call.head_start + call.nheads)
        if launch.final:
            if launch.begins:
                if not launch.fresh_q:
                    out.zero_()
                sink = None if self._sink is None else self._sink[heads]
                _begin_lse(lse, sink, launch.fresh_q)
            state = State(sums[0], lse, out) if sums else State(out, lse)
        else:
            result = self.state.result
            if result is not None and call is not self._call:
                result = result[:, :, heads]
            state = State(out, lse, result)
        with span("{.name} forward on rank {}", self._kernel, self.buffer_plan.plan.rank):
            self._kernel.forward(q, k, v, work.tiles, state, call)

    def combine(self, ours: Views, theirs: Views) -> None:
        merge(State(ours[0], ours[1]), theirs[0], theirs[1])

    def clear(self, views: Views) -> None:
        out, lse = views
        out.zero_()
        lse.fill_(-torch.inf)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output of this rank's queries, in the user's dtype, and lse."""
        if self._arrives_final:
            return self.final
        out, lse, final = self.state.out, self.state.lse, self.state.result
        return (out.to(self._call.dtype) if final is None else final), lse


class _BackwardPass:
    """q, dout, lse, delta and k, v travel as the plan says; dq and (dk, dv) are the results.

    For kernels that return blocks, out travels instead of delta.
    """

    def __init__(
        self,
        prepared: PreparedCall,
        local: LocalRank,
        shard: QKV,
        dout: Tensor,
        saved: Callable[[], Saved],
    ) -> None:
        self._kernel, self._call = prepared.kernels.backward, prepared.call
        self._shard, self._dout, self._saved = shard, dout, saved
        self._blocks = as_block(self._kernel) is not None
        self._grads: dict[tuple[Payload, Side], Views] = {}
        self.buffer_plan, self.pool, self.device = local.backward, local.pool, dout.device
        what = self.buffer_plan, _backward_payloads, self._kernel, self._call
        self.program = _lowered(*what, len(dout))

    def home(self, payload: Payload, side: Side) -> Views:
        q, k, v = self._shard
        if payload is not Payload.INPUT:
            if (payload, side) not in self._grads:
                self._grads[payload, side] = self._make_grads(payload, side)
            return self._grads[payload, side]
        if side is Side.KEY:
            return k, v
        saved = self._saved()
        return q, self._dout, saved.lse, saved.delta if saved.out is None else saved.out

    def _make_grads(self, payload: Payload, side: Side) -> Views:
        """Sums, or what is final; empty at first, unless every row is written."""
        if payload is Payload.FINAL:
            covered, dtype = self.buffer_plan.final[side][1], self._call.dtype
        else:
            covered = self.buffer_plan.begins[side] and _needs_no_zeros(self._kernel)
            dtype = self._call.state_dtype
        make = torch.empty if covered else torch.zeros
        like = self._shard[:1] if side is Side.QUERY else self._shard[1:]
        return tuple([make(x.shape, dtype=dtype, device=self.device) for x in like])

    def launch(self, launch: RunKernel, tensors: Sequence[Tensor]) -> None:
        q, dout, lse, delta_or_out, k, v, dq, dk, dv = tensors
        work = launch.work
        call = self._call.of_heads(*work.heads)
        saved = self._saved()
        if self._blocks:
            saved = Saved(lse, lse.new_empty(0), delta_or_out)
        elif lse is not saved.lse or delta_or_out is not saved.delta:  # some heads, or not our own
            saved = Saved(lse, delta_or_out)
        grads = Grads(dq, dk, dv, launch.fresh_q, launch.fresh_k)
        with span("{.name} backward on rank {}", self._kernel, self.buffer_plan.plan.rank):
            self._kernel.backward(dout, q, k, v, work.tiles, saved, grads, call)

    def combine(self, ours: Views, theirs: Views) -> None:
        with span("add gradients"):
            for mine, other in zip(ours, theirs, strict=True):
                mine.add_(other)

    def clear(self, views: Views) -> None:
        for view in views:
            view.zero_()

    def result(self) -> QKV:
        """dq, dk, dv of this rank's shards, in the user's dtype."""
        final = self.buffer_plan.final
        (dq,), (dk, dv) = (
            self.home(Payload.FINAL if final[side][0] else Payload.RESULT, side) for side in Side
        )
        return dq.to(self._call.dtype), dk.to(self._call.dtype), dv.to(self._call.dtype)


_MOST_LOWERED = 8  # of a plan: kinds of tensors


def _lowered(
    buffer_plan: BufferPlan,
    payloads: Callable[[Call, bool], Payloads],
    kernel: Kernel,
    call: Call,
    batch: int,
) -> Program:
    """What a pass does, for tensors of these shapes; worked out once for a plan."""
    blocks = as_block(kernel) is not None
    writes, direct = _needs_no_zeros(kernel), as_direct(kernel) is not None
    key = batch, call.nheads, call.headdim, call.headdim_v, call.dtype, blocks, writes, direct
    found: Program | None = buffer_plan.lowered.get(key)
    if found is None:
        found = lower(buffer_plan, payloads(call, blocks), batch, writes, direct)
        if len(buffer_plan.lowered) >= _MOST_LOWERED:
            buffer_plan.lowered.clear()
        buffer_plan.lowered[key] = found
    return found


def _forward_payloads(call: Call, blocks: bool) -> Payloads:
    """What `_ForwardPass.home` has."""
    group, dtype, state = call.nheads // call.nheads_k, call.dtype, call.state_dtype
    return {
        (Payload.INPUT, Side.QUERY): (Field(group, call.headdim, dtype),),
        (Payload.INPUT, Side.KEY): (
            Field(1, call.headdim, dtype),
            Field(1, call.headdim_v, dtype),
        ),
        (Payload.RESULT, Side.QUERY): (
            Field(group, call.headdim_v, state),
            Field(group, None, state),
        ),
        (Payload.FINAL, Side.QUERY): (
            Field(group, call.headdim_v, dtype),
            Field(group, None, state),
        ),
    }


def _backward_payloads(call: Call, blocks: bool) -> Payloads:
    """What `_BackwardPass.home` has."""
    group, dtype, state = call.nheads // call.nheads_k, call.dtype, call.state_dtype
    out, row = Field(group, call.headdim_v, dtype), Field(group, None, state)
    return {
        (Payload.INPUT, Side.QUERY): (
            Field(group, call.headdim, dtype),
            out,
            row,
            out if blocks else row,
        ),
        (Payload.INPUT, Side.KEY): (
            Field(1, call.headdim, dtype),
            Field(1, call.headdim_v, dtype),
        ),
        (Payload.RESULT, Side.QUERY): (Field(group, call.headdim, state),),
        (Payload.RESULT, Side.KEY): (
            Field(1, call.headdim, state),
            Field(1, call.headdim_v, state),
        ),
        (Payload.FINAL, Side.QUERY): (Field(group, call.headdim, dtype),),
        (Payload.FINAL, Side.KEY): (
            Field(1, call.headdim, dtype),
            Field(1, call.headdim_v, dtype),
        ),
    }
