"""Sphinx's configuration of the book; `build.py` adds language, title and folder with -D."""

from __future__ import annotations

import sys
from pathlib import Path

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
