"""Runs calls on ranks, in this process, in new ones or in torchrun's, and compares the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..bench.functions import find_functions, own_arguments, packed_leaves
from ..bench.inputs import call_of
from ..bench.versus import refuse_kernels
from ..bench.workload import Placement, Workload
from ..comm import launch
from ..engine.entry import run_virtual
from ..kernels.base import AUTO, choose_kernel
from .catalogue import VerifyCall, VerifyOptions
from .cut import cut
from .expected import Error, Tensors, expected, make_inputs

MOST_ERRORS = 3  # after so many crashes the rest is left out
ONE_DEVICE = "one device"


class Status(Enum):
    """What became of a call."""

    PASS = "pass"
    FAIL = "fail"
    CANNOT = "cannot"  # the kernel that was asked for does not do this
    ERROR = "error"  # it raised, died or hung
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a call, on one rank or on all.

    Attributes:
        call, status: which, and the same in a word.
        kernel: that was used.
        errors: against the oracle.
        reason: why there are none.
        differences: from one device, and from another kernel, by its name; only for the report.
    """

    call: VerifyCall
    status: Status
    kernel: str = ""
    errors: tuple[Error, ...] = ()
    reason: str = ""
    differences: Mapping[str, tuple[Error, ...]] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail."""
        return self.status in (Status.FAIL, Status.ERROR, Status.LEFT_OUT)


# All calls.


def check_kernels(calls: Sequence[VerifyCall], options: VerifyOptions) -> None:
    """NotImplementedError for kernels that can do none of the calls they were asked for."""
    device = launch.rank_device(options.device, 0)
    asked: dict[str, str] = {}  # by kernel: how
    reasons: dict[str, list[str]] = {}  # by kernel; "": it can
    for call in calls:
        kernel, why = call.placement.kernel, ""
        try:
            _kernel(call, device)
        except NotImplementedError as error:
            why = str(error)
        option = f"--kernel {kernel}" if kernel in options.kernels else call.function.name
        asked.setdefault(kernel, option)
        reasons.setdefault(kernel, []).append(why)
    reasons.pop(AUTO, None)
    refuse_kernels({asked[name]: why for name, why in reasons.items() if all(why)}, device)


def _kernel(call: VerifyCall, device: torch.device) -> str:
    """The kernel that the call will get; NotImplementedError with reasons if there is none."""
    asked = call_of(call.workload, device, with_lse=True)
    return choose_kernel(call.placement.kernel, asked).name


def check_all(
    calls: Sequence[VerifyCall], options: VerifyOptions, backend: str, timeout: float
) -> Iterator[Result]:
    """Results in the order of the calls, each as soon as all ranks have it."""
    if options.virtual:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # faster for small products than threads that wait for each other
        try:
            for found in check_on_rank(None, options.world_size, calls, options):
                yield _merged([found])
        finally:
            torch.set_num_threads(threads)
    elif launch.torchrun_rank():
        ranks = launch.run_joined(check_on_rank, (calls, options), options.device, backend)
        yield from map(_merged, ranks)
    else:
        yield from _spawned(calls, options, backend, timeout)


def _spawned(
    calls: Sequence[VerifyCall], options: VerifyOptions, backend: str, timeout: float
) -> Iterator[Result]:
    """In new processes; after a crash in yet newer ones, from the next call on."""
    done = crashes = 0
    while done < len(calls) and crashes < MOST_ERRORS:
        args = (calls[done:], options)
        try:
            for ranks in launch.run_spawned(
                check_on_rank, args, options.world_size, options.device, backend, timeout
            ):
                yield _merged(ranks)
                done += 1
        except launch.RanksFailed as failure:
            if done < len(calls):
                yield Result(calls[done], Status.ERROR, reason=str(failure))
            done, crashes = done + 1, crashes + 1
    for call in calls[done:]:
        yield Result(call, Status.LEFT_OUT, reason=f"not run after {crashes} crashes")


def _merged(ranks: Sequence[Sequence[Result]]) -> Result:
    """One result of those of all ranks; the first that did not pass has the status."""
    found = [each for results in ranks for each in results]
    worst = next((each for each in found if each.status is not Status.PASS), found[0])
    return replace(
        worst,
        errors=tuple(error for each in found for error in each.errors),
        differences={
            versus: tuple(error for each in found for error in each.differences.get(versus, ()))
            for versus in worst.differences
        },
    )


def check_on_rank(
    rank: int | None, world_size: int, calls: Sequence[VerifyCall], options: VerifyOptions
) -> Iterator[list[Result]]:
    """What this process finds out about each call, as one rank or, with None, as all of them."""
    here = rank or 0
    device = launch.rank_device(options.device, here)
    differences = Differences(options, device)
    for call in calls:
        inputs = make_inputs(call.workload, call.seed, device)
        spread = bool(call.placement.layout)
        virtual = spread and rank is None
        try:
            kernel = _kernel(call, device)
            # The draw of the group's first rank counts; a function without a group has its own.
            torch.manual_seed(call.seed + (here if spread else 0))
            found = call_virtual(call, inputs) if virtual else [call_on_rank(call, inputs, here)]
        except NotImplementedError as reason:
            asked = call.placement.kernel
            status = Status.FAIL if asked == AUTO else Status.CANNOT
            yield [Result(call, status, asked, reason=str(reason))]
            continue
        results = []
        for own, tensors in enumerate(found, here):
            errors = _errors(call, tensors, own, device, whole_sink=virtual or not spread)
            status = Status.PASS if all(error.passed for error in errors) else Status.FAIL
            others = differences.of(call, kernel, tensors, own)
            results.append(Result(call, status, kernel, errors, differences=others))
        yield results


def _errors(
    call: VerifyCall, found: Tensors, rank: int, device: torch.device, whole_sink: bool
) -> tuple[Error, ...]:
    """Errors of one rank's tensors. A rank's dsink is its own queries' part, unless it is whole."""
    errors = []
    for name, got in found.items():
        right = expected(call.workload, call.seed, device)[name]
        if name != "dsink":
            right = replace(right, tensor=part(call, name, right.tensor, rank))
        elif not whole_sink:
            queries = tuple(tokens(call, "q", rank))
            own = expected(call.workload, call.seed, device, queries)[name]
            numbers = ("plain", "largest", "scale")
            most = {each: max(getattr(own, each), getattr(right, each)) for each in numbers}
            right = replace(own, **most)
        errors.append(right.compare(name, rank, got))
    return tuple(errors)


