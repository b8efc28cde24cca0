"""The files of a report: read, named, and what each says about its machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.results import Results, load


@dataclass(frozen=True)
class Source:
    """One file.

    Attributes:
        name: of the file, with its folder where two have the same name.
        results: what it holds.
    """

    name: str
    results: Results

    @property
    def device(self) -> str:
        """Where it was measured, in words."""
        return self.results.device


def read(paths: Sequence[Path]) -> list[Source]:
    """Every file once; ValueError that names the one that cannot be read."""
    if not paths:
        raise ValueError("no file to report on")
    once = list({path.resolve(): path for path in paths}.values())
    names = Counter(path.name for path in once)
    sources = []
    for path in once:
        results = load(path)
        _check(path, results)
        sources.append(Source(path.name if names[path.name] == 1 else str(path), results))
    return sources


def header(source: Source) -> dict[str, Any]:
    """What was measured where: a line of the page's first table."""
    results = source.results
    return {
        "file": source.name,
        "device": source.device,
        "command": str(results.command),
        "created": str(results.created),
        "commit": None if results.commit is None else str(results.commit),
        "versions": {str(name): str(each) for name, each in results.versions.items()},
        "settings": {str(name): str(each) for name, each in results.settings.items()},
        "peak": {str(name): each for name, each in results.peak.items()},
        "rows": len(results.rows),
    }


def _check(path: Path, results: Results) -> None:
    """ValueError for a file of the right format with values of the wrong kind."""
    whole = ("machine", "versions", "settings", "details")
    parts = [(f"{name!r}", getattr(results, name)) for name in whole]
    for number, row in enumerate(results.rows):
        names = ("workload", "placement", "values", "errors")
        parts += [(f"{name!r} of row {number}", getattr(row, name)) for name in names]
        parts += [(f"error {name!r} of row {number}", each) for name, each in _items(row.errors)]
    for what, value in parts:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: damaged: {what} holds no names, but {value!r}")


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []
