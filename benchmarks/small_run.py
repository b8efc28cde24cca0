"""A small run of every kernel of ours in its main variants, for tools that watch each access.

    compute-sanitizer --tool memcheck python benchmarks/small_run.py
    compute-sanitizer --tool racecheck python benchmarks/small_run.py

Run it once without the tool first: compiling takes long under it.
"""

from __future__ import annotations

import importlib.util

import torch

import ring_flash_attn as rfa


def documents(
    headdim: int,
    dtype: torch.dtype,
    kernel: str = "triton",
    headdim_v: int | None = None,
    **options: object,
) -> None:
    """Packed documents, none of a whole number of blocks, on one device and on several ranks."""
    torch.manual_seed(0)
    offsets = [0, 70, 71, 71, 200]
    cu_seqlens = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    widths = (headdim, headdim, headdim_v or headdim, headdim_v or headdim)
    shapes = [(200, *shape) for shape in zip((4, 2, 2, 4), widths, strict=True)]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rfa.flash_attn_varlen_func(
        *leaves, cu_seqlens, cu_seqlens, 129, 129, causal=True, kernel=kernel, **options
    )
    out.backward(dout)
    for world_size, sources in ((2, 1), (4, 3)):
        out = rfa.virtual_ring_attention(
            *leaves,
            world_size=world_size,
            layout="zigzag",
            route="ring",
            sources_per_launch=sources,
            kernel=kernel,
            cu_seqlens=cu_seqlens,
            causal=True,
            **options,
        )
        out.backward(dout)


def batch(headdim: int, length: int, kernel: str = "triton") -> None:
    """Whole blocks, every key seen."""
    torch.manual_seed(0)
    qkv = torch.randn(2, length, 3, 2, headdim, device="cuda", dtype=torch.bfloat16)
    out = rfa.flash_attn_qkvpacked_func(qkv.requires_grad_(), kernel=kernel)
    out.sum().backward()


def cute() -> None:
    """Each of its backward's orders of products; launches for each gradient; every feature."""
    for headdim in (64, 80, 96, 128, 256):
        batch(headdim, 384, "cute")
    batch(64, 1024, "cute")
    documents(64, torch.bfloat16, "cute")
    documents(96, torch.float16, "cute", window_size=(50, 0))
    documents(128, torch.bfloat16, "cute", deterministic=True)
    documents(192, torch.bfloat16, "cute", 128)
    documents(200, torch.bfloat16, "cute", 72)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], device="cuda")
    documents(128, torch.float16, "cute", alibi_slopes=slopes, dropout_p=0.1, softcap=9.0)


def main() -> None:
    """Descriptors and pointers, masks and none, dropout, 16 and 32 bits; a library's blocks."""
    batch(64, 256)
    batch(128, 256)
    documents(64, torch.bfloat16)
    documents(128, torch.bfloat16, window_size=(50, 0))
    documents(40, torch.float16, dropout_p=0.1)
    documents(32, torch.float32)
    documents(64, torch.bfloat16, "fa2")  # the merge of its blocks
    if importlib.util.find_spec("cutlass") is None:
        print("without the kernel cute: nvidia-cutlass-dsl is not installed")
    elif torch.cuda.get_device_capability() == (9, 0):
        cute()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
