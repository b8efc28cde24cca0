"""Runs cases on ranks, here, in new processes or in torchrun's, against the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..bench.functions import find_functions, own_arguments, packed_leaves
from ..bench.workload import (
    Placement,
    Workload,
    call_of,
    dtype_name,
    refuse_kernels,
    size_of_workload,
)
from ..comm import launch
from ..engine.entry import run_virtual
from ..kernels.base import AUTO, choose_kernels
from ..plan.layout import get_layout, spans
from .catalogue import (
    ACCEPTED,
    CANNOT,
    ERROR,
    FAIL,
    LEFT_OUT,
    ONE_DEVICE,
    ORACLE,
    PASS,
    Case,
    Error,
    VerifyOptions,
    accepted_error,
)
from .oracle import Rules, cut, cut_names, oracle

Tensors = dict[str, Tensor]  # by name: q, k, v, out, lse, sink or the gradient of one

MOST_ERRORS = 3  # after so many crashes the rest is left out

FACTOR = 2.0  # how much worse than plain torch
ROUNDINGS = 2.0  # width of the rounding band, in eps of the dtype,
SUMMATION = 8.0  # and in eps of fp32, in which long sums are taken, each kernel in its own order
FP64_BAND = 1e-12  # relative
_HALF = (torch.bfloat16, torch.float16)
_ZERO = 1e-9  # a tensor this much smaller than the terms it is the sum of is zero

# Of the kernel `versus` and one workload: its name and tensors, by function, layout, route, rank.
Baseline = dict[Any, tuple[str, Tensors]]


# All cases.


def check_kernels(cases: Sequence[Case], options: VerifyOptions) -> None:
    """NotImplementedError for kernels that can do none of the cases they were asked for."""
    device = launch.rank_device(options.device, 0)
    reasons: dict[str, tuple[str, list[str]]] = {}  # by kernel: how it was asked for; "": it can
    for case in cases:
        kernel, why = case.placement.kernel, ""
        try:
            _kernel(case, device)
        except NotImplementedError as error:
            why = str(error)
        option = f"--kernel {kernel}" if kernel in options.kernels else case.function.name
        reasons.setdefault(kernel, (option, []))[1].append(why)
    reasons.pop(AUTO, None)
    refuse_kernels(dict(each for each in reasons.values() if all(each[1])), device)


def _kernel(case: Case, device: torch.device) -> str:
    """The kernel that the call will get; NotImplementedError with reasons if there is none."""
    asked = call_of(case.workload, device, with_lse=True)
    size = size_of_workload(case.workload, case.placement.world_size)
    return choose_kernels(case.placement.kernel, asked, size).name


def check_all(
    cases: Sequence[Case], options: VerifyOptions, backend: str, timeout: float
) -> Iterator[Case]:
    """The cases, in their order, each as soon as all ranks have it."""
    if options.virtual:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # faster for small products than threads that wait for each other
        try:
            yield from check_on_rank(None, options.world_size, cases, options)
        finally:
            torch.set_num_threads(threads)
    elif launch.torchrun_rank():
        ranks = launch.run_joined(check_on_rank, (cases, options), options.device, backend)
        yield from map(_merged, ranks)
    else:
        yield from _spawned(cases, options, backend, timeout)


def _spawned(
    cases: Sequence[Case], options: VerifyOptions, backend: str, timeout: float
) -> Iterator[Case]:
    """In new processes; after a crash in yet newer ones, from the next case on."""
    done = crashes = 0
    while done < len(cases) and crashes < MOST_ERRORS:
        args = (cases[done:], options)
        try:
            for ranks in launch.run_spawned(
                check_on_rank, args, options.world_size, options.device, backend, timeout
            ):
                yield _merged(ranks)
                done += 1
        except launch.RanksFailed as failure:
            if done < len(cases):
                yield replace(cases[done], status=ERROR, reason=str(failure))
            done, crashes = done + 1, crashes + 1
    for case in cases[done:]:
        yield replace(case, status=LEFT_OUT, reason=f"not run after {crashes} crashes")


def _merged(ranks: Sequence[Case]) -> Case:
    """One case of what all ranks found; the first that did not pass has the status."""
    worst = next((each for each in ranks if each.status != PASS), ranks[0])
    compared: dict[str, tuple[Error, ...]] = {}
    for each in ranks:
        for what, errors in each.compared.items():
            compared[what] = (*compared.get(what, ()), *errors)
    return replace(worst, compared=compared)


def check_on_rank(
    rank: int | None, world_size: int, cases: Sequence[Case], options: VerifyOptions
) -> Iterator[Case]:
    """What this process finds out about each case, as one rank or, with None, as all of them."""
    here = rank or 0
    device = launch.rank_device(options.device, here)
    for _, same_workload in groupby(cases, key=lambda case: case.workload):
        baseline: Baseline = {}
        for case in same_workload:
            virtual = case.spread and rank is None
            ranks = range(world_size) if virtual else [here]
            try:
                kernel = _kernel(case, device)
                # The first rank's draw counts in a group; a function without one has its own.
                torch.manual_seed(case.seed + (here if case.spread else 0))
                inputs = make_inputs(case.workload, case.seed, device)
                found = call_ranks(case, inputs, ranks, virtual)
            except NotImplementedError as reason:
                asked = case.placement.kernel
                status = FAIL if asked == AUTO else CANNOT
                yield replace(case, status=status, used_kernel=asked, reason=str(reason))
                continue
            compared: dict[str, tuple[Error, ...]] = {}
            for own, tensors in zip(ranks, found, strict=True):
                right = expected_on_rank(case, own, device, case.spread and not virtual)
                others = _others(case, kernel, tensors, own, baseline, options)
                for what, other in others.items():
                    errors = (right[n].compare(n, own, tensors[n], x) for n, x in other.items())
                    compared[what] = (*compared.get(what, ()), *errors)
            status = PASS if all(error.passed for error in compared[ORACLE]) else FAIL
            yield replace(case, status=status, used_kernel=kernel, compared=compared)


def expected_on_rank(
    case: Case, rank: int, device: torch.device, own_sink: bool
) -> dict[str, Expected]:
    """A rank's part of what the oracle says; of dsink its own queries' part, or the whole."""
    whole = expected(case.workload, case.seed, device)
    right = {
        name: replace(each, tensor=part(case, name, each.tensor, rank))
        for name, each in whole.items()
        if not name.startswith("dsink")
    }
    if "dsink" in whole:
        right["dsink"] = sink = whole["dsink"]
    if "dsink" in whole and own_sink:
        own = _sum_of_queries(part(case, "lse", whole["dsink by query"].tensor, rank))
        largest = max(sink.largest, _magnitude(own))
        right["dsink"] = replace(sink, tensor=own, largest=largest)
    return right


def _others(
    case: Case, kernel: str, found: Tensors, rank: int, baseline: Baseline, options: VerifyOptions
) -> dict[str, dict[str, Tensor | None]]:
    """What a rank's tensors are compared with: the oracle (None), one device, a kernel."""
    others: dict[str, dict[str, Tensor | None]] = {ORACLE: dict.fromkeys(found)}
    if not options.report:
        return others
    if case.spread:
        whole = call_on_one_device(case.workload, case.seed, kernel, found["out"].device)
        names = [name for name in found if name != "dsink"]  # a rank has a part of the sum
        others[ONE_DEVICE] = {name: part(case, name, whole[name], rank) for name in names}
    placement = case.placement
    key = (replace(case.function, prefix=""), placement.layout, placement.route, rank)
    used, tensors = baseline.get(key, (kernel, found))
    if placement.kernel == options.versus:
        baseline[key] = kernel, found
    elif used != kernel:
        others[options.versus] = {**tensors}
    return others


