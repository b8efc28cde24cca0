"""How the public functions are made from the signatures in `signatures.py`.

Each row of `FAMILIES` names a point (layout × route) and a signature. Out of it come its forms (q,
k, v; kv packed; qkv packed), and of each form one function that takes `kernel=` and one for each
prefix that fixes it: `triton_`, `native_`. The functions are compiled from source text, as
`dataclass` does, so that their signatures, defaults and pickles are those of functions written by
hand. `__init__.pyi`, for editors and type checkers, is written by `make format`.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.checks import unpack
from . import operators, signatures

PREFIXES = ("triton", "native")

# How q, k and v come: the parameters, and the statement that makes q, k, v of them.
_FORMS = {
    "func": (("q", "k", "v"), ""),
    "kvpacked_func": (("q", "kv"), "k, v = _unpack(kv, 'kv', 2, {packed})"),
    "qkvpacked_func": (("qkv",), "q, k, v = _unpack(qkv, 'qkv', 3, {packed})"),
    "qkvpacked_func_v2": (("qkv",), "q, k, v = _unpack(qkv, 'qkv', 3, {packed})"),
    "": (("q", "k", "v"), ""),
}
_TENSORS = {
    "q": "queries, ({rows}, nheads, headdim).",
    "k": "keys, ({rows}, nheads_k, headdim).",
    "v": "values, ({rows}, nheads_k, headdim_v).",
    "kv": "keys and values, ({rows}, 2, nheads_k, headdim).",
    "qkv": "queries, keys and values, ({rows}, 3, nheads, headdim).",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Functions that differ only in how q, k and v come, and in the kernel."""

    name: str
    layout: str
    route: str
    signature: Callable[..., Any]
    summary: str
    forms: tuple[str, ...] = ("func", "kvpacked_func", "qkvpacked_func")
    drop: tuple[str, ...] = ()  # parameters of the signature that these forms do not have
    note: str = ""

    @property
    def packed(self) -> bool:
        """Tensors are (total, …) rather than (batch, seqlen, …)."""
        return "varlen" in self.name


_s = signatures
FAMILIES = (
    Family("ring_flash_attn", "contiguous", "ring", _s.batch, "Ring attention, contiguous shards."),
    Family(
        "zigzag_ring_flash_attn",
        "zigzag",
        "ring",
        _s.batch,
        "Ring attention, zigzag shards: rank r holds parts r and 2W-1-r of 2W.",
    ),
    Family(
        "stripe_flash_attn",
        "stripe",
        "ring",
        _s.batch,
        "Ring attention, striped shards: rank r holds every W-th token from r on.",
    ),
    Family(
        "ring_flash_attn",
        "contiguous",
        "query_ring",
        _s.batch,
        "Ring attention, contiguous shards, in which queries travel and keys and values stay.",
        forms=("qkvpacked_func_v2",),
        note="The historic function of this name was a variant of neighbour hops that sent keys "
        "and values. Here it is the query ring: q, its output and its gradients travel. The "
        "result is that of `ring_flash_attn_qkvpacked_func`.",
    ),
    Family(
        "ring_flash_attn_varlen",
        "contiguous",
        "ring",
        _s.local_documents,
        "Ring attention, packed documents, each in contiguous shards.",
    ),
    Family(
        "zigzag_ring_flash_attn_varlen",
        "zigzag",
        "ring",
        _s.local_documents,
        "Ring attention, packed documents, each in zigzag shards.",
    ),
    Family(
        "stripe_flash_attn_varlen",
        "stripe",
        "ring",
        _s.documents,
        "Ring attention, packed documents, each in striped shards.",
    ),
    Family(
        "zigzag_llama3_flash_attn_varlen",
        "zigzag",
        "all_gather",
        _s.gathered_documents,
        "All-gather attention, packed documents, each in zigzag shards.",
    ),
    Family(
        "llama3_flash_attn_varlen",
        "flat_contiguous",
        "all_gather",
        _s.llama3,
        "All-gather attention, packed documents, the stream in contiguous equal shards.",
    ),
    Family("flash_attn", "", "", _s.single, "Attention on one device, as in flash_attn."),
    Family(
        "flash_attn_varlen",
        "",
        "",
        _s.single_documents,
        "Attention over packed documents on one device, as in flash_attn.",
        forms=("func",),
    ),
    Family(
        "flash_attn_varlen",
        "",
        "",
        _s.single_documents,
        "Attention over packed documents on one device, as in flash_attn.",
        forms=("kvpacked_func",),
        drop=("block_table",),
    ),
    Family(
        "flash_attn_varlen",
        "",
        "",
        _s.single_documents_qkv,
        "Attention over packed documents on one device, as in flash_attn.",
        forms=("qkvpacked_func",),
    ),
    Family(
        "ring_attention",
        "",
        "",
        _s.anything,
        "Exact attention over the ranks of a group: any layout, route and kernel.",
        forms=("",),
    ),
)


