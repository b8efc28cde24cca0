"""Names that other commands still import from here; `console.py` and `options.py` have them."""

from .console import ON_CPU as ON_CPU
from .console import write as write
from .options import Device as Device
