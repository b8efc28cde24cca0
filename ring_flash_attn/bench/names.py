"""What users call dtypes, workloads and implementations; known before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..kernels.base import kernel_names

DTYPES: Mapping[str, str] = {  # by what users write: torch's name
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "fp64": "float64",
    "float64": "float64",
}


class Preset(NamedTuple):
    """A workload in bf16."""

    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    headdim: int
    causal: bool


PRESETS: Mapping[str, Preset] = {
    "gpt2-small": Preset(8, 1024, 12, 12, 64, True),
    "gpt3": Preset(2, 2048, 96, 96, 128, True),
    "bert-base": Preset(16, 512, 12, 12, 64, False),
    "bert-large": Preset(8, 512, 16, 16, 64, False),
    "8k": Preset(1, 8192, 8, 8, 64, False),
    "16k": Preset(1, 16384, 8, 8, 64, False),
    "batch-inference": Preset(32, 512, 8, 8, 64, False),
    "llama3-8b": Preset(1, 8192, 32, 8, 128, True),
}
FORWARD_ONLY = frozenset({"batch-inference"})  # presets without gradients

# Implementations that are not ours; `peers.py` has them.
PEERS = (
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
    return (*kernel_names(), *PEERS)
