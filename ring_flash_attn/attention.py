"""The one autograd path: every public function ends here, on a rank of a group or virtual ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .comm import Transport
from .kernels.base import Call, Grads, Kernel, Saved, State
from .kernels.merge import merge
from .plan import Payload, Side, Work
from .walk import Field, Path, Views, Walker, walk

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank of this process brings: its plans, and its end of the group.

    Attributes:
        forward, backward: its steps.
        transport: makes a fresh end for each walk.
    """

    forward: Path
    backward: Path
    transport: Callable[[], Transport]


@dataclass(frozen=True, slots=True)
class Job:
    """A call, ready to run: its ranks in this process, the kernel, what the kernel must know."""

    ranks: tuple[Local, ...]
    kernel: Kernel
    call: Call


def attention(
    job: Job, shards: Sequence[QKV], sink: Tensor | None = None
) -> list[tuple[Tensor, ...]]:
    """Exact attention over the shards of all ranks; differentiable in q, k, v and sink.

    Args:
        job: what is to be done.
        shards: for each rank of this process q (batch, seqlen_q, nheads, headdim), k and v.
        sink: (nheads,) or None.

    Returns:
        For each rank of this process out, like q, and lse (batch, nheads, seqlen_q).
    """
    flat = [tensor for shard in shards for tensor in shard]
    results = _Attention.apply(job, sink, *flat)
    count = len(shards)
    return [(results[i], results[count + i]) for i in range(count)]


class _Attention(torch.autograd.Function):
    """All ranks of this process at once: apply(job, sink, q0, k0, v0, q1, …) → outs, lses."""

    @staticmethod
    def forward(ctx: Any, job: Job, sink: Tensor | None, *flat: Tensor) -> tuple[Tensor, ...]:
        shards = _by_rank(flat)
        with torch.autocast(job.call.device.type, enabled=False):
            walkers = [
                _Forward(job, local, shard, sink)
                for local, shard in zip(job.ranks, shards, strict=True)
            ]
            walk(walkers)
            outs = [walker.out() for walker in walkers]
        lses = [walker.state.lse for walker in walkers]
        ctx.job = job
        ctx.save_for_backward(sink, *flat, *outs, *lses)
        ctx.set_materialize_grads(False)
        return *outs, *lses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        count = len(job.ranks)
        sink, *saved = ctx.saved_tensors
        shards, outs, lses = _by_rank(saved), saved[3 * count : 4 * count], saved[4 * count :]
        dsink = None if sink is None else torch.zeros_like(sink, dtype=job.call.state_dtype)
        with torch.autocast(job.call.device.type, enabled=False):
            walkers = []
            for i, local in enumerate(job.ranks):
                dout, dlse = grads[i], grads[count + i]
                dout = torch.zeros_like(outs[i]) if dout is None else dout
                delta = _delta(dout, outs[i], dlse, job.call)
                if dsink is not None:
                    dsink -= _sink_part(sink, lses[i], delta)
                kept = Saved(lses[i], delta)
                walkers.append(_Backward(job, local, shards[i], dout, kept))
            walk(walkers)
            flat = [grad for walker in walkers for grad in walker.grads()]
        if dsink is not None:
            dsink = dsink.to(sink.dtype)
        return None, dsink, *flat


def _by_rank(flat: Sequence[Tensor]) -> list[QKV]:
    """q0, k0, v0, q1, … → (q0, k0, v0), …; anything after a multiple of three is ignored."""
    return list(zip(flat[0::3], flat[1::3], flat[2::3], strict=False))


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None, call: Call) -> Tensor:
    """(batch, nheads, seqlen_q): the sum of dout · out, less the gradient of lse."""
    products = dout.to(call.state_dtype) * out.to(call.state_dtype)
    delta = products.sum(-1).transpose(1, 2).contiguous()
    return delta if dlse is None else delta - dlse


