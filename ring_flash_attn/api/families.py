"""How the public functions are made from the signatures in `signatures.py`.

Each row of `FAMILIES` names a point (layout × route) and a signature. Out of it come its forms (q,
k, v; kv packed; qkv packed), and of each form one function that takes `kernel=` and one for each
prefix that fixes it: `triton_`, `native_`. The functions are compiled from source text, as
`dataclass` does, so that their signatures, defaults and pickles are those of functions written by
hand. `__init__.pyi`, for editors and type checkers, is written by `make format`.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.checks import unpack
from . import operators, signatures
from .signatures import Signature

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
_ANY_TENSORS = {
    "q": "queries of this rank, (batch, seqlen_q, nheads, headdim) or (total_q, nheads, headdim).",
    "k": "keys of this rank, (batch, seqlen_k, nheads_k, headdim) or (total_k, nheads_k, headdim).",
    "v": "values of this rank, like k; its head dimension may differ.",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Functions that differ only in how q, k and v come, and in the kernel."""

    name: str
    signature: Signature
    summary: str
    layout: str = ""  # and no route: on one device, or whatever the caller says
    route: str = ""
    forms: tuple[str, ...] = ("func", "kvpacked_func", "qkvpacked_func")
    note: str = ""

    @property
    def packed(self) -> bool:
        """Tensors are (total, …) rather than (batch, seqlen, …)."""
        return "varlen" in self.name


_s = signatures
FAMILIES = (
    Family("ring_flash_attn", _s.BATCH, "Ring attention, contiguous shards.", "contiguous", "ring"),
    Family(
        "zigzag_ring_flash_attn",
        _s.BATCH,
        "Ring attention, zigzag shards: rank r holds parts r and 2W-1-r of 2W.",
        "zigzag",
        "ring",
    ),
    Family(
        "stripe_flash_attn",
        _s.BATCH,
        "Ring attention, striped shards: rank r holds every W-th token from r on.",
        "stripe",
        "ring",
    ),
    Family(
        "ring_flash_attn",
        _s.BATCH,
        "Ring attention, contiguous shards, in which queries travel and keys and values stay.",
        "contiguous",
        "query_ring",
        forms=("qkvpacked_func_v2",),
        note="The historic function of this name was a variant of neighbour hops that sent keys "
        "and values. Here it is the query ring: q, its output and its gradients travel. The "
        "result is that of `ring_flash_attn_qkvpacked_func`.",
    ),
    Family(
        "ring_flash_attn_varlen",
        _s.LOCAL_DOCUMENTS,
        "Ring attention, packed documents, each in contiguous shards.",
        "contiguous",
        "ring",
    ),
    Family(
        "zigzag_ring_flash_attn_varlen",
        _s.LOCAL_DOCUMENTS,
        "Ring attention, packed documents, each in zigzag shards.",
        "zigzag",
        "ring",
    ),
    Family(
        "stripe_flash_attn_varlen",
        _s.DOCUMENTS,
        "Ring attention, packed documents, each in striped shards.",
        "stripe",
        "ring",
    ),
    Family(
        "zigzag_llama3_flash_attn_varlen",
        _s.GATHERED_DOCUMENTS,
        "All-gather attention, packed documents, each in zigzag shards.",
        "zigzag",
        "all_gather",
    ),
    Family(
        "llama3_flash_attn_varlen",
        _s.LLAMA3,
        "All-gather attention, packed documents, the stream in contiguous equal shards.",
        "flat_contiguous",
        "all_gather",
    ),
    Family("flash_attn", _s.SINGLE, "Attention on one device, as in flash_attn."),
    Family(
        "flash_attn_varlen",
        _s.SINGLE_DOCUMENTS,
        "Attention over packed documents on one device, as in flash_attn.",
        forms=("func",),
    ),
    Family(
        "flash_attn_varlen",
        _s.SINGLE_DOCUMENTS_KV,
        "Attention over packed documents on one device, as in flash_attn.",
        forms=("kvpacked_func",),
    ),
    Family(
        "flash_attn_varlen",
        _s.SINGLE_DOCUMENTS_QKV,
        "Attention over packed documents on one device, as in flash_attn.",
        forms=("qkvpacked_func",),
    ),
    Family(
        "ring_attention",
        _s.ANYTHING,
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
    run: Callable[..., Any]
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
            "_run": (_traceable if self.on_one_device else _outside_graphs)(self.run),
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
    def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(q, k, v, **options)
        if operators.traceable(**options):
            return operators.traced(q, k, v, **options)
        return torch.compiler.disable(function)(q, k, v, **options)

    return run


def _functions() -> Iterator[Function]:
    for prefix in ("", *PREFIXES):
        for family in FAMILIES:
            for form in family.forms:
                yield _function(family, form, prefix)


def _function(family: Family, form: str, prefix: str) -> Function:
    tensors, unpacking = _FORMS[form]
    signature = family.signature
    order = [name for name in signature.order.split() if not (prefix and name == "kernel")]
    heads = {head.partition(":")[0]: head for head, _ in (*signature.own, *signatures.COMMON)}
    point = [repr(family.layout), repr(family.route)] if signature.takes_point else []
    named = [f"{name}={name}" for name in order if name != "*"]
    kernel = [f"kernel={prefix!r}"] if prefix else []
    body = unpacking.format(packed=family.packed) + "\n" if unpacking else ""
    body += f"return _run({', '.join([*point, 'q, k, v', *named, *kernel])})\n"
    return Function(
        name="_".join(part for part in (prefix, family.name, form) if part),
        parameters=(*(f"{name}: Tensor" for name in tensors), *(heads.get(n, n) for n in order)),
        body=body,
        doc=_doc(family, tensors, order, prefix),
        run=signature.run,
        on_one_device=family.name.startswith("flash_attn"),
    )


def _doc(family: Family, tensors: tuple[str, ...], order: list[str], prefix: str) -> str:
    signature = family.signature
    described = _TENSORS
    rows, lse = "batch, seqlen", "(batch, nheads, seqlen)"
    if family.packed:
        rows, lse = "total", "(nheads, total)"
    elif signature is signatures.ANYTHING:
        described, lse = _ANY_TENSORS, lse + " or (nheads, total)"
    lines = [f"{name}: {described[name].format(rows=rows)}" for name in tensors]
    for head, text in (*signature.own, *signatures.COMMON):
        name = head.partition(":")[0]
        if name in order:
            lines.append(f"{name}: {text.format(lse=lse)}")
    kernel = f"Always uses the kernel {prefix!r}." if prefix else ""
    about = " ".join(part for part in (signature.about, family.note, kernel) if part)
    arguments = textwrap.indent("\n".join(lines), "    ")
    returns = f"    out, {signature.out}; see return_attn_probs for more."
    parts = (family.summary, about, f"Args:\n{arguments}", f"Returns:\n{returns}\n")
    return "\n\n".join(part for part in parts if part)


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
