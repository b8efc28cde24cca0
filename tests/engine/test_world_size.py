"""The result does not depend on the number of ranks, nor on layout and route.

The same global input goes through 1, 2, 3, 4 and 8 virtual ranks, in every layout × route: in fp64
it agrees with the oracle to 1e-12, in fp32 with one rank to 1e-5, forward and gradients.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Results, Sample, check, expected_of, make_sample, results_of
from torch import Tensor

from ring_flash_attn import Balanced, Mask, virtual_ring_attention
from ring_flash_attn.plan.build import BY_HEADS, BY_NODES, route_names
from ring_flash_attn.plan.layout import FLAT_PREFIX, layout_names

WORLD_SIZES = (1, 2, 3, 4, 8)
SEED = 11
POINTS = [(layout, route) for layout in layout_names() for route in route_names()]
SLOPES = torch.tensor([[0.5, 0.0, 1.25, -0.3], [0.1, 2.0, 0.0, 0.7], [0.0, 1.0, -0.2, 0.4]])
SINK = torch.tensor([0.4, -1.0, 2.0, 0.0], dtype=torch.float64)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "softcap": {"softcap": 1.5},
    "sink": {"causal": True, "window_size": (6, -1), "sink": SINK},
    "dropout": {"causal": True, "dropout_p": 0.3},
}
FORMS: dict[str, dict[str, Any]] = {
    "batch": {"batch": 2, "seqlen_q": 29},
    "packed": {"lengths_q": (13, 0, 10), "lengths_k": (13, 2, 7), "headdim_v": 3},
}
# A batch is one document: the same in a flat layout as in its twin (see test_layout.py).
CASES = [
    (layout, route, form)
    for layout, route in POINTS
    for form in FORMS
    if form == "packed" or not layout.startswith(FLAT_PREFIX)
]


@cache
def sample_of(form: str, feature: str) -> Sample:
    """Make global inputs in fp64; slopes are those of each sequence, or document."""
    options = dict(FEATURES[feature])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][: FORMS[form].get("batch", 3)]
    return make_sample(seed=len(form), **FORMS[form], **options)


@cache
def oracle_of(form: str, feature: str) -> Results:
    """Ask the oracle, once for all layouts and routes."""
    return expected_of(sample_of(form, feature), SEED)


def run(sample: Sample, layout: str | Balanced, route: str, world_size: int, **way: Any) -> Results:
    """Forward and backward over virtual ranks; where a route knows nodes, over two or more."""
    options = dict(sample.options)
    sink = options.pop("sink", None)
    if route in BY_HEADS:
        options["heads_k_stride"] = 1
    if route in BY_NODES and world_size % 2 == 0:
        options["ranks_per_node"] = 4 if world_size == 8 and route == "double_ring" else 2
    options |= way

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(SEED)
        out, lse, _ = virtual_ring_attention(
            q,
            k,
            v,
            world_size=world_size,
            layout=layout,
            route=route,
            cu_seqlens=sample.cu_seqlens_q,
            cu_seqlens_k=sample.cu_seqlens_k,
            return_attn_probs=True,
            sink=sink,
            **options,
        )
        return out, lse

    return results_of(attend, sample, sink)


@pytest.mark.product(6)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("layout", "route", "form"), CASES)
def test_fp64_agrees_with_the_oracle(layout: str, route: str, form: str, feature: str) -> None:
    for world_size in WORLD_SIZES:
        actual = run(sample_of(form, feature), layout, route, world_size)
        check(actual, oracle_of(form, feature), 1e-12)


@pytest.mark.product(6)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("layout", "route", "form"), CASES)
def test_fp32_agrees_with_one_rank(layout: str, route: str, form: str, feature: str) -> None:
    sample = sample_of(form, feature).to(torch.float32)
    alone = run(sample, layout, route, 1)
    for world_size in WORLD_SIZES[1:]:
        check(run(sample, layout, route, world_size), alone, 1e-5)


@st.composite
def any_samples(draw: st.DrawFn) -> Sample:
    """Any combination of features, lengths and head counts."""
    nheads_k = draw(st.sampled_from((1, 2, 3)))
    nheads = nheads_k * draw(st.sampled_from((1, 2, 5)))
    batch = draw(st.sampled_from((1, 3)))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.tuples(st.integers(-1, 20), st.integers(-1, 20))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 2.0))),
        "dropout_p": draw(st.sampled_from((0.0, 0.0, 0.5))),
    }
    lengths = st.lists(st.integers(0, 25), min_size=3, max_size=3)
    form: dict[str, Any] = {"batch": batch, "seqlen_q": draw(st.integers(1, 40))}
    if draw(st.booleans()):
        form["seqlen_k"] = draw(st.integers(1, 40))
    if draw(st.booleans()):
        batch, form = 3, {"lengths_q": draw(lengths), "lengths_k": draw(lengths)}
    if draw(st.booleans()):
        options["sink"] = torch.randn(nheads, dtype=torch.float64)
    if draw(st.booleans()):
        shape = (batch, nheads) if draw(st.booleans()) else (nheads,)
        options["alibi_slopes"] = torch.rand(shape)
    headdims = {"headdim": draw(st.integers(1, 9)), "headdim_v": draw(st.integers(1, 9))}
    return make_sample(nheads=nheads, nheads_k=nheads_k, **headdims, **form, **options)


@pytest.mark.parametrize(("layout", "route"), POINTS)
@given(sample=any_samples(), world_size=st.integers(1, 9))
@settings(max_examples=8, deadline=None)
def test_any_combination_agrees_with_the_oracle(
    layout: str, route: str, sample: Sample, world_size: int
) -> None:
    """Relative to 0.1 where all values are smaller, such as dq of rows that see one key."""
    actual = run(sample, layout, route, world_size)
    check(actual, expected_of(sample, SEED), 1e-12, floor=0.1)


@pytest.mark.parametrize("layout", ["balanced", "zigzag", "flat_stripe"])
@pytest.mark.parametrize("route", BY_NODES)
@given(sample=any_samples(), data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_nodes_agree_with_the_oracle(
    layout: str, route: str, sample: Sample, data: st.DataObject
) -> None:
    """2 or 3 nodes of 1 to 4 ranks, any number of nodes in a launch."""
    size, nodes = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 3))
    way = {"ranks_per_node": size, "sources_per_launch": data.draw(st.sampled_from((None, 1, 2)))}
    actual = run(sample, layout, route, size * nodes, **way)
    check(actual, expected_of(sample, SEED), 1e-12, floor=0.1)


@pytest.mark.parametrize(("layout", "route"), POINTS)
def test_more_ranks_than_tokens(layout: str, route: str) -> None:
    """Some ranks hold nothing; so do some of those that hold queries hold no keys."""
    for form in ({"lengths_q": (3, 0, 2)}, {"seqlen_q": 3, "seqlen_k": 5}, {"seqlen_q": 1}):
        sample = make_sample(**form, causal=True)
        check(run(sample, layout, route, 8), expected_of(sample, SEED), 1e-12)


@pytest.mark.parametrize(("layout", "route"), POINTS)
def test_rows_without_keys(layout: str, route: str) -> None:
    """Fewer keys than queries: out 0, lse −inf, gradients 0, no NaN; some ranks have no work."""
    sample = make_sample(seqlen_q=23, seqlen_k=6, causal=True, window_size=(2, -1))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        actual = run(sample.to(dtype), layout, route, 4)
        assert not actual["out"][:, :17].any()
        assert (actual["lse"][..., :17] == -torch.inf).all()
        assert not actual["dq"][:, :17].any()
        check(actual, expected_of(sample.to(dtype), SEED), tolerance)


OBJECTS = (
    Balanced(masks=((Mask(right=0), 2), (Mask(left=5, right=3), 1.5))),
    Balanced(masks=((Mask(), 1),), ranks_per_node=3),
)


@pytest.mark.parametrize("layout", OBJECTS, ids=["masks", "nodes"])
@pytest.mark.parametrize("route", route_names())
def test_a_balanced_object_is_a_layout(layout: Balanced, route: str) -> None:
    """Whatever masks it was made for; GQA, windows, dropout; one token, no token."""
    forms = (
        {"lengths_q": (13, 0, 1, 40, 7), "nheads": 6, "nheads_k": 2},
        {"lengths_q": (13, 0, 1, 9, 4), "lengths_k": (5, 3, 0, 20, 4)},
    )
    rules = ({"causal": True}, {"window_size": (5, 3)}, {"causal": True, "dropout_p": 0.3})
    for form, options in product(forms, rules):
        sample = make_sample(**form, **options)
        expected = expected_of(sample, SEED)
        for world_size in (2, 5, 8):
            check(run(sample, layout, route, world_size), expected, 1e-12)


@pytest.mark.parametrize("route", route_names())
def test_the_same_bits_every_time(route: str) -> None:
    """Grouping and order of summation are fixed by the plan."""
    sample = make_sample(seqlen_q=33, dtype=torch.float32, causal=True, deterministic=True)
    first, second = (run(sample, "zigzag", route, 4) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
