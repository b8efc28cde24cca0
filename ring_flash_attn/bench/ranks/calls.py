"""Public functions with their arguments on one rank, ready to be called again and again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ... import api
from ..scenario import Scenario
from ..workload import Placement, Workload
from .arguments import own_arguments
from .target import Target


class Call:
    """One function and its data.

    Args:
        function: its public name.
        leaves: q, k, v, however they come.
        dout: gradient of the output.
        arguments: all others.
    """

    def __init__(
        self, function: str, leaves: dict[str, Tensor], dout: Tensor, arguments: dict[str, Any]
    ) -> None:
        self._function = getattr(api, function)
        self._leaves, self._dout, self._arguments = leaves, dout, arguments

    def forward(self) -> Tensor:
        """Without anything kept for gradients."""
        with torch.no_grad():
            return self._run()

    def both(self) -> tuple[Tensor, ...]:
        """The output and the gradients."""
        out = self._run()
        return out, *torch.autograd.grad(out, list(self._leaves.values()), self._dout)

    def _run(self) -> Tensor:
        out: Tensor = self._function(**self._leaves, **self._arguments)
        return out


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, of how many, and its device."""

    rank: int
    world_size: int
    device: torch.device


def on_rank(target: Target, place: Place) -> Call:
    """The function itself, on this rank of the default group."""
    s = target.scenario
    placement = Placement(place.world_size, s.layout, s.route, s.kernel, s.heads_k_stride)
    arguments = own_arguments(
        target.signature, _workload(s, place.world_size), placement, place.rank, place.device
    )
    if target.takes_kernel:
        arguments["kernel"] = s.kernel
    return _call(target.function, target, s.size(place.rank), arguments, place)


def _workload(scenario: Scenario, times: int) -> Workload:
    """Documents `times` as long as in a rank's shard."""
    s = scenario
    cu_seqlens = tuple(accumulate((times * n for n in s.lengths), initial=0)) if s.packed else None
    heads = (s.nheads, s.nheads_k, s.headdim)
    return Workload(s.batch, times * s.tokens, *heads, s.causal, cu_seqlens=cu_seqlens)


def on_one_device(target: Target, place: Place) -> Call:
    """The same kernel on a rank's own tokens."""
    scenario = target.scenario
    signature = "single"
    if scenario.packed:
        signature = "single_documents_qkv" if target.form.startswith("qkv") else "single_documents"
    own = own_arguments(signature, _workload(scenario, 1), Placement(1), 0, place.device)
    arguments = {**own, "kernel": scenario.kernel}
    return _call(target.alone, target, scenario.tokens, arguments, place)


def _call(
    function: str, target: Target, tokens: int, arguments: dict[str, Any], place: Place
) -> Call:
    leaves, dout = _data(target.scenario, target.form, tokens, place.device)
    return Call(function, leaves, dout, {**arguments, "causal": target.scenario.causal})


def _data(
    scenario: Scenario, form: str, tokens: int, device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    (q, k, v), dout = replace(scenario, device=device).shard(tokens)
    if scenario.packed:
        q, k, v, dout = (x.squeeze(0) for x in (q, k, v, dout))
    if form.startswith("qkv"):
        leaves = {"qkv": torch.stack([q, k, v], -3)}
    elif form.startswith("kv"):
        leaves = {"q": q, "kv": torch.stack([k, v], -3)}
    else:
        leaves = {"q": q, "k": k, "v": v}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}, dout
