"""Step 10: GQA, sliding windows, attention sinks: what today's models ask of the kernel.

Grouped-query attention (GQA). `group` = heads / heads_k query heads share one KV head: query head h
reads KV head h // group. The KV cache and the bytes on the wire shrink by `group`. There is no need
to repeat k and v in memory: the query heads of a group are more rows for the same keys.

    q  (batch, rows, heads_k · group, d)  →  (batch, heads_k, group, rows, d)
    k  (batch, rows, heads_k, d)          →  (batch, heads_k, 1, rows, d)

In the backward pass this decides dK and dV: they sum over all rows, so over all heads of the group.

Sliding window. `window = (left, right)`: a query at position p sees keys p − left … p + right; −1:
no limit, and causal means right = 0. With its own key a causal query sees left + 1 keys. A block of
queries reads the keys from its first row's left edge to its last row's right edge: work grows with
rows · window, no longer with rows².

Attention sink. Probabilities sum to 1, even for a head that has nothing to say. A sink is a learned
number for each head, a score without a value. It joins the denominator alone:

    lse_i = log( Σ_j exp(s_ij) + exp(sink) ),      out_i = Σ_j exp(s_ij − lse_i) v_j

Online softmax needs one change: begin with maximum = sink and sum = 1 instead of −inf and 0. The
backward pass needs none, because p = exp(s − lse) already knows the sink. The sink's own gradient:
its value is zero, so dP is 0 and ds = p (dP − D) = −p D, with p = exp(sink − lse):

    dsink = − Σ_i exp(sink − lse_i) · D_i,      D_i = Σ_c dO_ic · O_ic

Exercise 10. Write `grouped_forward` and `grouped_backward`. The first version may repeat k and v;
then find where dK has to be summed. `rfa lab check 10 DIR` looks at it.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from ..definition import attention, visible

Window = tuple[int, int]


def by_group(x: Tensor, heads_k: int) -> Tensor:
    """(batch, rows, heads, d) → (batch, heads_k, group, rows, d); no copy of anything."""
    return x.unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4)


def by_head(x: Tensor) -> Tensor:
    """And back."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def key_range(
    first: int, last: int, rows_q: int, rows_k: int, causal: bool, window: Window
) -> tuple[int, int]:
    """Of queries first … last − 1: from which key on they see something, and up to where."""
    shift = rows_k - rows_q
    left, right = window[0], 0 if causal else window[1]
    begin = max(0, first + shift - left) if left >= 0 else 0
    end = min(rows_k, last + shift + right) if right >= 0 else rows_k
    return begin, max(begin, end)


def hidden_from(
    rows: range, keys: range, shift: int, causal: bool, window: Window, like: Tensor
) -> Tensor:
    """(rows, keys) booleans: what the mask takes away."""
    position = torch.tensor(rows, device=like.device)[:, None] + shift
    distance = torch.tensor(keys, device=like.device)[None, :] - position
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def grouped_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: Window = (-1, -1),
    sinks: Tensor | None = None, block_q: int = 32, block_k: int = 32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(batch, rows, heads, d) → output and lse (batch, heads, rows)."""
    rows_q, rows_k, heads_k, shift = q.shape[1], k.shape[1], k.shape[2], k.shape[1] - q.shape[1]
    grouped = by_group(q, heads_k)
    k, v = (x.transpose(1, 2)[:, :, None] for x in (k, v))  # (batch, heads_k, 1, rows, d)
    outs, lses = [], []
    for i in range(0, rows_q, block_q):
        rows = range(i, min(i + block_q, rows_q))
        mine = grouped[..., rows.start : rows.stop, :]
        acc = mine.new_zeros(*mine.shape[:-1], v.shape[-1])
        if sinks is None:
            m, total = acc[..., 0] - inf, acc[..., 0].clone()
        else:  # begin with the sink
            m = sinks.view(heads_k, -1, 1).expand(acc.shape[:-1]).to(acc)
            total = torch.ones_like(m)
        begin, end = key_range(i, rows.stop, rows_q, rows_k, causal, window)
        for j in range(begin, end, block_k):
            keys = range(j, min(j + block_k, end))
            s = mine @ k[..., keys.start : keys.stop, :].transpose(-1, -2) * q.shape[-1] ** -0.5
            s = s.masked_fill(hidden_from(rows, keys, shift, causal, window, q), -inf)
            m_new = torch.maximum(m, s.amax(-1))
            m_safe = m_new.masked_fill(m_new == -inf, 0.0)
            p, alpha = (s - m_safe[..., None]).exp(), (m - m_safe).exp()
            acc = acc * alpha[..., None] + p @ v[..., keys.start : keys.stop, :]
            m, total = m_new, total * alpha + p.sum(-1)
        outs.append(acc / total.masked_fill(total == 0, 1.0)[..., None])
        lses.append(m + total.log())
    return by_head(torch.cat(outs, -2)), torch.cat(lses, -1).flatten(1, 2)


def grouped_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    causal: bool = False, window: Window = (-1, -1), block_q: int = 32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; with a sink nothing changes, because lse holds it."""
    rows_q, rows_k, heads_k, shift = q.shape[1], k.shape[1], k.shape[2], k.shape[1] - q.shape[1]
    scale = q.shape[-1] ** -0.5
    grouped_q, grouped_do, d = (by_group(x, heads_k) for x in (q, dout, dout * out))
    delta = d.sum(-1)
    lse = lse.unflatten(1, (heads_k, -1))
    k, v = (x.transpose(1, 2)[:, :, None] for x in (k, v))
    dq, dk, dv = torch.zeros_like(grouped_q), torch.zeros_like(k), torch.zeros_like(v)
    for i in range(0, rows_q, block_q):
        rows = range(i, min(i + block_q, rows_q))
        begin, end = key_range(i, rows.stop, rows_q, rows_k, causal, window)
        if begin == end:
            continue
        at, seen = slice(i, rows.stop), slice(begin, end)
        s = grouped_q[..., at, :] @ k[..., seen, :].transpose(-1, -2) * scale
        hidden = hidden_from(rows, range(begin, end), shift, causal, window, q)
        p = (s - lse[..., at, None]).exp().masked_fill(hidden, 0.0)  # also where lse is −inf
        dp = grouped_do[..., at, :] @ v[..., seen, :].transpose(-1, -2)
        ds = p * (dp - delta[..., at, None]) * scale
        dq[..., at, :] = ds @ k[..., seen, :]
        # Dimension 2 is the group: its heads share the keys, so their gradients add up.
        dk[..., seen, :] += (ds.transpose(-1, -2) @ grouped_q[..., at, :]).sum(2, keepdim=True)
        dv[..., seen, :] += (p.transpose(-1, -2) @ grouped_do[..., at, :]).sum(2, keepdim=True)
    return by_head(dq), dk[:, :, 0].transpose(1, 2), dv[:, :, 0].transpose(1, 2)


