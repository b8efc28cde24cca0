"""Attention in fp64, a few queries at a time: what all implementations are compared with.

It shares no code with the library. Heads do not depend on each other, so that one KV head and its
query heads of one sequence stand for all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .workload import Workload

_SCORES = 1 << 27  # entries of the matrices that are held at a time: 1 GiB each
TENSORS = ("out", "dq", "dk", "dv")


@torch.no_grad()
def exact(workload: Workload, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out and the gradients in fp64: (seqlen, heads, headdim) of the first KV head."""
    group = workload.nheads // workload.nheads_k
    queries, douts = (x[0, :, :group].to(torch.float64) for x in (q, dout))
    key, value = (x[0, :, 0].to(torch.float64) for x in (k, v))
    found = {"out": queries.clone(), "dq": queries.clone()}
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    step = max(1, _SCORES // workload.seqlen)
    for head in range(group):
        for start in range(0, workload.seqlen, step):
            rows = slice(start, start + step)
            part = (queries[rows, head], key, value, douts[rows, head])
            out, dq, more_dk, more_dv = _rows(workload, start, *part)
            found["out"][rows, head], found["dq"][rows, head] = out, dq
            dk += more_dk
            dv += more_dv
    return {**found, "dk": dk[:, None], "dv": dv[:, None]}


def errors_of(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Of whole tensors against `exact`: max, mean, rmse, and max relative to the largest entry."""
    errors = {}
    for name, value in found.items():
        want = right[name]
        apart = (value[0, :, : want.shape[1]].to(torch.float64) - want).abs()
        worst = apart.max().item()
        errors[name] = {
            "max": worst,
            "mean": apart.mean().item(),
            "rmse": apart.square().mean().sqrt().item(),
            "relative": worst / (want.abs().max().item() or 1.0),
        }
    return errors


def _rows(
    workload: Workload, start: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries from row `start` on, of one head."""
    scale = workload.headdim**-0.5
    scores = (q @ k.T) * scale
    columns = torch.arange(len(k), device=q.device)
    distance = columns - torch.arange(start, start + len(q), device=q.device)[:, None]
    left, right = workload.window
    if left >= 0:
        scores.masked_fill_(distance < -left, -torch.inf)
    if workload.causal or right >= 0:
        scores.masked_fill_(distance > (0 if workload.causal else right), -torch.inf)
    p = scores.softmax(dim=-1)
    out = p @ v
    ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True)) * scale
    return out, ds @ k, ds.T @ q, p.T @ dout