# One call.


def tokens(case: Case, name: str, rank: int) -> list[int]:
    """Places in the stream of a rank's queries or, if `name` is k or v, keys; in local order."""
    keys = name.removeprefix("d") in ("k", "v")
    lengths = case.workload.lengths_k if keys else case.workload.lengths
    if not case.spread:  # every rank does everything
        return list(range(sum(lengths)))
    layout, world_size = case.placement.layout, case.placement.world_size
    if layout in cut_names():
        return cut(layout, lengths, rank, world_size)
    return list(proved_tokens(layout, lengths, case.workload.lengths, world_size)[rank])


@lru_cache(maxsize=64)
def proved_tokens(
    layout: str, lengths: tuple[int, ...], queries: tuple[int, ...], world_size: int
) -> tuple[tuple[int, ...], ...]:
    """All ranks' tokens as the layout itself has them; ValueError unless each is there once."""
    found = []
    for rank in range(world_size):
        held = spans(get_layout(layout), lengths, rank, world_size, queries=queries)
        found.append(tuple(token for span in held for token in span.tokens))
    times = Counter(token for tokens in found for token in tokens)
    wrong = [token for token in range(sum(lengths)) if times[token] != 1]
    if wrong or len(times) != sum(lengths):
        raise ValueError(f"layout {layout!r} does not hold every token once: {wrong[:8]} …")
    return tuple(found)


