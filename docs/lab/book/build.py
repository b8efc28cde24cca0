"""`make book`: run the steps, draw the figures, and make HTML of the prose, in two languages."""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "book"
GENERATED = BUILD / "generated"
LANGUAGES = {"en": "en", "zh": "zh_CN"}  # folder: Sphinx's name

FRONT = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FlashAttention, from one loop to the ring</title>
<meta http-equiv="refresh" content="0; url=en/index.html">
<p><a href="en/index.html">English</a> · <a href="zh/index.html" lang="zh">中文</a></p>
</html>
"""


def write_outputs() -> None:
    """What each step prints."""
    from ring_flash_attn.lab.device import device
    from ring_flash_attn.lab.registry import STEPS

    device()  # before anything imports triton
    for step in STEPS:
        print(f"running step {step.number}", flush=True)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            importlib.import_module(step.module).main()
        name = step.module.rpartition(".")[2]
        (GENERATED / f"{name}.txt").write_text(text.getvalue(), encoding="utf-8")


def write_figures() -> None:
    """Each function that figures/sNN_*.py names in `__all__`: it returns a Figure, or an SVG."""
    matplotlib.use("svg")
    sys.path.insert(0, str(HERE))
    from figures.style import STYLE

    for path in sorted((HERE / "figures").glob("s[0-9]*.py")):
        print(f"drawing {path.stem}", flush=True)
        module = importlib.import_module(f"figures.{path.stem}")
        for name in module.__all__:
            with matplotlib.rc_context(STYLE):
                figure, file = getattr(module, name)(), GENERATED / f"{path.stem}_{name}.svg"
                if isinstance(figure, str):
                    file.write_text(figure, encoding="utf-8")
                else:
                    figure.savefig(file, metadata={"Date": None})
                    plt.close(figure)


def write_pages(languages: Iterable[str] = LANGUAGES) -> int:
    """HTML of both languages; 0 if Sphinx had nothing to complain about."""
    from sphinx.cmd.build import main

    (BUILD / "index.html").write_text(FRONT, encoding="utf-8")
    failed = 0
    for folder in languages:
        cache = str(BUILD / "cache" / folder)
        options = ["-q", "-W", "--keep-going", "-d", cache, "-c", str(HERE)]
        options += ["-D", f"language={LANGUAGES[folder]}"]
        failed |= main([*options, str(HERE / folder), str(BUILD / folder)])
    return failed


def main() -> int:
    """Everything, from nothing."""
    shutil.rmtree(BUILD, ignore_errors=True)
    GENERATED.mkdir(parents=True)
    write_outputs()
    write_figures()
    failed = write_pages()
    if not failed:
        print(f"open {BUILD / 'index.html'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
