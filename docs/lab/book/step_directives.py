"""What the prose asks of a step: its code, its output, its figures, its exercise; and mathematics.

The step is the one that the page has its name from. `file-code` shows code of other files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.parsers.rst.directives.images import Figure
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.directives.code import LiteralInclude

ROOT = Path(__file__).parents[3]
LAB = ROOT / "ring_flash_attn" / "lab"


def _from(source: str | Path, path: Path) -> str:
    """As Sphinx names files: from the folder of the sources on."""
    return "/" + Path(os.path.relpath(path, source)).as_posix()


class _FromFile(LiteralInclude):
    """A file, or a part of it, that is not beside the page."""

    def include(self, path: Path, language: str, **options: Any) -> list[nodes.Node]:
        """As a block of code."""
        self.arguments = [_from(self.env.srcdir, path)]
        self.options = {**self.options, "language": language, **options}
        return super().run()

    @property
    def page(self) -> str:
        """The name of the step's file, without its suffix."""
        return str(self.env.docname)


class StepCode(_FromFile):
    """Functions and classes of the step's file, by name."""

    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """A block for each."""
        path = LAB / "steps" / f"{self.page}.py"
        found: list[nodes.Node] = []
        for name in self.arguments[0].split():
            found += self.include(path, "python", pyobject=name)
        return found


class FileCode(_FromFile):
    """A function or class of another file: its path in `ring_flash_attn/`, then its name.

    `start-at` and `end-before` choose a part of it.
    """

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """One block, under the file's name and the function's."""
        file, name = self.arguments
        path = LAB.parent / file
        caption = f"{path.name}: {name}"
        return self.include(path, "python", pyobject=name, dedent=None, caption=caption)


class StepOutput(_FromFile):
    """What `rfa lab run` prints; `start-at` and `end-before` choose a part of it."""

    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        """One block."""
        folder = Path(self.env.config.step_generated)
        return self.include(folder / f"{self.page}.txt", "text")


class StepExercise(_FromFile):
    """The file that the learner fills in."""

    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        """One block."""
        return self.include(LAB / "exercises" / f"e{self.page[1:]}.py", "python")


class StepFigure(Figure):
    """A function of `figures/`, by name; its text is the caption."""

    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """An image that is as wide as the page, or as it was drawn."""
        if not self.options.get("alt"):
            raise self.error(f"figure {self.arguments[0]}: say what it shows, in :alt:")
        env = self.state.document.settings.env
        folder = Path(env.config.step_generated)
        path = folder / f"{env.docname}_{self.arguments[0]}.svg"
        self.arguments = [_from(env.srcdir, path)]
        return list(super().run())


def _mathml(text: str, display: str) -> str:
    """Browsers show it without a script. A prime stands as high as it is, not above that."""
    prime = r"<msup>(<mi>[^<]*</mi>)<mi>(&#x02032;)</mi></msup>"
    return re.sub(prime, r"<mrow>\1<mo>\2</mo></mrow>", convert(text, display=display))


def visit_inline(self: Any, node: nodes.math) -> None:
    """A formula in a line of text."""
    self.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    """In a box that scrolls, should it be wider than the page."""
    self.body.append(f'<div class="math">{_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_config_value("step_generated", "", "env")  # where build.py puts outputs and figures
    app.add_directive("step-code", StepCode)
    app.add_directive("file-code", FileCode)
    app.add_directive("step-output", StepOutput)
    app.add_directive("step-exercise", StepExercise)
    app.add_directive("step-figure", StepFigure)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
