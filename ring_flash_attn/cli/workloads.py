"""From options to workloads: presets, single values, lists of them, windows and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..bench.workload import FORWARD_ONLY, PRESETS, Workload

_MOST = 1000  # workloads of one command


def make_workloads(
    preset: str | None,
    causal: bool | None,
    window: str | None,
    dtype: str | None,
    **numbers: str | None,
) -> list[Workload]:
    """Every combination of what the user wrote, else of the preset, else the default.

    Args:
        preset: name of one to start from.
        causal, window, dtype: of all workloads; None: as in the preset.
        numbers: one or several, such as `seqlen="512,1024"`; None: as in the preset.

    Raises:
        ValueError: a wrong value, by the name of its option.
    """
    if preset not in (None, *PRESETS):
        raise ValueError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    sides = None if window is None else parse_window(window)
    single = {"causal": causal, "window": sides, "dtype": dtype}
    changes: dict[str, Any] = {name: each for name, each in single.items() if each is not None}
    start = replace(Workload() if preset is None else PRESETS[preset], **changes)
    lists: dict[str, Any] = {
        name: _numbers(name, text) for name, text in numbers.items() if text is not None
    }
    chosen = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    if len(chosen) > _MOST:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in lists)
        raise ValueError(f"{options}: {len(chosen)} combinations; at most {_MOST} at a time")
    if "nheads" in lists and "nheads_k" not in lists:  # as many KV heads
        chosen = [{**each, "nheads_k": each["nheads"]} for each in chosen]
    return [replace(start, **each) for each in chosen]


def differences(workloads: Sequence[Workload]) -> list[str]:
    """Names of what is not the same in all of them."""
    values = [each.to_dict() for each in workloads]
    return [name for name in values[0] if any(each[name] != values[0][name] for each in values)]


def without_gradients(preset: str | None, no_grad: bool) -> bool:
    """Whether only forward passes are wanted."""
    return no_grad or preset in FORWARD_ONLY


def _numbers(name: str, text: str) -> list[int]:
    option = f"--{name.replace('_', '-')}"
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        message = f"{option} must be a number or several, as 512,1024; not {text!r}"
        raise ValueError(message) from None
    if min(found) < 1:
        raise ValueError(f"{option} must be positive, not {text!r}")
    return list(dict.fromkeys(found))


def parse_window(text: str) -> tuple[int, int]:
    """Of --window."""
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--window must be two numbers, as 1024,0; not {text!r}") from None
    if min(left, right) < -1:
        raise ValueError(f"--window {left},{right}: sides are -1 (all keys) or more")
    return left, right


def parse_offsets(text: str) -> tuple[int, ...]:
    """Of --cu-seqlens."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"--cu-seqlens must be whole numbers and commas, not {text!r}"
        raise ValueError(message) from None
