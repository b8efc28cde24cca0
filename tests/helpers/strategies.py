"""What the property tests draw: documents, masks, spans and whole problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis import strategies as st

from ring_flash_attn.plan import rows
from ring_flash_attn.plan.layout import Span, get_layout
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.tiles import Mask

MOST_RANKS = 16

world_sizes = st.integers(1, MOST_RANKS)

# Few long documents, many short ones, empty ones: fewer and more tokens than ranks.
document_lengths = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 24)), min_size=1, max_size=5
).map(tuple)

_sides = st.one_of(st.none(), st.integers(0, 4), st.integers(0, 24))
masks = st.one_of(
    st.just(Mask()), st.just(Mask(right=0)), st.builds(Mask, left=_sides, right=_sides)
)


@st.composite
def spans(draw: st.DrawFn, stride: int, document: int = 0) -> Span:
    """Rows of a shard, anywhere in a document; queries may have negative positions."""
    return Span(
        start=draw(st.integers(0, 9)),
        length=draw(st.integers(1, 12)),
        position=draw(st.integers(-20, 40)),
        stride=stride,
        document=document,
        index=draw(st.integers(0, 99)),
    )


@st.composite
def problems(draw: st.DrawFn, layout: str) -> Problem:
    """Any documents on up to 16 ranks; every third time with more or fewer keys than queries.

    A launch of the ring takes one source, some, all, or as many as the sizes say.
    """
    lengths_q = draw(document_lengths)
    lengths_k = lengths_q
    if draw(st.sampled_from((False, False, True))):
        number = len(lengths_q)
        lengths_k = tuple(draw(st.lists(st.integers(0, 24), min_size=number, max_size=number)))
    nheads_k, heads_k_stride = draw(st.sampled_from(((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))))
    world_size = draw(world_sizes)
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return Problem(
        get_layout(layout),
        lengths_q,
        lengths_k,
        world_size,
        draw(masks),
        nheads_k,
        heads_k_stride,
        draw(st.sampled_from((1, 2, 3, 5, MOST_RANKS, None))),
        draw(st.sampled_from((None, *divisors))),
    )


@contextmanager
def order_of_buffers(by_document: bool) -> Iterator[None]:
    """Within it, rows of several shards lie by document wherever that joins spans, or nowhere."""
    cost = 0 if by_document else 1 << 60
    with mock.patch.multiple(rows, COPY=0, LAUNCH=cost):
        yield
