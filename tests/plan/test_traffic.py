"""What travels: no more than has to, in few launches, for random packs on any number of ranks."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import chain, pairwise, product

import pytest

from ring_flash_attn.bench.documents import find_histogram
from ring_flash_attn.plan import groups as groups_of_sources
from ring_flash_attn.plan.balanced import Balanced
from ring_flash_attn.plan.buffers import BufferPlan
from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import get_layout, layout_names
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.routes import ring
from ring_flash_attn.plan.steps import Payload, Side
from ring_flash_attn.plan.tiles import Mask

MASKS = {"causal": Mask(right=0), "window": Mask(9, 0), "both": Mask(12, 3), "full": Mask()}

PLACES = [
    *((layout, world_size) for layout in layout_names() for world_size in (2, 3, 5, 8, 13, 16)),
    *((layout, n) for layout in ("balanced", "flat_contiguous") for n in (33, 64, 70)),
]


@cache
def pack(world_size: int, seed: int) -> tuple[int, ...]:
    """A few long documents, many short ones: about 40 tokens a rank."""
    rng = random.Random(seed)
    left, lengths = 40 * world_size, []
    while left > 0:
        lengths.append(min(left, int(rng.lognormvariate(2.5, 1.2))))
        left -= max(1, lengths[-1])
    return tuple(lengths)


def least(problem: Problem) -> Counter[tuple[int, int]]:
    """For each (owner, user), the keys of the one that some query of the other sees: counted token
    by token, from the definition of the mask."""
    found: Counter[tuple[int, int]] = Counter()
    for user in range(problem.world_size):
        owners = (owner for owner, _ in seen_tokens(problem, user))
        found.update((owner, user) for owner in owners if owner != user)
    return found


def seen_tokens(problem: Problem, user: int) -> set[tuple[int, int]]:
    """(owner, token) of the keys that some query of a rank sees."""
    owner = {
        token: rank
        for rank in range(problem.world_size)
        for span in problem.spans(Side.KEY, rank)
        for token in span.tokens
    }
    seen = set()
    for span in problem.spans(Side.QUERY, user):
        length = problem.lengths_k[span.document]
        first = span.index - span.position  # of the document, as lengths are equal
        for position in span.positions:
            left, right = problem.mask.left, problem.mask.right
            low = 0 if left is None else max(0, position - left)
            high = length if right is None else min(length, position + right + 1)
            seen.update(range(first + low, first + high))
    return {(owner[token], token) for token in seen}


def sent(route: str, problem: Problem, backward: bool) -> dict[Payload, Counter[tuple[int, int]]]:
    """Rows that go from rank to rank, by (source, target), from the plans of all ranks."""
    found: dict[Payload, Counter[tuple[int, int]]] = {each: Counter() for each in Payload}
    for rank in range(problem.world_size):
        path = BufferPlan(make_plan(route, problem, rank, backward), problem)
        for moves in path.moves:
            ends = [(m.transfer.payload, m.transfer.source, m.transfer.target) for m in moves]
            if route != "double_ring":
                assert len(set(ends)) == len(ends), "one message for each peer and post"
            for move in moves:
                t = move.transfer
                if t.target == rank != t.source:
                    found[t.payload][t.source, t.target] += move.rows
    return found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("layout", "world_size"), PLACES)
def test_every_key_goes_once_to_whoever_needs_it(layout: str, world_size: int, mask: str) -> None:
    """On routes that send straight from the owner: not one row more than the least possible."""
    lengths = pack(world_size, seed=world_size)
    problem = Problem(get_layout(layout), lengths, lengths, world_size, MASKS[mask], 1, 1, 4)
    expected = least(problem)
    for route in ("ring", "all_gather"):
        found = sent(route, problem, backward=True)
        assert found[Payload.INPUT] == expected
        home = Counter({(user, owner): rows for (owner, user), rows in expected.items()})
        assert found[Payload.RESULT] == home


NODES = [(4, 2), (6, 2), (9, 3), (8, 4), (12, 4), (16, 4), (24, 8)]


def least_of_nodes(problem: Problem, size: int) -> Counter[tuple[int, int]]:
    """For each (owner, node), the keys of the one that some query of another node sees."""
    tokens: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for user in range(problem.world_size):
        for owner, token in seen_tokens(problem, user):
            if owner // size != user // size:
                tokens.setdefault((owner, user // size), set()).add((owner, token))
    return Counter({ends: len(found) for ends, found in tokens.items()})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["balanced", "zigzag", "flat_contiguous"])
@pytest.mark.parametrize(("world_size", "size"), NODES)
def test_every_key_crosses_the_network_once_for_each_node(
    layout: str, world_size: int, size: int, mask: str
) -> None:
    """To its owner's peer, if a rank of the node needs it; from the peer to whoever needs it there.

    Gradients take the same ways back. Where two ranks of a node need a key, less crosses than on
    the ring.
    """
    lengths = pack(world_size, seed=world_size)
    shared = get_layout(layout), lengths, lengths, world_size, MASKS[mask], 1, 1
    problem = Problem(*shared, None, size)
    found, crossing = sent("double_ring", problem, backward=True), least_of_nodes(problem, size)
    network = Counter({ends: n for ends, n in found[Payload.INPUT].items() if crosses(ends, size)})
    assert network == Counter(
        {(owner, node * size + owner % size): rows for (owner, node), rows in crossing.items()}
    )
    inside = Counter[tuple[int, int]]()
    for (owner, user), rows in least(problem).items():
        near = owner if owner // size == user // size else user // size * size + owner % size
        inside[near, user] += rows * (near != user)
    assert found[Payload.INPUT] - network == +inside
    assert found[Payload.RESULT] == Counter(
        {(b, a): rows for (a, b), rows in found[Payload.INPUT].items()}
    )
    ring_rows = sent("ring", Problem(*shared, 4), backward=False)[Payload.INPUT]
    by_ring = sum(rows for ends, rows in ring_rows.items() if crosses(ends, size))
    assert network.total() <= by_ring
    if mask == "full" and layout == "zigzag":  # the longest documents lie on all ranks
        assert network.total() < by_ring


def crosses(ends: tuple[int, int], size: int) -> bool:
    return ends[0] // size != ends[1] // size


@pytest.mark.parametrize("sources", [None, 1, 2])
def test_own_keys_hide_the_first_hop_and_the_node_the_second(sources: int | None) -> None:
    """Keys of others cross two steps ahead of their launch, and gradients two steps after it; the
    last launches backward are on our own node."""
    lengths, heads = (320,), 1
    problem = Problem(
        get_layout("zigzag"), lengths, lengths, 20, Mask(right=0), heads, 1, sources, 4
    )
    for backward, rank in product((False, True), (0, 7, 19)):
        plan = make_plan("double_ring", problem, rank, backward)
        launched = {o: n for n, s in enumerate(plan.steps) for w in s.work for o in w.keys}
        near = {owner for owner in launched if owner // 4 == rank // 4}
        assert launched[rank] == 0
        assert backward or {launched[owner] for owner in near - {rank}} == {1}
        assert sorted(launched) == list(range(20))
        nodes = {owner // 4: n for owner, n in launched.items() if owner not in near}
        assert len(set(nodes.values())) == -(-4 // (sources or 4))
        for number, step in enumerate(plan.steps):
            for t in step.transfers:
                ahead = 2 if crosses((t.source, t.target), 4) else 1
                ahead = ahead if t.payload is Payload.INPUT else -ahead
                if rank in (t.source, t.target) and t.user == rank:
                    assert launched[t.owner] == number + ahead
        last = max(number for number, step in enumerate(plan.steps) if step.work)
        assert (max(nodes.values()) == last) is not backward
        assert len(plan.steps) == last + 1 + backward


@pytest.mark.parametrize("world_size", [16, 64, 128])
@pytest.mark.parametrize("documents", ["one", 42, 43])
def test_few_launches_over_nodes(documents: str | int, world_size: int) -> None:
    """8192 tokens a rank in nodes of 8: at most 8 launches, and a few peers."""
    lengths: tuple[int, ...] = (8192 * world_size,)
    layout = "zigzag" if documents == "one" else Balanced(ranks_per_node=8)
    if isinstance(documents, int):
        lengths = find_histogram("magi").draw(8192 * world_size, documents)
    mask = Mask(right=0)
    problem = Problem(get_layout(layout), lengths, lengths, world_size, mask, 8, 8, None, 8)
    for backward, rank in product((False, True), (0, 9, world_size - 1)):
        plan = make_plan("double_ring", problem, rank, backward)
        launches = [work for step in plan.steps for work in step.work]
        assert len(launches) <= (8 if world_size <= 64 else 10)
        peers = {end for s in plan.steps for t in s.transfers for end in (t.source, t.target)}
        assert len(peers - {rank}) <= 7 + world_size // 8 - 1


@pytest.mark.parametrize("layout", ["balanced", "zigzag", "flat_contiguous"])
@pytest.mark.parametrize("world_size", [2, 5, 16])
def test_from_neighbour_to_neighbour(layout: str, world_size: int) -> None:
    """One source a launch: a shard goes whole, to the last rank that needs it, and no further."""
    lengths = pack(world_size, seed=world_size)
    problem = Problem(get_layout(layout), lengths, lengths, world_size, MASKS["causal"])
    needed = least(problem)
    expected = 0
    for owner in range(world_size):
        hops = [(user - owner) % world_size for o, user in needed if o == owner]
        expected += problem.size(Side.KEY, owner) * max(hops, default=0)
    assert sent("ring", problem, backward=False)[Payload.INPUT].total() == expected


@pytest.mark.parametrize("world_size", [8, 16, 32, 64])
@pytest.mark.parametrize("seed", [42, 43, 44])
def test_few_launches_of_a_pack(world_size: int, seed: int) -> None:
    """Packs from a histogram, 8192 tokens a rank, on the ring: at most 8 launches, all ranks alike,
    and at most 8.5 shards arrive for one of them, backward 4.5."""
    lengths = find_histogram("magi").draw(8192 * world_size, seed)
    mask = Mask(right=0)
    problem = Problem(get_layout("balanced"), lengths, lengths, world_size, mask, 8, 8, None)
    for backward in (False, True):
        groups = ring._groups(problem, backward)
        assert groups is not None
        assert {len(each) for each in groups} == {len(groups[0])}
        assert 1 + len(groups[0]) <= 8
        for user, each in enumerate(groups):
            owners = [owner for group in each for owner in group]
            assert sorted(owners) == [
                owner
                for owner in range(world_size)
                if owner != user and problem.needed(user, owner)
            ]
            for group in each:
                rows = sum(len(r) for owner in group for r in problem.sent(owner, user))
                assert rows <= (4.5 if backward else 8.5) * 8192


@pytest.mark.parametrize("backward", [False, True])
def test_many_peers_are_talked_to_where_hops_would_be_far_longer(backward: bool) -> None:
    """A pack on hundreds of ranks: from its owners; one document: from neighbour to neighbour."""
    size, mask = 300, Mask(right=0)
    lengths = find_histogram("magi").draw(8192 * size, 42)
    problem = Problem(get_layout("balanced"), lengths, lengths, size, mask, 8, 8, None)
    assert max(len(problem.whose(rank)) for rank in range(size)) > ring._MOST_PEERS
    groups = ring._groups(problem, backward)
    assert groups is not None
    needed = [{o for o in range(size) if o != u and problem.needed(u, o)} for u in range(size)]
    assert [{owner for group in each for owner in group} for each in groups] == needed
    one = Problem(get_layout("zigzag"), (8192 * size,), (8192 * size,), size, mask, 8, 8, None)
    assert ring._groups(one, backward) is None


def test_keys_of_a_thousand_ranks_are_counted() -> None:
    """Long documents on a hundred ranks each do not stand for others."""
    size = 1024
    lengths = find_histogram("magi").draw(8192 * size, 42)
    problem = Problem(get_layout("balanced"), lengths, lengths, size, Mask(right=0))
    for user in (0, 500, 1023):
        counted = problem.received()[user]
        exact = {
            owner: sum(map(len, problem.sent(owner, user)))
            for owner in problem.whose(user)
            if owner != user
        }
        assert sum(counted.values()) == pytest.approx(sum(exact.values()), rel=0.05)


@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.parametrize("documents", [1, 5, 20])
def test_at_most_8_launches_on_64_ranks(layout: str, documents: int) -> None:
    """Whatever the layout, up to 8192 tokens a rank."""
    tokens = 8192 * 64
    cuts = sorted(random.Random(documents).sample(range(1, tokens), documents - 1))
    lengths = tuple(b - a for a, b in pairwise([0, *cuts, tokens]))
    problem = Problem(get_layout(layout), lengths, lengths, 64, Mask(right=0), 1, 1, None)
    for backward in (False, True):
        groups = ring._groups(problem, backward)
        assert groups is not None
        assert 1 + len(groups[0]) <= 8


def test_the_count_of_keys_is_exact_or_near() -> None:
    """Exact where documents lie on some ranks; of those on all, the longest stands for all."""
    lengths = pack(16, seed=1)
    for layout, error in (("balanced", 0), ("flat_contiguous", 0), ("zigzag", 0.25)):
        problem = Problem(get_layout(layout), lengths, lengths, 16, Mask(right=0))
        received = problem.received()
        for (owner, user), rows in least(problem).items():
            assert abs(received[user].get(owner, 0) - rows) <= error * 40 + error * rows


def test_the_first_group_is_half_as_large_or_all_are_even_or_filled_up() -> None:
    """If the larger ones are too large, as many owners in each; else as many rows as fit."""

    def groups(most: int, rows: dict[int, int], count: int) -> list[list[int]] | None:
        found = groups_of_sources.within(most, rows, [1, 2, 3, 4, 5], count)
        return None if found is None else [sorted(group) for group in found]

    tens = dict.fromkeys(range(1, 6), 10)
    assert groups(40, tens, 2) == [[1, 2], [3, 4, 5]]
    assert groups(20, tens, 3) == [[1], [2, 3], [4, 5]]
    assert groups(100, {1: 10, 2: 20, 3: 10, 4: 30, 5: 30}, 2) == [[1, 2], [3, 4, 5]]
    assert groups(30, {1: 20, 2: 10, 4: 20, 5: 10}, 2) == [[1, 2], [3, 4, 5]]
    rows = {2: 50, 3: 20, 4: 30, 5: 10}
    assert groups(50, rows, 2) is None
    assert groups(50, rows, 3) == [[1, 2], [3], [4, 5]]
    assert groups(10, {}, 1) == [[1, 2, 3, 4, 5]]


def test_few_rows_are_one_group() -> None:
    """A quarter of what a launch takes is worth a launch."""
    for rows, launches in ((10, 1), (11, 2), (20, 2), (21, 3), (90, 3)):
        found = groups_of_sources.within(40, {1: rows - 9, 2: 3, 3: 3, 4: 3}, [1, 2, 3, 4], 3)
        assert found is None or sum(map(bool, found)) <= launches
        if rows < 41:
            assert found is not None
            assert all(found[: sum(map(bool, found))])  # they come first


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("layout", "turns"), [("contiguous", True), ("zigzag", False)])
def test_ranks_begin_elsewhere_where_all_would_ask_one_first(
    layout: str, turns: bool, backward: bool
) -> None:
    """All need the start of a document, which lies on rank 0; in zigzag all send as much."""
    lengths = (8192 * 16,)
    problem = Problem(
        get_layout(layout), lengths, lengths, 16, Mask(right=0), sources_per_launch=None
    )
    sources = [ring._sources(problem, rank) for rank in range(16)]
    in_order = ring._grouped(problem, sources, backward)
    groups = ring._groups(problem, backward)
    assert groups is not None
    most = [groups_of_sources.most_sent(each, problem.received()) for each in (groups, in_order)]
    assert (4 * most[0] <= 3 * most[1]) is turns
    assert (groups == in_order) is not turns
    for found, expected in zip(groups, in_order, strict=True):
        assert sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(expected))
