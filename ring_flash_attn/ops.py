"""`import ring_flash_attn.ops` registers the operators; they live in `api/operators.py`."""

from .api import operators as operators
