"""The calls that `rfa verify` checks: functions by layout, route, kernel, feature and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..bench.functions import PublicFunction, find_functions
from ..bench.workload import Placement, Workload
from ..kernels.base import AUTO
from ..plan.layout import FLAT_PREFIX, layout_names
from .cut import cut_names

FEATURES = {
    "causal": "queries see no later keys; two query heads share a KV head",
    "full": "no mask",
    "window": "a window to both sides",
    "causal_window": "a window to the left",
    "softcap": "scores go through a tanh",
    "alibi": "a slope for every head, in a batch for every sequence",
    "sink": "one more score for each head",
    "dropout": "a quarter of the entries is dropped",
    "lse_grad": "the loss depends on lse, too",
    "mqa": "all query heads share one KV head",
    "headdim_v": "values have a head dimension of their own",
    "cross": "more keys than queries, fewer, and none",
    "tiny": "fewer tokens than ranks",
    "together": "window, softcap, ALiBi, sink, dropout, scale and gradient of lse at once",
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
_TOGETHER = ("causal_window", "softcap", "alibi", "sink", "dropout", "lse_grad")


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
        function: public name.
        form: how q, k and v come; the end of the name.
        signature: name of its list of arguments in `signatures.py`.
        feature: what is special about the workload.
        workload: what is computed.
        placement: layout and route are empty on one device; the kernel is the one asked for.
        seed: of the inputs; dropout's own is drawn from it.
    """

    function: str
    form: str
    signature: str
    feature: str
    workload: Workload
    placement: Placement
    seed: int


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
    form, signature = function.form, function.signature
    stride = 1 if signature in ("gathered_documents", "llama3") else None
    placement = Placement(options.world_size, layout, route, kernel, stride)
    for feature in options.features or FEATURES:
        if not _possible(signature, form, feature, bool(options.features)):
            continue
        for packed in _packings(function, layout, feature):
            workload = _workload(function, feature, packed, options)
            for dtype in _dtypes(options, form, feature):
                own = replace(workload, dtype=dtype)
                yield VerifyCall(
                    function.name, form, signature, feature, own, placement, options.seed
                )


def _possible(signature: str, form: str, feature: str, explicit: bool) -> bool:
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


def _dtypes(options: VerifyOptions, form: str, feature: str) -> tuple[str, ...]:
    if options.dtypes:
        return options.dtypes
    few = feature in _FEW and form in ("func", "")
    return _DTYPES[options.device] if few else _DTYPES[options.device][:1]


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
    return replace(base, **changes, **_changes(feature, base))


def _changes(feature: str, base: Workload) -> dict[str, Any]:
    """What a feature changes in a workload, lengths aside."""
    left, right = max(1, base.seqlen // 6), max(1, base.seqlen // 12)
    changes: dict[str, dict[str, Any]] = {
        "full": {"causal": False},
        "window": {"causal": False, "window": (left, right)},
        "causal_window": {"window": (left, -1)},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi": True},
        "sink": {"sink": True},
        "dropout": {"dropout_p": 0.25},
        "lse_grad": {"lse_grad": True},
        "mqa": {"nheads_k": 1},
        "headdim_v": {"headdim_v": max(1, base.headdim // 2)},
    }
    if feature != "together":
        return changes.get(feature, {})
    together = {name: value for part in _TOGETHER for name, value in changes[part].items()}
    return {"softmax_scale": 0.3, **together}


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
