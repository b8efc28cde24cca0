"""Ring: keys and values go from neighbour to neighbour; queries stay at home.

    step 0      step 1      step 2
    Q0·K0       Q0·K2       Q0·K1        K moves on while the kernel works;
    Q1·K1       Q1·K0       Q1·K2        backward, dK and dV follow one step
    Q2·K2       Q2·K1       Q2·K0        behind their K, and at the end go home

A shard goes only as far as somebody still needs it.

With `sources_per_launch` above 1, one launch takes the keys of several hops, which come straight
from their owners.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from ..build import make_work, register_route
from ..problem import Problem
from ..steps import Payload, Side, Step, Transfer, Work


@register_route("ring")
def ring(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Keys and values travel upwards through the ranks."""
    if problem.sources_per_launch > 1:
        return _leap(problem, rank, backward)
    return circulate(problem, rank, Side.KEY, direction=1, returns=backward)


def circulate(problem: Problem, rank: int, side: Side, direction: int, returns: bool) -> list[Step]:
    """Steps of `rank` when the shards of one side visit the ranks in turn, upwards or downwards.

    With `returns`, what is accumulated for a shard on its way comes home.
    """
    world_size = problem.world_size
    stays = [_stays(problem, owner, side, direction) for owner in range(world_size)]
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
    away = []
    for step in range(1, problem.world_size):
        host = (owner + direction * step) % problem.world_size
        query_rank, key_rank = (host, owner) if side is Side.KEY else (owner, host)
        if problem.needed(query_rank, key_rank):
            away.append(step)
    return (away[0], away[-1]) if away else (0, 0)


def _leap(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Steps of `rank` when the keys of up to `sources_per_launch` ranks meet one launch.

    While a step works on one group of hops, the next arrives, straight from its owners. Gradients
    go straight home in the step after their launch.
    """
    last = [_stays(problem, owner, Side.KEY, 1)[1] for owner in range(problem.world_size)]
    groups = [range(1), *_groups(max(last), problem.sources_per_launch, backward)]  # 0: our own

    def visitor(hop: int) -> int:
        return (rank - hop) % problem.world_size

    def transfers(payload: Payload, hops: range) -> list[Transfer]:
        uses = [(visitor(hop), rank) for hop in hops] + [(rank, visitor(-hop)) for hop in hops]
        return [
            Transfer.of_keys(payload, owner, user, problem.all_heads)
            for owner, user in uses
            if problem.needed(user, owner)
        ]

    def work(hops: range) -> tuple[Work, ...]:
        owners = sorted(visitor(hop) for hop in hops if problem.needed(rank, visitor(hop)))
        return make_work(problem, rank, owners, problem.all_heads, cut=True)

    steps = []
    for step in range(len(groups) + (backward and len(groups) > 1)):
        moves = transfers(Payload.INPUT, groups[step + 1]) if step + 1 < len(groups) else []
        moves += transfers(Payload.RESULT, groups[step - 1]) if backward and step > 1 else []
        steps.append(Step(tuple(moves), work(groups[step]) if step < len(groups) else ()))
    return steps


def _groups(hops: int, most: int, backward: bool) -> list[range]:
    """Hops 1 … `hops` in groups of at most `most`, as few and as even as can be.

    Smaller ones go first, as only the launch on our own keys hides their way here. Backward, the
    last one is a single hop, as nothing hides the way home of its gradients.
    """
    sizes = [*reversed(_even(hops - 1, most)), 1] if backward and hops else _even(hops, most)
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=1))]


def _even(total: int, most: int) -> list[int]:
    """As few parts of at most `most` as possible, nearly equal, in ascending order."""
    if not total:
        return []
    count = -(-total // most)
    size, larger = divmod(total, count)
    return [size] * (count - larger) + [size + 1] * larger
