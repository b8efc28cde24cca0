"""The balanced layout: each token once, tokens and pairs even, long documents on few ranks."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ring_flash_attn import Balanced, Mask
from ring_flash_attn.plan.balanced import Slice, place
from ring_flash_attn.plan.layout import get_layout, spans
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.steps import Side

CAUSAL = Mask(right=0)
MASKS = {
    "causal": ((CAUSAL, 1),),
    "full": ((Mask(), 1),),
    "window": ((Mask(left=200, right=0), 1),),
    "both sides": ((Mask(left=90, right=30), 1),),
    "backwards": ((Mask(left=0), 1),),
    "mixed": ((CAUSAL, 1), (Mask(left=300, right=0), 3.5)),
}

# Documents of a published histogram: (fewest tokens, most tokens, share of documents in percent).
HISTOGRAM = [
    (1, 10, 0.22),
    (11, 50, 2.91),
    (51, 100, 5.20),
    (101, 200, 10.23),
    (201, 500, 28.19),
    (501, 1024, 24.64),
    (1025, 2048, 15.65),
    (2049, 4096, 7.34),
    (4097, 8192, 3.05),
    (8193, 16384, 1.29),
    (16385, 32768, 0.85),
    (32769, 65536, 0.14),
    (65537, 131072, 0.17),
    (131073, 196608, 0.14),
]
SHARD = 8192


def documents(world_size: int, seed: int) -> tuple[int, ...]:
    """A pack of 8192 tokens a rank, no document longer than a quarter of it."""
    rng = random.Random(seed)
    left = total = SHARD * world_size
    found = []
    while left:
        low, high, _ = rng.choices(HISTOGRAM, [share for _, _, share in HISTOGRAM])[0]
        found.append(min(rng.randint(low, high), total // 4, left))
        left -= found[-1]
    return tuple(found)


def sees(mask: Mask, length: int, position: int) -> int:
    """How many keys a query sees, counted plainly."""
    first = 0 if mask.left is None else max(0, position - mask.left)
    last = length - 1 if mask.right is None else min(length - 1, position + mask.right)
    return last - first + 1


def pairs(lengths: Sequence[int], masks: Any, slices: Sequence[Slice]) -> float:
    """Pairs of a rank's queries, by the masks' weights; causal ones by the formula."""
    if masks == MASKS["causal"]:
        return sum(b * (b + 1) // 2 - a * (a + 1) // 2 for _, a, b in slices)
    return sum(
        weight * sees(mask, lengths[document], position)
        for mask, weight in masks
        for document, a, b in slices
        for position in range(a, b)
    )


def received(slices: Sequence[Slice]) -> int:
    """Keys of other ranks that causal queries see."""
    ends: dict[int, int] = {}
    for document, _, stop in slices:
        ends[document] = max(ends.get(document, 0), stop)
    return sum(ends.values()) - sum(stop - start for _, start, stop in slices)


def check(lengths: Sequence[int], world_size: int, held: Sequence[Sequence[Slice]]) -> None:
    """Each token once, in the order of the stream, in as few slices as it takes; sizes even."""
    assert len(held) == world_size
    sizes = [sum(stop - start for _, start, stop in slices) for slices in held]
    assert max(sizes) - min(sizes) <= 1
    places: list[Slice] = []
    for slices in held:
        for (d1, a1, b1), (d2, a2, _) in pairwise(slices):
            assert (d1, b1) < (d2, a2)  # ascending, and a gap where it is the same document
            assert a1 < b1
        places += slices
    ends = [0] * len(lengths)
    for document, start, stop in sorted(places):
        assert ends[document] == start < stop
        ends[document] = stop
    assert ends == list(lengths)


short = st.one_of(st.integers(0, 3), st.integers(0, 300))
any_lengths = st.one_of(
    st.lists(st.one_of(short, st.integers(0, 20_000)), max_size=40),
    st.lists(short, max_size=8),
    st.builds(lambda n, length: [length] * n, st.integers(1, 30), st.integers(0, 5000)),
).map(tuple)


@given(
    lengths=any_lengths,
    world_size=st.integers(1, 70),
    masks=st.sampled_from(list(MASKS.values())),
    ranks_per_node=st.sampled_from([None, None, 1, 2, 7, 8, 100]),
)
@example((), 3, MASKS["causal"], None)
@example((0, 0), 70, MASKS["causal"], 8)
@example((1,), 70, MASKS["full"], None)
@settings(max_examples=400, deadline=None)
def test_every_token_once_and_as_many_on_every_rank(
    lengths: tuple[int, ...], world_size: int, masks: Any, ranks_per_node: int | None
) -> None:
    check(lengths, world_size, place(lengths, world_size, masks, ranks_per_node))


@pytest.mark.parametrize("world_size", range(1, 71))
def test_packs_are_even_on_any_number_of_ranks(world_size: int) -> None:
    """Tokens to one, pairs to half a percent; of a published histogram, and of few tokens."""
    for lengths in (documents(world_size, world_size), documents(world_size, 7)[:-1]):
        held = place(lengths, world_size, MASKS["causal"])
        check(lengths, world_size, held)
        work = [pairs(lengths, MASKS["causal"], slices) for slices in held]
        assert max(work) <= 1.005 * mean(work)
        assert min(work) >= 0.99 * mean(work)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("world_size", [3, 8, 13])
def test_pairs_are_those_of_the_masks(kind: str, world_size: int) -> None:
    """Any mask, and several with weights: even to half a percent."""
    rng = random.Random(world_size)
    lengths = [rng.choice((rng.randint(1, 300), rng.randint(300, 4000))) for _ in range(40)]
    held = place(lengths, world_size, MASKS[kind])
    check(lengths, world_size, held)
    work = [pairs(lengths, MASKS[kind], slices) for slices in held]
    assert max(work) <= 1.005 * mean(work)


def test_weights_matter() -> None:
    lengths, masks = documents(8, 1), ((CAUSAL, 1), (Mask(), 9))
    assert place(lengths, 8, masks) == place(lengths, 8, [(mask, 2 * w) for mask, w in masks])
    assert place(lengths, 8, masks) != place(lengths, 8, [(CAUSAL, 9), (Mask(), 1)])


# Ranks: tokens received, in shards, the mean and the most of any rank, and the most that any sends;
# means over 20 packs.
TRAFFIC = {8: (0.95, 1.60, 2), 16: (1.88, 3.26, 3.5), 64: (7.61, 12.1, 12.5)}


@pytest.mark.parametrize("world_size", TRAFFIC)
def test_little_travels(world_size: int) -> None:
    means, mosts, leaving, numbers = [], [], [], []
    for seed in range(20):
        held = place(documents(world_size, seed), world_size, MASKS["causal"])
        traffic = [received(slices) / SHARD for slices in held]
        means.append(mean(traffic))
        mosts.append(max(traffic))
        leaving.append(max(sent(held)) / SHARD)
        numbers.append(max(map(len, held)))
    found = [mean(each) for each in (means, mosts, leaving)]
    assert all(a <= b for a, b in zip(found, TRAFFIC[world_size], strict=True)), found
    assert mean(numbers) <= 20


def test_one_sequence_is_zigzag() -> None:
    """Whole parts; elsewhere shards differ by one token at most."""
    for world_size in (1, 2, 3, 8):
        length = 2 * world_size * 5
        for rank in range(world_size):
            ours, zigzag = (
                [
                    t
                    for span in spans(get_layout(name), (length,), rank, world_size)
                    for t in span.tokens
                ]
                for name in ("balanced", "zigzag")
            )
            assert ours == zigzag


@pytest.mark.parametrize(("number", "length", "world_size"), [(8, 96, 8), (16, 96, 8), (4, 192, 8)])
def test_equal_documents_stay_as_whole_as_can_be(number: int, length: int, world_size: int) -> None:
    """One or two a rank; or one on two ranks, as in zigzag."""
    held = place((length,) * number, world_size, MASKS["causal"])
    owners = [
        {rank for rank in range(world_size) for d, *_ in held[rank] if d == n}
        for n in range(number)
    ]
    assert {len(ranks) for ranks in owners} == {max(1, world_size // number)}
    assert len({pairs((length,) * number, MASKS["causal"], slices) for slices in held}) == 1


@given(number=st.integers(1, 20), world_size=st.integers(2, 32))
@settings(deadline=None)
def test_equal_documents_are_as_good_as_in_zigzag(number: int, world_size: int) -> None:
    """No more travels, and pairs are as even; a single one has zigzag's roundings."""
    lengths = (4096,) * number
    ours = place(lengths, world_size, MASKS["causal"])
    zigzag = [
        [(d, t.start, t.stop) for d, t in get_layout("zigzag").held(lengths, rank, world_size)]
        for rank in range(world_size)
    ]
    assert sum(map(received, ours)) <= 1.001 * sum(map(received, zigzag))
    most, least = (
        max(pairs(lengths, MASKS["causal"], slices) for slices in held) for held in (ours, zigzag)
    )
    assert most <= 1.0025 * least


