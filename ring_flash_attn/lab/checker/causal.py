"""Step 9: which blocks a causal kernel visits, and what it computes then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .compare import Compare, Judgement
from .forward import HUGE, SIZES, forward_cases, plain_inputs, truth_of
from .learner import Cases, CheckCase, Learner
from .masks import seen
from .setting import PLAIN, Setting

_SHAPES = (  # rows, keys, tile
    (32, 32, 8, 8),
    (37, 37, 16, 8),
    (21, 37, 8, 16),
    (37, 21, 8, 8),
    (20, 22, 4, 4),
    (20, 23, 4, 4),
    (16, 48, 16, 16),
    (33, 33, 16, 16),
    (33, 25, 8, 16),
)
Block = tuple[int, int]
_KINDS = (("offset", "offset"), ("edge-", "edge"), ("edge+", "edge"), ("clipped", "clipped"))


def causal_attention(learner: Learner) -> Cases:
    """The list of blocks; then the forward pass."""
    for rows, keys, block_q, block_k in _SHAPES:
        for causal in (True, False):
            words = f"{'causal' if causal else 'full'}, {rows} queries × {keys} keys"
            words += f", tiles {block_q} × {block_k}"
            given = (rows, keys, block_q, block_k, causal)
            yield learner.case("visible_blocks", words, _judge_blocks(*given), *given)
    sizes = [HUGE, *(size for size in SIZES if size[3])]
    tiles = ((16, 16), (8, 32), (13, 5))
    yield from forward_cases(learner, "causal_forward", sizes, tiles, causal_argument=False)
    for tile in (*tiles, (8, 8)):
        yield _unvisited(learner, 45, 45, tile)


def _unvisited(learner: Learner, rows: int, keys: int, tile: Block) -> CheckCase:
    """Values that are NaN in blocks that the first tiles do not visit.

    They become NaN times 0, which is NaN, in the rows of a tile that visits them.
    """
    tensors, setting = plain_inputs(rows, keys, 64, causal=True)
    visited = seen(setting, "whole_tiles", tile)
    middle = rows // 2 // tile[0] * tile[0]
    until, first = middle + tile[0], int(visited[middle].sum())
    tensors[2][:, first:] = float("nan")
    truth = {name: x[:, :until] for name, x in truth_of(PLAIN, setting).items()}
    compare = Compare(truth, PLAIN, lost="visited")

    def judge(found: Any) -> Judgement:
        if isinstance(found, tuple) and all(isinstance(x, Tensor) for x in found):
            found = tuple(x[:, :until] for x in found)
        return compare(found)

    given = [*tensors, *tile]
    words = setting.describe(
        f"tiles {tile[0]} × {tile[1]}",
        f"v is NaN from key {first} on: rows 0–{until - 1} have no block with them",
    )
    return learner.case("causal_forward", words, judge, *given)


def _judge_blocks(
    rows: int, keys: int, block_q: int, block_k: int, causal: bool
) -> Callable[[Any], Judgement]:
    nothing = torch.zeros(1, 1)
    k = nothing.expand(1, 1, keys, 1)
    setting = Setting(nothing.expand(1, 1, rows, 1), k, k, causal=causal)

    def wanted(kind: str = "") -> dict[Block, bool]:
        """Blocks to visit, and whether they need a mask; `kind` as `seen` has it, or unclipped."""
        if kind == "clipped":
            whole = (-(-rows // block_q) * block_q, -(-keys // block_k) * block_k)
            distance = torch.arange(whole[1])[None, :] - torch.arange(whole[0])[:, None]
            counts = (distance <= (keys - rows if causal else whole[1])).double()
        else:
            counts = seen(setting, kind)
        parts = {
            (i, j): counts[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            for i in range(-(-rows // block_q))
            for j in range(-(-keys // block_k))
        }
        return {at: not bool(x.all()) for at, x in parts.items() if x.any()}

    def place(at: Block) -> str:
        i, j = at
        last = min((i + 1) * block_q, rows) - 1, min((j + 1) * block_k, keys) - 1
        return f"block {at}: rows {i * block_q}–{last[0]} × keys {j * block_k}–{last[1]}"

    def judge(found: Any) -> Judgement:
        try:
            blocks = {(int(i), int(j)): bool(mask) for i, j, mask in found}
        except (TypeError, ValueError):
            return Judgement(["expected a list of (i, j, needs_mask)"])
        if len(blocks) != len(found):
            return Judgement(["a block is listed twice"])
        true, judgement = wanted(), Judgement()
        if blocks == true:
            return judgement
        kinds = {
            "needs to be visited and is not": [at for at in true if at not in blocks],
            "is visited, though all of it is hidden": [at for at in blocks if at not in true],
            "needs a mask": [at for at in true if true[at] and blocks.get(at) is False],
            "needs no mask": [at for at in true if not true[at] and blocks.get(at)],
        }
        for what, places in kinds.items():
            if places:
                more = f" ({len(places)} such blocks)" if len(places) > 1 else ""
                judgement.lines.append(f"{place(min(places))} {what}{more}")
        for kind, mistake in _KINDS:
            if blocks == wanted(kind):
                judgement.votes[mistake] += 2
        missing, hidden, unmasked, _ = kinds.values()
        if missing:
            judgement.votes["skipped"] += 2
        if hidden and not missing and not judgement.votes:
            judgement.votes["visited"] += 2
        if unmasked and not judgement.votes:
            judgement.votes["edge"] += 2
        return judgement

    return judge
