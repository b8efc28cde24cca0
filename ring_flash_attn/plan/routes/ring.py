"""Ring: keys and values go from neighbour to neighbour; queries stay at home.

    step 0      step 1      step 2
    Q0·K0       Q0·K2       Q0·K1        K moves on while the kernel works;
    Q1·K1       Q1·K0       Q1·K2        backward, dK and dV follow one step
    Q2·K2       Q2·K1       Q2·K0        behind their K, and at the end go home

A shard goes only as far as somebody still needs it.

Unless `sources_per_launch` is 1, one launch takes the keys of several ranks, which come straight
from there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ..build import make_own_work, make_work, register_route
from ..groups import LAUNCHES, Groups, by_size, most_sent, split
from ..problem import Problem
from ..steps import Payload, Side, Step, Transfer, Work

_MOST_TOKENS = 96 * 1024  # whose keys and values a launch takes
_FEW_TOKENS = 8192  # a rank: up to so many, launches are small, and take more sources
_MOST_PEERS = 64  # of a rank: each costs NCCL a connection
_DETOUR = 4  # times as many rows that go from hop to hop are worse


@register_route("ring")
def ring(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Keys and values travel upwards through the ranks."""
    if problem.world_size == 1:  # nobody to ask what they need
        return [Step((), make_work(problem, rank, (rank,), problem.all_heads))]
    groups = _groups(problem, backward)
    if groups is not None:
        return _leap(problem, rank, groups, backward)
    return circulate(problem, rank, Side.KEY, direction=1, returns=backward)


def circulate(problem: Problem, rank: int, side: Side, direction: int, returns: bool) -> list[Step]:
    """Steps of `rank` when the shards of one side visit the ranks in turn, upwards or downwards.

    With `returns`, what is accumulated for a shard on its way comes home.
    """
    world_size = problem.world_size
    stays = problem.remember(
        ("stays", side, direction),
        lambda: [_stays(problem, owner, side, direction) for owner in range(world_size)],
    )
    longest = max(last for _, last in stays)

    def host(owner: int, step: int) -> int:
        return (owner + direction * step) % world_size

    def visitor(step: int) -> int:
        return (rank - direction * step) % world_size

    def transfer(payload: Payload, owner: int, source: int, target: int) -> Transfer:
        return Transfer(payload, side, owner, problem.all_heads, source, target)

    def inputs(step: int) -> list[Transfer]:
        leaving, coming = visitor(step), visitor(step + 1)
        moves = []
        if step < stays[leaving][1]:
            moves.append(transfer(Payload.INPUT, leaving, rank, host(leaving, step + 1)))
        if step < stays[coming][1]:
            moves.append(transfer(Payload.INPUT, coming, host(coming, step), rank))
        return moves

    def results(step: int) -> list[Transfer]:
        moves = []
        for owner in {visitor(step - 1), visitor(step), rank}:
            first, last = stays[owner]
            if not (last and first <= step - 1 <= last):
                continue
            source, target = host(owner, step - 1), host(owner, step) if step <= last else owner
            if rank in (source, target):
                moves.append(transfer(Payload.RESULT, owner, source, target))
        return moves

    def work(step: int) -> tuple[Work, ...]:
        guest = visitor(step)
        query_rank, key_rank = (rank, guest) if side is Side.KEY else (guest, rank)
        return make_work(problem, query_rank, (key_rank,), problem.all_heads)

    steps = []
    for step in range(longest + 1 + (returns and longest > 0)):
        moves = inputs(step) + (results(step) if returns else [])
        steps.append(Step(tuple(moves), work(step) if step <= longest else ()))
    return steps


def _stays(problem: Problem, owner: int, side: Side, direction: int) -> tuple[int, int]:
    """First and last step at which a shard away from home is needed; (0, 0) if it never is."""
    hosts = (problem.wanted_by if side is Side.KEY else problem.whose)(owner) - {owner}
    away = [direction * (host - owner) % problem.world_size for host in hosts]
    return (min(away), max(away)) if away else (0, 0)


