"""Do all ranks make the same call? Asked of the group's store when a call's signature is new.

`RFA_CHECK=off` turns this off; `RFA_CHECK=values` compares the values of cu_seqlens as well, which
costs a round over the store for every new cu_seqlens, and for every call of the llama3 functions.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..cache import Cache
from ..trace import span

MODES = ("off", "on", "values")
PATIENCE = timedelta(seconds=60)
_GET = timedelta(seconds=10)  # for a key that was there a moment ago
_SIGNATURES = 256  # remembered in a group; each is one or two kilobytes

Signature = tuple[tuple[str, object], ...]  # name and value of all that has to be equal


class _Known:
    """What this rank has agreed upon in one group."""

    def __init__(self, group: ProcessGroup) -> None:
        shared: Any = dist.distributed_c10d._get_process_group_store(group)
        self.store = shared.clone()  # waiting on it blocks no other thread's use of the store
        self.store.set_timeout(_GET)
        # How often this rank has made a group on this store.
        self.life = self.store.add(f"ring_flash_attn/lives/{dist.get_rank(group)}", 1)
        # Of calls that all ranks have made; all add, and so forget, in the same order.
        self.signatures: Cache[Signature, bool] = Cache(_SIGNATURES)
        self.rounds = 0  # over the store


_known: WeakKeyDictionary[ProcessGroup, _Known] = WeakKeyDictionary()
_failed: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()  # how far a call got
UNDER_WAY = "with messages under way"
_FAILED = "the call before failed"
_NEW_GROUP = "messages of a call that failed may still be under way: make a new process group"


def check_mode() -> str:
    """What RFA_CHECK asks for; ValueError for an unknown value."""
    mode = os.environ.get("RFA_CHECK", "on")
    if mode not in MODES:
        raise ValueError(f"RFA_CHECK={mode!r}: must be one of {', '.join(MODES)}")
    return mode


def call_failed(group: ProcessGroup, progress: str) -> None:
    """Note how far a call got that has failed: the next one asks whether it did on all ranks."""
    _failed[group] = progress


def meet_after_failure(group: ProcessGroup) -> None:
    """Before a pass that asks for nothing itself (a backward pass): the same question."""
    if group in _failed:
        agree((("call", "a backward pass"),), group)


def agree(signature: Signature, group: ProcessGroup, part: object = None) -> list[Any]:
    """Return if every rank of the group makes a call of this signature.

    `part` is what may differ, for JSON; with one, the ranks meet at every call, and all ranks'
    parts are returned.

    Raises:
        ValueError: on every rank, naming who has what, if they differ; after the group's timeout,
            naming who posted what and who posted nothing, if some rank does not take part; if an
            earlier call has left messages behind on some ranks.
    """
    if dist.get_world_size(group) == 1:
        return []
    failed = _failed.get(group)
    if check_mode() == "off":
        if failed is not None:
            raise ValueError(_NEW_GROUP)
        return []
    known = _known.get(group)
    if known is None:
        known = _known[group] = _Known(group)
    elif failed is None and part is None and known.signatures.get(signature):
        return []
    fields = dict(signature) if failed is None else {**dict(signature), _FAILED: failed}
    with span("ask whether all ranks make this call"):
        posted = _exchange(json.dumps([fields, part]), group, known)
    calls = {rank: fields for rank, (fields, _) in posted.items()}
    first = next(iter(calls.values()))
    if len(calls) < dist.get_world_size(group) or any(call != first for call in calls.values()):
        if any(_FAILED in call for call in calls.values()):
            _failed.setdefault(group, "on other ranks")
        raise ValueError(_describe(calls, group))
    if failed == UNDER_WAY:
        raise ValueError(_NEW_GROUP)
    _failed.pop(group, None)  # at the same place on all ranks: nothing is left of it
    known.signatures.add(signature, True)
    return [posted[rank][1] for rank in sorted(posted)]


def _exchange(text: str, group: ProcessGroup, known: _Known) -> dict[int, Any]:
    """Post ours, and read what the others post within the group's timeout."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store = known.store
    known.rounds += 1
    keys = [f"ring_flash_attn/{known.life}/{known.rounds}/{r}" for r in range(world_size)]
    store.set(keys[rank], text)
    posted: dict[int, Any] = {}
    try:
        posted = _read(keys, group, store)
    finally:
        if len(posted) == world_size:  # all are here, so all have read the round before
            store.delete_key(f"ring_flash_attn/{known.life}/{known.rounds - 1}/{rank}")
        else:  # whoever missed this round would start with it: so do we, next time
            store.delete_key(keys[rank])
            known.rounds -= 1
    return posted


def _read(keys: Sequence[str], group: ProcessGroup, store: Any) -> dict[int, Any]:
    """What each rank has posted, of those that come within the group's timeout."""
    timeout = group_timeout(group)
    patience = min(PATIENCE, timeout / 2)
    posted: dict[int, Any] = {}  # also of ranks that leave before us, and take their word with them
    for seconds in (patience, timeout - patience):
        try:
            store.wait(keys, seconds)
            texts = [text.decode() for text in store.multi_get(keys)]
        except RuntimeError:  # DistStoreError, or a FileStore's plain one
            texts = [_get(store, key) for key in keys]
        here = {rank: text for rank, text in enumerate(texts) if text}
        posted |= {rank: json.loads(text) for rank, text in here.items()}
        if len(here) == len(keys):
            break
        if seconds is patience:
            late = [r for r in range(len(keys)) if r not in here]
            warnings.warn(
                f"ring_flash_attn: {_ranks(late)} of the group did not come to this call within "
                f"{patience.total_seconds():g} s; waiting for the group's timeout of "
                f"{timeout.total_seconds():g} s",
                RuntimeWarning,
                stacklevel=2,
            )
    return posted


def _get(store: Any, key: str) -> str:
    """What is posted there; "" if nothing is, or not any more."""
    try:
        text: bytes = store.get(key) if store.check([key]) else b""
    except RuntimeError:  # removed in between
        return ""
    return text.decode()  # a TCPStore answers "" if it was removed in between


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long the group's collectives wait for a rank."""
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found.append(getattr(options, "_timeout", dist.default_pg_timeout))
    return min(found, default=dist.default_pg_timeout)


def _describe(calls: Mapping[int, dict[str, object]], group: ProcessGroup) -> str:
    """Who has what, field by field; only the fields that differ."""
    silent = [rank for rank in range(dist.get_world_size(group)) if rank not in calls]
    lines = []
    for field in sorted({field for call in calls.values() for field in call}):
        who_has = _by_value({rank: call.get(field) for rank, call in calls.items()})
        if len(who_has) > 1:
            lines += [f"{field} = {value} on {who}" for value, who in who_has.items()]
            if field == _FAILED:
                lines.append(_NEW_GROUP)
    if silent:
        lines += [f"{who} posted {text}" for text, who in _by_value(calls).items()]
        seconds = group_timeout(group).total_seconds()
        lines.append(
            f"{_ranks(silent)} posted nothing within {seconds:.0f} s: not in this call at all, "
            "failed before it, or in a call with arguments agreed upon earlier"
        )
    return "the ranks of the group do not make the same call:\n  " + "\n  ".join(lines)


def _by_value(values: Mapping[int, object]) -> dict[str, str]:
    """Who has each value, in words; by the value as JSON."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(json.dumps(value), []).append(rank)
    return {value: _ranks(who) for value, who in ranks.items()}


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