def test_a_sliding_window_leaves_a_sequence_in_one_run_a_rank() -> None:
    """As even as zigzag, and half the traffic."""
    held = place((6400,), 8, ((Mask(left=10, right=0), 1),))
    assert [len(slices) for slices in held] == [1] * 8


def test_documents_that_fit_a_rank_go_there_whole() -> None:
    lengths = (100, 200, 100, 200, 50, 150, 200)
    held = place(lengths, 5, ((Mask(left=0, right=0), 1),))
    for document in (1, 3, 6):
        assert [(document, 0, 200)] in held


def sent(held: Sequence[Sequence[Slice]], ranks_per_node: int = 1) -> list[int]:
    """Of each node, or rank, the keys that it sends: to each other that sees them, once."""
    nodes = [
        [each for slices in held[first : first + ranks_per_node] for each in slices]
        for first in range(0, len(held), ranks_per_node)
    ]
    ends: list[dict[int, int]] = [{} for _ in nodes]
    for end, slices in zip(ends, nodes):
        for document, _, stop in slices:
            end[document] = max(end.get(document, 0), stop)
    return [
        sum(
            max(0, min(stop, end.get(document, 0)) - start)
            for document, start, stop in slices
            for number, end in enumerate(ends)
            if number != owner
        )
        for owner, slices in enumerate(nodes)
    ]


