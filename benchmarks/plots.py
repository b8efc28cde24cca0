"""The pictures of the README, from the stored results.

pip install "ring-flash-attn[report]" kaleido
python benchmarks/plots.py docs/img
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ring_flash_attn.bench.results import Row, load
from ring_flash_attn.bench.workload import BACKWARD, BOTH, FORWARD

RESULTS = Path(__file__).parent.parent / "results"
COLOURS = {"triton": "#0072B2", "cudnn": "#009E73", "fa2": "#E69F00", "fa4": "#CC79A7"}
BASELINE = "#7f7f7f"
WIDTH, HEIGHT = 900, 340


def finish(figure: go.Figure, path: Path) -> None:
    figure.update_layout(
        template="plotly_white",
        width=WIDTH,
        height=HEIGHT,
        margin={"l": 60, "r": 10, "t": 60, "b": 30},
        legend={"orientation": "h", "y": 1.2, "x": 0},
        font={"family": "Helvetica, Arial, sans-serif", "size": 13},
        bargap=0.25,
    )
    figure.write_image(path)
    print(f"wrote {path}")


def shape(row: Row) -> str:
    """As it stands under the bars."""
    work = row.workload
    seen = "causal" if work["causal"] else "full"
    heads = f"{work['nheads']}/{work['nheads_k']} × {work['headdim']}"
    return f"{work['batch']} × {work['seqlen']}<br>{heads}<br>{seen}"


def beside(titles: Sequence[str]) -> go.Figure:
    return make_subplots(
        1, len(titles), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.04
    )


def kernels(path: Path) -> None:
    """TFLOP/s on one device."""
    files = ("causal_d128", "full_d128", "causal_d64", "full_512_d64", "causal_d256")
    rows = [row for file in files for row in load(RESULTS / f"compare_{file}_h200.json").rows]
    figure = beside(("forward", "backward"))
    for column, passes in enumerate((FORWARD, BACKWARD), 1):
        for name, colour in COLOURS.items():
            mine = [row for row in rows if (row.implementation, row.passes) == (name, passes)]
            if len(mine) < len(files):  # not measured at every shape
                continue
            figure.add_bar(
                x=[shape(row) for row in mine],
                y=[row.tflops for row in mine],
                text=[f"{row.tflops:.0f}" for row in mine],
                name=name,
                marker_color=colour,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.update_yaxes(title_text="TFLOP/s", col=1)
    finish(figure, path)


def lengths(path: Path) -> None:
    """TFLOP/s against the length."""
    found = load(RESULTS / "lengths_h200.json")
    rows = [*found.rows, *load(RESULTS / "compare_causal_d128_h200.json").rows]
    rows.sort(key=lambda row: row.workload["seqlen"])
    figure = beside(("forward", "backward"))
    for column, passes in enumerate((FORWARD, BACKWARD), 1):
        for name, colour in COLOURS.items():
            mine = [r for r in rows if (r.implementation, r.passes) == (name, passes)]
            figure.add_scatter(
                x=[row.workload["seqlen"] for row in mine],
                y=[row.tflops for row in mine],
                name=name,
                mode="lines+markers",
                line_color=colour,
                showlegend=column == 1,
                row=1,
                col=column,
            )
        figure.add_hline(
            y=found.machine["peak"]["tflops"],
            line_dash="dot",
            annotation_text="product of two matrices",
            row=1,
            col=column,
        )
    ticks = [row.workload["seqlen"] for row in mine]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{x // 1024}k" for x in ticks])
    figure.update_yaxes(title_text="TFLOP/s", rangemode="tozero", col=1)
    finish(figure, path)


def slowest(rows: Sequence[Row], passes: str, name: str, sources: int | None) -> Row:
    """The slowest rank of one implementation."""
    (found,) = (
        row
        for row in rows
        if row.implementation == name
        and row.passes == passes
        and row.values["slowest"]
        and "lengths" not in row.workload
        and (sources is None or row.placement.get("sources_per_launch") == sources)
    )
    return found


def replays(path: Path) -> None:
    """Efficiency of the slowest of 8 ranks."""
    rows = load(RESULTS / "replays_h200.json").rows
    kernels = ("fa2", "cudnn", "fa4", "triton")
    theirs = sorted({row.implementation for row in rows if " " in row.implementation})
    bars = [(name, None, BASELINE) for name in theirs]
    bars += [(name, 4, COLOURS[name]) for name in kernels]
    figure = beside(("forward", "forward + backward"))
    for column, passes in enumerate((FORWARD, BOTH), 1):
        for name, sources, colour in bars:
            share = slowest(rows, passes, name, sources).values["efficiency_percent"]
            figure.add_bar(
                x=[name if sources else f"baseline<br>on {name.split()[-1]}"],
                y=[share],
                text=[f"{share:.0f} %"],
                textposition="inside",
                textangle=0,
                marker_color=colour,
                showlegend=False,
                row=1,
                col=column,
            )
    figure.update_xaxes(tickangle=0)
    figure.update_yaxes(title_text="% of 8 × one device", range=[0, 115], col=1)
    figure.update_yaxes(range=[0, 115], col=2)
    finish(figure, path)


# TFLOP/s per H100, forward and backward, of 8 and once of 64: MagiAttention's chart of causal packs
# (SandAI-org/MagiAttention at 2c64135, docs/source/blog/cp_benchmark.md).
PUBLISHED = {
    "ring p2p": (89, 97),
    "ring all-gather": (288, 179),
    "Ulysses": (278, 332),
    "USP": (261, 325),
    "HybridCP": (277, 226),
    "MagiAttention": (459, 360),
    "the same,<br>64 ranks": (237, 264),
}


def packs(path: Path) -> None:
    """TFLOP/s per GPU on packed documents: ΣFLOPs / Σtime of the slowest rank."""
    found = load(RESULTS / "packs_h200.json").details["packs"]
    figure = beside(("forward", "backward"))
    for column, passes in enumerate((FORWARD, BACKWARD), 1):
        bars = [(name, rates[column - 1], BASELINE) for name, rates in PUBLISHED.items()]
        for ranks, colour in ((8, COLOURS["triton"]), (64, "#56B4E9")):
            each = [
                pack[passes]
                for name, pack in found.items()
                if name.startswith(f"{ranks} ranks, balanced × ring × triton,")
            ]
            rate = sum(one["tflops"] * one["ms"] for one in each) / sum(one["ms"] for one in each)
            bars.append((f"this library,<br>{ranks} ranks", rate, colour))
        for name, rate, colour in bars:
            figure.add_bar(
                x=[name],
                y=[rate],
                text=[f"{rate:.0f}"],
                marker_color=colour,
                showlegend=False,
                row=1,
                col=column,
            )
    figure.update_yaxes(title_text="TFLOP/s per GPU", col=1)
    finish(figure, path)


def main(folder: str = "docs/img") -> None:
    kernels(Path(folder) / "kernels_h200.svg")
    lengths(Path(folder) / "lengths_h200.svg")
    replays(Path(folder) / "replays_h200.svg")
    packs(Path(folder) / "packs_h200.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
