"""What `rfa replay --documents … --json` wrote for packs, in one file without what is large.

    python benchmarks/packs.py results/packs_h200.json FILE …

Rows of groups of more than 8 ranks stay for rank 0, which has the base, and the slowest; of all
ranks the medians stay.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_FEW = 8  # ranks whose rows are kept
_DIGITS = 5


def median(row: Mapping[str, Any]) -> float:
    """Of a row's runs, ms."""
    return statistics.median(row["samples_ms"])


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """With as many digits as say something."""
    samples = [float(f"{ms:.{_DIGITS}g}") for ms in row["samples_ms"]]
    return {**row, "samples_ms": samples}


def condensed(paths: Iterable[Path]) -> dict[str, Any]:
    """All packs of the files."""
    files = [json.loads(path.read_text()) for path in paths]
    rows: list[dict[str, Any]] = []
    packs: dict[str, Any] = {}
    medians: dict[str, dict[str, list[float]]] = {}
    for file in files:
        for name, replay in file["details"]["replays"].items():
            placement, seed = replay["placement"], replay["workload"]["seed"]
            own = [
                row
                for row in file["rows"]
                if row["workload"]["seed"] == seed and row["implementation"] == placement["kernel"]
            ]
            title = f"{placement['world_size']} ranks, {name}"
            for passes in dict.fromkeys(row["passes"] for row in own):
                ranks = [row for row in own if row["passes"] == passes]
                found = {row["placement"]["rank"]: round(median(row), 4) for row in ranks}
                medians.setdefault(title, {})[passes] = [found[rank] for rank in sorted(found)]
                slowest = max(ranks, key=median)
                few = len(ranks) <= _FEW
                rows += [
                    rounded(row)
                    for row in ranks
                    if few or row is slowest or row["placement"]["rank"] == 0
                ]
            for passes, rates in file["details"]["packs"].items():
                (pack,) = (each for each in rates["packs"] if each["seed"] == seed)
                packs.setdefault(title, {})[passes] = pack
    first = {key: value for key, value in files[0].items() if key not in ("rows", "details")}
    commands = dict.fromkeys(re.sub(" --json [^ ]*", "", file["command"]) for file in files)
    first["command"] = " && ".join(commands)
    return {**first, "rows": rows, "details": {"packs": packs, "medians_ms": medians}}


def main(target: str, *sources: str) -> None:
    """Write the file."""
    found = condensed(map(Path, sources))
    Path(target).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