def test_nodes_keep_what_they_can() -> None:
    """Less goes from node to node; tokens and pairs are as even as ever."""
    found: dict[int | None, list[list[int]]] = {None: [], 8: []}
    for seed in range(8):
        lengths = documents(64, seed)
        for ranks_per_node, crossing in found.items():
            held = place(lengths, 64, MASKS["causal"], ranks_per_node)
            check(lengths, 64, held)
            work = [pairs(lengths, MASKS["causal"], slices) for slices in held]
            assert max(work) <= 1.01 * mean(work)
            crossing.append(sent(held, 8))
    totals, mosts = ([sum(map(each, found[n])) for n in (8, None)] for each in (sum, max))
    assert totals[0] < 0.8 * totals[1]
    assert mosts[0] < mosts[1]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=9),
    world_size=st.integers(1, 20),
)
@settings(deadline=None)
def test_keys_follow_their_queries(lengths: list[tuple[int, int]], world_size: int) -> None:
    """Each key once; queries as without keys, and keys at the same part of a document."""
    queries, keys = (tuple(each) for each in zip(*lengths))
    problem = Problem(Balanced(), queries, keys, world_size, CAUSAL)
    found = []
    for rank in range(world_size):
        alone = spans(Balanced(), queries, rank, world_size)
        ours = problem.spans(Side.QUERY, rank)
        assert [span.index for span in ours] == [span.index for span in alone]
        held = problem.spans(Side.KEY, rank)
        found += [token for span in held for token in span.tokens]
        if len(lengths) == 1:
            continue
        for span in held:
            of, number = queries[span.document], keys[span.document]
            assert not of or any(
                a.position * number // of <= span.position
                and span.position + span.length <= (a.position + a.length) * number // of
                for a in alone
                if a.document == span.document
            )
    assert sorted(found) == list(range(sum(keys)))


