"""What `rfa verify` checks: the public functions, over features, dtypes, layouts, routes and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from ..generate import FAMILIES, PREFIXES, Family
from ..kernels.base import AUTO
from ..layout import FLAT_PREFIX, layout_names
from ..plan import route_names

# The first dtype is for every case, the others for a few.
DTYPES = {
    "cpu": ("float64", "float32", "bfloat16"),
    "cuda": ("bfloat16", "float16", "float32"),
}
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
_FEW = ("causal", "together")  # features that the other dtypes get
_FORMS_OF_ALL = ("causal", "full")  # features that kvpacked and qkvpacked get
_DIFFERENT_KEYS = ("single", "single_documents", "anything")
_ANY_LENGTH = ("documents", "gathered_documents", "anything")


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes over all ranks, before a feature or a function changes them."""

    batch: int = 2
    seqlen: int = 51
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 16


@dataclass(frozen=True, slots=True)
class Question:
    """One attention problem over all ranks; its answer does not depend on who computes it.

    Attributes:
        dtype: name of the dtype of q, k and v.
        batch: number of sequences; None for packed documents.
        lengths_q, lengths_k: tokens of the documents (of the one sequence of a batch).
        seed: of the inputs; dropout's own is drawn from it.
    """

    dtype: str
    batch: int | None
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    seed: int
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: bool = False
    sink: bool = False
    lse_grad: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and the function that has to answer it.

    Attributes:
        function: public name.
        signature: name of its list of arguments in `signatures.py`.
        form: how q, k and v come; the end of the name.
        layout, route: what the name says, or the arguments of `ring_attention`.
        kernel: what is asked for.
        feature: what is special about the question.
        question: the problem.
    """

    function: str
    signature: str
    form: str
    layout: str
    route: str
    kernel: str
    feature: str
    question: Question


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user wants to be checked; empty means all."""

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
    size: Size = Size()


def make_cases(choice: Choice) -> list[Case]:
    """All cases, those with one question next to each other."""
    cases = [
        case
        for name, family, form, prefix in _chosen(choice)
        for layout, route in _points(family, choice)
        for kernel in ((prefix,) if prefix else choice.kernels)
        for case in _of_point(name, family, form, layout, route, kernel, choice)
    ]
    order: dict[Question, int] = {}
    for case in cases:
        order.setdefault(case.question, len(order))
    return sorted(cases, key=lambda case: order[case.question])


def function_names(prefixes: bool = False) -> list[str]:
    """Public functions; with `prefixes`, also those that fix their kernel."""
    return [name for name, _, _, prefix in _functions() if prefixes or not prefix]


def _functions() -> Iterator[tuple[str, Family, str, str]]:
    for prefix in ("", *PREFIXES):
        for family in FAMILIES:
            for form in family.forms:
                name = "_".join(part for part in (prefix, family.name, form) if part)
                yield name, family, form, prefix


def _chosen(choice: Choice) -> Iterator[tuple[str, Family, str, str]]:
    """The functions that the names mean: exact names, patterns, or parts of names."""
    everything = function_names(prefixes=True)
    wanted: set[str] = set() if choice.names else set(function_names())
    for name in choice.names:
        if name in everything:
            found = [name]
        elif any(sign in name for sign in "*?["):
            found = [each for each in everything if fnmatch(each, name)]
        else:
            found = [each for each in function_names() if name in each]
        if not found:
            raise ValueError(f"no function {name!r}; choose from {', '.join(function_names())}")
        wanted.update(found)
    for name, family, form, prefix in _functions():
        # Virtual ranks meet at a point, whatever the form in which tensors come.
        twin = choice.virtual and family.layout and form in ("kvpacked_func", "qkvpacked_func")
        if name in wanted and not twin:
            yield name, family, form, prefix


def _points(family: Family, choice: Choice) -> list[tuple[str, str]]:
    """The (layout, route) at which a family is to be checked."""
    if family.signature.__name__ == "anything":
        layouts, routes = choice.layouts or layout_names(), choice.routes or route_names()
        return [(layout, route) for layout in layouts for route in routes]
    unwanted = (choice.layouts and family.layout not in choice.layouts) or (
        choice.routes and family.route not in choice.routes
    )
    return [] if unwanted else [(family.layout, family.route)]


def _of_point(
    name: str, family: Family, form: str, layout: str, route: str, kernel: str, choice: Choice
) -> Iterator[Case]:
    signature = family.signature.__name__
    for feature in choice.features or FEATURES:
        if not _possible(signature, form, feature, bool(choice.features)):
            continue
        for packed in _packings(family, layout, feature):
            question = _question(signature, form, feature, packed, choice)
            for dtype in _dtypes(choice, form, feature):
                asked = replace(question, dtype=dtype)
                yield Case(name, signature, form, layout, route, kernel, feature, asked)


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


def _packings(family: Family, layout: str, feature: str) -> tuple[bool, ...]:
    """Packed documents, a batch, or both."""
    if family.signature.__name__ != "anything":
        return (family.packed,)
    both = feature in _FORMS_OF_ALL and not layout.startswith(FLAT_PREFIX)
    return (False, True) if both else (True,)


def _dtypes(choice: Choice, form: str, feature: str) -> tuple[str, ...]:
    if choice.dtypes:
        return choice.dtypes
    few = feature in _FEW and form in ("func", "")
    return DTYPES[choice.device] if few else DTYPES[choice.device][:1]


def _question(signature: str, form: str, feature: str, packed: bool, choice: Choice) -> Question:
    """The problem for a function and a feature, in any dtype."""
    size = choice.size
    lengths = _lengths(signature, feature, packed, choice)
    question = Question(
        dtype="",
        batch=None if packed else size.batch,
        lengths_q=lengths,
        lengths_k=_other_lengths(lengths) if feature == "cross" else lengths,
        nheads=size.nheads,
        nheads_k=size.nheads if form.startswith("qkv") else size.nheads_k,
        headdim=size.headdim,
        headdim_v=size.headdim,
        seed=choice.seed,
    )
    return replace(question, **_changes(feature, size))


def _changes(feature: str, size: Size) -> dict[str, Any]:
    """What a feature changes in a question, lengths aside."""
    left, right = max(1, size.seqlen // 6), max(1, size.seqlen // 12)
    changes: dict[str, dict[str, Any]] = {
        "full": {"causal": False},
        "window": {"causal": False, "window_size": (left, right)},
        "causal_window": {"window_size": (left, -1)},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi": True},
        "sink": {"sink": True},
        "dropout": {"dropout_p": 0.25},
        "lse_grad": {"lse_grad": True},
        "mqa": {"nheads_k": 1},
        "headdim_v": {"headdim_v": max(1, size.headdim // 2)},
    }
    together = ("causal_window", "softcap", "alibi", "sink", "dropout", "lse_grad")
    changes["together"] = {"softmax_scale": 0.3}
    for part in together:
        changes["together"].update(changes[part])
    return changes.get(feature, {})


def _lengths(signature: str, feature: str, packed: bool, choice: Choice) -> tuple[int, ...]:
    """Documents as uneven as the function allows: odd, empty, of one token."""
    world_size, seqlen = choice.world_size, choice.size.seqlen
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
