"""The calls that `rfa verify` checks: functions by layout, route, kernel, feature and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..bench.functions import PublicFunction, find_functions
from ..bench.workload import Placement, Workload
from ..kernels.base import AUTO
from ..plan.layout import FLAT_PREFIX, layout_names
from .cut import cut_names

_TOGETHER = ("causal_window", "softcap", "alibi", "sink", "dropout", "lse_grad")
# By name, what a feature changes in a workload; `_lengths` and `_other_lengths` do the rest.
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
    device: str = "cpu"
    virtual: bool = False
    seed: int = 0
    workload: Workload = BASE
    report: bool = False
    versus: str = ""


@dataclass(frozen=True, slots=True)
class VerifyCall:
    """One call of a public function, over all ranks.

    Attributes:
        function: which.
        workload: what is computed.
        placement: layout and route are empty on one device; the kernel is the one asked for.
        feature: what is special about the workload.
        seed: of the inputs; dropout's own is drawn from it.
    """

    function: PublicFunction
    workload: Workload
    placement: Placement
    feature: str = ""
    seed: int = 0


def make_calls(options: VerifyOptions) -> list[VerifyCall]:
    """All calls, those with one workload next to each other, the kernel `versus` first.

    Raises:
        ValueError: there is no such function, or none with these layouts, routes and features.
    """
    for layout in options.layouts or layout_names():
        if layout not in cut_names():
            raise ValueError(f"verify cannot cut layout {layout!r} yet: teach verify/cut.py")
    calls = [
        call
        for function in find_functions(options.names)
        if not (options.virtual and _is_twin(function))
        for layout, route in function.points(options.layouts, options.routes)
        for kernel in ((function.prefix,) if function.prefix else options.kernels)
        for call in _calls(function, layout, route, kernel, options)
    ]
    if not calls:
        raise ValueError("no function goes with these of --layout, --route and --feature")
    order: dict[Workload, int] = {}
    for call in calls:
        order.setdefault(call.workload, len(order))
    return sorted(
        calls, key=lambda call: (order[call.workload], call.placement.kernel != options.versus)
    )


def _is_twin(function: PublicFunction) -> bool:
    """Virtual ranks get layout and route, whatever the form in which tensors come."""
    return bool(function.family.layout) and function.form in ("kvpacked_func", "qkvpacked_func")


def _calls(
    function: PublicFunction, layout: str, route: str, kernel: str, options: VerifyOptions
) -> Iterator[VerifyCall]:
    stride = 1 if function.signature in ("gathered_documents", "llama3") else None
    placement = Placement(options.world_size, layout, route, kernel, stride)
    plain = function.form in ("func", "")
    for feature in options.features or FEATURES:
        if not _possible(function, feature, explicit=bool(options.features)):
            continue
        few = _DTYPES[options.device] if feature in _FEW and plain else _DTYPES[options.device][:1]
        for packed in _packings(function, layout, feature):
            workload = _workload(function, feature, packed, options)
            for dtype in options.dtypes or few:
                own = replace(workload, dtype=dtype)
                yield VerifyCall(function, own, placement, feature, options.seed)


def _possible(function: PublicFunction, feature: str, explicit: bool) -> bool:
    """Other forms than q, k and v get most features only if the user asks for them."""
    signature, form = function.signature, function.form
    if feature == "headdim_v" and form not in ("func", ""):
        return False
    if feature == "mqa" and form.startswith("qkv"):
        return False
    if feature == "cross":
        return signature in _DIFFERENT_KEYS and not form.startswith("qkv")
    if feature == "tiny":
        return signature in _ANY_LENGTH
    return explicit or form in ("func", "") or feature in _FORMS_OF_ALL


def _packings(function: PublicFunction, layout: str, feature: str) -> tuple[bool, ...]:
    """Packed documents, a batch, or both."""
    if function.signature != "anything":
        return (function.family.packed,)
    both = feature in _FORMS_OF_ALL and not layout.startswith(FLAT_PREFIX)
    return (False, True) if both else (True,)


def _workload(
    function: PublicFunction, feature: str, packed: bool, options: VerifyOptions
) -> Workload:
    """For a function and a feature, in any dtype."""
    base = options.workload
    lengths = _lengths(function.signature, feature, packed, base.seqlen, options.world_size)
    changes: dict[str, Any] = {"seqlen": sum(lengths)}
    if packed:
        changes = {"batch": 1, "cu_seqlens": tuple(accumulate(lengths, initial=0))}
    if feature == "cross":
        keys = _other_lengths(lengths)
        changes["seqlen_k"] = sum(keys)
        if packed:
            changes["cu_seqlens_k"] = tuple(accumulate(keys, initial=0))
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


def _other_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Keys of documents with these queries: more, some for none, fewer, none."""
    if len(lengths) == 1:
        return (lengths[0] + lengths[0] // 2 + 1,)
    first, _, third, _, *rest = lengths
    return (first + first // 2, 4, third - 2, 0, *rest)
