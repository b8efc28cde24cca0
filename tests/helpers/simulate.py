"""A simulator of plans that proves them: what each rank has, computes and sums up, pair by pair.

A contribution is (query token, key token, KV head). It is born in a launch, lies in an accumulator
of the rank that computed it, travels in RESULT transfers, and must end at its owner's home, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import Span, get_layout
from ring_flash_attn.plan.layout import spans as spans_of
from ring_flash_attn.plan.problem import Problem
from ring_flash_attn.plan.steps import Heads, Payload, Plan, Side, Transfer, Work
from ring_flash_attn.plan.tiles import Mask, Tile

Contribution = tuple[int, int, int]
Parcel = tuple[Side, int, Heads, tuple[int, ...]]  # of whom, which heads; for whom it is relayed


def plans_of(route: str, problem: Problem, backward: bool) -> list[Plan]:
    """The plans of all ranks."""
    return [make_plan(route, problem, rank, backward) for rank in range(problem.world_size)]


def allowed(problem: Problem) -> set[Contribution]:
    """Every pair that the mask allows, from the definition: positions aligned at the ends."""
    found = set()
    starts_q, starts_k = ([0, *accumulate(x)] for x in (problem.lengths_q, problem.lengths_k))
    for document, (seqlen_q, seqlen_k) in enumerate(zip(problem.lengths_q, problem.lengths_k)):
        for i in range(seqlen_q):
            for j in range(seqlen_k):
                if problem.mask.allows(j - (i + seqlen_k - seqlen_q)):
                    pair = starts_q[document] + i, starts_k[document] + j
                    found |= {(*pair, head) for head in range(problem.nheads_k)}
    return found


def causal(
    layout: str,
    seqlen: int,
    world_size: int,
    window: int | None = None,
    nheads_k: int = 1,
    sources: int | None = 1,
) -> Problem:
    """One document under a causal mask."""
    mask, lengths = Mask(left=window, right=0), (seqlen,)
    return Problem(get_layout(layout), lengths, lengths, world_size, mask, nheads_k, 1, sources)


class Simulation:
    """All ranks of a problem, taken through their plans in step.

    Attributes:
        computed: how often each contribution was computed.
        home: for each (rank, side) what has arrived there, and how often.
    """

    def __init__(self, route: str, problem: Problem, backward: bool) -> None:
        self.problem, self.backward = problem, backward
        self.plans = plans_of(route, problem, backward)
        ranks = range(problem.world_size)
        self.tokens = {
            (side, rank): [
                token
                for span in spans_of(
                    problem.layout, lengths, rank, problem.world_size, queries=problem.lengths_q
                )
                for token in span.tokens
            ]
            for side, lengths in zip(Side, (problem.lengths_q, problem.lengths_k))
            for rank in ranks
        }
        self.positions_q = self._query_positions()
        self.computed: Counter[Contribution] = Counter()
        self.home: dict[tuple[int, Side], Counter[Contribution]] = {
            (rank, side): Counter() for rank in ranks for side in Side
        }
        self.there: list[set[Parcel]] = [set() for _ in ranks]  # inputs of others, by rank
        self.sums: list[dict[Parcel, Counter[Contribution]]] = [{} for _ in ranks]
        self.sent: set[tuple[int, Parcel]] = set()

    def _query_positions(self) -> list[int]:
        lengths = zip(self.problem.lengths_q, self.problem.lengths_k)
        return [i + k - q for q, k in lengths for i in range(q)]

    def run(self) -> None:
        """Walk all plans; AssertionError where a rank uses what it does not have."""
        lengths = {len(plan.steps) for plan in self.plans}
        assert len(lengths) == 1, "every rank has as many steps"
        for number in range(lengths.pop()):
            under_way = self._post(number)
            for plan in self.plans:
                for work in plan.steps[number].work:
                    self._launch(plan.rank, work)
            for transfer, content in under_way:
                self._arrive(transfer, content)
        left = [(rank, parcel) for rank, sums in enumerate(self.sums) for parcel in sums]
        assert not left, f"results that never went home: {left}"

    def _post(self, number: int) -> list[tuple[Transfer, Counter[Contribution]]]:
        """Take what is sent at the start of a step; both ends must have it in their plans."""
        for a in self.plans:
            for b in self.plans:
                assert between(a, number, a.rank, b.rank) == between(b, number, a.rank, b.rank)
        return [
            sent
            for plan in self.plans
            for sent in self._sent_by(plan.rank, plan.steps[number].transfers)
        ]

    def _sent_by(
        self, rank: int, transfers: tuple[Transfer, ...]
    ) -> Iterator[tuple[Transfer, Counter[Contribution]]]:
        for transfer in transfers:
            assert rank in (transfer.source, transfer.target), "somebody else's message"
            if transfer.source != rank:
                continue
            content: Counter[Contribution] = Counter()
            if transfer.payload is not Payload.INPUT:
                content = self._take(transfer)
            elif transfer.owner != rank:
                assert left(transfer) in self.there[rank], f"{transfer}: not there"
            yield transfer, content

    def _take(self, transfer: Transfer) -> Counter[Contribution]:
        parcel, rank = left(transfer), transfer.source
        assert (rank, parcel) not in self.sent, f"{transfer}: sent twice"
        self.sent.add((rank, parcel))
        if transfer.payload is Payload.FINAL:
            assert transfer.target == transfer.owner, f"{transfer}: final results go home"
            if not transfer.cut:  # our own, rounded in place
                assert rank == transfer.owner
                return Counter()
        content = self.sums[rank].pop(parcel, Counter())
        assert content, f"{transfer}: there is nothing to send"
        return content

    def _arrive(self, transfer: Transfer, content: Counter[Contribution]) -> None:
        parcel = filled(transfer)
        if transfer.payload is Payload.INPUT:
            self.there[transfer.target].add(parcel)
        elif transfer.owner == transfer.target:
            home = self.home[transfer.target, transfer.side]
            if transfer.payload is Payload.FINAL:
                assert not set(content) & set(home), f"{transfer}: final, but others add to it"
            home.update(content)
        else:
            self.sums[transfer.target].setdefault(parcel, Counter()).update(content)

    def _launch(self, rank: int, work: Work) -> None:
        rows = {}
        for side in Side:
            owners = work.owners(side)
            if owners != (rank,):  # otherwise our own shard is read in place
                missing = {(side, o, work.heads, ()) for o in owners} - self.there[rank]
                assert not missing, f"rank {rank} launches without {missing}"
            cut = work.cut and owners != (rank,)
            rows[side] = buffer_rows(self.problem, side, owners, work.queries if cut else None)
        assert work.tiles, "an empty launch"
        for tile in work.tiles:
            self._check_spans(tile, rows)
            for q, k in band(tile):
                (query_rank, i), (key_rank, j) = rows[Side.QUERY][q], rows[Side.KEY][k]
                new = [(i, j, head) for head in range(*work.heads)]
                self.computed.update(new)
                self._sum_up(rank, Side.QUERY, query_rank, work, new)
                if self.backward:
                    self._sum_up(rank, Side.KEY, key_rank, work, new)

    def _check_spans(self, tile: Tile, rows: dict[Side, list[tuple[int, int]]]) -> None:
        """The rows of a tile hold the tokens, at the positions, that its spans say."""
        for side, span in ((Side.QUERY, tile.query), (Side.KEY, tile.key)):
            for n in range(span.length):
                _, token = rows[side][span.start + n]
                assert token == span.index + span.stride * n
                if side is Side.QUERY:
                    assert self.positions_q[token] == span.position + span.stride * n

    def _sum_up(
        self, rank: int, side: Side, owner: int, work: Work, new: list[Contribution]
    ) -> None:
        if work.owners(side) == (rank,):
            self.home[rank, side].update(new)
            return
        parcel = (side, owner, work.heads, ())
        assert (rank, parcel) not in self.sent, "computed after its sum was sent"
        self.sums[rank].setdefault(parcel, Counter()).update(new)


Row = tuple[int, int]  # owner, token
Ranks = tuple[int, ...]
Place = tuple[int, int, int]  # document, position, token


def buffer_rows(
    problem: Problem, side: Side, owners: tuple[int, ...], queries: Ranks | None
) -> list[Row]:
    """What lies in each row of a buffer: a shard as it is, or what is needed of some.

    Of keys, what `queries` see, of queries those that see a key; owner after owner, by their first
    tokens, or by document and position, whichever the library has chosen.
    """
    if queries is None:
        (owner,) = owners
        return tokens_of(owner, problem.spans(side, owner))
    if side is Side.QUERY:
        arrangement = problem.query_arrangement(owners)
        shards = [(sighted(problem, owner), owner) for owner in owners]
    else:
        arrangement = problem.arrangement(owners, queries if len(queries) > 1 else queries[0])
        shards = [(needed(problem, owner, queries), owner) for owner in owners]
    if arrangement.by_document:
        parts = sorted((part[0], owner, part) for found, owner in shards for part in found)
        return [(owner, token) for _, owner, part in parts for _, _, token in part]
    in_order = sorted((found[0][0], owner, found) for found, owner in shards)
    return [(owner, token) for _, owner, found in in_order for part in found for *_, token in part]


def tokens_of(owner: int, spans: Iterable[Span]) -> list[Row]:
    """All tokens of some spans."""
    return [(owner, token) for _, _, token in places_of(spans)]


def places_of(spans: Iterable[Span]) -> list[Place]:
    """Row by row."""
    return [
        (s.document, s.position + s.stride * n, s.index + s.stride * n)
        for s in spans
        for n in range(s.length)
    ]


def needed(problem: Problem, owner: int, users: Ranks) -> list[list[Place]]:
    """What queries see of a shard of keys, token by token; what follows in a span lies together."""
    queries: dict[int, list[int]] = {}
    for user in users:
        for document, position, _ in places_of(problem.spans(Side.QUERY, user)):
            queries.setdefault(document, []).append(position)

    def seen(document: int, position: int) -> bool:
        return any(problem.mask.allows(position - each) for each in queries.get(document, ()))

    return _parts(problem.spans(Side.KEY, owner), seen)


def sighted(problem: Problem, owner: int) -> list[list[Place]]:
    """A rank's queries that see a key, likewise."""

    def sees(document: int, position: int) -> bool:
        keys = range(problem.lengths_k[document])
        return any(problem.mask.allows(key - position) for key in keys)

    return _parts(problem.spans(Side.QUERY, owner), sees)