def part(case: Case, name: str, whole: Tensor, rank: int) -> Tensor:
    """A rank's tokens of a whole tensor: q, k, v, out, lse or the gradient of one."""
    places = torch.tensor(tokens(case, name, rank), dtype=torch.int64, device=whole.device)
    return whole.index_select(-1 if name.endswith("lse") else -3, places)


def call_ranks(case: Case, inputs: Tensors, ranks: Sequence[int], virtual: bool) -> list[Tensors]:
    """Call the function, and differentiate: out, lse and gradients of each rank.

    As one rank of the default group, or as virtual ones. Their dsink comes whole, with the first.
    """
    workload, placement, function = case.workload, case.placement, case.function
    form = "" if virtual else function.form
    shards = [
        packed_leaves(form, *(part(case, name, inputs[name], rank) for name in "qkv"))
        for rank in ranks
    ]
    options: dict[str, Any] = {
        **workload.options,
        "alibi_slopes": inputs.get("slopes"),
        "return_attn_probs": True,
        "kernel": placement.kernel,
    }
    sinks = [inputs["sink"].detach().clone().requires_grad_()] if "sink" in inputs else []
    options["sink"] = sinks[0] if sinks else None
    if virtual:
        results = run_virtual(
            placement.layout,
            placement.route,
            [(shard["q"], shard["k"], shard["v"]) for shard in shards],
            workload.lengths,
            workload.lengths_k,
            packed=workload.packed,
            heads_k_stride=placement.heads_k_stride,
            ranks_per_node=placement.ranks_per_node,
            **options,
        )
    else:
        device = inputs["q"].device
        own = own_arguments(function, workload, placement, ranks[0], device)
        if function.prefix:
            del options["kernel"]  # the name says it
        results = [getattr(api, function.name)(**shards[0], **own, **options)]
    outputs, grads = [], []
    for rank, (out, lse, _) in zip(ranks, results, strict=True):
        for name, output in (("dout", out), ("dlse", lse)):
            if name in inputs:
                outputs.append(output)
                grads.append(part(case, name, inputs[name], rank))
    leaves = [leaf for shard in shards for leaf in shard.values()]
    found_grads = iter(torch.autograd.grad(outputs, leaves + sinks, grads))
    found = []
    for (out, lse, _), shard in zip(results, shards, strict=True):
        tensors = {"out": out.detach(), "lse": lse.detach()}
        for name in shard:
            grad = next(found_grads)
            views = grad.unbind(-3) if len(name) > 1 else (grad,)  # of qkv, kv; q, k, v
            tensors |= {f"d{each}": view for each, view in zip(name, views, strict=True)}
        found.append(tensors)
    if sinks:
        found[0]["dsink"] = next(found_grads)
    return found


@lru_cache(maxsize=4)  # functions and layouts share it
def call_on_one_device(workload: Workload, seed: int, kernel: str, device: torch.device) -> Tensors:
    """Compute the whole workload on one device, and differentiate."""
    name = "flash_attn_varlen_func" if workload.packed else "flash_attn_func"
    (function,) = find_functions((name,))
    torch.manual_seed(seed)
    case = Case(function, workload, Placement(1, "", "", kernel), seed=seed)
    (found,) = call_ranks(case, make_inputs(workload, seed, device), [0], virtual=False)
    return found