def sink_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """(heads,): a sink takes probability from the others and gives nothing back."""
    delta = (dout * out).sum(-1).transpose(1, 2)  # (batch, heads, rows)
    return -((sinks[:, None] - lse).exp() * delta).sum((0, 2))


def close(what: str, got: Tensor, want: Tensor) -> None:
    """AssertionError with the largest difference, and where it is."""
    torch.testing.assert_close(
        got.double(), want, atol=2e-5, rtol=2e-5, msg=lambda numbers: f"{what}: {numbers}"
    )


def check() -> None:
    """Outputs against the definition, gradients against autograd through the definition."""
    torch.manual_seed(0)
    for rows_q, rows_k, causal, window, sink in (
        (50, 50, True, (-1, -1), False),
        (41, 77, True, (13, -1), True),
        (64, 64, False, (7, 9), True),
        (70, 40, True, (20, 0), False),
    ):
        q, dout = torch.randn(2, rows_q, 6, 20), torch.randn(2, rows_q, 6, 20)
        k, v = torch.randn(2, 2, rows_k, 2, 20)
        sinks = torch.randn(6) if sink else None
        exact = [x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
        options = {"causal": causal, "window": window, "sinks": exact[3] if sink else None}
        want = attention(*exact[:3], **options)  # type: ignore[arg-type]
        grads = torch.autograd.grad(want[0], exact, dout.double())
        out, lse = grouped_forward(q, k, v, causal, window, sinks)
        got = [out, lse, *grouped_backward(q, k, v, out, lse, dout, causal, window)]
        if sinks is not None:
            got.append(sink_gradient(sinks, out, lse, dout))
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, (*want, *grads)):
            close(f"{name}, window {window}, causal {causal}", a, b.detach())


def cache_size(heads_k: int) -> float:
    """MiB of k and v: 128k tokens, one layer, d 128, bf16."""
    return 2 * 131072 * heads_k * 128 * 2 / 2**20


def effect_of_sink(sink: float) -> tuple[float, float]:
    """What it takes of the weight, and how long the output is; random data, mean over queries."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 1, 64) for _ in range(3))
    out, lse = grouped_forward(q, k, v, sinks=torch.tensor([sink]))
    return (sink - lse).exp().mean().item(), out.norm(dim=-1).mean().item()


def show() -> None:
    """The picture of a window, the bytes that GQA saves, and what a sink takes."""
    print("causal, window (4, 0): each query sees 5 keys")
    for row in visible(12, 12, True, (4, 0)).tolist():
        print("  " + " ".join("█" if seen else "·" for seen in row))

    print("\nkeys that a block of 128 queries reads at the end of the sequence")
    for rows in (4096, 16384, 65536):
        begin, end = key_range(rows - 128, rows, rows, rows, True, (1023, 0))
        print(f"  {rows:6} rows: causal {rows:6}, with a window of 1024 {end - begin}")

    print("\nKV cache of 128k tokens and one layer, d 128, bf16")
    for heads_k in (32, 8, 1):
        print(f"  32 query heads, {heads_k:2} KV heads: {cache_size(heads_k):6.0f} MiB")

    print("\nwhat a sink takes of the softmax (random data, 256 keys, mean over queries)")
    for sink in (-2.0, 2.0, 5.0, 8.0):
        share, length = effect_of_sink(sink)
        print(f"  sink {sink:4.0f}: {share:6.1%} of the weight, |out| {length:.3f}")


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
