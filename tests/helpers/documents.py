"""Documents of the repository, and the blocks and tables in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def block(document: str, mark: str) -> str:
    """The code block (or table) under the comment <!-- mark -->."""
    found = re.search(
        rf"<!-- {mark} -->\n(?:```\w*\n(.*?)```|((?:\|[^\n]*\n)+))", text(document), re.S
    )
    assert found, f"{document} has no block {mark!r}"
    return found[1] or found[2]


def table(document: str, mark: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = block(document, mark).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
