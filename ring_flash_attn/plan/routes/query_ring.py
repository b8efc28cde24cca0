"""Query ring: queries go from neighbour to neighbour; keys and values stay at home.

    step 0      step 1      step 2
    Q0·K0       Q1·K0       Q2·K0        Q moves on while the kernel works; its (out, lse), and
    Q1·K1       Q2·K1       Q0·K1        backward its dQ, follow one step behind and at the end
    Q2·K2       Q0·K2       Q1·K2        go home

Worth it where the query side is the smaller one: few queries against many keys. Queries travel
downwards, because under a causal mask they need the keys of the ranks below them.
"""

from __future__ import annotations

from ..build import register_route
from ..problem import Problem
from ..steps import Side, Step
from .ring import circulate


@register_route("query_ring")
def query_ring(problem: Problem, rank: int, backward: bool) -> list[Step]:
    """Queries, with what is accumulated for them, travel downwards through the ranks."""
    return circulate(problem, rank, Side.QUERY, direction=-1, returns=True)
