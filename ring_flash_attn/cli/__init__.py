"""The command line `rfa`: verify, measure, compare, profile and draw what the library does."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `rfa`, or say in one line what it lacks."""
    try:
        from .app import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f'rfa needs {missing.name}: pip install "ring-flash-attn[cli]"', file=sys.stderr)
        sys.exit(1)
    app()
