"""What is to be computed, and who computes, sends and receives what when: plain data, no torch.

What a route needs is here: `from ring_flash_attn.plan import Problem, Step, make_work, …`.
"""

from . import balanced, routes  # registers them
from .build import make_plan, make_work, register_route, route_names
from .layout import register_layout
from .problem import Problem
from .steps import Payload, Plan, Side, Step, Transfer, Work

__all__ = [
    "Payload",
    "Plan",
    "Problem",
    "Side",
    "Step",
    "Transfer",
    "Work",
    "balanced",
    "make_plan",
    "make_work",
    "register_layout",
    "register_route",
    "route_names",
    "routes",
]
