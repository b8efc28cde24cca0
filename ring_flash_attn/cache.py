"""A bounded cache that threads may share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Keeps the newest `size` entries; `evict` is called with every value that goes.

    First in, first out, used or not: ranks that add the same keys in the same order keep the same.
    """

    def __init__(self, size: int, evict: Callable[[Value], None] | None = None) -> None:
        self._size, self._evict = size, evict
        self._entries: dict[Key, Value] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        return self._entries.get(key)

    def clear(self) -> None:
        with self._lock:
            self._entries = {}

    def add(self, key: Key, value: Value) -> Value:
        """Keep a value, and return it; or the one that another thread has added meanwhile."""
        with self._lock:
            if key in self._entries:
                return self._entries[key]
            evicted = []
            while len(self._entries) >= self._size:
                evicted.append(self._entries.pop(next(iter(self._entries))))
            self._entries[key] = value
        if self._evict is not None:
            for old in evicted:
                self._evict(old)
        return value
