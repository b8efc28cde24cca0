"""The public flash-attn-shaped functions, all made by `families.py`; `__init__.pyi` lists them."""

from .families import FUNCTIONS

globals().update({name: function.build(__name__) for name, function in FUNCTIONS.items()})

__all__ = list(FUNCTIONS)
