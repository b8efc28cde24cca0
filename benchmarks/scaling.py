"""Predicted time per token from 8 to 1,024 ranks: docs/scaling.csv, and its picture.

python benchmarks/scaling.py            # prices everything: some 20 minutes of 2 cores
python benchmarks/scaling.py --picture  # draws what the file has (needs plotly and kaleido)
"""

from __future__ import annotations

import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ring_flash_attn.simulate.scaling import COLUMNS, FABRICS, RANKS, WORKLOADS, SchemePoint, price

DOCS = Path(__file__).parents[1] / "docs"
FILE = DOCS / "scaling.csv"


def points() -> list[SchemePoint]:
    """Of the file."""
    with FILE.open() as lines:
        return [SchemePoint.from_cells(row) for row in csv.reader(lines) if row[0] != COLUMNS[0]]


def compute() -> None:
    """Price all workloads on all fabrics, the largest groups first."""
    cells = [(name, fabric, n) for n in reversed(RANKS) for fabric in FABRICS for name in WORKLOADS]
    found: list[SchemePoint] = []
    with ProcessPoolExecutor(2) as pool:
        for cell, these in zip(cells, pool.map(price, *zip(*cells, strict=True)), strict=True):
            print(*cell, *these, sep="\n  ", flush=True)
            found += these
    order = {name: number for number, name in enumerate(WORKLOADS)}
    found.sort(key=lambda each: (order[each.workload], each.fabric, each.ranks))
    with FILE.open("w", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(
            [COLUMNS, *(each.cells() for each in found)]
        )


def picture() -> None:
    """A row for each fabric, a column for each workload."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    found = points()
    schemes = list(dict.fromkeys(each.scheme for each in found))
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#7f7f7f", "#D55E00")
    figure = make_subplots(
        len(FABRICS),
        len(WORKLOADS),
        subplot_titles=list(WORKLOADS) + [""] * len(WORKLOADS),
        row_titles=list(FABRICS),
        horizontal_spacing=0.035,
        vertical_spacing=0.09,
    )
    for row, fabric in enumerate(FABRICS, 1):
        for column, workload in enumerate(WORKLOADS, 1):
            for scheme, colour in zip(schemes, colours, strict=True):
                mine = [
                    each
                    for each in found
                    if (each.fabric, each.workload, each.scheme) == (fabric, workload, scheme)
                ]
                first = scheme == schemes[0]
                figure.add_trace(
                    go.Scatter(
                        x=[each.ranks for each in mine],
                        y=[each.per_token for each in mine],
                        name=scheme,
                        mode="lines+markers",
                        line={"color": colour, "width": 3 if first else 1.5},
                        marker={"size": 6 if first else 4},
                        showlegend=row == column == 1,
                    ),
                    row,
                    column,
                )
    figure.update_xaxes(type="log", tickvals=RANKS[::2], ticktext=[str(n) for n in RANKS[::2]])
    figure.update_yaxes(type="log", dtick=1)
    figure.update_yaxes(title_text="µs a token of a rank", col=1)
    figure.update_layout(
        template="plotly_white",
        width=1250,
        height=560,
        margin={"l": 60, "r": 30, "t": 90, "b": 30},
        legend={"orientation": "h", "y": 1.18, "x": 0},
        font={"family": "Helvetica, Arial, sans-serif", "size": 12},
    )
    figure.write_image(DOCS / "img" / "scaling.svg")


if __name__ == "__main__":
    if "--picture" not in sys.argv:
        compute()
    picture()
