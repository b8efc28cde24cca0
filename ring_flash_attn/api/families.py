"""How the public functions are made from the signatures in `signatures.py`.

Each row of `FAMILIES` names a point (layout × route) and a signature. Out of it come its forms (q,
k, v; kv packed; qkv packed), and of each form one function that takes `kernel=` and one for each
prefix that fixes it: `triton_`, `native_`, `cute_`. The functions are compiled from source text, as
`dataclass` does, so that their signatures, defaults and pickles are those of functions written by
hand. `__init__.pyi`, for editors and type checkers, is written by `make format`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..engine.checks import unpack
from ..plan.build import route_names
from ..plan.layout import FLAT_PREFIX, layout_names
from . import signatures
from .operators import compilable
from .signatures import Signature

PREFIXES = ("triton", "native", "cute")

# What each tensor is, and its dimensions after those of tokens.
_TENSORS = {
    "q": ("queries", "nheads, headdim"),
    "k": ("keys", "nheads_k, headdim"),
    "v": ("values", "nheads_k, headdim_v"),
    "kv": ("keys and values", "2, nheads_k, headdim"),
    "qkv": ("queries, keys and values", "3, nheads, headdim"),
}
_SHARDS = {
    "contiguous": "contiguous shards",
    "zigzag": "zigzag shards: rank r holds parts r and 2W-1-r of 2W",
    "stripe": "striped shards: rank r holds every W-th token from r on",
    "flat_contiguous": "the stream in contiguous equal shards",
}


_KINDS = {"all_gather": "All-gather", "all_to_all": "All-to-all (Ulysses)", "mesh": "Mesh (USP)"}
_KINDS["double_ring"] = "Double ring"


@dataclass(frozen=True, slots=True)
class Family:
    """Functions that differ only in how q, k and v come, and in the kernel."""

    name: str
    signature: Signature
    layout: str = ""  # and no route: on one device, or whatever the caller says
    route: str = ""
    forms: tuple[str, ...] = ("func", "kvpacked_func", "qkvpacked_func")
    note: str = ""

    @property
    def packed(self) -> bool:
        """Tensors are (total, …) rather than (batch, seqlen, …)."""
        return "varlen" in self.name

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        if self.signature is signatures.ANYTHING:
            return "Exact attention over the ranks of a group: any layout, route and kernel."
        if not self.layout:
            over = " over packed documents" if self.packed else ""
            return f"Attention{over} on one device, as in flash_attn."
        kind = _KINDS.get(self.route, "Ring")
        each = "" if self.layout.startswith(FLAT_PREFIX) else "each in "
        of = f"packed documents, {each}" if self.packed else ""
        return f"{kind} attention, {of}{_SHARDS[self.layout]}."


_s = signatures
FAMILIES = (
    Family("ring_flash_attn", _s.BATCH, "contiguous", "ring"),
    Family("zigzag_ring_flash_attn", _s.BATCH, "zigzag", "ring"),
    Family("stripe_flash_attn", _s.BATCH, "stripe", "ring"),
    Family(
        "ring_flash_attn",
        _s.BATCH,
        "contiguous",
        "query_ring",
        forms=("qkvpacked_func_v2",),
        note="The historic function of this name was a variant of neighbour hops that sent keys "
        "and values. Here it is the query ring: q, its output and its gradients travel, and keys "
        "and values stay. The result is that of `ring_flash_attn_qkvpacked_func`.",
    ),
    Family("ring_flash_attn_varlen", _s.LOCAL_DOCUMENTS, "contiguous", "ring"),
    Family("zigzag_ring_flash_attn_varlen", _s.LOCAL_DOCUMENTS, "zigzag", "ring"),
    Family("stripe_flash_attn_varlen", _s.DOCUMENTS, "stripe", "ring"),
    Family("zigzag_llama3_flash_attn_varlen", _s.GATHERED_DOCUMENTS, "zigzag", "all_gather"),
    Family("llama3_flash_attn_varlen", _s.LLAMA3, "flat_contiguous", "all_gather"),
    Family("ulysses_flash_attn", _s.BATCH, "contiguous", "all_to_all"),
    Family("ulysses_flash_attn_varlen", _s.DOCUMENTS, "flat_contiguous", "all_to_all"),
    Family("usp_flash_attn", _s.NODES_BATCH, "zigzag", "mesh"),
    Family("usp_flash_attn_varlen", _s.NODES_DOCUMENTS, "zigzag", "mesh"),
    Family("double_ring_flash_attn", _s.NODES_BATCH, "zigzag", "double_ring"),
    Family("double_ring_flash_attn_varlen", _s.NODES_DOCUMENTS, "zigzag", "double_ring"),
    Family("flash_attn", _s.SINGLE),
    Family("flash_attn_varlen", _s.SINGLE_DOCUMENTS, forms=("func",)),
    Family("flash_attn_varlen", _s.SINGLE_DOCUMENTS_KV, forms=("kvpacked_func",)),
    Family("flash_attn_varlen", _s.SINGLE_DOCUMENTS_QKV, forms=("qkvpacked_func",)),
    Family("ring_attention", _s.ANYTHING, forms=("",)),
)


@dataclass(frozen=True, slots=True)
class Function:
    """One public function, made as source text; `prefix` is a kernel that its name fixes."""

    family: Family
    form: str
    prefix: str

    @property
    def name(self) -> str:
        return "_".join(part for part in (self.prefix, self.family.name, self.form) if part)

    @property
    def signature(self) -> str:
        """Name of its list of arguments in `signatures.py`."""
        return self.family.signature.name

    @property
    def is_distributed(self) -> bool:
        return bool(self.family.layout) or self.family.signature is signatures.ANYTHING

    def points(self, layouts: Sequence[str], routes: Sequence[str]) -> list[tuple[str, str]]:
        """Every (layout, route) of these at which it can be called; of all if there are none."""
        if self.family.signature is signatures.ANYTHING:
            return list(product(layouts or layout_names(), routes or route_names()))
        layout, route = self.family.layout, self.family.route
        wanted = (not layouts or layout in layouts) and (not routes or route in routes)
        return [(layout, route)] if wanted else []

    @property
    def stub(self) -> str:
        """Its head, as in __init__.pyi."""
        described = (*self.family.signature.own, *signatures.COMMON)
        heads = {head.partition(":")[0]: head for head, _ in described}
        tensors = [f"{name}: Tensor" for name in self._tensors]
        lines = [f"    {each},\n" for each in (*tensors, *(heads.get(n, n) for n in self._order))]
        return f"def {self.name}(\n{''.join(lines)}) -> Output:"

    @property
    def _tensors(self) -> tuple[str, ...]:
        if self.form.startswith("qkv"):
            return ("qkv",)
        return ("q", "kv") if self.form.startswith("kv") else ("q", "k", "v")

    @property
    def _order(self) -> list[str]:
        order = self.family.signature.order.split()
        return [name for name in order if not (self.prefix and name == "kernel")]

    def build(self, module: str) -> Callable[..., Any]:
        """The function itself, as a member of `module`."""
        family, signature = self.family, self.family.signature
        arguments = [f"{name}={name}" for name in self._order if name != "*"]
        fixed: dict[str, object] = {"kernel": self.prefix} if self.prefix else {}
        if family.layout:
            fixed |= {"layout": family.layout, "route": family.route, "packed": family.packed}
        arguments += [f"{name}={value!r}" for name, value in fixed.items()]
        arguments += [signature.fixed] if signature.fixed else []
        lines = [
            f"{', '.join(name)} = _unpack({name}, {name!r}, {family.packed})"
            for name in self._tensors
            if len(name) > 1
        ]
        lines.append(f"return _run(q, k, v, {', '.join(arguments)})")
        source = "\n    ".join((self.stub, *lines))
        code = compile(source, f"<{self.name}>", "exec", flags=annotations.compiler_flag)
        scope: dict[str, Any] = {"_run": compilable(signature.run), "_unpack": unpack}
        exec(code, scope)
        function: Callable[..., Any] = scope[self.name]
        function.__doc__, function.__module__ = self._doc(), module
        return function

    def _doc(self) -> str:
        family, signature = self.family, self.family.signature
        forms = (False, True) if signature is signatures.ANYTHING else (family.packed,)
        rows = ["total" if packed else "batch, seqlen" for packed in forms]
        lse = " or ".join("(nheads, total)" if p else "(batch, nheads, seqlen)" for p in forms)
        slopes = " or ".join("documents" if packed else "batch" for packed in forms)

        def shapes(dims: str) -> str:
            return " or ".join(f"({each}, {dims})" for each in rows)

        lines = []
        for name in self._tensors:
            what, dims = _TENSORS[name]
            lines.append(f"{name}: {what}, {shapes(dims)}.")
        for head, text in (*signature.own, *signatures.COMMON):
            name = head.partition(":")[0]
            if name in self._order:
                lines.append(f"{name}: {text.format(lse=lse, rows=slopes)}")
        kernel = f"Always uses the kernel {self.prefix!r}." if self.prefix else ""
        about = " ".join(part for part in (signature.about, family.note, kernel) if part)
        arguments = textwrap.indent("\n".join(lines), "    ")
        returns = f"    out, {shapes('nheads, headdim_v')}; see return_attn_probs for more."
        parts = (family.summary, about, f"Args:\n{arguments}", f"Returns:\n{returns}\n")
        return "\n\n".join(part for part in parts if part)


FUNCTIONS = {
    function.name: function
    for prefix in ("", *PREFIXES)
    for family in FAMILIES
    for form in family.forms
    for function in (Function(family, form, prefix),)
}


def stub() -> str:
    """The text of __init__.pyi."""
    head = (
        "# Written by `make format`; do not edit.\n\n"
        "from torch import Tensor\nfrom torch.distributed import ProcessGroup\n"
        "from torch.distributed.device_mesh import DeviceMesh\n\n"
        "from ..engine.checks import CuSeqlens\nfrom ..engine.prepare import Output\n"
        "from ..plan.layout import Layout\n\n"
    )
    names = "".join(f'    "{name}",\n' for name in FUNCTIONS)
    defs = "".join(f"{function.stub} ...\n" for function in FUNCTIONS.values())
    return f"{head}{defs}\n__all__ = [\n{names}]\n"


def write_stub() -> None:
    """Bring __init__.pyi up to date."""
    Path(__file__).with_name("__init__.pyi").write_text(stub())