# Inputs, what the oracle says of them, and how far others may be from that.


@dataclass(frozen=True)
class Expected:
    """A tensor, or a rank's part of it, and what is needed to judge others.

    Attributes:
        tensor: out, lse, dq, dk, dv or dsink in fp64.
        dtype: of the inputs.
        plain: of the whole tensor, the largest error of the naive formula in that dtype.
        largest: of the whole tensor, the largest absolute value.
        scale: the largest absolute value of the whole tensor or of a part that it is the sum of.
            The derivative of a softmax is a difference, P·dP − P·delta, of which less may be left
            than the rounding of either part; with a single key nothing at all. That of a sink is
            a sum over delta's products.
    """

    tensor: Tensor
    dtype: torch.dtype
    plain: float
    largest: float
    scale: float

    @property
    def size(self) -> float:
        """What errors are relative to: the largest value, as in the original documents.

        Where the terms of a gradient cancel, as they do with a few tokens, less may be left than
        their rounding. Then it is so much that the rounding band is what is accepted; in fp32 and
        fp64, for which no relative error was ever set, the scale of the terms if nothing is left.
        """
        if self.dtype in _HALF:
            return max(self.largest, self._band / ACCEPTED["dq"] * self.scale)
        return self.largest if self.largest > _ZERO * self.scale else self.scale

    @property
    def _band(self) -> float:
        """What rounding may cost, in parts of the terms that are rounded."""
        return ROUNDINGS * torch.finfo(self.dtype).eps + SUMMATION * torch.finfo(torch.float32).eps

    def limit(self, name: str) -> float:
        """The largest error of the tensor of this name that passes.

        Twice the error of plain torch and a rounding band; in half precision never more than what
        is accepted; in fp64, where plain torch is the oracle itself, a fixed band.
        """
        if self.dtype is torch.float64:
            return FP64_BAND * self.scale
        limit = FACTOR * self.plain + self._band * self.scale
        accepted = accepted_error(name, dtype_name(self.dtype))
        return limit if accepted is None else min(limit, accepted * self.size)

    def compare(self, name: str, rank: int, got: Tensor, other: Tensor | None = None) -> Error:
        """The error of what a rank computed; or its difference from another result of the same.

        That may be as far from the right one as this: limits double.
        """
        want, factor = (self.tensor, 1) if other is None else (other, 2)
        if got.shape != want.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
        apart = difference(got, want)
        count = max(1, apart.numel())
        worst = _largest(apart)
        return Error(
            name,
            rank,
            max=worst,
            mean=float(apart.sum()) / count,
            rmse=float(apart.square().sum() / count) ** 0.5,
            relative=worst / (self.size or 1.0),
            plain=factor * self.plain,
            limit=factor * self.limit(name),
        )


def difference(got: Tensor, want: Tensor) -> Tensor:
    """Absolute difference in fp64; infinities that agree differ by 0, a NaN by infinity."""
    got, want = got.double(), want.double()
    apart = torch.where(got == want, 0.0, (got - want).abs())
    return torch.nan_to_num(apart, nan=torch.inf, posinf=torch.inf)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _magnitude(x: Tensor) -> float:
    """The largest finite absolute value; 0 if there is none."""
    return _largest(x.double().abs().nan_to_num(nan=0.0, posinf=0.0))


def dropout_seed(seed: int) -> int:
    """The seed that the library draws after `torch.manual_seed(seed)`."""
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(1 << 62, (), dtype=torch.int64, generator=generator))