def _leap(problem: Problem, rank: int, groups: Sequence[Groups], backward: bool) -> list[Step]:
    """Steps of `rank` when the keys of several ranks meet one launch; `groups` are all ranks'.

    While a step works on one group, the next arrives, straight from its owners. Gradients go
    straight home in the step after their launch. Backward, our own keys come first and last: behind
    a third of them the first group arrives, behind the rest the last gradients go home.
    """
    heads = problem.all_heads
    count = max(map(len, groups))
    users = [
        [user for user, theirs in enumerate(groups) if rank in theirs[number]]
        for number in range(count)
    ]

    def transfers(payload: Payload, number: int) -> list[Transfer]:
        ours = [Transfer.of_keys(payload, owner, rank, heads) for owner in groups[rank][number]]
        return ours + [Transfer.of_keys(payload, rank, user, heads) for user in users[number]]

    launches = [make_work(problem, rank, sorted(group), heads, cut=True) for group in groups[rank]]
    if backward and count:
        own, rest = make_own_work(problem, rank, heads)
        launches = [own, *launches, rest]
    else:
        launches = [make_work(problem, rank, (rank,), heads), *launches]
    moves: list[list[Transfer]] = [[] for _ in launches]
    for number in range(count):
        moves[number] += transfers(Payload.INPUT, number)
        if backward:
            moves[number + 2] += transfers(Payload.RESULT, number)
    return [Step(tuple(m), work) for m, work in zip(moves, launches, strict=True)]


def _groups(problem: Problem, backward: bool) -> list[Groups] | None:
    """All ranks' groups, as many on each; None: keys go from neighbour to neighbour.

    The next ranks below come first. But many ranks in a row need the start of a long document,
    which a few hold, and would all ask these at a time. So ranks begin at different places, if the
    most that a rank sends at a time is then at most three quarters.
    """
    if problem.sources_per_launch == 1:
        return None
    return problem.remember(("groups", backward), lambda: _make_groups(problem, backward))


def _make_groups(problem: Problem, backward: bool) -> list[Groups] | None:
    sources = [_sources(problem, rank) for rank in range(problem.world_size)]
    many = problem.sources_per_launch is None and _talk_to_many(sources)
    if many and not _detours(problem, sources):
        return None
    groups = _grouped(problem, sources, backward)
    count = max(map(len, groups))
    rows = problem.received()
    for turn in (_by_share, _by_group) if count > 1 else ():
        turned = [
            turn(*each, rank % count) for rank, each in enumerate(zip(sources, groups, strict=True))
        ]
        others = _grouped(problem, turned, backward)
        if 4 * most_sent(others, rows) <= 3 * most_sent(groups, rows):
            return others
    return groups


def _by_share(sources: list[int], groups: Groups, number: int) -> list[int]:
    """Sources from a share of them on: those of group `number`, where groups are equal."""
    first = number * len(sources) // len(groups)
    return sources[first:] + sources[:first]


def _by_group(sources: list[int], groups: Groups, number: int) -> list[int]:
    """The first sources, as many as the last `number` groups have, come last."""
    first = sum(map(len, groups[len(groups) - number :]))
    return sources[first:] + sources[:first]


def _grouped(problem: Problem, sources: list[list[int]], backward: bool) -> list[Groups]:
    """The sources of all ranks, in their order."""
    most = problem.sources_per_launch
    if most is not None:
        count = -(-max(map(len, sources)) // most)
        return [split(each, count) for each in sources]
    shard = -(-sum(problem.lengths_k) // problem.world_size)
    # Half a shard more: those of some ranks are larger than the mean. Backward, gradients in fp32
    # of as many rows are in flight besides; forward, there is room for fewer groups.
    if shard > _FEW_TOKENS:
        shards = alone = 2
    elif backward:
        shards = alone = 4
    else:
        shards, alone = 8, 6
    limit, alone = (number * shard + shard // 2 for number in (shards, alone))
    few = LAUNCHES - 1 - backward  # beside our own keys, which take two launches backward
    return by_size(sources, problem.received(), limit, alone, few, _MOST_TOKENS)


def _sources(problem: Problem, rank: int) -> list[int]:
    """Whose keys a rank needs, the next ones below it first."""
    others = problem.whose(rank) - {rank}
    return sorted(others, key=lambda owner: (rank - owner) % problem.world_size)


def _talk_to_many(sources: list[list[int]]) -> bool:
    """Whether a rank would get keys from, or send its own to, more ranks than it should."""
    peers = [set(each) for each in sources]
    for user, owners in enumerate(sources):
        for owner in owners:
            peers[owner].add(user)
    return max(map(len, peers)) > _MOST_PEERS


def _detours(problem: Problem, sources: list[list[int]]) -> bool:
    """Whether far more rows would be passed on from neighbour to neighbour than ranks need."""
    size, farthest = problem.world_size, [0] * problem.world_size
    for user, owners in enumerate(sources):
        for owner in owners:
            farthest[owner] = max(farthest[owner], (user - owner) % size)
    passed_on = sum(map(operator.mul, farthest, problem.sizes(Side.KEY)))
    return passed_on > _DETOUR * sum(sum(rows.values()) for rows in problem.received())
