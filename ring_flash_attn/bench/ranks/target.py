"""What is timed: a distributed function at a size, and what is found out about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from ..contenders import with_chosen_kernel
from ..report import BOTH_FLOPS
from ..results import BOTH
from ..scenario import Scenario, make_scenario

ANYTHING = "ring_attention"  # takes its point as arguments


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of one rank's shard.

    Attributes:
        batch, seqlen: of functions for batches; packed functions get as many documents.
        cu_seqlens: offsets of packed documents in the shard instead.
        nheads, nheads_k, headdim, dtype: of q, k and v; packed q, k and v have nheads KV heads.
        causal: queries see no later keys.
        heads_k_stride: KV heads that travel together where keys are gathered; None: all.
    """

    batch: int
    seqlen: int
    cu_seqlens: tuple[int, ...] | None
    nheads: int
    nheads_k: int
    headdim: int
    dtype: torch.dtype
    causal: bool
    heads_k_stride: int | None = None

    def documents(self) -> tuple[int, ...]:
        """Offsets of what packed functions get."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return tuple(accumulate([0] + [self.seqlen] * self.batch))


@dataclass(frozen=True)
class Target:
    """A public function, and what it is to compute.

    Attributes:
        function: its name.
        form: how q, k and v come; the end of the name.
        signature: name of its list of arguments in `signatures.py`.
        takes_kernel: False where the name says it.
        scenario: sizes, layout, route, and the kernel that was chosen.
    """

    function: str
    form: str
    signature: str
    takes_kernel: bool
    scenario: Scenario

    @property
    def name(self) -> str:
        """Different for different targets."""
        s = self.scenario
        point = f"{s.layout} × {s.route} × {s.kernel}" if self.function == ANYTHING else s.kernel
        return f"{self.function} ({point})"

    @property
    def alone(self) -> str:
        """The function that does it on one device."""
        form = (self.form or "func").removesuffix("_v2")
        return f"flash_attn{'_varlen' if self.scenario.packed else ''}_{form}"

    @property
    def base(self) -> str:
        """The same for targets that are compared with the same run on one device."""
        s = self.scenario
        return f"{self.alone}, {s.kernel}, {s.lengths}, {s.nheads_k} KV heads, on one device"

    def flops(self, passes: str) -> float:
        """Of a rank, on average."""
        s = self.scenario
        lengths = [length * s.world_size for length in s.lengths]
        pairs = sum(n * (n + 1) // 2 if s.causal else n * n for n in lengths)
        forward = 4 * s.batch * s.nheads * s.headdim * pairs / s.world_size
        return forward * (BOTH_FLOPS if passes == BOTH else 1)


@dataclass(frozen=True, slots=True)
class Timed:
    """One target, one way.

    Attributes:
        samples_ms: of each run the slowest rank's time; for a replay the runs of the slowest rank.
        theoretic_ms: world size times what one device takes for a rank's own tokens.
        peak_bytes: above inputs, outputs and gradients, on the rank that holds most; None on CPUs.
    """

    samples_ms: tuple[float, ...]
    theoretic_ms: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out: times by passes, or why there are none."""

    target: Target
    timed: Mapping[str, Timed] = field(default_factory=dict)
    failed: str | None = None


def make_target(
    function: str,
    form: str,
    signature: str,
    layout: str,
    route: str,
    *,
    packed: bool,
    kernel: str,
    takes_kernel: bool,
    size: Size,
    world_size: int,
    device: torch.device,
) -> Target:
    """A target, whose kernel is still to be chosen; ValueError for a wrong size."""
    nheads_k = size.nheads if form.startswith("qkv") else size.nheads_k
    stride = size.heads_k_stride or nheads_k if route == "all_gather" else None
    scenario = make_scenario(
        world_size=world_size,
        ranks=None,
        layout=layout,
        route=route,
        kernel=kernel,
        seqlen=size.seqlen,
        cu_seqlens=size.documents() if packed else None,
        batch=1 if packed else size.batch,
        nheads=size.nheads,
        nheads_k=nheads_k,
        headdim=size.headdim,
        dtype=size.dtype,
        causal=size.causal,
        heads_k_stride=stride,
        sources_per_launch=None,
        device=device,
    )
    return Target(function, form, signature, takes_kernel, scenario)


def with_kernel(target: Target) -> Target:
    """The target with the kernel that it gets; NotImplementedError with all reasons if none."""
    return replace(target, scenario=with_chosen_kernel(target.scenario))
