"""Hold the simulator against the stored replays of an H200, row by row; tables of docs/planner.md.

python benchmarks/simulated.py
"""

from pathlib import Path

from ring_flash_attn.simulate.replayed import function_table, replayed, tables

if __name__ == "__main__":
    results = Path(__file__).parents[1] / "results"
    rows = list(replayed(results))
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        print(row)
    print("\n".join(["", *tables(rows), "", *function_table(results)]))
