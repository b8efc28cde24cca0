"""Hold the simulator against the stored replays of an H200, row by row; tables of docs/planner.md.

python benchmarks/simulated.py
"""

from pathlib import Path

from ring_flash_attn.simulate.replayed import function_table, packs, replayed, tables

if __name__ == "__main__":
    results = Path(__file__).parents[1] / "results"
    rows, drawn = list(replayed(results)), list(packs(results))
    for row in sorted(rows + drawn, key=lambda row: -abs(row.error)):
        print(row)
    print("\n".join(["", *tables(rows, drawn), "", *function_table(results)]))
