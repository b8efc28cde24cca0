"""Step 7. Forward in Triton: the same tiles, one program for each block of queries.

In step 5 PyTorch launched about ten small kernels for each tile, and each wrote its result to
memory for the next one to read. A Triton kernel keeps the tile where it is computed: scores and
probabilities live in registers, blocks of q, k and v in the fast memory of one multiprocessor.

The outer loop of step 5, over blocks of queries, becomes the grid. Its iterations are
independent of each other, so the GPU runs them side by side:

    grid = (blocks of queries, batch)        program (i, b) computes rows i · BLOCK_Q … of batch b

The inner loop, over blocks of keys, stays a loop, because m, total and acc pass through it. The
mathematics is that of step 5, line by line. Three things are new:

1. Addresses. A tile is loaded through a matrix of pointers: start + row · d + column.
2. Edges. A tile has fixed sizes, powers of two. Where it reaches past the end of a tensor, loads
   give 0 and stores do nothing. A zero key is still a key, with score 0, so its score becomes −inf.
3. Types. tl.dot multiplies fp16 or bf16 and sums in fp32; m, total and acc are fp32 always.

Without a GPU the kernels run in Triton's interpreter: the same code, in NumPy, one program after
another. It must be chosen before triton is imported, and that is what `device()` does.

Exercise 7. Write `triton_forward` and its kernel. Leave out the mask of the last keys once, and see
which rows are wrong, and by how much. `rfa lab check 7 DIR` looks at it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..definition import attention
from ..device import device, interpreted

DEVICE = device()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def load_tile(matrix, rows, columns, n_rows, width):
    """The tile rows × columns of a matrix (n_rows, width); 0 outside of it."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < width)
    return tl.load(matrix + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(matrix, tile, rows, columns, n_rows, width):
    """Write a tile; what lies outside of the matrix is not written. Rounds to its type."""
    inside = (rows[:, None] < n_rows) & (columns[None, :] < width)
    tl.store(matrix + rows[:, None] * width + columns[None, :], tile, mask=inside)


@triton.jit
def visible(rows, keys, n_q, n_k, CAUSAL: tl.constexpr):
    """(rows, keys) booleans: inside of the matrix of scores and, if causal, not in the future."""
    seen = (rows[:, None] < n_q) & (keys[None, :] < n_k)
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None] + n_k - n_q)
    return seen


@triton.jit
def dot(a, b):
    """a @ b, summed in fp32. "ieee": no TF32 for fp32 operands."""
    if INTERPRETED:  # it multiplies bf16 wrongly
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, n_q, n_k, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D: the power of two that holds D
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q rows of out and lse."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)

    q = load_tile(q_ptr + batch * n_q * D, rows, columns, n_q, D)  # (BLOCK_Q, BLOCK_D)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)

    for start in range(0, n_k, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = load_tile(k_ptr + batch * n_k * D, keys, columns, n_k, D)  # (BLOCK_K, BLOCK_D)
        v = load_tile(v_ptr + batch * n_k * D, keys, columns, n_k, D)

        s = dot(q, tl.trans(k)) * scale  # (BLOCK_Q, BLOCK_K)
        s = tl.where(visible(rows, keys, n_q, n_k, CAUSAL), s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = tl.exp(s - shift[:, None])
        alpha = tl.exp(m - shift)
        total = alpha * total + tl.sum(p, 1)
        acc = alpha[:, None] * acc + dot(p.to(v.dtype), v)
        m = m_new

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees no key: out = 0, lse = −inf
    store_tile(out_ptr + batch * n_q * D, acc / total[:, None], rows, columns, n_q, D)
    tl.store(lse_ptr + batch * n_q + rows, m + tl.log(total), mask=rows < n_q)


def block_sizes(q: Tensor) -> tuple[int, int]:
    """(BLOCK_D, rows of a tile): d rounded up, and so many rows that a tile takes at most 16 KiB.

    tl.dot wants at least 16 of each.
    """
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    return block_d, min(64, max(16, 16384 // (block_d * q.element_size())))


def triton_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q (batch, queries, d), k, v (batch, keys, d) → out like q, lse (batch, queries) in fp32."""
    q, k, v = (x.contiguous() for x in (q, k, v))  # the kernel takes row i to begin at i · d
    (batch, n_q, d), n_k = q.shape, k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(batch, n_q, device=q.device)
    block_d, block = block_sizes(q)
    forward_kernel[(triton.cdiv(n_q, block), batch)](
        q, k, v, out, lse, n_q, n_k, d**-0.5,
        D=d, BLOCK_D=block_d, BLOCK_Q=block, BLOCK_K=block, CAUSAL=causal, num_stages=2,
    )  # fmt: skip
    return out, lse


def compare(case: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """AssertionError with the case and the numbers, if the two differ by more."""
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{case}: {m}"
    )


def check() -> None:
    """Against the definition: edges everywhere, three types."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)):
        for n_q, n_k, d in (
            (128, 128, 16),
            (70, 90, 24),  # more keys than queries
            (150, 70, 24),  # fewer: causally, the first 80 rows see nothing
        ):
            torch.manual_seed(n_q)
            q, k, v = (torch.randn(2, n, d, device=DEVICE, dtype=dtype) for n in (n_q, n_k, n_k))
            for causal in (False, True):
                expected = attention(q, k, v, causal=causal)
                found = triton_forward(q, k, v, causal)
                for name, a, b in zip(("out", "lse"), found, expected):
                    case = f"{name}, {dtype}, {n_q} queries, {n_k} keys, causal={causal}"
                    compare(case, a, b, tolerance)


def moved(n: int, d: int, size: int, block: int | None) -> int:
    """Bytes between memory and chip, one head; tiles of `block` queries, None: standard attention.

    As if there were no cache.
    """
    rows, matrix = n * d * size, n * n * size
    if block is None:
        return 4 * rows + 4 * matrix  # q, k, v, out; S and P, each written and read
    return 2 * rows + 2 * rows * triton.cdiv(n, block)  # every program reads all of k and v


def show() -> None:
    """How much the kernel reads and writes, against standard attention; on a GPU, its time."""
    n, d, size = 4096, 64, 2
    print(f"Bytes between memory and chip: {n} tokens, d = {d}, bf16, one head")
    print(f"  standard             {moved(n, d, size, None) >> 20:4} MiB")
    for block in (16, 64, 128, 256):
        print(f"  tiles of {block:3} queries {moved(n, d, size, block) >> 20:4} MiB")
    print("Larger tiles read k and v less often, until registers and shared memory are full.")
    if INTERPRETED:
        print("\nThis ran in the interpreter: right, and slow. Times need a GPU.")
        return
    q, k, v = (torch.randn(16, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    for name, function in (
        ("standard", lambda: torch.softmax(q @ k.mT * d**-0.5, -1) @ v),
        ("Triton", lambda: triton_forward(q, k, v, False)),
    ):
        print(f"  {name:9} {triton.testing.do_bench(function):7.3f} ms for 16 heads")


def main() -> None:
    check()
    print(f"Step 7: the Triton kernel equals the definition (on {DEVICE}).\n")
    show()


if __name__ == "__main__":
    main()
