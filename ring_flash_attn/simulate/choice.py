"""`Planner`: which layout and route `ContextParallel` takes for a batch, by predicted time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2
from threading import Lock
from typing import Any

import torch

from ..api.context_parallel import BatchPlacement
from ..bench.links import Link, Topology, find_link
from ..bench.workload import PRESETS, Workload
from ..engine.checks import check_flag, check_integer, check_window
from ..kernels.base import AUTO, LIBRARIES, NATIVE, load_kernel
from ..plan.balanced import Balanced
from ..plan.layout import Layout, get_layout
from .gpus import INTERFERENCE, find_gpu, gpu_names
from .machine import Gpu, Machine
from .planner import kernels_for, plan_workload
from .ranking import Ranking

_SEQUENCES = ("zigzag", "contiguous")  # layouts of a batch of equal sequences; others never win


@dataclass(frozen=True)
class Planner:
    """Chooses what `ContextParallel` is told to take as "auto": layout, route and its parameters.

    The first batch of a kind is planned as `plan_for` does it, which takes seconds; all of that
    kind take the same. Batches are of one kind if they have as many sequences, and if their tokens,
    and the length of the document that a token is in on average, round to the same powers of two.
    Nothing is sent: every rank of a group shards the same batches in the same order, and so they
    choose alike.

    Attributes:
        rankings: what was found, by kind of batch.

    Args:
        model: whose attention: a Hugging Face model's config, (nheads, nheads_k, headdim), or one
            of the names of `rfa plan --preset`.
        topology: what lies between the ranks, as in `plan_for`.
        gpu: as in `plan_for`; by default that of this process.
        causal, window_size: the mask of most layers.
        memory_limit: as in `plan_for`.
    """

    model: Any
    topology: Topology | Link | str
    gpu: str | None = None
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    memory_limit: int | None = None
    rankings: dict[tuple[object, ...], Ranking] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _machine: Machine = field(init=False, repr=False, compare=False)
    _workload: Workload = field(init=False, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        link = find_link(self.topology) if isinstance(self.topology, str) else self.topology
        if link is None:
            raise ValueError("topology 'none': a planner needs to know what lies between ranks")
        gpu = find_gpu(_this_gpu() if self.gpu is None else self.gpu)
        workload = Workload(
            1,
            1,
            *_heads(self.model),
            check_flag("causal", self.causal),
            check_window(self.window_size),
        )
        if self.memory_limit is not None:
            check_integer("memory_limit", self.memory_limit, 1)
        kernels_for(workload, gpu, None)  # whether there are rates
        object.__setattr__(self, "_machine", Machine(gpu, Topology.of(link), INTERFERENCE))
        object.__setattr__(self, "_workload", workload)

    def choose(
        self,
        lengths: Sequence[int],
        batch: int | None,
        world_size: int,
        layout: Layout | None,
        route: str | None,
        kernel: str,
    ) -> BatchPlacement:
        """What the group of a `ContextParallel` takes for a batch.

        Args:
            lengths: of packed documents, or of one sequence of a batch.
            batch: sequences; None: packed documents.
            world_size: number of ranks.
            layout, route: what is given; None: to be chosen.
            kernel: as given, "auto" too.
        """
        tokens = sum(lengths)
        at_token = sum(length * length for length in lengths) / max(1, tokens)
        name = None if layout is None else layout.name
        sizes = tuple(round(log2(max(1.0, size))) for size in (tokens, at_token))
        kind = (batch, *sizes, world_size, name, route, kernel)

        def plan() -> Ranking:
            sequences = {"batch": batch, "seqlen": tokens}
            pack = {"batch": 1, "cu_seqlens": (0, *accumulate(lengths))}
            values = {**self._workload.to_dict(), **(sequences if batch else pack)}
            workload = Workload.from_dict(values)
            return plan_workload(
                workload,
                world_size,
                self._machine,
                memory_limit=self.memory_limit,
                kernel=_kernel(kernel, workload, self._machine.gpu),
                layouts=(name,) if name else self._layouts(workload, world_size),
                routes=(route,) if route else (),
            )

        with self._lock:  # batches are sharded in any thread
            if kind not in self.rankings:
                self.rankings[kind] = plan()
            best = self.rankings[kind].best.placement
        return BatchPlacement(layout or get_layout(best.layout), best.route, best.parameters)

    def _layouts(self, workload: Workload, world_size: int) -> Sequence[str]:
        if not workload.packed:
            return _SEQUENCES
        node = self._machine.topology.ranks_per_node
        several = node is not None and node < world_size
        return (Balanced(ranks_per_node=node if several else None).name,)


def _kernel(name: str, workload: Workload, gpu: Gpu) -> str:
    """The one to price: the fastest that is installed, where a name leaves it open."""
    if name not in (AUTO, NATIVE):
        return name
    known = kernels_for(workload, gpu, None)
    known = tuple(each for each in known if name == AUTO or each in LIBRARIES)
    if not known:
        raise ValueError(f"kernel {name!r}: none of {', '.join(LIBRARIES)} has rates on {gpu.name}")
    return next((each for each in known if not isinstance(load_kernel(each), str)), known[0])


def _this_gpu() -> str:
    """The name that this process's GPU has here."""
    if not torch.cuda.is_available():
        raise ValueError(f"gpu: there is none here; say which: {', '.join(gpu_names())}")
    device = torch.cuda.get_device_name()
    for name in gpu_names():
        if re.search(rf"\b{name}\b", device):
            return name
    raise ValueError(f"gpu: no rates for {device!r}; name one of {', '.join(gpu_names())}")


def _heads(model: Any) -> tuple[int, int, int]:
    """Query heads, KV heads, head dimension."""
    if isinstance(model, str):
        if model not in PRESETS:
            raise ValueError(f"unknown preset {model!r}; choose one of {', '.join(PRESETS)}")
        shape = PRESETS[model]
        return shape.nheads, shape.nheads_k, shape.headdim
    if isinstance(model, Sequence) and len(model) == 3:
        heads = [check_integer("model", each, 1) for each in model]
        return heads[0], heads[1], heads[2]
    text = model.get_text_config() if hasattr(model, "get_text_config") else model
    nheads = getattr(text, "num_attention_heads", None)
    if nheads is None:
        raise TypeError(
            "model must be a Hugging Face config, (nheads, nheads_k, headdim), or the name of a "
            f"preset, not {type(model).__name__}"
        )
    nheads_k = getattr(text, "num_key_value_heads", None) or nheads
    return nheads, nheads_k, getattr(text, "head_dim", None) or text.hidden_size // nheads