def _parts(spans: Iterable[Span], wanted: Callable[[int, int], bool]) -> list[list[Place]]:
    """The places that are wanted; what follows in a span lies together."""
    found: list[list[Place]] = []
    for span in spans:
        before = False
        for place in places_of([span]):
            this = wanted(place[0], place[1])
            if this and not before:
                found.append([])
            if this:
                found[-1].append(place)
            before = this
    return found


def needed_rows(problem: Problem, transfer: Transfer) -> list[Row]:
    """What a transfer that is cut takes of a shard, row by row."""
    owner, users = transfer.owner, transfer.queries or (transfer.user,)
    if transfer.relayed_for and owner in (transfer.source, transfer.target):
        users = transfer.relayed_for
    query = transfer.side is Side.QUERY
    parts = sighted(problem, owner) if query else needed(problem, owner, users)
    return [(owner, token) for part in parts for _, _, token in part]


def left(transfer: Transfer) -> Parcel:
    """What the source has of it: what it relays lies apart from what it works on."""
    hop_home = transfer.payload is not Payload.INPUT and transfer.owner == transfer.target
    spread = transfer.payload is Payload.INPUT and transfer.owner != transfer.source
    relayed_for = transfer.relayed_for if hop_home or spread else ()
    return transfer.side, transfer.owner, transfer.heads, relayed_for


