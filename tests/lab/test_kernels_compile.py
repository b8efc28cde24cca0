"""The kernels of steps 7 and 8 and of their solutions, compiled for a GPU that need not be here.

The interpreter looks neither at types nor at how much shared memory a program needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks

STEP = {
    "forward_kernel": "ring_flash_attn.lab.steps.s07_triton_forward",
    "dq_kernel": "ring_flash_attn.lab.steps.s08_triton_backward",
    "dkdv_kernel": "ring_flash_attn.lab.steps.s08_triton_backward",
}
SOLUTION = {kernel: module.replace("steps.s", "solutions.e") for kernel, module in STEP.items()}
LIMIT = 163 * 1024  # bytes of shared memory that a program may have on an A100; an H100 gives more


@pytest.fixture(scope="module")
def compiler() -> Iterator[Ranks]:
    """A process that does not interpret."""
    pool = Ranks(1, environment={"TRITON_INTERPRET": "0"})
    yield pool
    pool.stop()


def _shared_memory(
    rank: int, world_size: int, module: str, name: str, dtype: str, d: int, with_dq: bool
) -> int:
    """Compile one kernel for sm_90; the bytes of shared memory that a program takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ring_flash_attn.lab import device

    device.device = lambda: torch.device("cuda")  # else the step believes in the interpreter
    kernel: Any = getattr(importlib.import_module(module), name)
    from ring_flash_attn.lab.steps.s07_triton_forward import INTERPRETED, block_sizes

    assert not INTERPRETED
    element = torch.float32 if dtype == "fp32" else torch.bfloat16
    block_d, block = block_sizes(torch.empty(1, 1, d, dtype=element))
    block = 32 if "solutions" in module else block
    constants = {
        "D": d, "BLOCK_D": block_d, "BLOCK_Q": block, "BLOCK_K": block, "CAUSAL": True,
        "WITH_DQ": with_dq,
    }  # fmt: skip
    signature, attributes, values = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        in_fp32 = argument in ("lse_ptr", "delta_ptr") or (argument == "dq_ptr" and with_dq)
        if argument.endswith("_ptr"):
            signature[argument] = "*fp32" if in_fp32 else f"*{dtype}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_stages": 2} if "steps" in module else {}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return found.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "d"), [("fp32", 24), ("fp32", 128), ("bf16", 64), ("bf16", 128)])
@pytest.mark.parametrize(
    ("name", "with_dq"), [*((name, False) for name in STEP), ("dkdv_kernel", True)]
)
def test_the_kernels_of_the_steps(
    compiler: Ranks, name: str, with_dq: bool, dtype: str, d: int
) -> None:
    (shared,) = compiler.run(_shared_memory, STEP[name], name, dtype, d, with_dq)
    assert shared <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLUTION)
def test_the_kernels_of_the_solutions(compiler: Ranks, name: str) -> None:
    (shared,) = compiler.run(_shared_memory, SOLUTION[name], name, "fp32", 64, False)
    assert shared <= LIMIT
