"""Runs cases on ranks, in this process, in new ones or in torchrun's, and compares the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..bench.functions import find_functions
from ..bench.inputs import call_of
from ..bench.ranks.arguments import own_arguments, packed_leaves
from ..bench.versus import refuse_kernels
from ..bench.workload import Placement, Workload
from ..comm import launch
from ..engine.entry import run_virtual
from ..kernels.base import AUTO, choose_kernel
from .catalogue import CANNOT, ERROR, FAIL, LEFT_OUT, PASS, Case, Error, VerifyOptions
from .expected import Expected, Tensors, expected, make_inputs
from .oracle import cut

MOST_ERRORS = 3  # after so many crashes the rest is left out
ONE_DEVICE = "one device"

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
    return choose_kernel(case.placement.kernel, asked).name


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
    return replace(
        worst,
        errors=tuple(error for each in ranks for error in each.errors),
        differences={
            versus: tuple(error for each in ranks for error in each.differences.get(versus, ()))
            for versus in worst.differences
        },
    )


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
            errors: list[Error] = []
            differences: dict[str, tuple[Error, ...]] = {}
            for own, tensors in zip(ranks, found, strict=True):
                right = _expected(case, own, device, own_sink=case.spread and not virtual)
                errors += [right[name].compare(name, own, x) for name, x in tensors.items()]
                others = _others(case, kernel, tensors, own, baseline, options)
                for what, other in others.items():
                    apart = (right[n].compare(n, own, tensors[n], x) for n, x in other.items())
                    differences[what] = (*differences.get(what, ()), *apart)
            yield replace(
                case,
                status=PASS if all(error.passed for error in errors) else FAIL,
                used_kernel=kernel,
                errors=tuple(errors),
                differences=differences,
            )


def _expected(case: Case, rank: int, device: torch.device, own_sink: bool) -> dict[str, Expected]:
    """A rank's part of what the oracle says; of dsink its own queries' part, or the whole."""
    whole = expected(case.workload, case.seed, device)
    right = {
        name: replace(each, tensor=part(case, name, each.tensor, rank))
        for name, each in whole.items()
        if name != "dsink"
    }
    if "dsink" in whole:
        sink = own = whole["dsink"]
        if own_sink:
            queries = tuple(tokens(case, "q", rank))
            own = expected(case.workload, case.seed, device, queries)["dsink"]
        numbers = ("plain", "largest", "scale")
        most = {each: max(getattr(own, each), getattr(sink, each)) for each in numbers}
        right["dsink"] = replace(own, **most)
    return right


def _others(
    case: Case, kernel: str, found: Tensors, rank: int, baseline: Baseline, options: VerifyOptions
) -> dict[str, Tensors]:
    """What a rank's tensors are compared with: one device, and the kernel `versus`."""
    others: dict[str, Tensors] = {}
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
        others[options.versus] = tensors
    return others


# One call.


def tokens(case: Case, name: str, rank: int) -> list[int]:
    """Places in the stream of a rank's queries or, if `name` is k or v, keys; in local order."""
    keys = name.removeprefix("d") in ("k", "v")
    lengths = case.workload.lengths_k if keys else case.workload.lengths
    if not case.spread:  # every rank does everything
        return list(range(sum(lengths)))
    return cut(case.placement.layout, lengths, rank, case.placement.world_size)


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
            **options,
        )
    else:
        device = inputs["q"].device
        own = own_arguments(function.signature, workload, placement, ranks[0], device)
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