def test_every_process_places_alike() -> None:
    """Whatever the seed of its hashes."""
    lengths = documents(16, 3)
    code = (
        "from ring_flash_attn.plan.balanced import *\n"
        f"print(place({lengths}, 16, ((Mask(right=0), 1), (Mask(left=99, right=0), 0.3)), 4))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_it_takes_milliseconds() -> None:
    """10 are meant for 64 ranks; several times as many on a busy machine."""
    lengths = documents(64, 1)
    assert len(lengths) > 400
    times = []
    for _ in range(5):
        start = process_time()
        place(lengths, 64, MASKS["causal"])
        times.append(process_time() - start)
    assert min(times) < 0.05


def test_a_name_says_what_all_ranks_must_agree_on() -> None:
    assert Balanced().name == "balanced"
    assert Balanced([[CAUSAL, 1]]) == get_layout("balanced") == Balanced()
    other = Balanced(masks=((CAUSAL, 2), (Mask(left=64, right=0), 1)), ranks_per_node=8)
    assert "left=64" in other.name
    assert "ranks_per_node=8" in other.name
    assert get_layout(other) is other
    nodes = Balanced(ranks_per_node=8)
    assert nodes.name == "Balanced(ranks_per_node=8)"
    assert get_layout(nodes.name) == nodes


@pytest.mark.parametrize(
    "masks",
    [
        (),
        CAUSAL,
        (CAUSAL,),
        ((CAUSAL, 0),),
        ((CAUSAL, True),),
        (("causal", 1),),
        ((Mask(-1, 0), 1),),
        None,
        3,
    ],
)
def test_wrong_masks_are_refused(masks: Any) -> None:
    with pytest.raises(ValueError, match="masks must be pairs"):
        Balanced(masks=masks)


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "8"])
def test_wrong_numbers_of_ranks_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="ranks_per_node must be a positive integer"):
        Balanced(ranks_per_node=number)


@pytest.mark.parametrize("layout", [Balanced, None, 3, ("balanced",)])
def test_what_is_no_layout_is_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        get_layout(layout)


def blocks(start: int, stop: int) -> int:
    """Blocks of 128 × 128 that a kernel computes for causal queries of a slice."""
    return sum(-(-min(row + 128, stop) // 128) for row in range(start, stop, 128))


def figures(world_size: int) -> list[str]:
    """A row of the table of packs in docs/design.md."""
    pairs_, blocks_, means, mosts, leaving, numbers = [], [], [], [], [], []
    for seed in range(20):
        lengths = documents(world_size, seed)
        held = place(lengths, world_size, MASKS["causal"])
        work = [pairs(lengths, MASKS["causal"], slices) for slices in held]
        price = [sum(blocks(start, stop) for _, start, stop in slices) for slices in held]
        traffic = [received(slices) / SHARD for slices in held]
        pairs_.append(max(work) / mean(work))
        blocks_.append(max(price) / mean(price))
        means.append(mean(traffic))
        mosts.append(max(traffic))
        leaving.append(max(sent(held)) / SHARD)
        numbers.append(max(map(len, held)))
    even = (f"{mean(each):.3f} ({max(each):.3f})" for each in (pairs_, blocks_))
    travels = f"{mean(means):.2f} ({mean(mosts):.2f})", f"{mean(leaving):.2f}"
    return [*even, *travels, f"{mean(numbers):.0f}"]


def test_the_table_of_packs_is_true() -> None:
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    rows = text.partition("<!-- packs -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in table] == ["8", "16", "64"]
    for ranks, *found in table:
        assert found == figures(int(ranks))
