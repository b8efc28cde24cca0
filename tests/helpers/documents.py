"""Documents of the repository, the blocks and tables in them, and its examples."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

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


def example(name: str) -> ModuleType:
    """A script of examples/, as a module; in any process."""
    full = f"examples_{name}"
    if full not in sys.modules:
        spec = spec_from_file_location(full, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]
