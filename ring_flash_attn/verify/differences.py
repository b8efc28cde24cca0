"""Results beside results: several ranks and one device, one kernel and another."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from .answers import answer, torch_dtype
from .callers import Tensors, call_on_one_device, part
from .cases import Case, Choice
from .measure import Error, compare
from .questions import Question

ONE_DEVICE = "one device"
_on_one_device = lru_cache(maxsize=4)(call_on_one_device)  # functions and layouts share it


class Differences:
    """Compares what a process computes with one device, and with the kernel `choice.versus`.

    Args:
        choice: what to compare; nothing without a report.
        device: of the process.
    """

    def __init__(self, choice: Choice, device: torch.device) -> None:
        self._choice, self._device = choice, device
        self._question: Question | None = None
        self._baseline: dict[tuple[str, str, str, int], tuple[str, Tensors]] = {}

    def of(
        self, case: Case, kernel: str, found: Tensors, rank: int, world_size: int
    ) -> dict[str, tuple[Error, ...]]:
        """By what a rank's tensors are compared with; cases come in the order of `make_cases`."""
        if not self._choice.report:
            return {}
        differences = {}
        if case.layout:
            whole = _on_one_device(case.question, kernel, self._device)
            own = {
                name: part(case, name, whole[name], rank, world_size)
                for name in found
                if name != "dsink"  # a rank has a part of the sum
            }
            differences[ONE_DEVICE] = self._compare(case, rank, found, own)
        other = self._other(case, kernel, found, rank)
        if other is not None:
            differences[self._choice.versus] = self._compare(case, rank, found, other)
        return differences

    def _other(self, case: Case, kernel: str, found: Tensors, rank: int) -> Tensors | None:
        """What the other kernel computed for this rank; None if this is it."""
        if case.question != self._question:
            self._question = case.question
            self._baseline.clear()
        function = case.function.removeprefix(f"{case.kernel}_")
        key = (function, case.layout, case.route, rank)
        if case.kernel == self._choice.versus:
            self._baseline[key] = kernel, found
            return None
        used, tensors = self._baseline.get(key, ("", None))
        return None if used == kernel else tensors

    def _compare(self, case: Case, rank: int, found: Tensors, other: Tensors) -> tuple[Error, ...]:
        """Errors against other tensors, which may be as far from the right ones as these."""
        right = answer(case.question, self._device)
        errors = (
            compare(
                name,
                rank,
                found[name],
                want,
                dtype=torch_dtype(case.question.dtype),
                plain=right.plain_errors[name],
                largest_value=right.largest[name],
                scale=right.scales[name],
            )
            for name, want in other.items()
        )
        return tuple(replace(each, plain=2 * each.plain, limit=2 * each.limit) for each in errors)