@lru_cache(maxsize=4)
def make_inputs(workload: Workload, seed: int, device: torch.device) -> Tensors:
    """Normally distributed inputs, drawn on the CPU so that every device gets the same ones.

    Returns:
        Whole tensors, the same on every rank: q, k, v and dout in the workload's dtype; where it
        has them dlse and sink, in fp32 (fp64 for fp64), and slopes, in fp32, (nheads,) for packed
        documents and (batch, nheads) for a batch.
    """
    generator = torch.Generator().manual_seed(seed)
    lead = () if workload.packed else (workload.batch,)
    total_q, total_k = workload.seqlen, sum(workload.lengths_k)
    nheads, nheads_k = workload.nheads, workload.nheads_k
    dim, dim_v = workload.headdim, workload.headdim_v or workload.headdim
    shapes = {
        "q": (*lead, total_q, nheads, dim),
        "k": (*lead, total_k, nheads_k, dim),
        "v": (*lead, total_k, nheads_k, dim_v),
        "dout": (*lead, total_q, nheads, dim_v),
    }
    if workload.lse_grad:
        shapes["dlse"] = (*lead, nheads, total_q)
    if workload.sink:
        shapes["sink"] = (nheads,)
    inputs = {}
    for name, shape in shapes.items():
        dtype = workload.torch_dtype
        if name in ("dlse", "sink") and dtype is not torch.float64:
            dtype = torch.float32
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs[name] = drawn.to(device, dtype)
    if workload.alibi:
        slopes = 2.0 ** -torch.arange(1, nheads + 1, dtype=torch.float32, device=device)
        numbers = torch.arange(1, workload.batch + 1, device=device)
        inputs["slopes"] = slopes if workload.packed else slopes / numbers[:, None]
    return inputs


@lru_cache(maxsize=4)
def expected(workload: Workload, seed: int, device: torch.device) -> dict[str, Expected]:
    """What the oracle says: out, lse, dq, dk, dv and, with a sink, dsink, also query by query."""
    right, parts = _attend(workload, seed, device, torch.float64)
    plain, _ = _attend(workload, seed, device, workload.torch_dtype)
    return {
        name: Expected(
            x,
            workload.torch_dtype,
            plain=_largest(difference(plain[name], x)),
            largest=_magnitude(x),
            scale=max(_magnitude(x), _magnitude(parts[name]) if name in parts else 0.0),
        )
        for name, x in right.items()
    }


def _attend(
    workload: Workload, seed: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """The naive formula in one dtype: out, lse and gradients; and what dq, dk and dsink sum up."""
    inputs = make_inputs(workload, seed, device)
    wanted = [name for name in ("q", "k", "v", "sink") if name in inputs]
    leaves = {name: inputs[name].to(dtype).detach().requires_grad_() for name in wanted}
    sink = leaves.get("sink")
    drawn = dropout_seed(seed) if workload.dropout_p else 0
    rules = Rules(**workload.options, alibi_slopes=inputs.get("slopes"), sink=sink, seed=drawn)
    cu_seqlens = workload.cu_seqlens, workload.cu_seqlens_k or workload.cu_seqlens
    out, lse = oracle(leaves["q"], leaves["k"], leaves["v"], rules, *cu_seqlens)
    ends = {"dout": out, "dlse": lse}
    grads = {name: inputs[name].to(dtype) for name in ends if name in inputs}
    found = torch.autograd.grad(
        [ends[name] for name in grads],
        list(leaves.values()),
        list(grads.values()),
        retain_graph=True,
    )
    tensors = {"out": out.detach(), "lse": lse.detach()}
    tensors |= {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}
    products = (out.detach() * grads["dout"]).transpose(-2, -3)  # (…, nheads, seqlen, headdim)
    delta = products.sum(-1)
    part = torch.autograd.grad(lse, [leaves["q"], leaves["k"]], delta)
    parts = dict(zip(("dq", "dk"), part, strict=True))
    if sink is not None:
        share = (sink[:, None] - lse).detach().exp()
        tensors["dsink by query"] = share * (grads.get("dlse", 0.0) - delta)
        parts["dsink"] = _sum_of_queries(share * products.abs().sum(-1))
    return tensors, parts


def _sum_of_queries(x: Tensor) -> Tensor:
    """By head, of a tensor like lse."""
    return x.transpose(-1, -2).flatten(0, -2).sum(0)
