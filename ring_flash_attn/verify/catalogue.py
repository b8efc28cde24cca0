"""The cases of `rfa verify`: functions by layout, route, kernel, feature and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from ..bench.functions import find_functions
from ..bench.workload import Placement, Workload
from ..kernels.base import AUTO
from ..plan.build import BY_NODES
from ..plan.layout import FLAT_PREFIX, SplitLayout, get_layout, layout_names

if TYPE_CHECKING:
    from ..api.families import Function

# By tensor, the relative error that has always been accepted here, in half precision.
ACCEPTED = {"out": 1e-2, "lse": 1e-2, "dq": 5e-2, "dk": 5e-2, "dv": 5e-2, "dsink": 5e-2}
ORACLE, ONE_DEVICE = "oracle", "one device"
# What becomes of a case, the worst first.
ERROR, FAIL, LEFT_OUT, PASS, CANNOT = STATUSES = ("error", "fail", "left out", "pass", "cannot")
_TOGETHER = ("causal_window", "softcap", "alibi", "sink", "dropout", "lse_grad")
# By name, what a feature changes in a workload; `_lengths` and `_lengths_k` do the rest.
FEATURES: Mapping[str, Callable[[Workload], dict[str, Any]]] = {
    "causal": lambda w: {},  # two query heads share a KV head
    "full": lambda w: {"causal": False},
    "window": lambda w: {
        "causal": False,
        "window": (max(1, w.seqlen // 6), max(1, w.seqlen // 12)),
    },
    "causal_window": lambda w: {"window": (max(1, w.seqlen // 6), -1)},
    "softcap": lambda w: {"softcap": 2.0},
    "alibi": lambda w: {"alibi": True},
    "sink": lambda w: {"sink": True},
    "dropout": lambda w: {"dropout_p": 0.25},
    "lse_grad": lambda w: {"lse_grad": True},  # the loss depends on lse, too
    "mqa": lambda w: {"nheads_k": 1},
    "headdim_v": lambda w: {"headdim_v": max(1, w.headdim // 2)},
    "cross": lambda w: {},  # more keys than queries, fewer, and none
    "tiny": lambda w: {},  # fewer tokens than ranks
    "together": lambda w: (
        {name: value for part in _TOGETHER for name, value in FEATURES[part](w).items()}
        | {"softmax_scale": 0.3}
    ),
}
BASE = Workload(batch=2, seqlen=51, nheads=4, nheads_k=2, headdim=16, causal=True)

# The first dtype is for every call, the others for a few.
_DTYPES = {
    "cpu": ("float64", "float32", "bfloat16"),
    "cuda": ("bfloat16", "float16", "float32"),
}
_FEW = ("causal", "together")  # features that the other dtypes get
_FORMS_OF_ALL = ("causal", "full")  # features that kvpacked and qkvpacked get
_DIFFERENT_KEYS = ("single", "single_documents", "anything")
_ANY_LENGTH = ("documents", "gathered_documents", "anything")


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What the user wants to be checked; empty means all.

    Attributes:
        ranks_per_node: of routes that know nodes; None: 2, if there are more and it divides them.
        workload: sizes, before a feature or a function changes them.
        seed: of the inputs.
        report: compare with one device, and with the kernel `versus`.
    """

    names: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    kernels: tuple[str, ...] = (AUTO,)
    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    world_size: int = 4
    ranks_per_node: int | None = None
    device: str = "cpu"
    virtual: bool = False
    seed: int = 0
    workload: Workload = BASE
    report: bool = False
    versus: str = ""


@dataclass(frozen=True, slots=True)
class Error:
    """How far one tensor of one rank is from the expected one.

    Attributes:
        tensor: one of ACCEPTED.
        max, mean, rmse: of the absolute difference.
        relative: largest difference over `Expected.size`, that of the whole tensor on all ranks.
        plain: largest difference of plain torch in the same dtype, over the whole tensor.
        limit: what `max` may be.
    """

    tensor: str
    rank: int
    max: float
    mean: float
    rmse: float
    relative: float
    plain: float
    limit: float

    @property
    def passed(self) -> bool:
        """Within the limit; a NaN is not."""
        return self.max <= self.limit


def accepted_error(tensor: str, dtype: str) -> float | None:
    """Relative; None but for bf16 and fp16."""
    return ACCEPTED[tensor] if dtype in ("bfloat16", "float16") else None


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a public function over all ranks, and what became of it.

    Attributes:
        placement: layout and route are empty on one device; the kernel is the one asked for.
        feature: what is special about the workload.
        seed: of the inputs; dropout's own is drawn from it.
        status: one of STATUSES; "" before it is run.
        used_kernel: the one that `placement.kernel` came to.
        compared: errors by what they are from: ORACLE; for the report also ONE_DEVICE, and another
            kernel by its name.
        reason: why there are none.
    """

    function: Function
    workload: Workload
    placement: Placement
    feature: str = ""
    seed: int = 0
    status: str = ""
    used_kernel: str = ""
    compared: Mapping[str, tuple[Error, ...]] = field(default_factory=dict)
    reason: str = ""

    @property
    def errors(self) -> tuple[Error, ...]:
        """Against the oracle."""
        return self.compared.get(ORACLE, ())

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail."""
        return self.status in (ERROR, FAIL, LEFT_OUT)

    @property
    def spread(self) -> bool:
        """Over ranks, not each on its own."""
        return bool(self.placement.layout)