# One call.


def tokens(call: VerifyCall, name: str, rank: int) -> list[int]:
    """Places in the stream of a rank's queries or, if `name` is k or v, keys; in local order."""
    keys = name.removeprefix("d") in ("k", "v")
    lengths = call.workload.lengths_k if keys else call.workload.lengths
    if not call.placement.layout:  # every rank does everything
        return list(range(sum(lengths)))
    return cut(call.placement.layout, lengths, rank, call.placement.world_size)


def part(call: VerifyCall, name: str, whole: Tensor, rank: int) -> Tensor:
    """A rank's tokens of a whole tensor: q, k, v, out, lse or the gradient of one."""
    places = torch.tensor(tokens(call, name, rank), dtype=torch.int64, device=whole.device)
    return whole.index_select(-1 if name.endswith("lse") else -3, places)


def call_on_rank(call: VerifyCall, inputs: Tensors, rank: int) -> Tensors:
    """Call the function as this rank of the default group, and differentiate."""
    leaves = packed_leaves(call.function.form, *_shard(call, inputs, rank))
    options = _options(call, inputs)
    if call.function.prefix:
        del options["kernel"]  # the name says it
    device = inputs["q"].device
    own = own_arguments(call.function, call.workload, call.placement, rank, device)
    out, lse, _ = getattr(api, call.function.name)(**leaves, **own, **options)
    if options["sink"] is not None:
        leaves["sink"] = options["sink"]
    grads = _differentiate(call, inputs, list(leaves.values()), {rank: (out, lse)})
    found = {"out": out.detach(), "lse": lse.detach()}
    for name, grad in zip(leaves, grads, strict=True):
        if name in ("qkv", "kv"):
            views = zip(name, grad.unbind(-3), strict=True)
            found |= {f"d{each}": view for each, view in views}
        else:
            found[f"d{name}"] = grad
    return found


