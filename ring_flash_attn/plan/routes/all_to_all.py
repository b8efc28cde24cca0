"""All-to-all: tokens are exchanged for heads, so that a rank has all tokens of some heads.

    step 0              step 1          step 2
    get Q, K            Q·K             return out, or dQ and dK
    (of my heads)

The scheme of DeepSpeed-Ulysses. Where ranks share a KV head, as there are fewer of them than ranks
or their number does not divide, each takes the queries of some ranks.
"""

from __future__ import annotations

from ..build import register_route
from ..problem import Problem
from ..shares import Exchange, Share, Shares, share_out
from ..steps import Step, Transfer, Work


@register_route("all_to_all")
def all_to_all(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Steps of `rank`: group g + 1 of its heads arrives, and g − 1 leaves, while g is computed."""
    everybody = tuple(range(problem.world_size))
    shares: Shares = problem.remember(("shares",), lambda: share_out(problem, everybody))
    exchange = Exchange(problem, rank, shares)
    groups = {user: _groups(theirs, problem.heads_k_stride) for user, theirs in shares.items()}
    count = max(map(len, groups.values()))
    moves: list[list[Transfer]] = [[] for _ in range(count + 2)]
    works: list[list[Work]] = [[] for _ in range(count + 2)]
    for user, theirs in groups.items():
        for number, group in enumerate(theirs):
            for share in group:
                moves[number] += exchange.queries_come(user, share)
                moves[number] += exchange.keys_come(user, share, everybody)
                moves[number + 2] += exchange.results_leave(user, share)
                if backward:
                    moves[number + 2] += exchange.gradients_leave(user, share, everybody)
                if user == rank:
                    works[number + 1] += exchange.work(share, everybody)
    steps = [Step(tuple(m), tuple(w)) for m, w in zip(moves, works, strict=True)]
    if problem.world_size == 1:
        return steps[1 : max(2, count + 1)]
    return steps if backward or exchange.returns else steps[:-1]


def _groups(shares: tuple[Share, ...], stride: int) -> list[list[Share]]:
    """Shares that travel together: of at most `stride` heads."""
    found: list[list[Share]] = []
    room = 0
    for share in shares:
        first, end = share.heads
        while first < end:
            if not room:
                found.append([])
                room = stride
            last = min(end, first + room)
            found[-1].append(Share((first, last), share.queries))
            room -= last - first
            first = last
    return found
