"""Small right answers to the exercises, and what is changed in them to plant a mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ring_flash_attn import lab

_HEAD = """
import math
import torch
INF = float("inf")
"""

SUMS = """
def online_softmax(blocks):
    m = torch.full_like(blocks[0][:, 0], -INF)
    total = torch.zeros_like(m)
    for s in blocks:
        new = torch.maximum(m, s.amax(1))
        safe = new.masked_fill(new == -INF, 0.0)
        p = torch.exp(s - safe[:, None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(1)
        m = new
    return m, total


def softmax_dot(scores, values):
    m = torch.full_like(scores[0][:, 0], -INF)
    total = torch.zeros_like(m)
    acc = 0.0
    for s, v in zip(scores, values):
        new = torch.maximum(m, s.amax(1))
        safe = new.masked_fill(new == -INF, 0.0)
        p = torch.exp(s - safe[:, None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(1)
        acc = acc * alpha[:, None] + p @ v
        m = new
    return acc / total.masked_fill(total == 0, 1.0)[:, None]
"""

TILED = """
def tiled_forward(q, k, v, causal, block_q=TILE, block_k=TILE):
    rows, keys, d = q.shape[1], k.shape[1], q.shape[2]
    offset = keys - rows
    scale = d**-0.5
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
    for i in range(0, rows, block_q):
        qi = q[:, i : i + block_q]
        m = torch.full_like(qi[..., 0], -INF)
        total = torch.zeros_like(m)
        acc = torch.zeros_like(qi)
        at = torch.arange(i, min(i + block_q, rows)) + offset
        for j in range(0, keys, block_k):
            kj, vj = k[:, j : j + block_k], v[:, j : j + block_k]
            if causal and j > at[-1]:
                break
            s = qi @ kj.mT * scale
            key = torch.arange(j, j + kj.shape[1])
            if causal:
                s = s.masked_fill(key[None, :] > at[:, None], -INF)
            new = torch.maximum(m, s.amax(2))
            safe = new.masked_fill(new == -INF, 0.0)
            p = torch.exp(s - safe[..., None])
            alpha = torch.exp(m - safe)
            total = total * alpha + p.sum(2)
            acc = acc * alpha[..., None] + p @ vj
            m = new
        out[:, i : i + block_q] = acc / total.masked_fill(total == 0, 1.0)[..., None]
        lse[:, i : i + block_q] = m + torch.log(total)
    return out, lse
"""

FUNCTION = """
class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = tiled_forward(q, k, v, causal, 16, 16)
        ctx.save_for_backward(q, k, v, out, lse)
        return out
"""

# The same with powers of 2 and other tiles.
BASE_2 = """
def tiled_forward(q, k, v, causal, block_q=TILE, block_k=TILE):
    block_q, block_k = 24, 3
    rows, keys = q.shape[1], k.shape[1]
    unit = q.shape[2] ** -0.5 * math.log2(math.e)
    outs, lses = [], []
    for i in range(0, rows, block_q):
        qi = q[:, i : i + block_q] * unit
        m = torch.full_like(qi[..., 0], -1e30)
        total, acc = torch.zeros_like(m), torch.zeros_like(qi)
        at = torch.arange(i, min(i + block_q, rows)) + keys - rows
        for j in reversed(range(0, keys, block_k)):
            s = qi @ k[:, j : j + block_k].mT
            if causal:
                key = torch.arange(j, min(j + block_k, keys))
                s = s.masked_fill(key > at[:, None], -INF)
            new = torch.maximum(m, s.amax(2))
            p, alpha = torch.exp2(s - new[..., None]), torch.exp2(m - new)
            total, m = total * alpha + p.sum(2), new
            acc = acc * alpha[..., None] + p @ v[:, j : j + block_k]
        outs.append(acc / total.clamp(min=1e-30)[..., None])
        lses.append((m + torch.log2(total)) * math.log(2.0))
    return torch.cat(outs, 1), torch.cat(lses, 1)
"""

BACKWARD = """
def tiled_backward(q, k, v, out, lse, dout, causal):
    rows, keys = q.shape[1], k.shape[1]
    offset = keys - rows
    scale = q.shape[2] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    D = (dout * out).sum(2)
    for j in range(0, keys, TILE):
        c = slice(j, j + TILE)
        for i in range(0, rows, TILE):
            r = slice(i, i + TILE)
            s = q[:, r] @ k[:, c].mT * scale
            if causal:
                at = torch.arange(rows)[r] + offset
                key = torch.arange(keys)[c]
                s = s.masked_fill(key[None, :] > at[:, None], -INF)
            p = torch.exp(s - lse[:, r, None]).nan_to_num()
            dp = dout[:, r] @ v[:, c].mT
            ds = p * (dp - D[:, r, None])
            dq[:, r] += ds @ k[:, c] * scale
            dk[:, c] += ds.mT @ q[:, r] * scale
            dv[:, c] += p.mT @ dout[:, r]
    return dq, dk, dv
"""

TRITON = """
import triton
import triton.language as tl


@triton.jit
def kernel(Q, K, V, O, L, rows, keys, d, scale, CAUSAL: tl.constexpr, BQ: tl.constexpr,
           BK: tl.constexpr, BD: tl.constexpr):
    i, b = tl.program_id(0), tl.program_id(1)
    r, c = i * BQ + tl.arange(0, BQ), tl.arange(0, BD)
    at = r[:, None] * d + c[None, :]
    ok = (r[:, None] < rows) & (c[None, :] < d)
    q = tl.load(Q + b * rows * d + at, mask=ok, other=0.0)
    m = tl.full((BQ,), -float("inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BD), tl.float32)
    offset = keys - rows
    for j in range(0, keys, BK):
        key = j + tl.arange(0, BK)
        place = b * keys * d + key[:, None] * d + c[None, :]
        inside = (key[:, None] < keys) & (c[None, :] < d)
        k = tl.load(K + place, mask=inside, other=0.0)
        v = tl.load(V + place, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(key[None, :] < keys, s, -float("inf"))
        if CAUSAL:
            s = tl.where(key[None, :] <= r[:, None] + offset, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        alpha = tl.exp(m - safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, v)
        m = new
    total = tl.where(total == 0, 1.0, total)
    tl.store(O + b * rows * d + at, acc / total[:, None], mask=ok)
    tl.store(L + b * rows + r, m + tl.log(total), mask=r < rows)


def triton_forward(q, k, v, causal):
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, rows, d = q.shape
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
    block = triton.next_power_of_2(d)
    kernel[(triton.cdiv(rows, 16), batch)](
        q, k, v, out, lse, rows, k.shape[1], d, d**-0.5, causal, 16, TILE, block)
    return out, lse
"""

TRITON_BACKWARD = """
import triton
import triton.language as tl


@triton.jit
def kernel(S, LSE, DP, D, P, DS, keys, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    row = at // keys
    p = tl.exp(tl.load(S + at, mask=ok, other=0.0) - tl.load(LSE + row, mask=ok, other=0.0))
    p = tl.where(p == p, p, 0.0)
    ds = p * (tl.load(DP + at, mask=ok, other=0.0) - tl.load(D + row, mask=ok, other=0.0))
    tl.store(P + at, p, mask=ok)
    tl.store(DS + at, ds, mask=ok)


def triton_backward(q, k, v, out, lse, dout, causal):
    keys, rows = k.shape[1], q.shape[1]
    scale = q.shape[2] ** -0.5
    s = q @ k.mT * scale
    if causal:
        key, at = (torch.arange(n, device=q.device) for n in (keys, rows))
        at = at + keys - rows
        s = s.masked_fill(key[None, :] > at[:, None], -INF)
    dp, D = (dout @ v.mT).contiguous(), (dout * out).sum(2)
    p, ds = torch.empty_like(dp), torch.empty_like(dp)
    grid = (triton.cdiv(p.numel(), 64),)
    kernel[grid](s.contiguous(), lse, dp, D, p, ds, keys, p.numel(), 64)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dout
"""

BLOCKS = """
def visible_blocks(rows_q, rows_k, block_q, block_k, causal):
    found = []
    offset = rows_k - rows_q
    for i in range(-(-rows_q // block_q)):
        first, last = i * block_q + offset, min((i + 1) * block_q, rows_q) - 1 + offset
        for j in range(-(-rows_k // block_k)):
            start, end = j * block_k, min((j + 1) * block_k, rows_k) - 1
            if not causal or start <= last:
                found.append((i, j, causal and end > first))
    return found


def causal_forward(q, k, v, block_q=64, block_k=64):
    return tiled_forward(q, k, v, True, block_q, block_k)
"""

GROUPED = """
def masked(q, k, causal, window):
    rows, keys = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    wide = k.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, wide) * q.shape[-1] ** -0.5
    distance = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window
    right = 0 if causal else right
    if left >= 0:
        s = s.masked_fill(distance < -left, -INF)
    if right >= 0:
        s = s.masked_fill(distance > right, -INF)
    return s


def grouped_forward(q, k, v, causal, window, sinks):
    s = masked(q, k, causal, window)
    wide = v.repeat_interleave(q.shape[2] // k.shape[2], 2)
    m = s.amax(-1, keepdim=True)
    if sinks is not None:
        m = torch.maximum(m, sinks[None, :, None, None])
    safe = m.masked_fill(m == -INF, 0.0)
    p = torch.exp(s - safe)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[None, :, None, None] - safe)
    lse = (safe + torch.log(total))[..., 0]
    p = p / total.masked_fill(total == 0, 1.0)
    return torch.einsum("bhij,bjhd->bihd", p, wide), lse


def grouped_backward(q, k, v, out, lse, dout, causal, window):
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5
    s = masked(q, k, causal, window)
    safe = lse.masked_fill(lse == -INF, 0.0)
    p = torch.exp(s - safe[..., None])
    kk, vv = (x.repeat_interleave(group, 2) for x in (k, v))
    dp = torch.einsum("bihd,bjhd->bhij", dout, vv)
    D = (dout * out).sum(-1).transpose(1, 2)
    ds = p * (dp - D[..., None])
    dq = torch.einsum("bhij,bjhd->bihd", ds, kk) * scale
    dk = torch.einsum("bhij,bihd->bjhd", ds, q) * scale
    dv = torch.einsum("bhij,bihd->bjhd", p, dout)
    dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return dq, dk, dv
"""

PACKED = """
def packed_forward(q, k, v, cu_seqlens, causal):
    tokens = q.shape[0]
    place = torch.arange(tokens)
    document = torch.searchsorted(cu_seqlens[1:].long(), place, right=True)
    s = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    hidden = document[:, None] != document[None, :]
    if causal:
        hidden = hidden | (place[None, :] > place[:, None])
    s = s.masked_fill(hidden, -INF)
    lse = s.logsumexp(-1)
    return torch.einsum("hij,jhd->ihd", torch.exp(s - lse[..., None]), v), lse
"""

MERGE = """
def merge(out1, lse1, out2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    safe = lse.masked_fill(lse == -INF, 0.0)
    one, two = torch.exp(lse1 - safe)[..., None], torch.exp(lse2 - safe)[..., None]
    return one * out1 + two * out2, lse
"""

RING = """
def block(q, k, v, causal):
    s = q @ k.mT * q.shape[1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -INF)
    lse = s.logsumexp(1)
    return torch.exp(s - lse[:, None]) @ v, lse


def ring_forward(rank, world_size, q, k, v, send, recv, causal):
    out, lse = torch.zeros_like(q), torch.full_like(q[:, 0], -INF)
    for step in range(world_size):
        source = (rank - step) % world_size
        if step + 1 < world_size:
            send((rank + 1) % world_size, k, v)
        if not causal or source <= rank:
            out, lse = merge(out, lse, *block(q, k, v, causal and source == rank))
        if step + 1 < world_size:
            k, v = recv((rank - 1) % world_size)
    return out, lse


def ring_backward(rank, world_size, q, k, v, out, lse, dout, send, recv, causal):
    scale = q.shape[1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    D = (dout * out).sum(1, keepdim=True)
    for step in range(world_size):
        source = (rank - step) % world_size
        if not causal or source <= rank:
            s = q @ k.mT * scale
            if causal and source == rank:
                s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -INF)
            p = torch.exp(s - lse[:, None])
            ds = p * (dout @ v.mT - D)
            dq += ds @ k * scale
            dk += ds.mT @ q * scale
            dv += p.mT @ dout
        send((rank + 1) % world_size, k, v, dk, dv)
        k, v, dk, dv = recv((rank - 1) % world_size)
    return dq, dk, dv
"""

ZIGZAG = """
def zigzag_shard(length, rank, world_size):
    parts = 2 * world_size
    early, late = rank, parts - 1 - rank
    return torch.cat([
        torch.arange(c * length // parts, (c + 1) * length // parts) for c in (early, late)])


def zigzag_steps(rank, world_size):
    steps = [(rank, "all", "all", True)]
    for t in range(1, world_size):
        source = (rank - t) % world_size
        if source < rank:
            steps.append((source, "all", "early", False))
        else:
            steps.append((source, "late", "all", False))
    return steps
"""

WEIGHTED_SUM = """
import triton
import triton.language as tl


@triton.jit
def kernel(X, W, Y, d, BD: tl.constexpr):
    c = tl.arange(0, BD)
    row = tl.program_id(0)
    x = tl.load(X + row * d + c, mask=c < d, other=0.0)
    tl.store(Y + row, tl.sum(x * tl.load(W + c, mask=c < d, other=0.0), 0))


@triton.jit
def backward_kernel(W, G, DX, d, BD: tl.constexpr):
    c = tl.arange(0, BD)
    row = tl.program_id(0)
    w = tl.load(W + c, mask=c < d, other=0.0)
    tl.store(DX + row * d + c, tl.load(G + row) * w, mask=c < d)


class WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        x = x.contiguous()
        y = torch.empty_like(x[:, 0])
        kernel[(x.shape[0],)](x, weight, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        (rows, d), g = x.shape, g.contiguous()
        dx = torch.empty(rows, d, device=x.device)
        backward_kernel[(rows,)](weight, g, dx, d, triton.next_power_of_2(d))
        return dx, (g[:, None] * x).sum(0)
"""

ACCUMULATE = """
def accumulate(dtype, value_dtype, cast_first, n=1000, value=0.01):
    total, one = torch.zeros((), dtype=dtype), torch.tensor(value, dtype=value_dtype)
    for _ in range(n):
        total += one.to(dtype) if cast_first else one
    return total.item()
"""

STANDARD = """
def standard_attention(q, k, v, causal):
    s = q @ k.mT * q.shape[2] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1 + k.shape[1] - q.shape[1]).bool(), -INF)
    p = s.softmax(2).nan_to_num()
    return p @ v, {"q": q, "k": k, "v": v, "p": p}
"""

PREDICT = """
def predict(pairs, tokens, world_size, heads, heads_k, headdim, flops_per_second,
            bytes_per_second, latency, backward=False):
    compute = 4 * heads * headdim * pairs * (2.5 if backward else 1) / world_size
    compute /= flops_per_second
    shard = 2 * tokens / world_size * heads_k * headdim
    communication = exposed = 0.0
    for t in range(world_size + 1):
        size = 2 * shard * (t <= world_size - 2) + 4 * shard * (backward and t >= 2)
        if size:
            hop = latency + size / bytes_per_second
            communication += hop
            exposed += max(0.0, hop - (compute / world_size if t < world_size else 0.0))
    return {"compute": compute, "communication": communication, "exposed": exposed}
"""


def answer(source: str, tile: int = 16) -> str:
    """A whole file."""
    return _HEAD + source.replace("TILE", str(tile))


RIGHT = {
    1: WEIGHTED_SUM,
    2: ACCUMULATE,
    3: STANDARD,
    4: SUMS,
    5: TILED + FUNCTION,
    6: BACKWARD,
    7: TRITON,
    8: TRITON_BACKWARD,
    9: TILED + BLOCKS,
    10: GROUPED,
    11: PACKED,
    12: MERGE,
    13: MERGE + RING,
    14: ZIGZAG,
    15: PREDICT,
}


def solution(step: int, tile: int = 32) -> str:
    """Ours, with tiles of another size."""
    (path,) = (Path(lab.__file__).parent / "solutions").glob(f"e{step:02}_*.py")
    return re.sub(r"\b32\b", str(tile), path.read_text())


class Planted(NamedTuple):
    """What to replace in the right answer of a step, and what the checker has to call it.

    Tiles of `tile`; where `old` is not in the answer here, it is in the solution.
    """

    step: int
    mistake: str
    old: str
    new: str
    tile: int = 16


_RESCALED = "total = total * alpha + p.sum(2)\n            acc = acc * alpha[..., None] + p @ vj"
_SAFE = "safe = new.masked_fill(new == -INF, 0.0)\n            p"
_NEW = "new = torch.maximum(m, s.amax(2))"
_DQ = "dq[:, r] += ds @ k[:, c] * scale"
_BLOCK = "block(q, k, v, causal and source == rank)"
_HOME = "k, v, dk, dv = recv((rank - 1) % world_size)"
_TAIL = '        s = tl.where(key[None, :] < keys, s, -float("inf"))\n'
_NATURAL = "m + torch.log(total)"

PLANTED = [
    # forgot to rescale
    Planted(4, "rescale", "acc = acc * alpha[:, None] + p @ v", "acc = acc + p @ v"),
    Planted(4, "rescale", "total = total * alpha + p.sum(1)", "total = total + p.sum(1)"),
    Planted(5, "rescale", "acc * alpha[..., None] + p @ vj", "acc + p @ vj"),
    Planted(5, "rescale", "total * alpha + p.sum(2)", "total + p.sum(2)"),
    Planted(
        5, "rescale", _RESCALED, "total = total + p.sum(2)\n            acc = acc + p @ vj"
    ),
    Planted(7, "rescale", "acc * alpha[:, None] + tl.dot", "acc + tl.dot"),
    Planted(7, "rescale", "acc * alpha[:, None] + tl.dot", "acc + tl.dot", 8),
    Planted(9, "rescale", "acc * alpha[..., None] + p @ vj", "acc + p @ vj"),
    # maximum not carried
    Planted(4, "maximum", "new = torch.maximum(m, s.amax(1))", "new = s.amax(1)"),
    Planted(4, "maximum", "        m = new\n", ""),
    Planted(5, "maximum", _NEW, "new = s.amax(2)"),
    Planted(5, "maximum", "            m = new\n", ""),
    Planted(5, "maximum", "alpha = torch.exp(m - safe)", "alpha = torch.exp(s.amax(2) - safe)"),
    Planted(7, "maximum", "tl.maximum(m, tl.max(s, 1))", "tl.max(s, 1)", 8),
    Planted(5, "no_maximum", _NEW, "new = torch.zeros_like(m)"),
    Planted(5, "unnormalised", "acc / total.masked_fill(total == 0, 1.0)[..., None]", "acc"),
    Planted(5, "lse_part", _NATURAL, "m"),
    Planted(7, "unnormalised", "acc / total[:, None]", "acc"),
    # −inf rows
    Planted(9, "inf_rows", _SAFE, "safe = new\n            p"),
    Planted(4, "inf_rows", "safe = new.masked_fill(new == -INF, 0.0)", "safe = new"),
    Planted(10, "inf_rows", "safe = m.masked_fill(m == -INF, 0.0)", "safe = m"),
    Planted(12, "inf_rows", "safe = lse.masked_fill(lse == -INF, 0.0)", "safe = lse"),
    Planted(10, "inf_rows", "safe = lse.masked_fill(lse == -INF, 0.0)", "safe = lse"),
    Planted(9, "inf_rows", "s.masked_fill(key[None, :] > at[:, None], -INF)",
            "s.masked_fill(key[None, :] > at[:, None], -1e30)"),
    Planted(7, "inf_rows", "tl.where(total == 0, 1.0, total)", "total"),
    Planted(6, "inf_rows", ".nan_to_num()", ""),
    Planted(3, "inf_rows", ".nan_to_num()", ""),
    # base 2
    Planted(5, "base2", _NATURAL, "(m + torch.log(total)) / math.log(2)"),
    Planted(5, "base2", _NATURAL, "m + torch.log2(total)"),
    Planted(5, "base2", "p = torch.exp(s - safe[..., None])\n            alpha = torch.exp(",
            "p = torch.exp2(s - safe[..., None])\n            alpha = torch.exp2("),
    Planted(7, "base2", "m + tl.log(total)", "m + tl.log2(total)"),
    Planted(6, "base2", "torch.exp(s - lse[:, r, None])", "torch.exp2(s - lse[:, r, None])"),
    Planted(6, "base2", "torch.exp(s - lse[:, r, None])",
            "torch.exp2(s * math.log2(math.e) - lse[:, r, None])"),
    Planted(8, "base2", "tl.exp(tl.load(S", "tl.exp2(tl.load(S"),
    Planted(12, "base2", "torch.logaddexp(", "torch.logaddexp2("),
    # scales
    Planted(5, "scale_twice", "kj.mT * scale", "kj.mT * scale * scale"),
    Planted(5, "scale_missing", "kj.mT * scale", "kj.mT"),
    Planted(7, "scale_twice", "tl.trans(k)) * scale", "tl.trans(k)) * scale * scale"),
    Planted(6, "scale_dk", "dk[:, c] += ds.mT @ q[:, r] * scale", "dk[:, c] += ds.mT @ q[:, r]"),
    Planted(8, "scale_dk", "ds.mT @ q * scale", "ds.mT @ q"),
    Planted(10, "scale_dk", "ds, q) * scale", "ds, q)"),
    Planted(6, "scale_dq", _DQ, "dq[:, r] += ds @ k[:, c]"),
    Planted(6, "scale_twice", "dk[:, c] += ds.mT @ q[:, r] * scale",
            "dk[:, c] += ds.mT @ (q[:, r] * scale) * scale"),
    Planted(6, "scale_twice", "k[:, c].mT * scale", "k[:, c].mT * scale * scale"),
    Planted(8, "scale_twice", "ds @ k * scale", "ds @ k * scale * scale"),
    # dQ
    Planted(6, "dq_twice", _DQ, f"{_DQ}\n            {_DQ}"),
    Planted(6, "dq_twice", _DQ, "dq[:, r] += dq[:, r] + ds @ k[:, c] * scale"),
    Planted(8, "dq_twice", "ds @ k * scale", "2 * ds @ k * scale"),
    Planted(6, "dq_twice", _DQ, f"{_DQ}\n            if j + TILE >= keys: {_DQ}".replace(
        "TILE", "16")),
    Planted(13, "dq_twice", "dq += ds @ k * scale", "dq += 2 * ds @ k * scale"),
    Planted(6, "overwritten", _DQ, _DQ.replace("+=", "=")),
    # D
    Planted(6, "unrounded", "dp - D[:, r, None]", "dp - DD[:, r]"),
    Planted(8, "unrounded", "D = (dout @ v.mT).contiguous(), (dout * out).sum(2)",
            "D = (dout @ v.mT).contiguous(), (dout * (s.softmax(2).nan_to_num() @ v)).sum(2)"),
    Planted(6, "no_d", "dp - D[:, r, None]", "dp"),
    # masks
    Planted(5, "edge", "key[None, :] > at[:, None]", "key[None, :] >= at[:, None]"),
    Planted(5, "edge", "key[None, :] > at[:, None]", "key[None, :] > at[:, None] + 1"),
    Planted(7, "edge", "key[None, :] <= r", "key[None, :] < r"),
    Planted(6, "edge", "key[None, :] > at[:, None]", "key[None, :] >= at[:, None]"),
    Planted(9, "edge", "            if causal:\n",
            "            if causal and j + block_k <= at[0]:\n"),
    Planted(9, "edge", "end > first", "end > first + 1"),
    Planted(9, "skipped", "start <= last", "end <= first"),
    Planted(9, "skipped", "if causal and j > at[-1]", "if causal and j + kj.shape[1] - 1 > at[0]"),
    Planted(5, "edge", "if causal:", "if False:"),
    Planted(11, "no_mask", "if causal:", "if False:"),
    Planted(3, "mask_after", "    p = s.softmax(2).nan_to_num()",
            "    p = (q @ k.mT * q.shape[2] ** -0.5).softmax(2).masked_fill(s == -INF, 0.0)"),
    Planted(11, "mask_after", "    s = s.masked_fill(hidden, -INF)\n    lse = s.logsumexp(-1)\n",
            "    lse = s.logsumexp(-1)\n    s = s.masked_fill(hidden, -INF)\n"),
    Planted(5, "offset", "offset = keys - rows", "offset = 0"),
    Planted(6, "offset", "offset = keys - rows", "offset = 0"),
    Planted(7, "offset", "offset = keys - rows", "offset = 0"),
    Planted(8, "offset", "at = at + keys - rows", "at = at + 0"),
    Planted(9, "offset", "offset = rows_k - rows_q", "offset = 0"),
    Planted(10, "offset", " - (keys - rows)", ""),
    Planted(10, "window", "distance < -left", "distance <= -left"),
    Planted(10, "window", "distance < -left", "distance < -left - 1"),
    Planted(10, "window", "distance > right", "distance > right + (not causal)"),
    Planted(10, "edge", "distance > right", "distance > right + int(causal)"),
    # tails
    Planted(7, "tail", _TAIL, ""),
    Planted(7, "tail", _TAIL, "", 32),
    Planted(7, "tail", _TAIL, "", 64),
    # strides
    Planted(1, "strides", "        x = x.contiguous()\n", ""),
    Planted(1, "strides", "x.shape, g.contiguous()", "x.shape, g"),
    Planted(1, "strides", "torch.empty(rows, d, device=x.device)", "torch.empty_like(x)"),
    Planted(7, "strides", "(x.contiguous() for x in (q, k, v))", "q, k, v"),
    Planted(7, "strides", "q.contiguous(), k.contiguous(), v.contiguous()", "q, k, v"),
    Planted(8, "strides", "for x in (q, k, v, lse, dout))", "for x in (q, k, v, lse, dout))\n"
            "    dout = given"),
    Planted(8, "strides", "(x.contiguous() for x in (q, k, v, lse, dout))", "q, k, v, lse, dout"),
    Planted(1, "strides", "*x.stride(), BLOCK_ROWS=16", "d, 1, BLOCK_ROWS=16"),
    # loads and stores beyond a tensor
    Planted(1, "outside", "tl.store(y_ptr + i, y, mask=i < rows)", "tl.store(y_ptr + i, y)"),
    Planted(1, "outside", "w = tl.load(w_ptr + j, mask=j < d, other=0.0)\n        y",
            "w = tl.load(w_ptr + j)\n        y"),
    Planted(1, "outside", "x = tl.load(at, mask=exists, other=0.0)\n        w",
            "x = tl.load(at)\n        w"),
    Planted(7, "outside", "mask=rows < n_q)", "mask=rows >= 0)"),
    Planted(7, "outside", "v = tl.load(v_ptr + at_k, mask=in_k, other=0.0)",
            "v = tl.load(v_ptr + at_k)"),
    Planted(8, "outside", "tl.store(dv_ptr + at, dv, mask=inside)",
            "tl.store(dv_ptr + at, dv, mask=columns[None, :] < d)"),
    # more than one tile
    Planted(1, "columns", "y += tl.sum", "y = tl.sum"),
    Planted(1, "columns", "y += tl.sum", "y = tl.sum", 128),
    Planted(6, "overwritten", "] +=", "] =", 64),
    Planted(6, "overwritten", _DQ, _DQ.replace("+=", "="), 40),
    Planted(6, "overwritten", "] +=", "] =", 128),
    Planted(7, "rescale", "acc * alpha[:, None] + tl.dot", "acc + tl.dot", 64),
    Planted(7, "rescale", "acc * alpha[:, None] + tl.dot", "acc + tl.dot", 128),
    Planted(8, "overwritten", "dq += tl.dot", "dq = tl.dot", 64),
    Planted(8, "overwritten", "dv += tl.dot", "dv = tl.dot", 64),
    Planted(8, "overwritten", "dk += tl.dot", "dk = tl.dot", 128),
    # the batch
    Planted(7, "batch", "at_k = batch * n_k * d + ", "at_k = "),
    Planted(7, "batch", "at_q = batch * n_q * d + ", "at_q = "),
    Planted(7, "batch", "b * rows * d + at, mask", "at, mask"),
    Planted(8, "batch", "k_ptr + batch * n_k * d", "k_ptr"),
    Planted(8, "batch", "lse_ptr + batch * n_q + rows", "lse_ptr + rows"),
    # causal blocks
    Planted(9, "mask_late", "            new = torch.maximum(m, s.amax(2))",
            "            new = torch.maximum(m, (qi @ kj.mT * scale).amax(2))"),
    Planted(9, "visited", "if causal and j > at[-1]:", "if False:"),
    Planted(9, "visited", "if causal and j > at[-1]:", "if causal and j > at[-1] + block_k:"),
    Planted(9, "visited", "if not causal or start <= last", "if True"),
    Planted(9, "clipped", "min((j + 1) * block_k, rows_k) - 1", "(j + 1) * block_k - 1"),
    Planted(9, "skipped", "start <= last", "start <= first"),
    # what was called something else, or nothing
    Planted(4, "inverted", "alpha = torch.exp(m - safe)", "alpha = torch.exp(safe - m)"),
    Planted(5, "inverted", "alpha = torch.exp(m - safe)", "alpha = torch.exp(safe - m)"),
    Planted(5, "inverted", "alpha = torch.exp(m - safe)",
            "alpha = torch.where(m == -INF, 0.0, torch.exp(safe - m))"),
    Planted(7, "inverted", "alpha = tl.exp(m - safe)", "alpha = tl.exp(safe - m)"),
    Planted(5, "no_mask", "tiled_forward(q, k, v, causal, 16, 16)",
            "tiled_forward(q, k, v, False, 16, 16)"),
    Planted(5, "local", "key = torch.arange(j, j + kj.shape[1])",
            "key = torch.arange(kj.shape[1])"),
    Planted(5, "local", "at = torch.arange(i, min(i + block_q, rows)) + offset",
            "at = torch.arange(qi.shape[1]) + offset"),
    Planted(7, "local", "key[None, :] <= r[:, None] + offset",
            "key[None, :] - j <= r[:, None] + offset"),
    Planted(5, "base2", "k, v, out, lse)", "k, v, out, lse / math.log(2))"),
    Planted(12, "no_maximum", "torch.logaddexp(lse1, lse2)",
            "torch.log(torch.exp(lse1) + torch.exp(lse2))"),
    Planted(6, "scale_both", "] * scale\n            d", "]\n            d"),
    Planted(13, "scale_both", "scale\n            d", "1\n            d"),
    Planted(6, "ds_mask", "ds = p * (dp",
            "ds = torch.exp(q[:, r] @ k[:, c].mT * scale - lse[:, r, None]).nan_to_num() * (dp"),
    Planted(6, "wrong_d", "D = (dout * out)", "D = (out * out)"),
    Planted(6, "wrong_d", "D = (dout * out)", "D = (dout * q)"),
    Planted(8, "wrong_d", "(dout.float() * out.float())", "(dout.float() * dout.float())"),
    Planted(13, "wrong_d", "D = (dout * out)", "D = (dout * v)"),
    Planted(8, "transpose", "tl.dot(tl.trans(p), dout", "tl.dot(p, dout"),
    Planted(8, "transpose", "tl.dot(tl.trans(ds), q", "tl.dot(ds, q", 32),
    Planted(3, "dimension", "s.softmax(2)", "s.softmax(1)"),
    Planted(3, "dimension", "s.softmax(2)", "s.softmax(0)"),
    Planted(12, "carried", "two * out2, lse", "two * out2, lse1"),
    Planted(13, "carried", "out, lse = merge(out, lse", "out, _ = merge(out, lse"),
    Planted(13, "carried", "two * out2, lse", "two * out2, lse2"),
    # GQA, sinks
    Planted(10, "group", ".sum(3) for", "[:, :, :, 0] for"),
    Planted(10, "group", ".sum(3) for", ".mean(3) for"),
    Planted(10, "group", "    dk, dv = (x.unflatten", "    (x.unflatten"),
    Planted(10, "sinks", "total = total + torch.exp(sinks[None, :, None, None] - safe)", "pass"),
    # packed documents
    Planted(11, "documents", "hidden = document[:, None] != document[None, :]",
            "hidden = torch.zeros(tokens, tokens).bool()"),
    Planted(11, "documents", "right=True", "right=False"),
    # merges
    Planted(12, "lse_max", "torch.logaddexp(", "torch.maximum("),
    Planted(12, "lse_max", "two * out2, lse", "two * out2, torch.maximum(lse1, lse2)"),
    Planted(12, "weights", "one * out1 + two * out2", "(out1 + out2) / 2"),
    Planted(13, "lse_max", "torch.logaddexp(", "torch.maximum("),
    # the ring
    Planted(13, "source", "source = (rank - step)", "source = (rank + step)"),
    Planted(13, "source", "source = (rank - step)", "source = (rank - step - 1)"),
    Planted(13, "source", "            send((rank + 1) % world_size, k, v)",
            "            send((rank + 1) % world_size, own_k, own_v)"),
    Planted(13, "missing_step", "for step in range(world_size):\n        source = (rank - step) % "
            "world_size\n        if step + 1", "for step in range(world_size - 1):\n        "
            "source = (rank - step) % world_size\n        if step + 1"),
    Planted(13, "ring_mask", "source == rank)", "True)"),
    Planted(13, "home", _HOME,
            f"if step + 1 < world_size:\n            {_HOME}"),
    Planted(13, "home", "k, v, dk, dv)", "k, v)"),
    # zigzag
    Planted(14, "zigzag", "parts - 1 - rank", "world_size + rank"),
    Planted(14, "zigzag", "source < rank", "source > rank"),
    Planted(14, "zigzag", '"late", "all"', '"early", "all"'),
    Planted(14, "source", "(rank - t) % world_size", "(t - 1) % world_size"),
]  # fmt: skip


def planted(each: Planted) -> str:
    """The right answer with the mistake."""
    source = answer(RIGHT[each.step], each.tile)
    if each.old not in source:
        source = solution(each.step, each.tile)
    assert each.old in source, each
    made = source.replace(each.old, each.new)
    made = made.replace(
        "DD[:, r]",
        "(torch.exp(q[:, r] @ k.mT * scale - lse[:, r, None]) @ v * dout[:, r])"
        ".sum(2, keepdim=True)",
    )
    made = made.replace(
        "send((rank + 1) % world_size, k, v)\n        k, v, dk, dv = recv",
        "send((rank + 1) % world_size, k, v)\n        k, v = recv",
    )
    made = made.replace(
        "    q, k, v, lse, dout = (x", "    given = dout\n    q, k, v, lse, dout = (x"
    )
    if "own_k" in made:
        made = made.replace(
            "    out, lse = torch.zeros_like(q), torch.full",
            "    own_k, own_v = k, v\n    out, lse = torch.zeros_like(q), torch.full",
        )
    return made
