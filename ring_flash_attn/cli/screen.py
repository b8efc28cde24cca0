"""Names that other commands still import from here; `console.py` has them."""

from .console import screen as screen
from .console import status as status
