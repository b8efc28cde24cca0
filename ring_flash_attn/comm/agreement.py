"""Do all ranks make the same call? Asked of the group's store when a call's signature is new.

Ranks that disagree would hang or, worse, mix up each other's data. So the first time a rank makes a
call of some signature it posts the signature to the group's store, waits for those of the others,
and compares. After that the signature is known and costs nothing.

`RFA_CHECK=off` turns this off; `RFA_CHECK=values` compares the values of cu_seqlens as well, which
costs a round over the store for every new cu_seqlens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..trace import span

MODES = ("off", "on", "values")
PATIENCE = timedelta(seconds=60)

Signature = tuple[tuple[str, object], ...]  # name and value of all that has to be equal


class _Known:
    """What this rank has agreed upon in one group."""

    def __init__(self, life: int) -> None:
        self.life = life  # how often this rank has made a group on this store
        self.signatures: set[Signature] = set()
        self.rounds = 0


_known: WeakKeyDictionary[ProcessGroup, _Known] = WeakKeyDictionary()


def check_mode() -> str:
    """What RFA_CHECK asks for; ValueError for an unknown value."""
    mode = os.environ.get("RFA_CHECK", "on")
    if mode not in MODES:
        raise ValueError(f"RFA_CHECK={mode!r}: must be one of {', '.join(MODES)}")
    return mode


def agree(signature: Signature, group: ProcessGroup) -> None:
    """Return if every rank of the group makes a call of this signature.

    Raises:
        ValueError: on every rank, naming who has what, if they differ; after 60 s, naming who
            posted what and who posted nothing, if some rank does not take part.
    """
    if check_mode() == "off" or dist.get_world_size(group) == 1:
        return
    if group not in _known:
        _known[group] = _Known(
            _store(group).add(f"ring_flash_attn/lives/{dist.get_rank(group)}", 1)
        )
    known = _known[group]
    if signature in known.signatures:
        return
    with span("ask whether all ranks make this call"):
        posted = _exchange(json.dumps(dict(signature)), group, known)
    if len(set(posted.values())) > 1 or len(posted) < dist.get_world_size(group):
        raise ValueError(_describe(posted, dist.get_world_size(group)))
    known.signatures.add(signature)


def _store(group: ProcessGroup) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def _exchange(text: str, group: ProcessGroup, known: _Known) -> dict[int, str]:
    """Post ours, and read what the others post within our patience."""
    store = _store(group)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    known.rounds += 1
    keys = [f"ring_flash_attn/{known.life}/{known.rounds}/{r}" for r in range(world_size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError:  # DistStoreError, or a FileStore's plain one
        keys = [key for key in keys if store.check([key])]
    posted = {int(key.rsplit("/", 1)[1]): store.get(key).decode() for key in keys}
    if len(posted) == world_size:  # all are here, so all have read the round before
        store.delete_key(f"ring_flash_attn/{known.life}/{known.rounds - 1}/{rank}")
    else:
        known.rounds -= 1  # whoever missed this round would start with it: so do we, next time
    return posted


def _describe(posted: Mapping[int, str], world_size: int) -> str:
    """Who has what, field by field; only the fields that differ."""
    silent = [rank for rank in range(world_size) if rank not in posted]
    signatures = {rank: json.loads(text) for rank, text in posted.items()}
    lines = []
    fields = sorted({field for signature in signatures.values() for field in signature})
    for field in fields:
        ranks: dict[str, list[int]] = {}
        for rank, signature in signatures.items():
            ranks.setdefault(json.dumps(signature.get(field)), []).append(rank)
        if len(ranks) > 1:
            lines += [f"{field} = {value} on {_ranks(who)}" for value, who in ranks.items()]
    if silent:
        calls: dict[str, list[int]] = {}
        for rank, text in posted.items():
            calls.setdefault(text, []).append(rank)
        lines += [f"{_ranks(who)} posted {call}" for call, who in calls.items()]
        lines.append(
            f"{_ranks(silent)} posted nothing within {PATIENCE.total_seconds():.0f} s: not in this "
            "call at all, failed before it, or in a call with arguments agreed upon earlier"
        )
    return "the ranks of the group do not make the same call:\n  " + "\n  ".join(lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
