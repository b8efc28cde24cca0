"""The cases of `rfa verify`: functions over layouts, routes, kernels, features and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from ..api.families import FAMILIES, PREFIXES, Family
from ..kernels.base import AUTO
from ..plan.build import route_names
from ..plan.layout import FLAT_PREFIX, layout_names
from .questions import FEATURES, Question, Size, make_question

# The first dtype is for every case, the others for a few.
DTYPES = {
    "cpu": ("float64", "float32", "bfloat16"),
    "cuda": ("bfloat16", "float16", "float32"),
}
_FEW = ("causal", "together")  # features that the other dtypes get
_FORMS_OF_ALL = ("causal", "full")  # features that kvpacked and qkvpacked get
_DIFFERENT_KEYS = ("single", "single_documents", "anything")
_ANY_LENGTH = ("documents", "gathered_documents", "anything")


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
    size: Size = field(default_factory=Size)
    report: bool = False  # compare with one device, and with the kernel `versus`
    versus: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """A public function: its family, how q, k and v come, and the kernel that its name fixes."""

    family: Family
    form: str
    prefix: str = ""

    @property
    def name(self) -> str:
        """As in the API."""
        return "_".join(part for part in (self.prefix, self.family.name, self.form) if part)

    @property
    def is_distributed(self) -> bool:
        """Whether it needs a group."""
        return bool(self.family.layout) or self.family.signature.__name__ == "anything"


def make_cases(choice: Choice) -> list[Case]:
    """All cases, those with one question next to each other, the kernel `versus` first."""
    cases = [
        case
        for named in chosen_functions(choice)
        for layout, route in points(named.family, choice)
        for kernel in ((named.prefix,) if named.prefix else choice.kernels)
        for case in _of_point(named, layout, route, kernel, choice)
    ]
    order: dict[Question, int] = {}
    for case in cases:
        order.setdefault(case.question, len(order))
    return sorted(cases, key=lambda case: (order[case.question], case.kernel != choice.versus))


def function_names(prefixes: bool = False) -> list[str]:
    """Public functions; with `prefixes`, also those that fix their kernel."""
    return [named.name for named in _functions() if prefixes or not named.prefix]


def _functions() -> Iterator[Named]:
    for prefix in ("", *PREFIXES):
        for family in FAMILIES:
            for form in family.forms:
                yield Named(family, form, prefix)


def chosen_functions(choice: Choice) -> Iterator[Named]:
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
    for named in _functions():
        # Virtual ranks meet at a point, whatever the form in which tensors come.
        packed = named.form in ("kvpacked_func", "qkvpacked_func")
        twin = choice.virtual and named.family.layout and packed
        if named.name in wanted and not twin:
            yield named


def points(family: Family, choice: Choice) -> list[tuple[str, str]]:
    """The (layout, route) at which a family is to be checked."""
    if family.signature.__name__ == "anything":
        layouts, routes = choice.layouts or layout_names(), choice.routes or route_names()
        return [(layout, route) for layout in layouts for route in routes]
    unwanted = (choice.layouts and family.layout not in choice.layouts) or (
        choice.routes and family.route not in choice.routes
    )
    return [] if unwanted else [(family.layout, family.route)]


def _of_point(named: Named, layout: str, route: str, kernel: str, choice: Choice) -> Iterator[Case]:
    family, form = named.family, named.form
    signature = family.signature.__name__
    for feature in choice.features or FEATURES:
        if not _possible(signature, form, feature, bool(choice.features)):
            continue
        for packed in _packings(family, layout, feature):
            question = make_question(
                signature, form, feature, packed, choice.size, choice.world_size, choice.seed
            )
            for dtype in _dtypes(choice, form, feature):
                asked = replace(question, dtype=dtype)
                yield Case(named.name, signature, form, layout, route, kernel, feature, asked)


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
