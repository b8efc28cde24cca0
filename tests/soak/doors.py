"""The doors: a case goes through one of the library's, and its results are checked with the oracle.

Calls are made in worker processes, so that one that crashes or hangs is a failure like any other.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from calls import extra_arguments, held_of, packed_inputs, whole
from ranks import Ranks
from samples import Results, Sample, error, expected_of
from torch import Tensor
from torch.distributed import ProcessGroup

import ring_flash_attn
from ring_flash_attn.api.families import PREFIXES

from .cases import MOST_RANKS, Case, sample_of

SEED = 5  # of the first rank's generator; the others have their own
PATIENCE = 120.0  # seconds without an answer of any rank after which a call hangs
REFUSING = ("native", "cute")  # kernels that are not there on a CPU, or cannot do every call

# Of max|a − b| over the larger of max|b| and `_floors`.
TOLERANCE = {"float64": 1e-12, "float32": 5e-6, "float16": 2e-3, "bfloat16": 1.5e-2}


class Failed(AssertionError):
    """A call that should have worked raised, crashed or hung."""


class Doors:
    """The processes in which calls are made; each kind starts when it is needed.

    Args:
        ranks: how many there are for calls on a group; a case may take fewer.
        device: of all cases. On the CPU, Triton's kernels are interpreted.
    """

    def __init__(self, ranks: int = MOST_RANKS, device: str = "cpu") -> None:
        environment = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
        self.alone = Ranks(1, over_tcp=True)
        self.interpreter = Ranks(1, environment=environment, over_tcp=True)
        self.group = Ranks(ranks, environment=environment, over_tcp=True)

    def stop(self) -> None:
        """End all processes."""
        for pool in (self.alone, self.interpreter, self.group):
            pool.stop()

    def check(self, case: Case) -> bool:
        """Make the call, forward and backward; whether a kernel did it rather than refused it.

        Raises:
            AssertionError: a result is wrong.
            Failed: the call raised, crashed or hung.
        """
        pool = self.group
        if case.door != "processes":
            pool = self.interpreter if case.interpreted else self.alone
        outcomes = pool.outcomes(run_rank, case, timeout=PATIENCE)
        if not all(ok for ok, _ in outcomes.values()):
            raise Failed("\n".join(f"rank {rank}: {outcomes[rank][1]}" for rank in outcomes))
        results = [
            outcomes[rank][1] for rank in range(case.world_size if pool is self.group else 1)
        ]
        errors = [result for result in results if isinstance(result, str)]
        refused = [error for error in errors if "NotImplementedError" in error]
        if len(refused) == len(results) and case.kernel in REFUSING:
            return False
        if errors:
            if pool is self.group:
                pool.stop()  # who knows what is still under way
            raise Failed("\n".join(errors))
        check_results(case, results)
        return True


def check_results(case: Case, parts: list[Results]) -> None:
    """Assert that the ranks' results are what the oracle says."""
    sample = sample_of(case)
    expected = expected_of(sample, SEED)
    names = ["out", *(["lse"] if case.returns != "out" else []), *(f"d{x}" for x in case.wanted)]
    results = parts[0]
    if case.door == "processes":
        tokens = [_tokens(case, sample, rank) for rank in range(case.world_size)]
        for_q, for_k = ([of_rank[side] for of_rank in tokens] for side in (0, 1))
        keys = {"dk", "dv"}
        results = whole([{n: x for n, x in part.items() if n not in keys} for part in parts], for_q)
        results |= whole([{n: x for n, x in part.items() if n in keys} for part in parts], for_k)
    assert set(results) == set(names), f"{sorted(results)} instead of {sorted(names)}"
    floors, limit = _floors(case, sample, expected), TOLERANCE[case.dtype]
    errors = {name: error(results[name], expected[name], floors.get(name, 1.0)) for name in names}
    wrong = {name: found for name, found in errors.items() if not found <= limit}
    assert not wrong, f"errors beyond {limit}: {wrong}"


def _floors(case: Case, sample: Sample, expected: Results) -> dict[str, float]:
    """The size of what a gradient is the difference of: dp and delta, which may cancel out.

    Delta is the sum of dout · out, and out has been rounded.
    """

    def most(x: Tensor) -> float:
        return float(x.abs().max()) if x.numel() else 0.0

    delta = most((sample.dout.double() * expected["out"]).abs().sum(-1)) + most(sample.dlse)
    scale = case.headdim**-0.5 if case.softmax_scale is None else case.softmax_scale
    sizes = {"dq": scale * delta * most(sample.k), "dk": scale * delta * most(sample.q)}
    return {name: max(size, 1.0) for name, size in {**sizes, "dsink": delta}.items()}


def run_rank(rank: int, n: int, case: Case) -> Results | str | None:
    """On one rank: the results, or the traceback. Ranks that have no part in the case get None."""
    group = None
    if case.door == "processes" and case.world_size < n:
        group = _group_of(case.world_size)
    if rank >= case.world_size:
        return None
    try:
        return call(case, rank, group)
    except Exception:
        return traceback.format_exc()


@cache
def _group_of(world_size: int) -> ProcessGroup:
    """The first ranks of all; every rank asks, in the same order."""
    return dist.new_group(list(range(world_size)))


