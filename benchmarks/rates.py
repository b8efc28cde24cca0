"""Write the points of an H200 from `results/` into the package, where rates are fitted from them.

python benchmarks/rates.py
"""

from pathlib import Path

from ring_flash_attn.simulate.points import DATA, points_of_results, write_points

if __name__ == "__main__":
    points = points_of_results(Path(__file__).parents[1] / "results")
    write_points(points, DATA / "h200.csv")
    print(f"{len(points)} points")
