"""Plans without numpy: torch's arrays say the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems

from ring_flash_attn.kernels import tables
from ring_flash_attn.plan import arrays
from ring_flash_attn.plan.buffers import BufferPlan
from ring_flash_attn.plan.build import make_plan, route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.plan.problem import Problem

CPU = torch.device("cpu")


def everything(problem: Problem, route: str, rank: int) -> list[object]:
    """Plans, where rows lie, launch tables; of a problem that nothing is known of."""
    fresh = Problem(*(getattr(problem, name) for name in problem.__match_args__))
    found: list[object] = []
    for backward in (False, True):
        plan = make_plan(route, fresh, rank, backward)
        made = BufferPlan(plan, fresh)
        found.append(plan)
        for moves in made.moves:
            found += [(tuple(m.of_shard), tuple(m.of_slot), m.rows, m.place) for m in moves]
        for key, arrangement in made.arrangements.items():
            found.append((key, arrangement.spans, arrangement.size, arrangement.by_document))
        for work in (work for step in plan.steps for work in step.work):
            table = tables.table(list(work.tiles), 16, 8, backward, CPU, 3.0)
            found += [table.blocks.tolist(), table.tiles.tolist(), table.work, table.halves]
            found.append(tables.launch_size(work.tiles, 16, 8))
            found.append(round(tables.padded_pairs(work.tiles, 16), 3))
            cut = tables.table(list(work.tiles), 16, 8, False, CPU, pieces=tables.Pieces(3, 2))
            found += [cut.blocks.tolist(), cut.tiles.tolist(), cut.work, cut.pieces]
    return found


@pytest.mark.parametrize("layout", layout_names())
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_plans_are_the_same_without_numpy(layout: str, data: st.DataObject) -> None:
    problem = data.draw(problems(layout))
    route = data.draw(st.sampled_from(route_names()))
    rank = data.draw(st.integers(0, problem.world_size - 1))
    assert arrays.np is not None
    known = everything(problem, route, rank)
    with mock.patch.object(arrays, "np", None):
        assert everything(problem, route, rank) == known


@pytest.mark.parametrize("numpy", [True, False])
def test_operations(numpy: bool) -> None:
    """Those that the two name differently."""
    with mock.patch.object(arrays, "np", arrays.np if numpy else None):
        vector = arrays.vector
        groups, values = vector([2, 0, 2]), vector([5, -3, 7])
        assert arrays.sum_of_each(groups, values, 4).tolist() == [-3, 0, 12, 0]
        assert arrays.least_of_each(groups, values, 4, 9).tolist() == [-3, 9, 5, 9]
        assert arrays.most_of_each(groups, values, 4, -9).tolist() == [-3, -9, 7, -9]
        assert arrays.count(groups, 4).tolist() == [1, 0, 2, 0]
        assert arrays.repeat(values, groups).tolist() == [5, 5, 7, 7]
        assert arrays.sums_before(values).tolist() == [0, 5, 2, 9]
        assert arrays.running_max(values).tolist() == [5, 5, 7]
        assert arrays.insertion_points(vector([1, 3, 3]), vector([3])).tolist() == [1]
        assert arrays.insertion_points(vector([1, 3, 3]), vector([3]), right=True).tolist() == [3]
        assert [each.tolist() for each in arrays.unique(groups)] == [[0, 2], [1, 0, 1]]
        assert arrays.nonzero(groups).tolist() == [0, 2]
        assert arrays.vector([]).tolist() == arrays.filled(0, 1).tolist() == []
        assert arrays.filled((1, 2), value=True).tolist() == [[True, True]]
        assert arrays.to_tensor(values).dtype == torch.int64
