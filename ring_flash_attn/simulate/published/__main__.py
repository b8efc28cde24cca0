"""`python -m ring_flash_attn.simulate.published`: every published row beside the prediction."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import fit, table


def main() -> None:
    """Print the tables, write them into a page, or compute the constants."""
    parser = argparse.ArgumentParser(prog="python -m ring_flash_attn.simulate.published")
    parser.description = "Published measurements of other libraries beside what the simulator says."
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write them into docs/predictions.md"
    )
    parser.add_argument("--fit", action="store_true", help="compute the constants, some minutes")
    options = parser.parse_args()
    if options.fit:
        fit.fit_all()
    elif options.write:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(table.written(page), encoding="utf-8")
    else:
        print(table.pages())


if __name__ == "__main__":
    main()
