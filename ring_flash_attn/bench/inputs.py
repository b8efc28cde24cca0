"""A workload as the library sees it: the call for kernels, options, the problem of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..engine.entry import make_problem
from ..engine.prepare import Options
from ..kernels.base import Call, choose_kernel
from ..plan.problem import Problem
from .workload import Placement, Workload


def call_of(workload: Workload, device: torch.device, with_lse: bool = False) -> Call:
    """What kernels are asked whether they can do it."""
    w = workload
    lead = () if w.packed else (w.batch,)
    return Call(
        device=device,
        dtype=w.torch_dtype,
        nheads=w.nheads,
        nheads_k=w.nheads_k,
        headdim=w.headdim,
        headdim_v=w.headdim_v or w.headdim,
        softmax_scale=w.headdim**-0.5 if w.softmax_scale is None else w.softmax_scale,
        mask=w.mask,
        softcap=w.softcap,
        alibi_slopes=torch.empty((*lead, w.nheads), device="meta") if w.alibi else None,
        dropout_p=w.dropout_p,
        sink=w.sink,
        packed=len(w.lengths) > 1,
        with_lse=with_lse,
    )


def options_of(workload: Workload, kernel: str) -> Options:
    """The arguments that all public functions share."""
    return Options(**workload.options, kernel=kernel)


def problem_of(workload: Workload, placement: Placement) -> Problem:
    """What all ranks compute together; ValueError where the placement makes no sense."""
    return make_problem(
        placement.layout,
        placement.route,
        workload.lengths,
        workload.lengths_k,
        placement.world_size,
        options_of(workload, placement.kernel),
        workload.nheads_k,
        placement.heads_k_stride,
        placement.sources_per_launch,
    )


def resolve(workload: Workload, placement: Placement, device: torch.device) -> Placement:
    """The placement with the library's choices made: the kernel, and sources of a launch.

    Raises:
        ValueError: the placement makes no sense.
        NotImplementedError: no kernel can do it; with every reason.
    """
    problem = problem_of(workload, placement)
    sources = problem.sources_per_launch if placement.route == "ring" else None
    kernel = choose_kernel(placement.kernel, call_of(workload, device)).name
    return replace(placement, kernel=kernel, sources_per_launch=sources)
