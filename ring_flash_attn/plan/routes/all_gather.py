"""All-gather: every rank first gets all keys and values it needs, a group of KV heads at a time.

    step 0          step 1                  step 2                  step 3
    get K (h0)      get K (h1)              get K (h2)              …
                    Q·K (h0)                Q·K (h1)                Q·K (h2)
                                            return dK (h0)          return dK (h1)

The llama3 scheme: few, large launches. The smaller the head groups, the less memory, and the more
of the transfers is hidden behind work.
"""

from __future__ import annotations

from ..build import make_work, register_route
from ..problem import Problem
from ..steps import Heads, Payload, Step, Transfer


@register_route("all_gather")
def all_gather(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Steps of `rank`: fetch group g + 1 and return the gradients of g − 1 while working on g."""
    ranks = range(problem.world_size)
    sources = [owner for owner in ranks if problem.needed(rank, owner)]
    targets = [user for user in ranks if problem.needed(user, rank)]
    gathers = any(owner != rank for owner in sources)  # otherwise our own keys are read in place

    def moves(payload: Payload, heads: Heads) -> list[Transfer]:
        ours = {Transfer.of_keys(payload, owner, rank, heads) for owner in sources if gathers}
        theirs = {Transfer.of_keys(payload, rank, user, heads) for user in targets if user != rank}
        return sorted(ours | theirs)

    groups = [
        (head, head + problem.heads_k_stride)
        for head in range(0, problem.nheads_k, problem.heads_k_stride)
    ]
    steps = []
    for step in range(len(groups) + 1 + backward):
        transfers = []
        if step < len(groups):
            transfers += moves(Payload.INPUT, groups[step])
        if backward and step >= 2:
            transfers += moves(Payload.RESULT, groups[step - 2])
        ready = groups[step - 1 : step] if step else []
        work = [w for heads in ready for w in make_work(problem, rank, sources, heads, cut=True)]
        steps.append(Step(tuple(transfers), tuple(work)))
    return steps
