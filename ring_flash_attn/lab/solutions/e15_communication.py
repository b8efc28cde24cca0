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
    flops = 4 * heads * headdim * pairs * (2.5 if backward else 1.0)
    compute = flops / world_size / flops_per_second
    shard = 2 * (tokens / world_size) * heads_k * headdim  # numbers in k and v
    communication, exposed = 0.0, 0.0
    for step in range(world_size + 1):
        size = 2 * shard if step <= world_size - 2 else 0.0
        if backward and step >= 2:
            size += 4 * shard
        if size:
            hop = latency + size / bytes_per_second
            work = compute / world_size if step < world_size else 0.0
            communication += hop
            exposed += max(0.0, hop - work)
    return {"compute": compute, "communication": communication, "exposed": exposed}