def make_cases(options: VerifyOptions) -> list[Case]:
    """All cases, those with one workload next to each other, the kernel `versus` first.

    Raises:
        ValueError: there is no such function, or none with these layouts, routes and features.
    """
    from .oracle import cut_names  # which imports torch

    for layout in options.layouts or layout_names():
        if layout not in cut_names() and isinstance(get_layout(layout), SplitLayout):
            raise ValueError(f"verify cannot cut layout {layout!r} yet: teach verify/oracle.py")
    functions = find_functions(options.names)
    if options.virtual:  # one form: virtual ranks get layout and route, however tensors come
        functions = [f for f in functions if not f.family.layout or f.form == f.family.forms[0]]
    cases = [
        case
        for function in functions
        for layout, route in function.points(options.layouts, options.routes)
        for kernel in ((function.prefix,) if function.prefix else options.kernels)
        for case in _cases(function, layout, route, kernel, options)
    ]
    if not cases:
        raise ValueError("no function goes with these of --layout, --route and --feature")
    order = {each: i for i, each in enumerate(dict.fromkeys(case.workload for case in cases))}
    return sorted(
        cases, key=lambda case: (order[case.workload], case.placement.kernel != options.versus)
    )


def _is_plain(function: Function) -> bool:
    """Whether q, k and v come as three tensors."""
    return function.form in ("func", "")


def _cases(
    function: Function, layout: str, route: str, kernel: str, options: VerifyOptions
) -> Iterator[Case]:
    stride = 1 if function.signature in ("gathered_documents", "llama3") else None
    nodes = _ranks_per_node(options) if route in BY_NODES else None
    placement = Placement(options.world_size, layout, route, kernel, stride, ranks_per_node=nodes)
    anything = function.signature == "anything"
    for feature in options.features or FEATURES:
        if not _possible(function, feature, explicit=bool(options.features)):
            continue
        packings = [anything or function.family.packed]
        if anything and feature in _FORMS_OF_ALL and not layout.startswith(FLAT_PREFIX):
            packings = [False, True]
        dtypes = _DTYPES[options.device]
        few = dtypes if feature in _FEW and _is_plain(function) else dtypes[:1]
        for packed, dtype in product(packings, options.dtypes or few):
            workload = replace(_workload(function, feature, packed, options), dtype=dtype)
            yield Case(function, workload, placement, feature, options.seed)


def _ranks_per_node(options: VerifyOptions) -> int | None:
    if options.ranks_per_node is not None:
        return options.ranks_per_node
    return 2 if options.world_size > 2 and options.world_size % 2 == 0 else None


def _possible(function: Function, feature: str, explicit: bool) -> bool:
    """Other forms than q, k and v get most features only if the user asks for them."""
    same_heads = function.form.startswith("qkv")
    rules = {
        "headdim_v": _is_plain(function),
        "mqa": not same_heads,
        "cross": function.signature in _DIFFERENT_KEYS and not same_heads,
        "tiny": function.signature in _ANY_LENGTH,
    }
    usual = explicit or _is_plain(function) or feature in (*_FORMS_OF_ALL, "cross", "tiny")
    return usual and rules.get(feature, True)


def _workload(function: Function, feature: str, packed: bool, options: VerifyOptions) -> Workload:
    """For a function and a feature, in any dtype."""
    base = options.workload
    lengths = _lengths(function.signature, feature, packed, base.seqlen, options.world_size)
    keys = _lengths_k(lengths) if feature == "cross" else None
    changes: dict[str, Any] = {"seqlen": sum(lengths), "seqlen_k": keys and sum(keys)}
    if packed:
        changes |= {"batch": 1, "cu_seqlens": tuple(accumulate(lengths, initial=0))}
        changes["cu_seqlens_k"] = keys and tuple(accumulate(keys, initial=0))
    if function.form.startswith("qkv"):
        changes["nheads_k"] = base.nheads
    return replace(base, **changes, **FEATURES[feature](base))


def _lengths(
    signature: str, feature: str, packed: bool, seqlen: int, world_size: int
) -> tuple[int, ...]:
    """Documents as uneven as the function allows: odd, empty, of one token."""
    if feature == "tiny":
        return (max(1, world_size - 2), 0, 1)
    local = -(-seqlen // world_size)
    if signature == "batch":
        return (local * world_size,)
    if signature == "local_documents":
        return tuple(world_size * length for length in _documents(local))
    if signature == "llama3":
        return _documents(local * world_size)
    return _documents(seqlen) if packed else (seqlen,)


def _documents(total: int) -> tuple[int, ...]:
    if total < 9:
        return (total,)
    first = total * 5 // 9
    return (first, 0, 3, 1, total - first - 4)


def _lengths_k(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Keys of documents with these queries: more, some for none, fewer, none."""
    if len(lengths) == 1:
        return (lengths[0] + lengths[0] // 2 + 1,)
    first, _, third, _, *rest = lengths
    return (first + first // 2, 4, third - 2, 0, *rest)
