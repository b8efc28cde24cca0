"""Launches of the kernel "cute", with arguments as a GPU gets them: see `cute_device.py`."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

import ring_flash_attn as rfa
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.verify.oracle import Rules, oracle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
NAMES = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}  # of the largest entry


@dataclass(frozen=True)
class Case:
    """A call; `documents` are lengths of queries and of keys, packed if there are some."""

    heads: tuple[int, int] = (4, 2)
    headdims: tuple[int, int] = (16, 16)
    batch: int = 1
    lengths: tuple[int, int] = (70, 70)
    documents: tuple[tuple[int, int], ...] = ()
    dtype: torch.dtype = torch.bfloat16
    form: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    ways: dict[str, Any] = field(default_factory=dict)


EVERYTHING = {"window_size": (40, 9), "softcap": 3.0, "alibi_slopes": True, "sink": True}
EVERYTHING["dropout_p"] = 0.3
DOCUMENTS = ((40, 40), (3, 3), (0, 0), (57, 57), (1, 1))
ORDERED = {"deterministic": True}
CASES = {
    "plain": Case(),
    "full_fp16": Case(dtype=torch.float16, rules={}),
    "one_token": Case(lengths=(1, 1), batch=3, headdims=(8, 8)),
    "one_query": Case(lengths=(1, 130), rules={}),
    "one_key": Case(lengths=(130, 1), rules={}),
    "queries_without_keys": Case(lengths=(140, 20), batch=2),
    "group_of_16": Case(heads=(16, 1), lengths=(150, 150)),
    "group_of_7": Case(heads=(7, 1), lengths=(40, 40), batch=2),
    "group_of_7_ordered": Case(heads=(7, 1), lengths=(40, 40), batch=2, options=ORDERED),
    "narrow_values": Case(headdims=(104, 24)),
    "mla": Case(headdims=(192, 128), heads=(2, 2)),
    "wide": Case(headdims=(200, 136), heads=(4, 2), rules=EVERYTHING),
    "ordered": Case(headdims=(72, 72), options=ORDERED, batch=2),
    "ordered_wide": Case(headdims=(256, 256), heads=(2, 1), options=ORDERED, rules=EVERYTHING),
    "everything": Case(rules=EVERYTHING, batch=2),
    "everything_ordered": Case(rules=EVERYTHING, options=ORDERED, heads=(6, 2), batch=2),
    "documents": Case(documents=DOCUMENTS, rules=EVERYTHING),
    "documents_ordered": Case(documents=DOCUMENTS, rules=EVERYTHING, options=ORDERED),
    "documents_of_many_heads": Case(documents=DOCUMENTS, heads=(8, 1)),
    "uneven_documents": Case(documents=((40, 60), (0, 7), (9, 0), (33, 5), (0, 0), (1, 50))),
    "packed": Case(form="packed", heads=(4, 4), batch=2),
    "heads_first": Case(form="heads first", batch=2, headdims=(24, 16)),
    "slices": Case(form="slices", batch=2),
    "expanded": Case(form="expanded", batch=2),
    "misaligned": Case(form="misaligned"),
    **{  # every layout and every route once; `test_cute_host.py` has all pairs
        f"{layout}_{route}": Case(
            documents=DOCUMENTS,
            rules=EVERYTHING,
            ways={"world_size": 3, "layout": layout, "route": route},
        )
        for layout, route in zip(layout_names(), itertools.cycle(route_names()), strict=False)
    },
    "one_source_ordered": Case(
        documents=DOCUMENTS,
        heads=(6, 2),
        options=ORDERED,
        ways={"world_size": 4, "layout": "zigzag", "route": "ring", "sources_per_launch": 1},
    ),
}
# Each reaches the host by another way: the rest waits for `make test-all`.
QUICK = {"plain", "group_of_16", "ordered", "documents", "slices", "flat_zigzag_ring"}


def _shaped(x: Tensor, form: str) -> Tensor:
    """The same numbers, somewhere else."""
    if form == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "slices":  # rows that TMA cannot read
        return torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]]
    if form == "misaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if form == "expanded":
        return x[:1].expand_as(x)
    return x


def _inputs(case: Case) -> list[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(0)
    (d, dv), (nheads, nheads_k) = case.headdims, case.heads
    lengths = case.lengths
    if case.documents:
        lengths = tuple(map(sum, zip(*case.documents, strict=True)))  # type: ignore[assignment]
    rows, rows_k = lengths
    shapes = ((rows, nheads, d), (rows_k, nheads_k, d), (rows_k, nheads_k, dv), (rows, nheads, dv))
    made = [torch.randn(case.batch, *shape, generator=generator).to(case.dtype) for shape in shapes]
    if case.form == "packed":
        made[:3] = torch.stack(made[:3], 2).unbind(2)
    made = [_shaped(x, case.form) for x in made]
    return [x[0] for x in made] if case.documents else made


def _results(run: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Output, lse and gradients, as if both were used."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = run(*leaves)
    used = lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    loss = (out * inputs[3].to(out.dtype)).sum().to(lse.dtype) + used
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def _plain_loss(run: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The same without lse's gradient, dout as it lies: a kernel then computes delta itself."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = run(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(out.dtype))]


def _offsets(case: Case) -> list[list[int]] | None:
    if not case.documents:
        return None
    return [[0, *itertools.accumulate(each)] for each in zip(*case.documents, strict=True)]


def _attend(case: Case, rules: dict[str, Any]) -> Any:
    """The call, which returns out and lse."""
    options = {"kernel": "cute", **rules, **case.options}
    offsets = _offsets(case)
    if case.ways:
        assert offsets is not None
        return lambda q, k, v: rfa.virtual_ring_attention(
            q, k, v, cu_seqlens=offsets[0], return_attn_probs=True, **case.ways, **options
        )[:2]
    if offsets is None:
        return lambda q, k, v: rfa.flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2]
    longest = [max(each) for each in zip(*case.documents, strict=True)]
    return lambda q, k, v: rfa.flash_attn_varlen_func(
        q, k, v, *offsets, *longest, return_attn_probs=True, **options
    )[:2]


def _compare(rank: int, world_size: int, name: str) -> tuple[list[str], int]:
    """What is too far from fp64, and how many kinds of launches there were."""
    import cute_device

    case = CASES[name]
    inputs, rules = _inputs(case), dict(case.rules)
    if "sink" in rules:
        rules["sink"] = torch.linspace(-1, 1, case.heads[0])
    if "alibi_slopes" in rules:
        rules["alibi_slopes"] = torch.linspace(0.02, 0.3, case.heads[0])
    found: list[str] = []
    with cute_device.installed() as kinds:
        for results in (_results, _plain_loss):
            torch.manual_seed(1)
            got = results(_attend(case, rules), inputs)
            torch.manual_seed(1)
            exact = Rules(seed=int(torch.randint(1 << 62, (), dtype=torch.int64)), **rules)
            offsets = _offsets(case) or (None, None)

            def run(q: Tensor, k: Tensor, v: Tensor, exact=exact, offsets=offsets) -> Any:  # type: ignore[no-untyped-def]
                return oracle(q, k, v, exact, *offsets)

            want = results(run, [x.double() for x in inputs])
            for each, a, b in zip(NAMES, got, want, strict=True):
                a, b = a.double(), b.view(a.shape)
                assert torch.equal(a == -torch.inf, b == -torch.inf), each
                away = (a - b).nan_to_num(neginf=0.0).abs().max() if a.numel() else 0.0
                size = b[b.isfinite()].abs().max() if a.numel() else 1.0
                if not away <= TOLERANCE[case.dtype] * max(float(size), 0.2):
                    found.append(f"{results.__name__} {each}: {float(away)} of {float(size)}")
    return found, len(kinds)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_launches(pool: Ranks, name: str) -> None:
    """Results of all launches of a call, if the device does what their arguments say."""
    ((found, kinds),) = pool.run(_compare, name)
    assert not found, "\n".join(found)
    assert kinds > 1
