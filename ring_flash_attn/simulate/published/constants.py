"""Constants that no source states: what each means, its value, and the rows that fixed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Constants:
    """All of them; `python -m ring_flash_attn.simulate.published --fit` computes them."""

    merged: float = 22
    nvlink: float = 150e9
    interference: float = 0.674
    uneven: float = 1.074
    stall: float = 112.5e-6
    a800_node: float = 89e9
    a800_communicator: float = 55.2e9
    a800_message: float = 21.7e9
    l20_speed: float = 0.425
    l20_pair: float = 29.4e9
    l20_host: float = 9.77e9
    l20_sockets: float = 3.2e9


class About(NamedTuple):
    """A constant: where the fit looks for it, on every other row of which table; its meaning."""

    name: str
    unit: str
    low: float
    high: float
    source: str
    meaning: str


_RING, _BURST, _YUNCHANG = "ring_flash_attention", "burst_engine", "yunchang"
LISTED = (
    About(
        *("merged", "B", 10, 38, _RING),
        "what a merge moves for each element of out: 10 if TorchScript fuses all of it, "
        "38 operation by operation",
    ),
    About(
        *("nvlink", "B/s", 40e9, 200e9, _RING),
        "what NCCL reaches of NVLink, each way",
    ),
    About(
        *("interference", "", 0, 1, _RING),
        "compute that is lost beside a message, as a share of its seconds at `nvlink`",
    ),
    About(
        *("uneven", "", 1, 1.15, _RING),
        "times that FlashAttention-2 takes where rows do not fill its last block",
    ),
    About(
        *("stall", "s", 0, 200e-6, _RING),
        "the GPU is idle when the host reads an index back, in packed zigzag",
    ),
    About(*("a800_node", "B/s", 50e9, 120e9, _BURST), "all adapters of a node together, each way"),
    About(
        *("a800_communicator", "B/s", 30e9, 80e9, _BURST),
        "what one communicator of each GPU of a node reaches of it",
    ),
    About(
        *("a800_message", "B/s", 8e9, 30e9, _BURST), "what one GPU of a node reaches of it, alone"
    ),
    About(*("l20_speed", "", 0.2, 1, _YUNCHANG), "speed of an SM, times that of an H100"),
    About(*("l20_pair", "B/s", 2e9, 30e9, _YUNCHANG), "between two GPUs on a PCIe switch"),
    About(*("l20_host", "B/s", 0.5e9, 20e9, _YUNCHANG), "of two such GPUs to all others"),
    About(*("l20_sockets", "B/s", 0.5e9, 20e9, _YUNCHANG), "of four GPUs to the other socket's"),
)
FITTED = Constants()
