"""A bounded cache that threads may share; where files lie that later runs read."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keeps the newest `size` entries; `evict` is called with every value that goes.

    First in, first out, used or not: ranks that add the same keys in the same order keep the same.
    With `weigh`, old entries go also when all together weigh more than `most`; the newest stays.
    """

    def __init__(
        self,
        size: int,
        evict: Callable[[Value], None] | None = None,
        weigh: Callable[[Value], int] | None = None,
        most: int = 0,
    ) -> None:
        self._size, self._evict, self._weigh, self._most = size, evict, weigh, most
        self._entries: dict[Key, Value] = {}
        self._weight = 0
        self._being_made: dict[Key, Future[Value]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        return self._entries.get(key)

    def clear(self) -> None:
        with self._lock:
            self._entries, self._weight = {}, 0

    def add(self, key: Key, value: Value) -> Value:
        """Keep a value, and return it; or the one that another thread has added meanwhile."""
        weight = 0 if self._weigh is None else self._weigh(value)
        with self._lock:
            if key in self._entries:
                return self._entries[key]
            evicted = []
            while self._entries and (
                len(self._entries) >= self._size
                or (self._weigh is not None and self._weight + weight > self._most)
            ):
                old = self._entries.pop(next(iter(self._entries)))
                self._weight -= 0 if self._weigh is None else self._weigh(old)
                evicted.append(old)
            self._entries[key] = value
            self._weight += weight
        if self._evict is not None:
            for old in evicted:
                self._evict(old)
        return value

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made now if it is not there.

        Threads that ask for it meanwhile wait for the one that makes it, and get its error too.
        """
        found = self._entries.get(key)
        if found is not None:
            return found
        with self._lock:
            if key in self._entries:
                return self._entries[key]
            pending = self._being_made.get(key)
            ours = pending is None
            if pending is None:
                pending = self._being_made[key] = Future()
        if not ours:
            return pending.result()
        try:
            value = self.add(key, make())
        except BaseException as error:
            pending.set_exception(error)
            raise
        else:
            pending.set_result(value)
            return value
        finally:
            with self._lock:
                del self._being_made[key]


def user_path(variable: str, name: str) -> Path | None:
    """What an environment variable names, by default in the user's cache.

    None if the user wants none, or has no home.
    """
    named = os.environ.get(variable)
    if named is None:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        named = os.path.join(caches, "ring_flash_attn", name)
    found = os.path.expanduser(named)
    return None if not found or found.startswith("~") else Path(found)
