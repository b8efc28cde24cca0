"""What implementations are called; known before torch is imported."""

from __future__ import annotations

from ..kernels.base import kernel_names

# Implementations that are not ours; `implementations.py` has them.
LIBRARIES = (
    "torch standard",
    "SDPA flash",
    "SDPA efficient",
    "SDPA cuDNN",
    "SDPA math",
    "FlexAttention",
    "xFormers",
    "flash-attn 2",
    "flash-attn 3",
    "flash-attn 4",
)


def implementation_names() -> tuple[str, ...]:
    """All of them, ours first."""
    return (*kernel_names(), *LIBRARIES)
