"""Zigzag ring attention with RoPE under torchrun, compared with attention on one device.

    torchrun --nproc-per-node 4 examples/ring_attention.py

Uses GPUs and NCCL if there is a GPU for each rank of the machine, the CPU and gloo otherwise.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor

from ring_flash_attn import flash_attn_func, position_ids, shard, zigzag_ring_flash_attn_func


def main() -> None:
    """Every rank computes its part both ways; rank 0 prints how far they are apart."""
    args = _arguments()
    device = _start()
    shape_q, shape_k = (
        (args.batch, args.seqlen, n, args.headdim) for n in (args.nheads, args.nheads_k)
    )
    torch.manual_seed(0)  # every rank makes the same whole tensors
    q, k, v, dout = (torch.randn(shape) for shape in (shape_q, shape_k, shape_k, shape_q))

    # This rank's tokens only. In a model, q, k and v would come from the sharded hidden states.
    local = [shard(x, "zigzag").to(device).requires_grad_() for x in (q, k, v)]
    positions = position_ids("zigzag", seqlen=args.seqlen, device=device)
    out = zigzag_ring_flash_attn_func(
        rotate(local[0], positions), rotate(local[1], positions), local[2], causal=True
    )
    out.backward(shard(dout, "zigzag").to(device))

    # The same on the whole sequence, on one device.
    whole = [x.to(device).requires_grad_() for x in (q, k, v)]
    positions = torch.arange(args.seqlen, device=device)
    expected = flash_attn_func(
        rotate(whole[0], positions), rotate(whole[1], positions), whole[2], causal=True
    )
    expected.backward(dout.to(device))

    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(local, whole, strict=True))]
    for name, (ours, theirs) in zip(("out", "dq", "dk", "dv"), pairs, strict=True):
        error = _error(ours.detach(), theirs.detach())
        if dist.get_rank() == 0:
            print(f"{name:>3}: max |ring - one device| / max |one device| = {error:.1e}")
    dist.destroy_process_group()


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of (batch, seqlen, nheads, headdim) at positions (seqlen,)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * frequencies)[:, None, :]  # (seqlen, 1, headdim / 2)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _error(ours: Tensor, whole: Tensor) -> float:
    """Largest difference on any rank, relative to the largest entry."""
    difference = (ours - shard(whole, "zigzag")).abs().max() / whole.abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def _start() -> torch.device:
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < ranks_here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--nheads", type=int, default=8, help="query heads")
    parser.add_argument("--nheads-k", type=int, default=2, help="key and value heads")
    parser.add_argument("--headdim", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
