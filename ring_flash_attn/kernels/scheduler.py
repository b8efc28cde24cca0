"""What tile schedulers need on the host: how many programs, in which order, which counter."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from .base import Call
from .device_cache import capturing, stream_handle
from .tables import LaunchSize, Table

MARGIN = "RFA_SM_MARGIN"
_PROGRAMS = 8  # for each processor in a section: four times what runs at once
_COUNTERS = 1024  # launches of captured graphs whose counters need not be set to zero
_TOGETHER = 8  # programs that go through the queries of one pair at a time
_LONGEST = 0.9  # of a program's share of the work: longer pieces are split
_LONGEST_HALVED = 1.25  # the same before every query head goes alone, which takes most memory
_UNEVEN = 1.05  # times a bound that no schedule reaches
_PART = 192  # rows of queries: what it takes to begin a piece, and to add up its gradients
_WORTH = 0.95  # of the time without: more parts take more memory


@cache
def processors(device: torch.device) -> int:
    """How many SMs it has."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def free_processors(device: torch.device) -> int:
    """All SMs but those left to others, such as NCCL's kernels."""
    value, count = os.environ.get(MARGIN, "0"), processors(device)
    if not value.isdecimal() or int(value) >= count:
        raise ValueError(f"{MARGIN} must be less than {device}'s {count} processors, not {value!r}")
    return count - int(value)


def programs(pairs: int, device: torch.device) -> float:
    """How many run at a time for each pair of batch and head."""
    return processors(device) / pairs


def section(pairs: int, nheads: int, work: Table, call: Call) -> int:
    """How many pairs of batch and head are under way together; see `place` in the kernels.

    Programs that own keys read q and dout, and add to dQ: of all pairs together more than fits into
    the L2 cache as a rule. They share what they read if several go through the same pair together.
    And the last section is about as wide as the others: with few pairs it would not occupy all SMs.
    """
    sharing = nheads // call.nheads_k  # those with the same keys and values
    if work.level:  # whatever comes last takes as long: there is nothing to win but the cache
        return sharing
    count = len(work.blocks)
    if work.by_key:
        sections = -(-pairs * min(_TOGETHER, count) // processors(call.device))
        least = -(-pairs // (sections * sharing))
        widths = range(least, least + least // 4 + 1)
        groups = pairs // sharing
        return max(widths, key=lambda width: ((groups - 1) % width + 1) / width) * sharing
    wanted = -(-_PROGRAMS * processors(call.device) // count)
    return min(pairs, -(-wanted // sharing) * sharing)


def duration(size: LaunchSize, pairs: int, device: torch.device) -> float:
    """Of a launch for so many pairs, roughly, where an entry of the scores takes 1.

    Blocks are chosen by it, and results depend on them: so not on how many processors are left to
    others.
    """
    return size.time(pairs, processors(device))


def split(work: Table, batch: int, call: Call) -> int:
    """Into how many parts a group of query heads goes, so that there is work for all programs.

    As parts are added up one by one, results depend on it: so not on how many processors are left
    to others.
    """
    pairs, group = batch * call.nheads_k, call.nheads // call.nheads_k
    key = pairs, group, processors(call.device)
    if key not in work.parts:
        work.parts[key] = _parts(work, *key)
    return work.parts[key]


def _parts(work: Table, pairs: int, group: int, count: int) -> int:
    """As few as it takes for each to be shorter than a program's share, and for even waves."""
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    fewer = divisors[:-1]
    share = pairs * work.total / count
    fit = (
        n
        for limit, some in ((_LONGEST, fewer), (_LONGEST_HALVED, fewer[-1:]))
        for n in some
        if work.longest <= n * limit * share
    )
    best = next(fit, group)
    fastest = _in_parts(work, pairs, group, best, count)
    for n in divisors[divisors.index(best) + 1 :]:
        time = _in_parts(work, pairs, group, n, count)
        if time < _WORTH * fastest:
            best, fastest = n, time
    return best


def _in_parts(work: Table, pairs: int, group: int, parts: int, count: int) -> float:
    """How long a launch takes, roughly, in rows of queries."""
    each = pairs * parts
    items = len(work.work) * each
    rounds = range(-(-items // count))  # one program takes n + 1 of the longest n * count + 1
    longest = max((n + 1) * work.work[n * count // each] for n in rounds) * group / parts
    even = pairs * group * work.total / count
    return max(even, _UNEVEN * longest) + items * _PART / count


def counter(device: torch.device) -> Tensor:
    """A zero, which the kernel that gets it leaves behind as one.

    Kernels that run at the same time get different ones: every stream has its own, and so has
    every launch of a captured graph, which may run at any time. It is zero already, unless there
    are no more of these, or none yet: then the graph sets one to zero.
    """
    if capturing(device):
        spare = _spare.get(device)
        return spare.pop() if spare else torch.zeros(1, dtype=torch.int32, device=device)
    return _counter(device, stream_handle(device))


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    if device not in _spare:  # a blocking copy: no stream has to wait for it
        zeros = torch.zeros(_COUNTERS, 4, dtype=torch.int32, device="cpu").to(device)
        _spare[device] = list(zeros[:, :1].unbind())  # 16 bytes apart
    return torch.zeros(1, dtype=torch.int32, device=device)


_spare: dict[torch.device, list[Tensor]] = {}  # for graphs that are to be captured
