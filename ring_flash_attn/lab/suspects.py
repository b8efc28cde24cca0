"""What a result looks like if one of the usual mistakes was made, in fp64 and a few lines each.

The checker compares a wrong result with each of these; the one that it agrees with names the
mistake. NaN in a suspect's tensor stands for "anything": rows whose value the mistake leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

INF = float("inf")
LN2 = math.log(2.0)
TILES = (8, 16, 32, 64, 128)
Suspect = tuple[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Mistake:
    """Its name, how one sees it, and what helps, short of the solution."""

    name: str
    says: str
    hint: str


MISTAKES = {
    "rescale": Mistake(
        "forgot to rescale",
        "what was summed before the maximum moved keeps its old reference",
        "When the maximum goes from m to m', every exp(x − m) summed so far must become "
        "exp(x − m'): multiply the accumulator and the sum by the same factor.",
    ),
    "maximum": Mistake(
        "maximum not carried",
        "each block is taken relative to its own maximum, not to the largest so far",
        "The running maximum is max(old, this block's). Keep it for the next block, and rescale "
        "by the old one.",
    ),
    "no_maximum": Mistake(
        "no maximum subtracted",
        "exp of large scores overflows",
        "Subtract the running maximum before exp; the quotient does not change.",
    ),
    "unnormalised": Mistake(
        "not divided by the sum",
        "the output is the accumulator, Σ exp(s − m) v, without the division",
        "After the last block, divide the accumulator by the running sum.",
    ),
    "lse_part": Mistake(
        "half of the lse",
        "lse is the maximum or the logarithm of the sum alone",
        "lse = m + log Σ exp(s − m) has both parts.",
    ),
    "base2": Mistake(
        "base 2 against natural lse",
        "powers of 2 and powers of e are mixed",
        "exp(x) = exp2(x · log2(e)). If you compute with exp2, convert once on the way in, and "
        "multiply the lse by ln 2 on the way out: callers expect the natural one.",
    ),
    "scale_twice": Mistake(
        "scale applied twice",
        "scores or gradients have the factor 1/√d once too often",
        "Scale either q or the scores. In the backward pass each of dQ and dK gets 1/√d once.",
    ),
    "scale_missing": Mistake(
        "missing 1/√d in the scores",
        "scores are q kᵀ without the scale",
        "s = q kᵀ / √d.",
    ),
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
    "edge": Mistake(
        "wrong mask at the edge",
        "the mask is off where visible and hidden keys meet",
        "A query sees its own position and all before: key ≤ query. Blocks that the diagonal "
        "crosses need the mask for each element.",
    ),
    "skipped": Mistake(
        "a visible block was skipped",
        "the loop ends before a block that is visible in part",
        "Visit a block if its first key is visible to the last row of the tile.",
    ),
    "no_mask": Mistake(
        "no mask",
        "queries see keys that are hidden from them",
        "Apply the mask before the softmax.",
    ),
    "upside_down": Mistake(
        "mask upside down",
        "queries see later keys, and not the earlier ones",
        "Causal: key position ≤ query position. Look at which index is the row's.",
    ),
    "offset": Mistake(
        "causal offset",
        "queries and keys differ in number, and the mask starts at the first key",
        "Both sequences end together: query i has position i + keys − queries.",
    ),
    "window": Mistake(
        "window off by one",
        "the window is one key too wide or too narrow",
        "(left, right) counts keys before and after the own position, which is visible as well: "
        "−left ≤ key − query ≤ right.",
    ),
    "tail": Mistake(
        "unmasked tail block",
        "the last block reaches beyond the last key, and what lies there is counted",
        "Where the number of keys is no multiple of the tile, set scores of columns ≥ keys to "
        "−inf; loading zeros there is not enough, since exp(0) is 1.",
    ),
    "inf_rows": Mistake(
        "−inf rows",
        "a row that has seen no key (yet) became NaN, or something else than 0",
        "While a row's maximum is −inf, −inf − (−inf) is NaN: subtract 0 there. A row that never "
        "sees a key has output 0 and lse −inf.",
    ),
    "documents": Mistake(
        "documents that leak",
        "a query sees keys of another document",
        "Two tokens may see each other only if cu_seqlens puts them into the same document; the "
        "token at cu_seqlens[i] is the first of document i.",
    ),
    "sinks": Mistake(
        "the sink is not counted right",
        "the softmax without the sink, or with it in another place",
        "A sink is one more score for each row, once, unscaled, without a value: in the sum and "
        "in the lse.",
    ),
    "group": Mistake(
        "dK not summed over the GQA group",
        "dK and dV have the share of some query heads only",
        "All query heads of a group read the same KV head, so its gradient is the sum of theirs.",
    ),
    "head": Mistake(
        "wrong KV head",
        "query heads use the keys of another group",
        "Query head h uses KV head h // (heads / heads_k).",
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
    "no_d": Mistake(
        "no D",
        "dS lacks the term of the softmax's sum",
        "dS = P ∘ (dP − D), with D = rowsum(dO ∘ O) for each row.",
    ),
    "lse_max": Mistake(
        "lse merged by max",
        "the larger lse stands for both",
        "lse = log(exp(lse1) + exp(lse2)): the maximum is only the reference inside.",
    ),
    "weights": Mistake(
        "wrong weights in the merge",
        "the two outputs are not weighted by their part of the sum",
        "Output i has the weight exp(lse_i − lse), with the merged lse.",
    ),
    "source": Mistake(
        "wrong source rank",
        "keys are taken for those of another rank",
        "If everybody sends to rank + 1, then after t steps a rank holds the keys of rank − t "
        "(mod world size), and passes on what it has received.",
    ),
    "ring_mask": Mistake(
        "wrong mask for a ring step",
        "whole shards are masked, or hidden ones are seen",
        "Step 0 is causal within the shard; shards of lower ranks are seen whole, those of "
        "higher ranks not at all.",
    ),
    "missing_step": Mistake(
        "a ring step is missing",
        "the keys of one rank never took part",
        "With world_size ranks there are world_size steps, the first on the rank's own keys.",
    ),
    "home": Mistake(
        "gradients not sent home",
        "dK and dV are not those of the rank's own keys",
        "dK and dV travel with their keys. After the last step they are one hop from home: send "
        "them on once more.",
    ),
    "strides": Mistake(
        "strides ignored",
        "a tensor that is not contiguous is read as if it were",
        "Pass the strides to the kernel, or call .contiguous() before the launch.",
    ),
    "zigzag": Mistake(
        "wrong zigzag half",
        "the wrong half of the queries or of the keys takes part",
        "Rank r holds chunks r and 2·world_size − 1 − r. Keys of lower ranks: all queries, the "
        "early half of the keys. Keys of higher ranks: the late half of the queries, all keys.",
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One call, in fp64: q (batch, heads, rows, d); k and v with heads_k heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sinks: Tensor | None = None
    documents: tuple[int, ...] | None = None
    tiles: tuple[tuple[int, int], ...] = ()  # (rows, keys) that the learner was told, if any
    world_size: int = 1
    out: Tensor | None = None  # backward: what was handed in
    lse: Tensor | None = None
    dout: Tensor | None = None

    @property
    def rows(self) -> int:
        """Queries."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """Keys."""
        return self.k.shape[2]

    @property
    def scale(self) -> float:
        """1/√d."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def key_tiles(self) -> tuple[int, ...]:
        """Widths that the learner's tiles may have."""
        told = tuple(keys for _, keys in self.tiles)
        return tuple(n for n in dict.fromkeys(told or TILES) if n <= 2 * self.keys)

    @property
    def all_tiles(self) -> tuple[tuple[int, int], ...]:
        """Tiles that the learner may have."""
        sizes = (8, 16, 32, 64)
        return self.tiles or tuple((a, b) for a in sizes for b in sizes)


