"""Random calls: what a case is, how cases are drawn, and the inputs they stand for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from calls import FUNCTIONS
from hypothesis import strategies as st
from samples import Sample, make_sample
from strategies import document_lengths

from ring_flash_attn.api.families import PREFIXES
from ring_flash_attn.plan.build import BY_HEADS, BY_NODES, BY_SOURCES, route_names
from ring_flash_attn.plan.layout import layout_names

MOST_RANKS, INTERPRETED_RANKS = 8, 3
VIRTUAL = "virtual_ring_attention"
DOORS = ("virtual", "single", "processes")
STRIDES = ("", "heads first", "columns first", "wide rows", "every second")
RETURNS = ("out", "lse", "lse with gradient")
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One call, forward and backward, over all ranks; the defaults are the simplest call there is.

    Attributes:
        function: public name.
        layout, route: for functions whose name does not say them; so are heads_k_stride (also for
            the llama3 functions), sources_per_launch and (also for functions over nodes)
            ranks_per_node.
        batch: number of sequences; None for packed documents.
        lengths_q, lengths_k: tokens of the documents, or of the one sequence of a batch.
        alibi: "", "heads" for slopes (nheads,), "batch" for (batch, nheads),
            "documents" for (documents, nheads).
        returns: one of RETURNS.
        strides: one of STRIDES, of q, k, v and the gradient of out.
        wanted: inputs that require a gradient, of q, k, v, sink.
        seed: of the inputs.
    """

    function: str = VIRTUAL
    world_size: int = 1
    layout: str = "contiguous"
    route: str = "ring"
    kernel: str = "reference"
    device: str = "cpu"
    dtype: str = "float64"
    batch: int | None = 1
    lengths_q: tuple[int, ...] = (1,)
    lengths_k: tuple[int, ...] = (1,)
    nheads: int = 1
    nheads_k: int = 1
    headdim: int = 1
    headdim_v: int = 1
    heads_k_stride: int | None = None
    sources_per_launch: int | None = None
    ranks_per_node: int | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: str = ""
    sink: bool = False
    deterministic: bool = False
    returns: str = "out"
    strides: str = ""
    wanted: tuple[str, ...] = ("q", "k", "v")
    seed: int = 0

    def __repr__(self) -> str:
        """Only what differs from the simplest call."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        shown = [
            f"{name}={value!r}" for name, (value, default) in values.items() if value != default
        ]
        return f"Case({', '.join(shown)})"

    @property
    def interpreted(self) -> bool:
        """Triton's interpreter is so slow that only small cases are worth their time."""
        return self.kernel == "triton" and self.device == "cpu"

    @property
    def plain_name(self) -> str:
        """The function's name without the kernel."""
        prefix, _, rest = self.function.partition("_")
        return rest if prefix in PREFIXES else self.function

    @property
    def kind(self) -> str:
        """Name of the signature, which says how documents are described."""
        virtual = self.function == VIRTUAL
        return "virtual" if virtual else FUNCTIONS[self.plain_name][0].signature.name

    @property
    def form(self) -> str:
        """How q, k and v come."""
        return "" if self.function == VIRTUAL else FUNCTIONS[self.plain_name][1]

    @property
    def leaves(self) -> list[tuple[str, ...]]:
        """Which of q, k and v each tensor argument holds."""
        if self.form.startswith("qkvpacked"):
            return [("q", "k", "v")]
        return [("q",), ("k", "v")] if self.form.startswith("kv") else [("q",), ("k",), ("v",)]

    @property
    def point(self) -> tuple[str, str]:
        """Layout and route, whoever says them; empty on one device."""
        if self.kind in ("virtual", "anything"):
            return self.layout, self.route
        family, _ = FUNCTIONS[self.plain_name]
        return family.layout, family.route

    @property
    def door(self) -> str:
        """One of DOORS."""
        if self.kind == "virtual":
            return "virtual"
        return "single" if self.kind.startswith("single") else "processes"


@st.composite
def cases(draw: st.DrawFn, function: str, kernel: str, device: str = "cpu") -> Case:
    """Any call that users may make of a function."""
    case = Case(function=function, kernel=kernel, device=device)
    if case.door != "single":
        most = INTERPRETED_RANKS if case.interpreted else MOST_RANKS
        case = replace(case, world_size=draw(st.integers(1, most)))
    case = replace(
        case,
        dtype=draw(st.sampled_from(dtypes(kernel, device))),
        seed=draw(st.integers(0, 99)),
    )
    return _with_options(draw, _with_point(draw, _with_sizes(draw, case)))


def dtypes(kernel: str, device: str) -> tuple[str, ...]:
    """What a kernel takes; the interpreter multiplies bf16 in its own way."""
    if kernel in ("auto", "reference"):
        return ("float64", "float32", *HALF)
    return ("float32", "float16") if device == "cpu" else ("float32", *HALF)