def call_virtual(call: VerifyCall, inputs: Tensors) -> list[Tensors]:
    """Run all ranks of the call in this process; dsink comes whole, with rank 0."""
    workload, placement = call.workload, call.placement
    shards = [_shard(call, inputs, rank) for rank in range(placement.world_size)]
    options = _options(call, inputs)
    results = run_virtual(
        placement.layout,
        placement.route,
        shards,
        workload.lengths,
        workload.lengths_k,
        packed=workload.packed,
        heads_k_stride=placement.heads_k_stride,
        **options,
    )
    outputs = {rank: (out, lse) for rank, (out, lse, _) in enumerate(results)}
    sink = [] if options["sink"] is None else [options["sink"]]
    leaves = [x for shard in shards for x in shard]
    grads = _differentiate(call, inputs, leaves + sink, outputs)
    found = []
    for rank, (out, lse) in outputs.items():
        dq, dk, dv = grads[3 * rank : 3 * rank + 3]
        found.append({"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv})
    if sink:
        found[0]["dsink"] = grads[-1]
    return found


@lru_cache(maxsize=4)  # functions and layouts share it
def call_on_one_device(workload: Workload, seed: int, kernel: str, device: torch.device) -> Tensors:
    """Compute the whole workload on one device, and differentiate."""
    name = "flash_attn_varlen_func" if workload.packed else "flash_attn_func"
    (function,) = find_functions((name,))
    torch.manual_seed(seed)
    call = VerifyCall(function, workload, Placement(1, "", "", kernel), seed=seed)
    return call_on_rank(call, make_inputs(workload, seed, device), 0)


def _shard(call: VerifyCall, inputs: Tensors, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part(call, name, inputs[name], rank) for name in ("q", "k", "v"))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _options(call: VerifyCall, inputs: Tensors) -> dict[str, Any]:
    """Arguments that all functions share."""
    sink = inputs.get("sink")
    return {
        **call.workload.options,
        "alibi_slopes": inputs.get("slopes"),
        "return_attn_probs": True,
        "sink": None if sink is None else sink.detach().clone().requires_grad_(),
        "kernel": call.placement.kernel,
    }


def _differentiate(
    call: VerifyCall,
    inputs: Tensors,
    leaves: list[Tensor],
    outputs: Mapping[int, tuple[Tensor, Tensor]],
) -> tuple[Tensor, ...]:
    """Gradients of leaves; `outputs` are out and lse of some ranks."""
    ends, grads = [], []
    for rank, (out, lse) in outputs.items():
        for name, end in (("dout", out), ("dlse", lse)):
            if name in inputs:
                ends.append(end)
                grads.append(part(call, name, inputs[name], rank))
    return torch.autograd.grad(ends, leaves, grads)


# Two results of the same call.


class Differences:
    """Compares what a process computes with one device, and with the kernel `options.versus`."""

    def __init__(self, options: VerifyOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        self._workload: Workload | None = None
        self._baseline: dict[Any, tuple[str, Tensors]] = {}  # of this workload

    def of(
        self, call: VerifyCall, kernel: str, found: Tensors, rank: int
    ) -> dict[str, tuple[Error, ...]]:
        """By what a rank's tensors are compared with; calls come in the order of `make_calls`."""
        if not self._options.report:
            return {}
        if call.workload != self._workload:
            self._workload = call.workload
            self._baseline.clear()
        others: dict[str, Tensors] = {}
        if call.placement.layout:
            whole = call_on_one_device(call.workload, call.seed, kernel, self._device)
            names = [name for name in found if name != "dsink"]  # a rank has a part of the sum
            others[ONE_DEVICE] = {name: part(call, name, whole[name], rank) for name in names}
        placement, versus = call.placement, self._options.versus
        key = (replace(call.function, prefix=""), placement.layout, placement.route, rank)
        used, tensors = self._baseline.get(key, (kernel, found))
        if placement.kernel == versus:
            self._baseline[key] = kernel, found
        elif used != kernel:
            others[versus] = tensors
        right = expected(call.workload, call.seed, self._device)
        differences = {}
        for name_of_other, other in others.items():
            errors = (
                replace(right[name], tensor=want).compare(name, rank, found[name])
                for name, want in other.items()
            )
            # The other tensors may be as far from the right ones as these.
            differences[name_of_other] = tuple(
                replace(each, plain=2 * each.plain, limit=2 * each.limit) for each in errors
            )
        return differences