# Who sees whom, rightly or wrongly: how often key j counts for query i.


def seen(setting: Setting, kind: str = "", tile: tuple[int, int] = (1, 1)) -> Tensor:
    """(rows, keys): 1 for a visible pair, 0 for a hidden one."""
    rows, keys = setting.rows, setting.keys
    offset = 0 if kind == "offset" else keys - rows
    distance = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + offset)
    left, right = (INF if side < 0 else side for side in setting.window)
    right = 0 if setting.causal else right
    left += {"left+": 1, "left-": -1}.get(kind, 0)
    right += {"right+": 1, "right-": -1, "edge+": 1, "edge-": -1}.get(kind, 0)
    if kind == "no_mask":
        right = INF
    if kind == "no_window":
        left, right = INF, 0 if setting.causal else INF
    if kind == "upside_down":
        left, right = right, left
    found = (-left <= distance) & (distance <= right)
    if setting.documents is not None and kind != "no_documents":
        shift = {"documents+": 1, "documents-": -1}.get(kind, 0)
        borders = torch.tensor(setting.documents[1:-1]) + shift
        mine = torch.bucketize(torch.arange(rows), borders, right=True)
        found &= mine[:, None] == mine[None, :]
    if kind in ("whole_tiles", "full_tiles"):
        found = _by_tile(found, tile, kind == "whole_tiles")
    return found.double()