def _with_sizes(draw: st.DrawFn, case: Case) -> Case:
    """Documents as uneven as the function allows, heads and their dimensions."""
    kind, qkv = case.kind, case.form.startswith("qkvpacked")
    packed = "documents" in kind or kind == "llama3"
    if kind in ("virtual", "anything"):
        packed = draw(st.booleans())
    lengths_q = _lengths(draw, case, packed)
    lengths_k = lengths_q
    same = qkv or kind in ("local_documents", "documents", "gathered_documents", "llama3")
    if not same and draw(st.integers(0, 2)) == 2:
        lengths_k = tuple(_length(draw, case) for _ in lengths_q)
    nheads_k = draw(st.integers(1, 4))
    nheads = nheads_k if qkv else nheads_k * draw(st.sampled_from((1, 2, 3)))
    headdims = st.integers(1, 9)
    if not case.interpreted:
        headdims = st.one_of(headdims, st.sampled_from((16, 24, 32, 64)))
    headdim = draw(headdims)
    return replace(
        case,
        batch=None if packed else draw(st.integers(1, 3)),
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim=headdim,
        headdim_v=headdim if "packed" in case.form else draw(st.one_of(st.just(headdim), headdims)),
    )


def _length(draw: st.DrawFn, case: Case) -> int:
    """Tokens of a document; `batch` wants equal shards."""
    most = 40 if case.interpreted else 120
    length = draw(st.one_of(st.integers(0, 3), st.integers(0, 24), st.integers(0, most)))
    return length - length % case.world_size if case.kind == "batch" else length


def _lengths(draw: st.DrawFn, case: Case, packed: bool) -> tuple[int, ...]:
    if not packed:
        return (_length(draw, case),)
    lengths = list(draw(document_lengths))
    if not case.interpreted and draw(st.integers(0, 5)) == 5:
        lengths[0] = draw(st.integers(25, 150))
    if case.kind == "local_documents":
        return tuple(length * case.world_size for length in lengths)
    if case.kind == "llama3":  # the stream divides, and has a token
        total = max(sum(lengths), 1)
        lengths[-1] += -(-total // case.world_size) * case.world_size - sum(lengths)
    return tuple(lengths)


def _with_point(draw: st.DrawFn, case: Case) -> Case:
    """What the function's name leaves open of layout and route."""
    divisors = [n for n in range(1, case.nheads_k + 1) if case.nheads_k % n == 0]
    if case.kind in ("gathered_documents", "llama3"):
        return replace(case, heads_k_stride=draw(st.sampled_from(divisors)))
    nodes = None
    if case.kind not in ("virtual", "anything"):
        if case.point[1] in BY_NODES:
            nodes = _ranks_per_node(draw, case)
        return replace(case, ranks_per_node=nodes)
    route = draw(st.sampled_from(route_names()))
    stride = draw(st.sampled_from((None, *divisors))) if route in BY_HEADS else None
    sources = st.one_of(st.none(), st.integers(1, MOST_RANKS))
    return replace(
        case,
        layout=draw(st.sampled_from(layout_names())),
        route=route,
        heads_k_stride=stride,
        sources_per_launch=draw(sources) if route in BY_SOURCES else None,
        ranks_per_node=_ranks_per_node(draw, case) if route in BY_NODES else None,
    )


def _ranks_per_node(draw: st.DrawFn, case: Case) -> int | None:
    sizes = [n for n in range(1, case.world_size + 1) if case.world_size % n == 0]
    return draw(st.sampled_from((None, *sizes)))


def _with_options(draw: st.DrawFn, case: Case) -> Case:
    sides = st.one_of(st.just(-1), st.integers(0, 4), st.integers(0, 40))
    sink = draw(st.booleans())
    return replace(
        case,
        causal=draw(st.booleans()),
        window_size=draw(st.one_of(st.just((-1, -1)), st.tuples(sides, sides))),
        softmax_scale=draw(st.sampled_from((None, None, 0.3, 1.3))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0))),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.25))),
        alibi=draw(
            st.sampled_from(("", "", "heads", "documents" if case.batch is None else "batch"))
        ),
        sink=sink,
        deterministic=draw(st.booleans()),
        returns=draw(st.sampled_from(RETURNS)),
        strides=draw(st.sampled_from(STRIDES)),
        wanted=_wanted(draw, case, sink),
    )


def _wanted(draw: st.DrawFn, case: Case, sink: bool) -> tuple[str, ...]:
    """All gradients as a rule; tensors that are packed together want one together."""
    parts = case.leaves + [("sink",)] * sink
    if draw(st.integers(0, 2)) == 2:
        parts = [part for part in parts if draw(st.booleans())]
    return tuple(name for part in parts for name in part)


def sample_of(case: Case) -> Sample:
    """Make the inputs over all ranks, on the CPU."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    names = ("causal", "window_size", "softmax_scale", "softcap", "dropout_p", "deterministic")
    options: dict[str, Any] = {name: getattr(case, name) for name in names}
    if case.alibi:
        rows = {"heads": (), "batch": (case.batch,), "documents": (len(case.lengths_q),)}
        options["alibi_slopes"] = torch.rand(*rows[case.alibi], case.nheads, generator=generator)
    if case.sink:
        options["sink"] = torch.randn(case.nheads, generator=generator, dtype=torch.float64)
    sizes: dict[str, Any] = {"lengths_q": case.lengths_q, "lengths_k": case.lengths_k}
    if case.batch is not None:
        sizes = {"seqlen_q": case.lengths_q[0], "seqlen_k": case.lengths_k[0]}
        sizes["batch"] = case.batch
    sample = make_sample(
        nheads=case.nheads,
        nheads_k=case.nheads_k,
        headdim=case.headdim,
        headdim_v=case.headdim_v,
        seed=case.seed,
        dtype=getattr(torch, case.dtype),
        **sizes,
        **options,
    )
    if case.returns != "lse with gradient":
        sample = replace(sample, dlse=torch.zeros_like(sample.dlse))
    return sample
