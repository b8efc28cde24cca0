"""The attention contract of Stanford's CS336, assignment 2, met by the functions of steps 5 to 8.

Both classes are called as `apply(q, k, v, is_causal)`: q (batch, queries, d), k and v
(batch, keys, d), in fp32, fp16 or bf16; the result is like q. One of the saved tensors has the
shape (batch, queries): the natural lse, in fp32. Lengths and d are any numbers. With other numbers
of keys than queries both end together: query i sees the keys up to i + keys − queries.

To run the course's tests, let its `tests/adapters.py` return these.
"""

from __future__ import annotations

from torch.autograd import Function


def get_flashattention_autograd_function_pytorch() -> type[Function]:
    """Tiles in PyTorch, forward and backward, on any device."""
    from .steps.s06_backward import RecomputedAttention

    return RecomputedAttention


def get_flashattention_autograd_function_triton() -> type[Function]:
    """Triton kernels, forward and backward: on a GPU, or interpreted where there is none."""
    from .steps.s08_triton_backward import TritonAttention

    return TritonAttention