def _by_tile(found: Tensor, tile: tuple[int, int], any_pair: bool) -> Tensor:
    """Tiles with a visible pair count whole; or only tiles without a hidden pair count."""
    rows, keys = found.shape
    pad = (0, -keys % tile[1], 0, -rows % tile[0])
    padded = functional.pad(found, pad, value=not any_pair)
    blocks = padded.unflatten(0, (-1, tile[0])).unflatten(2, (-1, tile[1]))
    kept = blocks.any(3).any(1) if any_pair else blocks.all(3).all(1)
    return kept.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:rows, :keys]


def wrong_masks(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    """Each mistake with the mask that it makes."""
    kinds = []
    if setting.rows != setting.keys and (setting.causal or setting.window != (-1, -1)):
        kinds.append(("offset", "offset"))
    if setting.documents is not None:
        kinds += [("documents", kind) for kind in ("no_documents", "documents+", "documents-")]
    if setting.causal:
        kinds += [("edge", "edge-"), ("edge", "edge+"), ("no_mask", "no_mask")]
        kinds.append(("upside_down", "upside_down"))
    if setting.window[0] >= 0:
        kinds += [("window", "left+"), ("window", "left-")]
    if setting.window[1] >= 0 and not setting.causal:
        kinds += [("window", "right+"), ("window", "right-")]
    if setting.window != (-1, -1):
        kinds.append(("no_mask", "no_window"))
    for mistake, kind in kinds:
        yield mistake, seen(setting, kind)
    if setting.causal or setting.window != (-1, -1):
        for tile in setting.all_tiles:
            yield "edge", seen(setting, "whole_tiles", tile)
            yield "skipped", seen(setting, "full_tiles", tile)


# One pass over blocks of keys.


def expand(x: Tensor, group: int, interleave: bool = True) -> Tensor:
    """KV heads for all query heads."""
    return x.repeat_interleave(group, 1) if interleave else x.repeat(1, group, 1, 1)


def scores_of(setting: Setting, counts: Tensor, interleave: bool = True) -> Tensor:
    """Scaled scores; a pair that counts twice has log 2 more, a hidden one −inf."""
    k = expand(setting.k, setting.group, interleave)
    return setting.q @ k.transpose(-1, -2) * setting.scale + counts.log().to(setting.q)


def online(
    scores: Tensor, values: Tensor, tile: int, switch: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, maximum and sum after an online softmax with one mistake, or with none."""
    m = torch.full_like(scores[..., 0], -INF)
    total, last = torch.zeros_like(m), m
    acc = torch.zeros_like(scores[..., :1] * values[..., :1, :])
    for start in range(0, scores.shape[-1], tile):
        s = scores[..., start : start + tile]
        top = s.amax(-1)
        last = torch.maximum(m, top)
        if switch in ("own", "own_unscaled"):
            last = top
        if switch == "no_maximum":
            last = torch.zeros_like(top)
        safe = last.masked_fill(last == -INF, 0.0)
        p = (s - safe[..., None]).exp()
        alpha = (m - safe).exp()
        if switch == "block_alpha":
            alpha = (top - safe).exp()
        if switch == "inverse_alpha":
            alpha = torch.where(m == -INF, 0.0, (safe - m).exp())
        kept = torch.ones_like(alpha)
        of_sum = kept if switch in ("keep_sum", "keep_both", "own_unscaled") else alpha
        of_acc = kept if switch in ("keep_acc", "keep_both", "own_unscaled") else alpha
        total = total * of_sum + p.sum(-1)
        acc = acc * of_acc[..., None] + p @ values[..., start : start + tile, :]
        if switch != "not_stored":
            m = last
    out = acc / total.masked_fill(total == 0, 1.0)[..., None]
    return out, last + total.log(), last, total


SWITCHES = {
    "keep_acc": "rescale",
    "keep_sum": "rescale",
    "keep_both": "rescale",
    "inverse_alpha": "rescale",
    "own": "maximum",
    "own_unscaled": "maximum",
    "not_stored": "maximum",
    "block_alpha": "maximum",
    "no_maximum": "no_maximum",
}


def wrong_sums(scores: Tensor, values: Tensor, tiles: tuple[int, ...]) -> Iterator[Suspect]:
    """Online softmax with each of its mistakes; those that show where exp overflows, in fp32."""
    for tile in tiles:
        for switch, mistake in SWITCHES.items():
            overflows = switch in ("own", "no_maximum")
            for dtype in (torch.float32,) if overflows else (torch.float64,):
                out, lse, m, total = online(scores.to(dtype), values.to(dtype), tile, switch)
                lost = ~out.isfinite().all(-1) | ~total.isfinite()  # not numbers: +inf
                out = out.double().masked_fill(lost[..., None], INF)
                lse, total = (x.double().masked_fill(lost, INF) for x in (lse, total))
                yield mistake, {"out": out, "lse": lse, "m": m.double(), "total": total}


# The forward pass.


def forward(setting: Setting, counts: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
    """Output and lse in one piece; rows that see nothing are open."""
    scores = scores_of(setting, counts) * factor
    return finish(setting, scores, expand(setting.v, setting.group))


def finish(setting: Setting, scores: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Softmax, with sinks if there are any; rows that see nothing are open."""
    out, lse, m, _ = online(scores, v, scores.shape[-1])
    if setting.sinks is not None:
        out, lse = with_sink(out, lse, setting.sinks[:, None])
        m = torch.maximum(m, setting.sinks[:, None])
    empty = (scores == -INF).all(-1)
    nothing = float("nan")
    return {
        "out": out.masked_fill(empty[..., None], nothing),
        "lse": lse.masked_fill(empty, nothing),
        "m": m,
    }


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """One more score without a value."""
    both = torch.logaddexp(lse, sink)
    return out * (lse - both).exp()[..., None], both


def forward_suspects(setting: Setting) -> Iterator[Suspect]:
    """What (out, lse) looks like after each mistake, the most likely first."""
    counts = seen(setting)
    scores, v = scores_of(setting, counts), expand(setting.v, setting.group)
    right = finish(setting, scores, v)
    lse, m = right["lse"], right["m"]
    for mistake, mask in wrong_masks(setting):
        yield mistake, forward(setting, mask)
    if setting.group > 1:
        other = expand(setting.v, setting.group, interleave=False)
        yield "head", finish(setting, scores_of(setting, counts, interleave=False), other)
    yield from _tails(setting, counts, right)
    yield "scale_twice", forward(setting, counts, setting.scale)
    yield "scale_missing", forward(setting, counts, 1 / setting.scale)
    for factor in (LN2, 1 / LN2):  # exp2 of natural scores, exp of those in base 2
        wrong = forward(setting, counts, factor)
        for other_lse in (wrong["lse"], wrong["lse"] / factor, wrong["lse"] * factor):
            yield "base2", {"out": wrong["out"], "lse": other_lse}
    for other_lse in (lse / LN2, lse * LN2, m + (lse - m) / LN2, m / LN2 + (lse - m)):
        yield "base2", {"lse": other_lse}
    for other_lse in (m, lse - m, (lse - m).exp(), lse.exp()):
        yield "lse_part", {"lse": other_lse}
    yield "unnormalised", {"out": right["out"] * (lse - m).exp()[..., None]}
    yield from _wrong_sinks(setting, scores, v)
    for mistake, result in wrong_sums(scores, v, setting.key_tiles):
        if setting.sinks is not None:
            out, both = with_sink(result["out"], result["lse"], setting.sinks[:, None])
            result = {"out": out, "lse": both}
        yield mistake, result


def _tails(setting: Setting, counts: Tensor, right: dict[str, Tensor]) -> Iterator[Suspect]:
    """The last block counts rows of zeros, or of the next sequence, as keys."""
    if setting.causal:
        return
    out, lse = right["out"], right["lse"]
    for tile in setting.key_tiles:
        extra = -setting.keys % tile
        if not extra or setting.world_size > 1:
            continue
        both = torch.logaddexp(lse, torch.full_like(lse, math.log(extra)))
        yield "tail", {"out": out * (lse - both).exp()[..., None], "lse": both}
        yield "tail", {"out": out * (lse - both).exp()[..., None]}
        if extra <= setting.keys and setting.q.shape[0] > 1:
            k, v = (torch.cat([x, x.roll(-1, 0)[:, :, :extra]], 2) for x in (setting.k, setting.v))
            longer = Setting(setting.q, k, v)
            wrong = forward(longer, functional.pad(counts, (0, extra), value=1.0))
            wrong["out"][-1], wrong["lse"][-1] = float("nan"), float("nan")  # behind the tensor
            yield "tail", wrong


def _wrong_sinks(setting: Setting, scores: Tensor, v: Tensor) -> Iterator[Suspect]:
    if setting.sinks is None:
        return
    out, lse, _, _ = online(scores, v, scores.shape[-1])
    sink = setting.sinks[:, None]
    yield "sinks", {"out": out, "lse": lse}
    counts = (-(-setting.keys // tile) for tile in setting.key_tiles)
    for other in (sink * setting.scale, *(sink + math.log(n) for n in dict.fromkeys(counts))):
        wrong = with_sink(out, lse, other)
        yield "sinks", dict(zip(("out", "lse"), wrong))


# The backward pass.


def gradients(
    setting: Setting,
    counts: Tensor,
    *,
    factor: float = 1.0,
    powers: tuple[float, float] = (1.0, 1.0),
    d: str = "",
    group: Callable[[Tensor], Tensor] = lambda x: x.sum(2),
    interleave: bool = True,
) -> dict[str, Tensor]:
    """dq, dk, dv by recomputation: P = exp(s − lse), D = rowsum(dO ∘ O), dS = P ∘ (dP − D).

    `powers` multiply scores and lse in the exponent; `factor` the scores.
    """
    assert setting.out is not None
    assert setting.lse is not None
    assert setting.dout is not None
    k, v = (expand(x, setting.group, interleave) for x in (setting.k, setting.v))
    s = setting.q @ k.transpose(-1, -2) * setting.scale * factor * powers[0]
    lse = setting.lse.masked_fill(setting.lse == -INF, INF) * powers[1]
    p = (s - lse[..., None]).exp() * counts.to(s)
    dp = setting.dout @ v.transpose(-1, -2)
    total = (setting.dout * setting.out).sum(-1, keepdim=True)
    if d == "unrounded":
        total = (p * dp).sum(-1, keepdim=True)
    if d == "output":
        total = (setting.dout * (p @ v)).sum(-1, keepdim=True)
    if d == "none":
        total = torch.zeros_like(total)
    ds = p * (dp - total)
    dq, dk = (
        ds @ k * setting.scale * factor,
        ds.transpose(-1, -2) @ setting.q * setting.scale * factor,
    )
    dv = p.transpose(-1, -2) @ setting.dout
    shape = (-1, setting.group)
    if setting.group > 1:
        dk, dv = (group(x.unflatten(1, shape)) for x in (dk, dv))
    return {"dq": dq, "dk": dk, "dv": dv}


def backward_suspects(setting: Setting) -> Iterator[Suspect]:
    """What (dq, dk, dv) looks like after each mistake, the most likely first."""
    counts, scale = seen(setting), setting.scale
    right = gradients(setting, counts)
    yield "scale_dk", {"dk": right["dk"] / scale}
    yield "scale_dq", {"dq": right["dq"] / scale}
    yield "scale_twice", {"dq": right["dq"] * scale, "dk": right["dk"] * scale}
    yield "dq_twice", {"dq": right["dq"] * 2}
    yield "unrounded", gradients(setting, counts, d="unrounded")
    yield "unrounded", gradients(setting, counts, d="output")
    yield "no_d", gradients(setting, counts, d="none")
    if setting.group > 1:
        for pick in (lambda x: x[:, :, 0], lambda x: x[:, :, -1], lambda x: x.mean(2)):
            wrong = gradients(setting, counts, group=pick)
            yield "group", {"dk": wrong["dk"], "dv": wrong["dv"]}
        wrong = gradients(setting, counts, interleave=False)
        yield "head", {"dq": wrong["dq"]}
    for mistake, mask in wrong_masks(setting):
        yield mistake, gradients(setting, mask)
    for powers in ((1.0, LN2), (LN2, 1.0), (LN2, LN2), (1 / LN2, 1.0), (1 / LN2, 1 / LN2)):
        yield "base2", gradients(setting, counts, powers=powers)
    yield "scale_twice", gradients(setting, counts, factor=scale)
    yield "scale_missing", gradients(setting, counts, factor=1 / scale)
    yield "scale_missing", gradients(setting, counts, powers=(1 / scale, 1.0))
    yield "scale_twice", gradients(setting, counts, powers=(scale, 1.0))
    yield from _wrong_order(setting, counts)


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


# Two results, one result.


def merge_suspects(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> Iterator[Suspect]:
    """What a merge gives after each mistake; rows that one of them does not see are open."""
    open_rows = (lse1 == -INF) | (lse2 == -INF)
    for mistake, out, lse in _merges(out1, lse1, out2, lse2):
        nothing = float("nan")
        result = {"lse": lse.masked_fill(open_rows, nothing)}
        yield mistake, {"out": out.masked_fill(open_rows[..., None], nothing), **result}


def _merges(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    lse, top = torch.logaddexp(lse1, lse2), torch.maximum(lse1, lse2)

    def weigh(reference: Tensor, unit: float = 1.0) -> Tensor:
        one, two = ((each - reference).mul(unit).exp()[..., None] for each in (lse1, lse2))
        return one * out1 + two * out2

    larger = torch.where((lse1 >= lse2)[..., None], out1, out2)
    for wrong in (weigh(lse), weigh(top), larger):
        yield "lse_max", wrong, top
    in_two = torch.logaddexp(lse1 * LN2, lse2 * LN2) / LN2
    yield "base2", weigh(in_two, LN2), in_two
    yield "base2", weigh(lse), in_two
    yield "base2", weigh(lse), lse / LN2
    yield "weights", weigh(top), lse
    for wrong in ((out1 + out2) / 2, out1 + out2, weigh(lse).sub(out1 + out2).neg()):
        yield "weights", wrong, lse
    total = (lse1 + lse2)[..., None]
    yield "weights", (lse1[..., None] * out1 + lse2[..., None] * out2) / total, lse
    yield "weights", weigh(lse), lse1 + lse2


# The ring: shards of one sequence, rank after rank.

_HELD = {  # whose keys rank r has at step t, if everybody sends …
    "to rank + 1": lambda r, t: r - t,
    "to rank − 1": lambda r, t: r + t,
    "its own to rank + 1": lambda r, t: r - min(t, 1),
    "its own to rank − 1": lambda r, t: r + min(t, 1),
}
_BELIEVED = (  # whose keys rank r takes them for
    lambda r, t: r - t,
    lambda r, t: r + t,
    lambda r, t: r - t - 1,
    lambda r, t: r - t + 1,
    lambda r, t: t,
)


def ring_counts(
    setting: Setting,
    held: Callable[[int, int], int],
    believed: Callable[[int, int], int],
    mask: str = "",
    steps: int | None = None,
) -> Tensor:
    """(rows, keys): how often a pair counts if keys of `held` are masked as those of `believed`."""
    ranks = setting.world_size
    each = setting.rows // ranks
    counts = torch.zeros(setting.rows, setting.keys, dtype=torch.float64)
    ones = torch.ones(each, each, dtype=torch.float64)
    for rank in range(ranks):
        for step in range(ranks if steps is None else steps):
            source, taken = held(rank, step) % ranks, believed(rank, step) % ranks
            part = ones
            if setting.causal and mask != "none":
                if taken > rank and not mask.startswith("unskipped"):
                    part = ones * 0
                elif taken == rank or mask.endswith("local"):
                    part = ones.tril()
            rows, keys = (slice(i * each, (i + 1) * each) for i in (rank, source))
            counts[rows, keys] += part
    return counts


def wrong_counts(setting: Setting) -> Iterator[tuple[str, Tensor]]:
    """Each mistake of the ring with how often pairs count then."""
    usual = _HELD["to rank + 1"]
    right = ring_counts(setting, usual, usual)
    ranks = setting.world_size
    for held in _HELD.values():
        for believed in _BELIEVED:
            counts = ring_counts(setting, held, believed)
            if not torch.equal(counts, right):
                yield "source", counts
    if setting.causal:
        for mask in ("none", "local", "unskipped", "unskipped local"):
            yield "ring_mask", ring_counts(setting, usual, usual, mask)
        for mistake, counts in wrong_masks(setting):
            if mistake == "edge":
                yield mistake, counts
    for steps in (ranks - 1, ranks + 1, 1):
        yield "missing_step", ring_counts(setting, usual, usual, steps=steps)


def ring_forward_suspects(setting: Setting) -> Iterator[Suspect]:
    """What all ranks' (out, lse) look like after each mistake, one after the other."""
    for mistake, counts in wrong_counts(setting):
        yield mistake, forward(setting, counts)
    each = setting.rows // setting.world_size
    for name in range(len(list(_merges(*_pair(setting), *_pair(setting))))):
        out, lse = [], []
        mistake = ""
        for rank in range(setting.world_size):
            steps = [
                source
                for t in range(setting.world_size)
                if (source := (rank - t) % setting.world_size) <= rank or not setting.causal
            ]
            merged: tuple[Tensor, Tensor] | None = None
            for source in steps:
                part = _shard(setting, rank, source, each)
                if merged is None:
                    merged = part
                else:
                    mistake, *both = list(_merges(*merged, *part))[name]
                    merged = both[0], both[1]
            assert merged is not None
            out.append(merged[0])
            lse.append(merged[1])
        yield mistake or "weights", {"out": torch.cat(out, 2), "lse": torch.cat(lse, 2)}
    yield from forward_suspects(setting)


def _pair(setting: Setting) -> tuple[Tensor, Tensor]:
    return setting.q, setting.q[..., 0]


def _shard(setting: Setting, rank: int, source: int, each: int) -> tuple[Tensor, Tensor]:
    rows, keys = (slice(i * each, (i + 1) * each) for i in (rank, source))
    own = Setting(
        setting.q[:, :, rows],
        setting.k[:, :, keys],
        setting.v[:, :, keys],
        causal=setting.causal and rank == source,
    )
    found = forward(own, seen(own))
    return found["out"], found["lse"]


def ring_backward_suspects(setting: Setting) -> Iterator[Suspect]:
    """What all ranks' (dq, dk, dv) look like after each mistake, one after the other."""
    right = gradients(setting, seen(setting))
    ranks, each = setting.world_size, setting.rows // setting.world_size
    for hops in (1, -1, 2, -2):
        dk, dv = (right[name].roll(hops * each, 2) for name in ("dk", "dv"))
        yield "home", {"dk": dk, "dv": dv}
    of_rank = torch.arange(setting.rows) // each
    rank, source = of_rank[:, None], of_rank[None, :]
    counts = seen(setting)
    kept = [rank == source]  # only a rank's own queries; all but those of one rank
    kept += [(rank - source) % ranks != step for step in range(1, ranks)]
    for part in kept:
        wrong = gradients(setting, counts * part)
        yield "home", {"dk": wrong["dk"], "dv": wrong["dv"]}
    shares = [gradients(setting, counts * (rank == r)) for r in range(ranks)]
    yield (
        "home",
        {  # what a rank computed, all sources in one sum
            name: torch.cat(
                [shares[r][name].unflatten(2, (ranks, each)).sum(2) for r in range(ranks)], 2
            )
            for name in ("dk", "dv")
        },
    )
    for mistake, wrong_count in wrong_counts(setting):
        yield mistake, gradients(setting, wrong_count)
    yield from backward_suspects(setting)
