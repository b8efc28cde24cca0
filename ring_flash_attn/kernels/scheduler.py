"""What tile schedulers need on the host: how many programs, in which order, which counter."""

from __future__ import annotations

import os
from functools import cache
from heapq import heappop, heappush
from itertools import groupby
from math import ceil

import torch
from torch import Tensor

from .base import Call
from .device_cache import capturing, stream_handle
from .tables import WHOLE, LaunchSize, Pieces, Table

MARGIN = "RFA_SM_MARGIN"
_PROGRAMS = 8  # for each processor in a section: four times what runs at once
_COUNTERS = 1024  # launches of captured graphs whose counters need not be set to zero
_TOGETHER = 8  # programs that go through the queries of one pair at a time
_LONGEST = 0.9  # of a program's share of the work: longer pieces are split
_LONGEST_HALVED = 1.25  # the same before every query head goes alone, which takes most memory
_UNEVEN = 1.05  # times a bound that no schedule reaches
_PART = 192  # rows of queries: what it takes to begin a piece, and to add up its gradients
_WORTH = 0.95  # of the time without: more parts take more memory
_PIECES = 4  # at most, of the keys of a block of queries
_LENGTHS = 24  # of items: where there are more, short ones fill the end
_WAVES = (1.2, 2.2)  # of items that are cut, or all
_BLOCK, _CARRY = 192, 320  # keys: what it takes to begin an item, and to take a state over
_EVEN = 1.015  # times as long as if all programs ended together is good enough


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
    if work.pieces > 1:  # pieces of the same rows are far from each other
        return pairs
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


def pieces(work: Table, pairs: int, device: torch.device) -> Pieces:
    """How to cut the longest items by their keys, so that all programs end together.

    A piece goes on from the state that the one before leaves behind, so there has to be one.
    Results depend on it: so not on how many processors are left to others.
    """
    programs, count = processors(device), len(work.work)
    even = (work.total + _BLOCK * count) * pairs / programs
    few = len(set(work.work)) <= _LENGTHS
    if work.masked or not few or work.longest <= (_EVEN - 1) * even:
        return WHOLE
    best, fastest = WHOLE, time_in_pieces(work, pairs, programs, WHOLE)
    some = (ceil(waves * programs / pairs) for waves in _WAVES)
    for blocks in sorted({min(count, each) for each in some} | {count}):
        for number in range(2, _PIECES + 1):
            if fastest <= _EVEN * even:
                return best
            found = Pieces(number, blocks)
            time = time_in_pieces(work, pairs, programs, found)
            if time < (2 - _EVEN) * fastest:
                best, fastest = found, time
    return best


def time_in_pieces(work: Table, pairs: int, programs: int, cut: Pieces) -> float:
    """How long a launch takes, in keys of a block.

    Each program takes the next item when it is done, and a piece begins when the one before has
    ended. The order is that of `_in_pieces` in `tables.py`. Equal items are taken together: as many
    as there are programs that are free at the same time.
    """
    size = -(-work.longest // cut.number)
    rounds: list[list[tuple[float, int, int]]] = [[] for _ in range(1 + cut.number)]
    for length, same in groupby(work.work[: cut.blocks]):
        number, items = max(1, -(-length // size)), pairs * len(list(same))
        cost = length / number + _BLOCK + (_CARRY if number > 1 else 0)
        for each in rounds[1 + cut.number - number :]:
            each.append((cost, items, length))
    for length, same in groupby(work.work[cut.blocks :]):
        items = pairs * len(list(same))
        rounds[0 if length > size else -1].append((length + _BLOCK, items, 0))
    free = [(0.0, programs)]  # from when on, and how many
    ends: dict[int, list[tuple[float, int]]] = {}  # of the last piece of blocks of a length
    for each in rounds:
        for cost, items, length in sorted(each, reverse=True):
            found = []
            for before, count in ends.get(length, [(0.0, items)]):
                while count:
                    since, idle = heappop(free)
                    taken = min(idle, count)
                    if taken < idle:
                        heappush(free, (since, idle - taken))
                    end = max(since, before) + cost
                    heappush(free, (end, taken))
                    found.append((end, taken))
                    count -= taken
            if length:
                ends[length] = found
    return max(free)[0]


def progress(rows: int, device: torch.device) -> Tensor:
    """So many zeros, which the kernel that gets them leaves behind as zeros.

    As with `counter`, kernels that run at the same time get different ones.
    """
    if capturing(device):
        return torch.zeros(rows, dtype=torch.int32, device=device)
    key = device, stream_handle(device)
    found = _progress.get(key)
    if found is None or len(found) < rows:
        found = _progress[key] = torch.zeros(rows, dtype=torch.int32, device=device)
    return found[:rows]


_progress: dict[tuple[torch.device, int], Tensor] = {}


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
