"""Step 6: backward by recomputation, and what it gives after each mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from .compare import Compare
from .forward import LONG, SIZES, Size, Suspects, plain_inputs, truth_of
from .learner import Cases, Learner
from .masks import seen, wrong_masks
from .setting import INF, LN2, PLAIN, TILES, Form, Mistake, Setting, Suspect, expand, random

MISTAKES = {
    "scale_dk": Mistake(
        "missing 1/√d in dK",
        "dK is √d times too large",
        "s = scale · q kᵀ, so dK = scale · dSᵀ q.",
    ),
    "scale_dq": Mistake(
        "missing 1/√d in dQ",
        "dQ is √d times too large",
        "s = scale · q kᵀ, so dQ = scale · dS k.",
    ),
    "scale_both": Mistake(
        "missing 1/√d in dQ and dK",
        "dQ and dK are √d times too large",
        "s = scale · q kᵀ, so dQ = scale · dS k and dK = scale · dSᵀ q.",
    ),
    "dq_twice": Mistake(
        "dQ summed twice",
        "some or all key blocks are in dQ more than once",
        "Each pair of tiles adds to dQ once. Look for a sum that is added to itself, or for two "
        "kernels that both add.",
    ),
    "overwritten": Mistake(
        "overwritten, not summed",
        "a gradient holds the share of one block only",
        "Add up over the blocks of the other sequence: +=, not =.",
    ),
    "unrounded": Mistake(
        "D from unrounded O",
        "D is not made from the output that was handed in",
        "D = rowsum(dO ∘ O) with the stored, rounded O: that is the output which dO belongs to. "
        "Do not compute O again.",
    ),
    "wrong_d": Mistake(
        "D from a wrong tensor",
        "the term that is subtracted from dP is no rowsum(dO ∘ O)",
        "D = rowsum(dO ∘ O): for each row one number, of the output and its gradient.",
    ),
    "ds_mask": Mistake(
        "dS not masked",
        "hidden pairs have no weight in dV, but they have one in dQ and dK",
        "P is 0 where a key is hidden. Make dS of the same, masked P.",
    ),
    "transpose": Mistake(
        "missing transpose",
        "a tile of P or dS is multiplied as it is, not transposed",
        "dV = Pᵀ dO and dK = dSᵀ Q: rows of the result are keys.",
    ),
    "no_d": Mistake(
        "no D",
        "dS lacks the term of the softmax's sum",
        "dS = P ∘ (dP − D), with D = rowsum(dO ∘ O) for each row.",
    ),
}


def gradients(
    setting: Setting,
    counts: Tensor,
    *,
    factor: float = 1.0,
    powers: tuple[float, float] = (1.0, 1.0),
    d: str = "",
    total: Tensor | None = None,
    group: Callable[[Tensor], Tensor] = lambda x: x.sum(2),
    interleave: bool = True,
) -> dict[str, Tensor]:
    """dq, dk, dv by recomputation: P = exp(s − lse), D = rowsum(dO ∘ O), dS = P ∘ (dP − D).

    `powers` multiply scores and lse in the exponent; `factor` the scores; `total` is D, if given.
    """
    assert setting.out is not None
    assert setting.lse is not None
    assert setting.dout is not None
    k, v = (expand(x, setting.group, interleave) for x in (setting.k, setting.v))
    scale = setting.scale * factor
    s = setting.q @ k.transpose(-1, -2) * scale * powers[0]
    lse = setting.lse.masked_fill(setting.lse == -INF, INF) * powers[1]
    p = (s - lse[..., None]).exp() * counts.to(s)
    dp = setting.dout @ v.transpose(-1, -2)
    if total is None:
        total = (setting.dout * setting.out).sum(-1, keepdim=True)
    if d == "unrounded":
        total = (p * dp).sum(-1, keepdim=True)
    if d == "output":
        total = (setting.dout * (p @ v)).sum(-1, keepdim=True)
    if d == "none":
        total = torch.zeros_like(total)
    ds = p * (dp - total)
    dq, dk = ds @ k * scale, ds.transpose(-1, -2) @ setting.q * scale
    dv = p.transpose(-1, -2) @ setting.dout
    if setting.group > 1:
        dk, dv = (group(x.unflatten(1, (-1, setting.group))) for x in (dk, dv))
    return {"dq": dq, "dk": dk, "dv": dv}


def probabilities(setting: Setting, counts: Tensor) -> tuple[Tensor, Tensor]:
    """P and dS, without GQA."""
    assert setting.out is not None
    assert setting.lse is not None
    assert setting.dout is not None
    lse = setting.lse.masked_fill(setting.lse == -INF, INF)
    s = setting.q @ setting.k.transpose(-1, -2) * setting.scale
    p = (s - lse[..., None]).exp() * counts.to(s)
    total = (setting.dout * setting.out).sum(-1, keepdim=True)
    return p, p * (setting.dout @ setting.v.transpose(-1, -2) - total)


def backward_suspects(setting: Setting) -> Iterator[Suspect]:
    """What (dq, dk, dv) looks like after each mistake."""
    counts, scale = seen(setting), setting.scale
    right = gradients(setting, counts)
    yield "scale_dk", {"dk": right["dk"] / scale}
    yield "scale_dq", {"dq": right["dq"] / scale}
    yield "scale_both", {"dq": right["dq"] / scale, "dk": right["dk"] / scale}
    yield "scale_twice", {"dq": right["dq"] * scale, "dk": right["dk"] * scale}
    yield "dq_twice", {"dq": right["dq"] * 2}
    yield "unrounded", gradients(setting, counts, d="unrounded")
    yield "unrounded", gradients(setting, counts, d="output")
    yield "no_d", gradients(setting, counts, d="none")
    for mistake, mask in wrong_masks(setting):
        yield mistake, gradients(setting, mask)
    for powers in ((1.0, LN2), (LN2, 1.0), (LN2, LN2), (1 / LN2, 1.0), (1 / LN2, 1 / LN2)):
        yield "base2", gradients(setting, counts, powers=powers)
    yield "scale_twice", gradients(setting, counts, factor=scale)
    yield "scale_missing", gradients(setting, counts, factor=1 / scale)
    yield "scale_missing", gradients(setting, counts, powers=(1 / scale, 1.0))
    yield "scale_twice", gradients(setting, counts, powers=(scale, 1.0))
    yield from _wrong_order(setting, counts)
    yield from _wrong_d(setting, counts)
    if setting.masked:
        unmasked = gradients(setting, torch.ones_like(counts))
        yield "ds_mask", {"dq": unmasked["dq"], "dk": unmasked["dk"], "dv": right["dv"]}
    if setting.group == 1:
        yield from _untransposed(setting, counts)


def _wrong_d(setting: Setting, counts: Tensor) -> Iterator[Suspect]:
    """D of other tensors than dO and O."""
    assert setting.out is not None
    assert setting.dout is not None
    assert setting.lse is not None
    out, dout, q = setting.out, setting.dout, setting.q
    pairs = [
        (out, out),
        (dout, dout),
        (dout, q),
        (out, q),
        (out, out * 0 + 1),
        (dout, dout * 0 + 1),
    ]
    if setting.group == 1 and setting.rows == setting.keys:
        pairs += [(dout, setting.v), (dout, setting.k), (out, setting.v)]
    totals = [(a * b).sum(-1, keepdim=True) for a, b in pairs]
    mean = (dout * out).mean(-1, keepdim=True)
    for total in (*totals, mean, setting.lse.nan_to_num(neginf=0.0)[..., None]):
        yield "wrong_d", gradients(setting, counts, total=total)


def _untransposed(setting: Setting, counts: Tensor) -> Iterator[Suspect]:
    """Square tiles of P and dS, or the whole, that are not transposed."""
    assert setting.dout is not None
    p, ds = probabilities(setting, counts)
    for tile in (n for n in TILES if n < 2 * max(setting.rows, setting.keys)):
        pad = (0, -setting.keys % tile, 0, -setting.rows % tile)
        found = {}
        for name, x, other in (("dv", p, setting.dout), ("dk", ds * setting.scale, setting.q)):
            tiles = functional.pad(x, pad).unflatten(2, (-1, tile)).unflatten(4, (-1, tile))
            wrong = tiles.transpose(3, 5).flatten(4).flatten(2, 3)  # each tile transposed
            other = functional.pad(other, (0, 0, 0, pad[3]))
            found[name] = (wrong.transpose(-1, -2) @ other)[:, :, : setting.keys]
        yield "transpose", found


def _wrong_order(setting: Setting, counts: Tensor) -> Iterator[Suspect]:
    """dQ that adds a sum to itself; gradients of the last tile alone."""
    for tile in setting.key_tiles:
        starts = range(0, setting.keys, tile)
        if len(starts) < 2:
            continue
        parts = []
        for start in starts:
            part = torch.zeros_like(counts)
            part[:, start : start + tile] = counts[:, start : start + tile]
            parts.append(gradients(setting, part)["dq"])
        whole = torch.stack(parts)
        doubled = torch.zeros_like(whole[0])
        for part in parts:
            doubled = 2 * doubled + part
        yield "dq_twice", {"dq": doubled}
        yield "dq_twice", {"dq": whole.cumsum(0).sum(0)}
        yield "dq_twice", {"dq": whole.sum(0) + whole[-1]}
        yield "dq_twice", {"dq": whole.sum(0) + whole[0]}
        yield "overwritten", {"dq": whole[-1]}
        yield "overwritten", {"dq": whole[0]}
    for tile in dict.fromkeys(rows for rows, _ in setting.all_tiles):
        start = (setting.rows - 1) // tile * tile
        if start:
            for rows in (slice(start, None), slice(0, tile)):
                part = torch.zeros_like(counts)
                part[rows] = counts[rows]
                wrong = gradients(setting, part)
                yield "overwritten", {"dk": wrong["dk"], "dv": wrong["dv"]}


def judge_backward(
    form: Form,
    tensors: Sequence[Tensor],
    setting: Setting,
    suspects: Suspects = backward_suspects,
    tolerance: float = 2e-4,
    rounded: bool = False,
    expanded: bool = False,
) -> tuple[Compare, list[Tensor]]:
    """Compare gradients with the true ones and with suspects; and q, k, v, out, lse, dout.

    `rounded`: the output was rounded; `expanded`: dout is one number, as after out.mean().
    """
    out, lse = (x.float() for x in truth_of(form, setting).values())
    dout = random(*out.shape, seed=7)
    if expanded:
        dout = torch.tensor(0.7).expand(out.shape)
    if rounded:
        out = out.to(torch.float8_e5m2).float()  # coarse: seen beside TF32's rounding, too
    wide = [form.ours(name, x.double()) for name, x in (("out", out), ("lse", lse), ("out", dout))]
    setting = replace(setting, out=wide[0], lse=wide[1], dout=wide[2])
    right = gradients(setting, seen(setting))
    truth = {name: form.learner(name, x) for name, x in right.items()}
    judge = Compare(truth, form, setting, partial(suspects, setting), tolerance, setting.masked)
    return judge, [*tensors, out, lse, dout]


def backward_cases(
    learner: Learner,
    name: str,
    sizes: Iterable[Size],
    tolerance: float = 2e-4,
    suspects: Suspects = backward_suspects,
) -> Cases:
    """Backward passes of (batch, rows, d)."""
    for size in sizes:
        for rounded in (False, True) if size == SIZES[0] else (False,):
            tensors, setting = plain_inputs(*size)
            more = ("out rounded to fp8 by the forward pass",) if rounded else ()
            judge, given = judge_backward(PLAIN, tensors, setting, suspects, tolerance, rounded)
            if learner.has_kernels:
                judge = replace(judge, lost="outside")
            yield learner.case(name, setting.describe(*more), judge, *given, size[3])


def tiled_backward(learner: Learner) -> Cases:
    """Step 6."""
    yield from backward_cases(learner, "tiled_backward", (*SIZES, *LONG))