@dataclass(frozen=True, slots=True)
class Function:
    """One public function, as source text."""

    name: str
    parameters: tuple[str, ...]
    body: str
    doc: str
    template: Callable[..., Any]
    on_one_device: bool

    @property
    def stub(self) -> str:
        """Its entry in __init__.pyi."""
        lines = "".join(f"    {parameter},\n" for parameter in self.parameters)
        return f"def {self.name}(\n{lines}) -> Output: ...\n"

    def build(self, module: str) -> Callable[..., Any]:
        """The function itself, as a member of `module`."""
        head = f"def {self.name}({', '.join(self.parameters)}) -> Output:\n"
        source = head + textwrap.indent(self.body, "    ")
        code = compile(source, f"<{self.name}>", "exec", flags=annotations.compiler_flag)
        scope: dict[str, Any] = {
            "_template": (_traceable if self.on_one_device else _outside_graphs)(self.template),
            "_unpack": unpack,
        }
        exec(code, scope)
        function: Callable[..., Any] = scope[self.name]
        function.__doc__, function.__module__ = self.doc, module
        return function


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which torch.compile breaks the graph instead of tracing into a plan."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.compile traces as one operator where it can."""

    @functools.wraps(function)
    def run(layout: str, route: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(layout, route, q, k, v, **options)
        if operators.traceable(**options):
            return operators.traced(q, k, v, **options)
        return torch.compiler.disable(function)(layout, route, q, k, v, **options)

    return run


def _functions() -> Iterator[Function]:
    for prefix in (None, *PREFIXES):
        for family in FAMILIES:
            for form in family.forms:
                yield _function(family, form, prefix)


def _function(family: Family, form: str, prefix: str | None) -> Function:
    tensors, unpacking = _FORMS[form]
    given = inspect.signature(family.signature).parameters
    hidden = {"q", "k", "v", *family.drop}
    if form:  # the name says the point
        hidden |= {"layout", "route"}
    if prefix:
        hidden.add("kernel")
    shown = [p for name, p in given.items() if name not in hidden]
    body = unpacking.format(packed=family.packed) + "\n" if unpacking else ""
    body += f"return _template({_arguments(family, form, shown, prefix)})\n"
    return Function(
        name="_".join(part for part in (prefix, family.name, form) if part),
        parameters=_parameters(tensors, shown),
        body=body,
        doc=_doc(family, tensors, shown, prefix),
        template=family.signature,
        on_one_device=family.name.startswith("flash_attn"),
    )


def _parameters(tensors: tuple[str, ...], shown: list[inspect.Parameter]) -> tuple[str, ...]:
    parts = [f"{name}: Tensor" for name in tensors]
    for parameter in shown:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(_parameter(parameter))
    return tuple(parts)


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    return text + f" = {parameter.default!r}".replace("'", '"')


def _arguments(
    family: Family, form: str, shown: list[inspect.Parameter], prefix: str | None
) -> str:
    fixed = ["q", "k", "v"] if form == "" else [repr(family.layout), repr(family.route), "q, k, v"]
    named = [f"{parameter.name}={parameter.name}" for parameter in shown]
    return ", ".join(fixed + named + ([f"kernel={prefix!r}"] if prefix else []))


def _doc(
    family: Family, tensors: tuple[str, ...], shown: list[inspect.Parameter], prefix: str | None
) -> str:
    rows, lse = ("batch, seqlen", "(batch, nheads, seqlen)")
    if family.packed:
        rows, lse = "total", "(nheads, total)"
    elif family.signature is signatures.anything:
        lse += " or (nheads, total)"
    described = [f"{name}: {_TENSORS[name].format(rows=rows)}" for name in tensors]
    names = {parameter.name for parameter in shown}
    common = signatures.COMMON.format(
        lse=lse,
        group="group: process group; the default one if None.\n" if "group" in names else "",
        kernel="" if prefix else 'kernel: "auto", "native", "triton", "reference", or a library.',
    ).strip()
    note = family.note + (f" Always uses the kernel {prefix!r}." if prefix else "")
    text = inspect.cleandoc(family.signature.__doc__ or "")
    for name, value in (
        ("{summary}", family.summary),
        ("{note}", note.strip()),
        ("    {tensors}", textwrap.indent("\n".join(described), "    ")),
        ("    {common}", textwrap.indent(common, "    ")),
    ):
        text = text.replace(name, value)
    paragraphs = [part.rstrip() for part in text.split("\n\n") if part.strip()]
    lines = "\n\n".join(paragraphs).splitlines()
    return "\n".join(line for line in lines if not _describes(line, family.drop)) + "\n"


def _describes(line: str, names: tuple[str, ...]) -> bool:
    return any(line.strip().startswith(f"{name}:") for name in names)


def stub() -> str:
    """The text of __init__.pyi."""
    head = (
        "# Written by `make format`; do not edit.\n\n"
        "from torch import Tensor\nfrom torch.distributed import ProcessGroup\n\n"
        "from ..engine.checks import CuSeqlens\nfrom ..engine.prepare import Output\n\n"
    )
    names = "".join(f'    "{name}",\n' for name in FUNCTIONS)
    defs = "".join(function.stub for function in FUNCTIONS.values())
    return f"{head}{defs}\n__all__ = [\n{names}]\n"


FUNCTIONS = {function.name: function for function in _functions()}


def write_stub() -> None:
    """Bring __init__.pyi up to date."""
    Path(__file__).with_name("__init__.pyi").write_text(stub())
