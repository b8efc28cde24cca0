"""Step 9: which blocks a causal kernel visits, and what it computes then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .compare import Judgement
from .forward import SIZES, forward_cases
from .learner import Cases, Learner
from .masks import seen
from .setting import Setting

_SHAPES = (  # rows, keys, tile
    (32, 32, 8, 8), (37, 37, 16, 8), (21, 37, 8, 16), (37, 21, 8, 8), (20, 22, 4, 4),
    (20, 23, 4, 4), (16, 48, 16, 16),
)  # fmt: skip
Block = tuple[int, int]


def causal_attention(learner: Learner) -> Cases:
    """The list of blocks; then the forward pass."""
    for rows, keys, block_q, block_k in _SHAPES:
        for causal in (True, False):
            words = f"{'causal' if causal else 'full'}, {rows} queries × {keys} keys"
            words += f", tiles {block_q} × {block_k}"
            given = (rows, keys, block_q, block_k, causal)
            yield learner.case("visible_blocks", words, _judge_blocks(*given), *given)
    sizes = [size for size in SIZES if size[3]]
    tiles = ((16, 16), (8, 32), (13, 5))
    yield from forward_cases(learner, "causal_forward", sizes, tiles, causal_argument=False)


def _judge_blocks(
    rows: int, keys: int, block_q: int, block_k: int, causal: bool
) -> Callable[[Any], Judgement]:
    nothing = torch.zeros(1, 1)
    k = nothing.expand(1, 1, keys, 1)
    setting = Setting(nothing.expand(1, 1, rows, 1), k, k, causal=causal)

    def wanted(kind: str = "") -> dict[Block, bool]:
        """Blocks to visit, and whether they need a mask."""
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
        for kind, mistake in (("offset", "offset"), ("edge-", "edge"), ("edge+", "edge")):
            if blocks == wanted(kind):
                judgement.votes[mistake] += 1
        missing, _, unmasked, _ = kinds.values()
        if missing and not judgement.votes:
            judgement.votes["skipped"] += 1
        if unmasked and not judgement.votes:
            judgement.votes["edge"] += 1
        return judgement

    return judge
