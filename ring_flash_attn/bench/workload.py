"""Workloads and placements: what attention is to compute, and how it is spread.

Importing it loads no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ..plan.layout import Span
from ..plan.tiles import Mask, make_tile
from .documents import Drawn
from .links import NONE, Link, Topology

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..engine.prepare import Options
    from ..kernels.base import Call
    from ..kernels.costs import Size
    from ..plan.problem import Problem

FORWARD, BACKWARD, BOTH = PASSES = ("forward", "backward", "both")
FLOPS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # of the forward pass
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
DTYPES: Mapping[str, str] = {  # by what users write: torch's name
    **{name: long for long, short in SHORT_DTYPES.items() for name in (short, long)},
    "half": "float16",
}
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_LSE_BYTES = 4
_SEED = 0
_SIZES = ("batch", "seqlen", "nheads", "nheads_k", "headdim")
_FEATURES = (  # what most workloads do not have
    "seqlen_k", "headdim_v", "softmax_scale", "softcap", "dropout_p", "alibi", "sink", "lse_grad",
)  # fmt: skip


def dtype_name(dtype: str | torch.dtype) -> str:
    """torch's name of it, "bfloat16" for "bf16"; ValueError if there is none."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def find_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """torch's object, by its long or short name; ValueError if there is none."""
    import torch

    return getattr(torch, dtype_name(dtype))


def lengths_of(cu_seqlens: Iterable[int]) -> tuple[int, ...]:
    """Tokens of each document; ValueError unless the offsets start at 0 and go up."""
    offsets = tuple(cu_seqlens)
    lengths = tuple(end - start for start, end in pairwise(offsets))
    if not lengths or offsets[0] != 0 or min(lengths) < 0 or not sum(lengths):
        raise ValueError(f"cu_seqlens {','.join(map(str, offsets))} must start at 0 and go up")
    return lengths


def rank_tokens(cu_seqlens: Sequence[int], world_size: int, seqlen: int | None = None) -> int:
    """Tokens of a rank, rounded down, of packed documents over all ranks.

    Raises:
        ValueError: there are fewer tokens than ranks, or not `seqlen` for each.
    """
    tokens = sum(lengths_of(cu_seqlens))
    if seqlen is not None and tokens != seqlen * world_size:
        raise ValueError(
            f"seqlen {seqlen} and cu_seqlens {','.join(map(str, cu_seqlens))}: offsets are those "
            "of the whole stream over all ranks, no longer those of a rank, and must end at "
            f"{world_size} × {seqlen} = {world_size * seqlen}"
        )
    if tokens < world_size:
        raise ValueError(f"cu_seqlens ends at {tokens}: fewer tokens than {world_size} ranks")
    return tokens // world_size


@dataclass(frozen=True)
class Workload:
    """One attention call over all tokens, whoever computes it; names as in flash-attn."""

    batch: int = 2
    seqlen: int = 1024  # of each sequence; of packed documents all tokens
    nheads: int = 8
    nheads_k: int = 8
    headdim: int = 64
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    dtype: str = "bfloat16"  # torch's name; short names and torch's objects will do
    cu_seqlens: tuple[int, ...] | None = None  # packed documents: offsets in the whole stream
    drawn: Drawn | None = None  # how these were drawn, if they were
    seqlen_k: int | None = None  # of the keys, if there are more or fewer than queries
    cu_seqlens_k: tuple[int, ...] | None = None
    headdim_v: int | None = None  # of v and out, if it is not headdim
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: bool = False
    sink: bool = False
    lse_grad: bool = False  # the loss depends on lse as well

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("dtype", dtype_name(self.dtype))
        put("window", tuple(self.window))
        if self.cu_seqlens is not None:
            if self.batch != 1:
                raise ValueError(f"batch {self.batch}: packed documents have batch 1")
            put("cu_seqlens", tuple(self.cu_seqlens))
            put("seqlen", sum(lengths_of(self.cu_seqlens)))
        if self.cu_seqlens_k is not None:
            put("cu_seqlens_k", tuple(self.cu_seqlens_k))
            put("seqlen_k", sum(lengths_of(self.cu_seqlens_k)))
            if len(self.cu_seqlens_k) != len(self.cu_seqlens or ()):
                raise ValueError("cu_seqlens_k must delimit as many documents as cu_seqlens")
        if self.headdim_v == self.headdim:
            put("headdim_v", None)
        for name in (*_SIZES, *(["headdim_v"] if self.headdim_v is not None else [])):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.nheads % self.nheads_k:
            raise ValueError(
                f"the number of query heads must be a multiple of the number of KV heads, but "
                f"nheads is {self.nheads} and nheads_k {self.nheads_k}"
            )
        if min(self.window) < -1:
            raise ValueError("window {},{}: sides are -1 (all keys) or more".format(*self.window))

    def __str__(self) -> str:
        heads = f"{self.nheads}/{self.nheads_k}" if self.nheads_k != self.nheads else self.nheads
        tokens, seen = f"seqlen {self.seqlen}", "causal" if self.causal else "full"
        if self.packed:
            tokens += f" in {len(self.lengths)} document{'s' * (len(self.lengths) != 1)}"
            if self.drawn is not None:
                tokens += f" ({self.drawn.documents}, seed {self.drawn.seed})"
        if self.window != (-1, -1):
            seen += ", window {},{}".format(*self.window)
        if self.softcap:
            seen += f", softcap {self.softcap:g}"
        dims = f"{self.headdim}/{self.headdim_v}" if self.headdim_v else self.headdim
        sizes = f"batch {self.batch}, {tokens}, heads {heads}, headdim {dims}"
        return f"{sizes}, {seen}, {self.dtype}"

    # Shapes.

    @property
    def packed(self) -> bool:
        """Packed documents rather than a batch."""
        return self.cu_seqlens is not None

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Queries of each document; of a batch those of one sequence."""
        return (self.seqlen,) if self.cu_seqlens is None else lengths_of(self.cu_seqlens)

    @cached_property
    def lengths_k(self) -> tuple[int, ...]:
        """Likewise keys."""
        if self.cu_seqlens_k is not None:
            return lengths_of(self.cu_seqlens_k)
        return self.lengths if self.seqlen_k is None else (self.seqlen_k,)

    @property
    def mask(self) -> Mask:
        """What queries see."""
        return Mask.of(causal=self.causal, window_size=self.window)

    @property
    def options(self) -> dict[str, Any]:
        """What attention functions take of it, by flash-attn's names."""
        names = ("causal", "softmax_scale", "softcap", "dropout_p")
        return {"window_size": self.window, **{name: getattr(self, name) for name in names}}

    @property
    def features(self) -> dict[str, Any]:
        """What it has besides a mask and documents with as many keys as queries."""
        usual = {each.name: each.default for each in fields(self)}
        values = {name: getattr(self, name) for name in _FEATURES}
        return {name: value for name, value in values.items() if value != usual[name]}

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's object."""
        return find_dtype(self.dtype)

    def share(self, world_size: int) -> Workload:
        """A rank's own tokens, as a call on one device: every document `world_size` times shorter.

        `world_size` times its pairs are a rank's part of all pairs, if that were even.
        """
        if self.cu_seqlens is None:
            return replace(self, seqlen=max(1, self.seqlen // world_size))
        *offsets, total = (end // world_size for end in self.cu_seqlens)
        return replace(self, cu_seqlens=(*offsets, max(1, total)), drawn=None)

    # What it comes to.

    @cached_property
    def pairs(self) -> int:
        """Allowed (query, key) pairs of one head, over the documents of one sequence."""
        mask, total = self.mask, 0
        for (q, k), count in Counter(zip(self.lengths, self.lengths_k, strict=True)).items():
            if q and k:
                tile = make_tile(Span(0, q, k - q, 1, 0, 0), Span(0, k, 0, 1, 0, 0), mask)
                total += count * tile.pairs if tile is not None else 0
        return total

    def flops(self, passes: str = FORWARD) -> float:
        """Of two matrix products forward, and of five backward."""
        dims = self.headdim + (self.headdim_v or self.headdim)
        return FLOPS[passes] * 2 * self.batch * self.nheads * self.pairs * dims

    def bytes(self, passes: str = FORWARD) -> int:
        """The least that a pass reads and writes: each tensor once.

        Forward q, k, v, out and lse; backward q, k, v, out, dout, dq, dk, dv and lse.
        """
        tensors, lses = {FORWARD: (1, 1), BACKWARD: (2, 1), BOTH: (3, 2)}[passes]
        rows, rows_k = self.seqlen * self.nheads, sum(self.lengths_k) * self.nheads_k
        dims = self.headdim + (self.headdim_v or self.headdim)  # q and out; k and v
        each = (rows + rows_k) * dims * _ITEMSIZE[self.dtype]
        return self.batch * (tensors * each + lses * rows * _LSE_BYTES)

    def tensors(self, device: torch.device, tokens: int | None = None) -> Any:
        """Random (q, k, v), each (batch, seqlen, nheads, headdim), and dout.

        All tokens, or as many as `tokens` of a rank's shard.
        """
        import torch

        generator = torch.Generator(device).manual_seed(_SEED)
        rows_k = sum(self.lengths_k) if tokens is None else tokens
        rows = self.seqlen if tokens is None else tokens
        dim_v = self.headdim_v or self.headdim

        def make(*shape: int) -> Tensor:
            shape = (self.batch, *shape)
            return torch.randn(shape, generator=generator, dtype=self.torch_dtype, device=device)

        q = make(rows, self.nheads, self.headdim)
        k, v = make(rows_k, self.nheads_k, self.headdim), make(rows_k, self.nheads_k, dim_v)
        return (q, k, v), make(rows, self.nheads, dim_v)

    # In files.

    def to_dict(self) -> dict[str, Any]:
        """Plain values; features and documents only where there are any."""
        names = (*_SIZES, "causal", "window", "dtype")
        values = {name: getattr(self, name) for name in names}
        values["window"] = list(self.window)
        if self.packed:
            values["lengths"] = list(self.lengths)
        if self.drawn is not None:
            values |= asdict(self.drawn)
        if self.cu_seqlens_k is not None:
            values["lengths_k"] = list(self.lengths_k)
        return {**values, **self.features}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Workload:
        """What `to_dict` wrote; other names are left out."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for side in ("", "_k"):
            if f"lengths{side}" in values:
                known[f"cu_seqlens{side}"] = tuple(accumulate(values[f"lengths{side}"], initial=0))
        if "documents" in values:
            known["drawn"] = Drawn(*(values[each.name] for each in fields(Drawn)))
        return cls(**known)


@dataclass(frozen=True)
class Placement:
    """How a workload is spread over ranks, and by which kernel; names as in `ring_attention`."""

    world_size: int = 8
    layout: str = "zigzag"
    route: str = "ring"
    kernel: str = "auto"
    heads_k_stride: int | None = None
    sources_per_launch: int | None = None  # None: by size, if the route is a ring
    link: Link | Topology | None = None  # that a replay emulates; None: communication costs nothing
    ranks_per_node: int | None = None  # of routes that know nodes; None: all

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be positive, not {self.world_size}")

    def __str__(self) -> str:
        return f"{self.layout} × {self.route} × {self.kernel}"

    @property
    def link_name(self) -> str:
        """As in files."""
        return NONE if self.link is None else self.link.name

    @property
    def parameters(self) -> dict[str, int]:
        """Those of the route that are not left to it."""
        names = ("heads_k_stride", "sources_per_launch", "ranks_per_node")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in rows of results, where the kernel is the implementation."""
        values = {"world_size": self.world_size, "layout": self.layout, "route": self.route}
        return {**values, **self.parameters}

    def describe(self, workload: Workload) -> dict[str, Any]:
        """A workload in rows of results: `seqlen` is that of a rank."""
        return {**workload.to_dict(), "seqlen": workload.seqlen // self.world_size}


PRESETS: Mapping[str, Workload] = {
    "gpt2-small": Workload(8, 1024, 12, 12, 64, True),
    "gpt3": Workload(2, 2048, 96, 96, 128, True),
    "bert-base": Workload(16, 512, 12, 12, 64, False),
    "bert-large": Workload(8, 512, 16, 16, 64, False),
    "8k": Workload(1, 8192, 8, 8, 64, False),
    "16k": Workload(1, 16384, 8, 8, 64, False),
    "batch-inference": Workload(32, 512, 8, 8, 64, False),
    "llama3-8b": Workload(1, 8192, 32, 8, 128, True),
}
FORWARD_ONLY = frozenset({"batch-inference"})  # presets without gradients


# As the library sees them.


def call_of(
    workload: Workload, device: torch.device, with_lse: bool = False, grad: bool = True
) -> Call:
    """What kernels are asked whether they can do it; `grad`: the backward pass, too."""
    import torch

    from ..kernels.base import Call

    w = workload
    same = ("nheads", "nheads_k", "headdim", "mask", "softcap", "dropout_p", "sink")
    slopes = (w.nheads,) if w.packed else (w.batch, w.nheads)
    return Call(
        **{name: getattr(w, name) for name in same},
        device=device,
        dtype=w.torch_dtype,
        headdim_v=w.headdim_v or w.headdim,
        softmax_scale=w.headdim**-0.5 if w.softmax_scale is None else w.softmax_scale,
        alibi_slopes=torch.empty(slopes, device="meta") if w.alibi else None,
        packed=len(w.lengths) > 1,
        with_lse=with_lse,
        needs_grad=grad,
    )


def options_of(workload: Workload, kernel: str) -> Options:
    """The arguments that all public functions share."""
    from ..engine.prepare import Options

    return Options(**workload.options, kernel=kernel)


def problem_of(workload: Workload, placement: Placement) -> Problem:
    """What all ranks compute together; ValueError where the placement makes no sense."""
    from ..engine.entry import make_problem

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
        placement.ranks_per_node,
    )


def size_of_workload(workload: Workload, world_size: int = 1) -> Size:
    """What the choice of kernels depends on, besides the call."""
    from ..kernels.costs import size_of

    return size_of(workload.batch, workload.lengths, workload.lengths_k, world_size)


def resolve(
    workload: Workload, placement: Placement, device: torch.device, grad: bool = True
) -> Placement:
    """The placement with the library's choice of a kernel; ValueError if it makes no sense.

    NotImplementedError with every reason if no kernel can do it.
    """
    from ..kernels.base import choose_kernels

    problem_of(workload, placement)
    size = size_of_workload(workload, placement.world_size)
    kernels = choose_kernels(placement.kernel, call_of(workload, device, grad=grad), size)
    if kernels.forward is not kernels.backward:  # one for each pass: what "auto" does
        return placement
    return replace(placement, kernel=kernels.name)


def refuse_kernels(reasons: Mapping[str, Sequence[str]], device: torch.device) -> None:
    """NotImplementedError if there are any: of each kernel, what `choose_kernel` says each time."""
    import torch

    if not reasons:
        return
    lines = []
    for name, why in reasons.items():
        shortest = min((text.splitlines()[1:] for text in why), key=len)
        lines += [f"{name} can do none of this on {device.type}:", *shortest]
    if device.type == "cpu" and torch.cuda.is_available():
        lines.append("There is a GPU here: --device cuda takes it.")
    lines.append(
        "Choose other kernels (--kernel, --versus) or functions; `rfa info` says what can run here."
    )
    raise NotImplementedError("\n".join(lines))