def _sink_part(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(nheads,): the sum over queries of (probability of the sink) · delta."""
    score = sink.to(lse.dtype)[:, None]
    return torch.where(score > -torch.inf, (score - lse).exp() * delta, 0.0).sum((0, 2))


class _Forward(Walker):
    """q, k, v travel as the plan says; (out, lse) is the result of the query side."""

    def __init__(self, job: Job, local: Local, shard: QKV, sink: Tensor | None) -> None:
        q, k, v = shard
        self.job = job
        call = job.call
        super().__init__(local.forward, local.transport(), q.shape[0], q.device)
        group = call.nheads // call.nheads_k
        self.fields = {
            (Payload.INPUT, Side.QUERY): (Field(group, call.headdim, call.dtype),),
            (Payload.INPUT, Side.KEY): _key_fields(call, call.dtype),
            (Payload.RESULT, Side.QUERY): (
                Field(group, call.headdim_v, call.state_dtype),
                Field(group, None, call.state_dtype),
            ),
        }
        out = q.new_zeros((*q.shape[:3], call.headdim_v), dtype=call.state_dtype)
        lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
        if sink is not None:
            lse.copy_(sink.to(lse.dtype)[:, None].expand_as(lse))
        final = self.plan.complete and call.dtype is not call.state_dtype
        self.state = State(out, lse, torch.empty_like(out, dtype=call.dtype) if final else None)
        self.home = {
            (Payload.INPUT, Side.QUERY): (q,),
            (Payload.INPUT, Side.KEY): (k, v),
            (Payload.RESULT, Side.QUERY): (out, lse),
        }

    def launch(self, work: Work) -> None:
        (q,), (k, v) = self.inputs(work, Side.QUERY), self.inputs(work, Side.KEY)
        result = self.state.result
        if result is not None:
            result = self.fields[Payload.RESULT, Side.QUERY][0].of_heads(result, work.heads)
        out, lse = self.results(work, Side.QUERY)
        state = State(out, lse, result)
        self.job.kernel.forward(q, k, v, work.tiles, state, self.job.call.of_heads(*work.heads))

    def combine(self, side: Side, ours: Views, theirs: Views) -> None:
        merge(State(ours[0], ours[1]), theirs[0], theirs[1])

    def clear(self, side: Side, views: Views) -> None:
        out, lse = views
        out.zero_()
        lse.fill_(-torch.inf)

    def out(self) -> Tensor:
        """The output of this rank's queries, in the user's dtype."""
        return (
            self.state.out.to(self.job.call.dtype)
            if self.state.result is None
            else self.state.result
        )


class _Backward(Walker):
    """q, dout, lse, delta and k, v travel as the plan says; dq and (dk, dv) are the results."""

    def __init__(self, job: Job, local: Local, shard: QKV, dout: Tensor, saved: Saved) -> None:
        q, k, v = shard
        self.job = job
        call = job.call
        super().__init__(local.backward, local.transport(), q.shape[0], q.device)
        group = call.nheads // call.nheads_k
        row = Field(group, None, call.state_dtype)
        self.fields = {
            (Payload.INPUT, Side.QUERY): (
                Field(group, call.headdim, call.dtype),
                Field(group, call.headdim_v, call.dtype),
                row,
                row,
            ),
            (Payload.INPUT, Side.KEY): _key_fields(call, call.dtype),
            (Payload.RESULT, Side.QUERY): (Field(group, call.headdim, call.state_dtype),),
            (Payload.RESULT, Side.KEY): _key_fields(call, call.state_dtype),
        }
        dq, dk, dv = (torch.zeros(x.shape, dtype=call.state_dtype, device=x.device) for x in shard)
        self.home = {
            (Payload.INPUT, Side.QUERY): (q, dout, saved.lse, saved.delta),
            (Payload.INPUT, Side.KEY): (k, v),
            (Payload.RESULT, Side.QUERY): (dq,),
            (Payload.RESULT, Side.KEY): (dk, dv),
        }

    def launch(self, work: Work) -> None:
        q, dout, lse, delta = self.inputs(work, Side.QUERY)
        k, v = self.inputs(work, Side.KEY)
        (dq,), (dk, dv) = self.results(work, Side.QUERY), self.results(work, Side.KEY)
        call = self.job.call.of_heads(*work.heads)
        saved, grads = Saved(lse, delta), Grads(dq, dk, dv)
        self.job.kernel.backward(dout, q, k, v, work.tiles, saved, grads, call)

    def combine(self, side: Side, ours: Views, theirs: Views) -> None:
        for mine, other in zip(ours, theirs, strict=True):
            mine += other

    def clear(self, side: Side, views: Views) -> None:
        for view in views:
            view.zero_()

    def grads(self) -> list[Tensor]:
        """dq, dk, dv of this rank's shards, in the user's dtype."""
        (dq,) = self.home[Payload.RESULT, Side.QUERY]
        dk, dv = self.home[Payload.RESULT, Side.KEY]
        return [grad.to(self.job.call.dtype) for grad in (dq, dk, dv)]


def _key_fields(call: Call, dtype: torch.dtype) -> tuple[Field, Field]:
    return Field(1, call.headdim, dtype), Field(1, call.headdim_v, dtype)
