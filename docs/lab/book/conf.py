"""Sphinx's configuration of the book; `build.py` adds language, title and folder with -D."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

project = "FlashAttention, from one loop to the ring"
author = "ring_flash_attn"
extensions = ["myst_parser", "step_directives"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["book.css"]
templates_path = ["templates"]
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
pygments_style = "friendly"
highlight_language = "python"

_CHINESE = {  # words of the theme that Sphinx does not translate
    "Next": "下一步",
    "Previous": "上一步",
    "Home": "首页",
    "On this page": "本页内容",
    "Back to top": "回到顶部",
    "Made with ": "主题：",
}


def _translate(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """For the templates of one page."""
    if app.config.language == "zh_CN":
        context["_"] = context["gettext"] = lambda text: (
            _CHINESE.get(text) or app.translator.gettext(text)
        )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", _translate)