def call(case: Case, rank: int = 0, group: ProcessGroup | None = None, **changes: Any) -> Results:
    """Make one rank's part of the call, forward and backward; changes: other arguments."""
    sample = sample_of(case)
    arguments = _arguments(case, sample, rank, group)
    if case.door == "processes":
        sample = _shard(sample, *_tokens(case, sample, rank))
    sample = _on(sample, case.device)
    leaves = []
    for names, x in zip(case.leaves, packed_inputs(case.form, sample), strict=True):
        leaf = strided(x, case.strides).detach()
        leaves.append(leaf.requires_grad_(any(name in case.wanted for name in names)))
    options = {**sample.options, **arguments, **changes}
    sink = options.get("sink")
    if sink is not None:
        options["sink"] = sink = sink.clone().requires_grad_("sink" in case.wanted)
    torch.manual_seed(SEED + rank)
    returned = getattr(ring_flash_attn, case.function)(*leaves, **options)
    return _differentiated(case, sample, leaves, sink, returned)


def _differentiated(
    case: Case, sample: Sample, leaves: list[Tensor], sink: Tensor | None, returned: Any
) -> Results:
    """What was returned, and the gradients that are wanted, by name."""
    out, lse = (returned, None) if case.returns == "out" else returned[:2]
    outputs, flowing = [out], [strided(sample.dout, case.strides)]
    if case.returns == "lse with gradient":
        outputs, flowing = [out, lse], [*flowing, sample.dlse]
    named = {**dict(zip(case.leaves, leaves)), **({} if sink is None else {("sink",): sink})}
    named = {names: x for names, x in named.items() if x.requires_grad}
    assert out.requires_grad == bool(named)
    results = {"out": out.detach()} if lse is None else {"out": out.detach(), "lse": lse.detach()}
    grads = torch.autograd.grad(outputs, list(named.values()), flowing) if named else ()
    for names, grad in zip(named, grads):
        parts = grad.unbind(-3) if len(names) > 1 else (grad,)
        results |= {f"d{name}": part for name, part in zip(names, parts, strict=True)}
    return {name: x.cpu() for name, x in results.items()}


def _tokens(case: Case, sample: Sample, rank: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of a rank, cut as `rfa verify` does."""
    layout, _ = case.point
    sides = ((sample.q, sample.cu_seqlens_q), (sample.k, sample.cu_seqlens_k))
    of_q, of_k = (
        held_of(layout, cu, x.shape[-3], rank, case.world_size, sample.cu_seqlens_q)
        for x, cu in sides
    )
    return of_q, of_k


def _shard(sample: Sample, of_q: Tensor, of_k: Tensor) -> Sample:
    q, dout = (x.index_select(-3, of_q) for x in (sample.q, sample.dout))
    k, v = (x.index_select(-3, of_k) for x in (sample.k, sample.v))
    return Sample(q, k, v, dout, sample.dlse[..., of_q], options=sample.options)


def _on(sample: Sample, device: str) -> Sample:
    tensors = {name: getattr(sample, name).to(device) for name in ("q", "k", "v", "dout", "dlse")}
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in sample.options.items()}
    return replace(sample, **tensors, options=moved)


def _arguments(case: Case, sample: Sample, rank: int, group: ProcessGroup | None) -> dict[str, Any]:
    """Everything but tensors and the options of the sample."""
    arguments: dict[str, Any] = {"return_attn_probs": case.returns != "out"}
    if not case.function.startswith(tuple(f"{prefix}_" for prefix in PREFIXES)):
        arguments["kernel"] = case.kernel
    if case.door == "processes":
        arguments["group"] = group
    if case.ranks_per_node is not None:
        arguments["ranks_per_node"] = case.ranks_per_node
    if case.kind in ("virtual", "anything"):
        names = ("layout", "route", "heads_k_stride", "sources_per_launch")
        arguments |= {name: getattr(case, name) for name in names}
        if case.kind == "virtual":
            arguments["world_size"] = case.world_size
        elif case.batch is not None:
            arguments |= {"seqlen": case.lengths_q[0], "seqlen_k": case.lengths_k[0]}
        if case.batch is None:
            cu_q, cu_k = (torch.tensor(x) for x in (sample.cu_seqlens_q, sample.cu_seqlens_k))
            arguments |= {"cu_seqlens": cu_q.to(case.device), "cu_seqlens_k": cu_k.to(case.device)}
        return arguments
    extra = extra_arguments(case.plain_name, sample, rank, case.world_size)
    if case.heads_k_stride is not None:
        extra["heads_k_stride"] = case.heads_k_stride
    if case.kind == "single_documents":  # queries and keys of their own
        cu_k = torch.tensor(sample.cu_seqlens_k, dtype=torch.int32)
        extra |= {"cu_seqlens_k": cu_k, "max_seqlen_k": max(case.lengths_k)}
    moved = {n: x.to(case.device) if isinstance(x, Tensor) else x for n, x in extra.items()}
    return {**arguments, **moved}


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers, but not one after the other in memory."""
    if how == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "wide rows":
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    if how == "columns first":
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if how == "every second":
        return x.repeat_interleave(2, dim=0)[::2]
    return x
