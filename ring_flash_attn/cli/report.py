"""`rfa report`: files of results as one page with charts, which opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.results import check_output
from . import options as o
from .console import screen, status, usage_errors, write


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What bench, compare, ring, replay, verify wrote."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "ring_flash_attn: results",
    json_file: o.JsonFile = None,
) -> None:
    """Make one HTML page of files of results: charts, filters, schedules, and the table.

    The page needs no network: everything it shows is inside.

    \b
    rfa report results/*.json -o report.html
    rfa verify --json verify.json; rfa report verify.json --title "Is it right?"
    """
    from ..report.page import json_for_script, make_page, page_data, plotly_script
    from ..report.records import read

    console = screen()
    with usage_errors():
        for path in (output, json_file):
            check_output(path)
            if path is not None and path.resolve() in {each.resolve() for each in inputs}:
                raise ValueError(f"{path} is also an input")
        plotly = plotly_script()
        with status(console, "making the page"):
            data = page_data(read(inputs))
            page = make_page(data, title, plotly)
    write(console, page, output)
    size = output.stat().st_size / 1e6
    console.print(f"{len(data['records'])} rows of {len(data['sources'])} files, {size:.1f} MB")
    if json_file is not None:
        write(console, json_for_script(data) + "\n", json_file)
