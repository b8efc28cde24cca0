"""The kernels that move rows, as machine code for a GPU that need not be there."""

from __future__ import annotations

import importlib.util
import re

import pytest
from machine_code import compilers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

POINTERS = {
    "add_kernel": {"arena_ptr": "*fp32", "table_ptr": "*i64", "ours_ptr": "*fp32"},
    "copy_kernel": {
        "target_ptr": "*bf16",
        "source_ptr": "*bf16",
        "at_ptr": "*i64",
        "taken_ptr": "*i64",
    },
}
CONSTANTS = {"ROWS": 1, "COLUMNS": 1024, "VECTOR": 4, "TAKEN": True}


def accesses(name: str) -> list[str]:
    """How rows are loaded and stored, if all numbers that Triton looks at are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ring_flash_attn.kernels import fused_rows

    kernel = getattr(fused_rows, name)
    types, values, attributes = {}, {}, {}
    for number, each in enumerate(kernel.params):
        if each.is_constexpr:
            types[each.name], values[number,] = "constexpr", CONSTANTS[each.name]
        elif each.name == "column_blocks":  # 1, as ever
            types[each.name], values[number,] = "constexpr", 1
        else:
            types[each.name] = POINTERS[name].get(each.name, "i32")
            if not each.do_not_specialize:
                attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, values, attributes)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return re.findall(r"(?:ld|st)\.global(?:\.v\d)?\.b(?:8|16|32)", code)  # tables have 64


@pytest.mark.parametrize("name", POINTERS)
def test_rows_are_moved_16_bytes_at_a_time(name: str) -> None:
    with compilers() as pool:
        found = pool.submit(accesses, name).result()
    assert found
    assert {each.partition("global.")[2] for each in found} == {"v4.b32"}
