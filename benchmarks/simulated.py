"""Hold the simulator against the stored replays of an H200, row by row.

python benchmarks/simulated.py
"""

import statistics
from pathlib import Path

from ring_flash_attn.simulate.replayed import replayed

if __name__ == "__main__":
    rows = list(replayed(Path(__file__).parents[1] / "results"))
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        print(row)
    for name, half in (("fitted", True), ("tested", False)):
        errors = [abs(row.error) for row in rows if row.fitted is half]
        within = sum(error <= 0.1 for error in errors)
        middle, worst = statistics.median(errors), max(errors)
        print(f"{name}: {len(errors)} rows, median {middle:.1%}, worst {worst:.1%}, ", end="")
        print(f"{within} within 10 %")
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        what = "documents" if row.workload.packed else "one document"
        where = f"{row.placement.layout} × {row.placement.route}"
        groups.setdefault((row.placement.kernel, where, what), []).append(row.error)
    print("| kernel | layout × route | tokens | rows | median error | from … to |")
    print("|---|---|---|---|---|---|")
    for (kernel, where, what), errors in sorted(groups.items()):
        middle = statistics.median(map(abs, errors))
        span = f"{min(errors):+.1%} … {max(errors):+.1%}"
        print(f"| `{kernel}` | {where} | {what} | {len(errors)} | {middle:.1%} | {span} |")
