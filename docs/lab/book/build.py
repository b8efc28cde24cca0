"""`make book`: run the steps, draw the figures, and make HTML of the prose, in two languages."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BUILD = HERE.parents[2] / "build" / "book"
LANGUAGES = {  # folder: Sphinx's name, title
    "en": ("en", "FlashAttention, from one loop to the ring"),
    "zh": ("zh_CN", "FlashAttention：从一个循环到环"),
}

FRONT = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FlashAttention, from one loop to the ring</title>
<script>location.replace((/^zh/.test(navigator.language) ? "zh" : "en") + "/index.html")</script>
<p><a href="en/index.html">English</a> · <a href="zh/index.html" lang="zh">中文</a></p>
</html>
"""


def write_outputs(generated: Path, again: Collection[int] | None = None) -> None:
    """What each step prints; with `again`, of these steps and of those that have none yet."""
    from ring_flash_attn.lab.device import device
    from ring_flash_attn.lab.registry import STEPS

    device()  # before anything imports triton
    for step in STEPS:
        file = generated / f"{step.module.rpartition('.')[2]}.txt"
        if again is not None and step.number not in again and file.exists():
            continue
        print(f"running step {step.number}", flush=True)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            importlib.import_module(step.module).main()
        file.write_text(text.getvalue(), encoding="utf-8")


def write_figures(generated: Path) -> None:
    """Each function that a file of figures/ names in `__all__`: it returns a Figure, or an SVG."""
    matplotlib.use("svg")
    sys.path.insert(0, str(HERE))
    from figures.style import STYLE

    for page in sorted((HERE / "figures").glob("[is]*.py")):
        module = importlib.import_module(f"figures.{page.stem}")
        for name in getattr(module, "__all__", ()):
            print(f"drawing {page.stem}: {name}", flush=True)
            with matplotlib.rc_context(STYLE):
                figure, file = getattr(module, name)(), generated / f"{page.stem}_{name}.svg"
                if isinstance(figure, str):
                    file.write_text(figure, encoding="utf-8")
                else:
                    figure.savefig(file, metadata={"Date": None})
                    plt.close(figure)


def write_pages(build: Path) -> int:
    """HTML of both languages; 0 if Sphinx had nothing to complain about."""
    from sphinx.cmd.build import main

    (build / "index.html").write_text(FRONT, encoding="utf-8")
    failed = 0
    for folder, (language, title) in LANGUAGES.items():
        options = ["-q", "-W", "--keep-going", "-E", "-c", str(HERE)]
        options += ["-d", str(build / "cache" / folder), "-D", f"language={language}"]
        options += ["-D", f"html_title={title}", "-D", f"step_generated={build / 'generated'}"]
        failed |= main([*options, str(HERE / folder), str(build / folder)])
    return failed


def main() -> int:
    """All pages; the steps that are asked for, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=BUILD, help="the folder to write to")
    kept = "run these steps again, and keep what the others printed"
    parser.add_argument("--step", type=int, nargs="*", help=kept)
    options = parser.parse_args()
    build = options.output.resolve()
    generated = build / "generated"
    if build == BUILD and options.step is None:
        shutil.rmtree(build, ignore_errors=True)
    generated.mkdir(parents=True, exist_ok=True)
    write_outputs(generated, options.step)
    write_figures(generated)
    failed = write_pages(build)
    if not failed:
        print(f"open {build / 'index.html'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
