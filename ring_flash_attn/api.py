"""The public flash-attn-shaped functions, all made by `generate.py`; `api.pyi` lists them."""

from .generate import FUNCTIONS

globals().update({name: function.build(__name__) for name, function in FUNCTIONS.items()})

__all__ = list(FUNCTIONS)
