"""Exercise 15: what one rank of a ring computes, what it sends, and what of that shows."""

from __future__ import annotations


def predict(
    pairs: int,
    tokens: int,
    world_size: int,
    heads: int,
    heads_k: int,
    headdim: int,
    flops_per_second: float,
    bytes_per_second: float,
    latency: float,
    backward: bool = False,
) -> dict[str, float]:
    """Seconds of one rank in one pass, forward or backward, in a balanced layout.

    Work: 4 * heads * headdim FLOPs for each pair, 2.5 times as many backward. All ranks have the
    same, and all world_size steps of a rank, too.

    Messages: k and v of a shard in bf16 travel during steps 0 … world_size - 2. Backward, dk and dv
    of a shard in fp32 travel, too, during steps 2 … world_size; in the last one nobody computes.
    What travels in the same step shares the link: one latency, then all bytes over the bandwidth.

    Args:
        pairs: allowed (query, key) pairs of the whole stream.
        tokens: of the whole stream.
        flops_per_second: the kernel's rate.
        bytes_per_second: the link's bandwidth in one direction; we send while we receive.
        latency: seconds of a step's messages besides.
        backward: the backward pass alone.

    Returns:
        "compute": all steps' work; "communication": all steps' messages; "exposed": by how much
        messages take longer than the work of their step, added up over steps.
    """
    raise NotImplementedError("FLOPs over a rate, bytes over a link; then go through the steps")