def filled(transfer: Transfer) -> Parcel:
    """What the target has of it, likewise."""
    relayed_for = () if left(transfer)[-1] else transfer.relayed_for
    return transfer.side, transfer.owner, transfer.heads, relayed_for


def between(plan: Plan, number: int, source: int, target: int) -> list[Transfer]:
    """Messages from one rank to another in a step, in the order of a plan."""
    transfers = plan.steps[number].transfers
    return [t for t in transfers if (t.source, t.target) == (source, target)]


def band(tile: Tile) -> Iterator[tuple[int, int]]:
    """Rows (query, key) of the pairs that a tile computes."""
    for i in range(tile.query.length):
        for j in range(tile.key.length):
            if tile.low <= j - i <= tile.high:
                yield tile.query.start + i, tile.key.start + j


def useless_inputs(plans: list[Plan]) -> list[Transfer]:
    """INPUT transfers after which the target neither launches with the shard nor passes it on."""
    found = []
    for plan in plans:
        for number, step in enumerate(plan.steps):
            later = plan.steps[number + 1 :]
            used = {
                (side, owner, work.heads, ())
                for after in later
                for work in after.work
                for side in Side
                for owner in work.owners(side)
            }
            used |= {
                left(t)
                for after in later
                for t in after.transfers
                if t.payload is Payload.INPUT and t.source == plan.rank
            }
            for t in step.transfers:
                if t.payload is Payload.INPUT and t.target == plan.rank:
                    found += [t] if filled(t) not in used else []
    return found
