"""Who sees whom, rightly or wrongly: how often key j counts for query i."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .setting import INF, Mistake, Setting

MISTAKES = {
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
    "mask_after": Mistake(
        "mask after the softmax",
        "hidden keys have weight 0, and are still in the sum of the softmax",
        "Set hidden scores to −inf before the softmax: then the other weights add up to 1.",
    ),
    "mask_late": Mistake(
        "mask after the maximum",
        "a hidden score is taken for the maximum, so that visible weights underflow",
        "Set hidden scores to −inf before the maximum of the row.",
    ),
    "visited": Mistake(
        "hidden blocks are visited",
        "blocks of which no query sees any key are computed",
        "Visit block (i, j) only if its first key is visible to the last row of the tile.",
    ),
    "clipped": Mistake(
        "a short block taken for a whole one",
        "the last row or key of a block at the end lies beyond the sequence",
        "The last key of block j is min((j + 1) · block_k, keys) − 1; of rows likewise.",
    ),
    "local": Mistake(
        "positions local to the tile",
        "the mask compares indices within the tile, not positions in the sequence",
        "The rows of tile i begin at i · block_q, the keys of tile j at j · block_k: add where the "
        "tile begins.",
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
}


def seen(setting: Setting, kind: str = "", tile: tuple[int, int] = (1, 1)) -> Tensor:
    """(rows, keys): 1 for a visible pair, 0 for a hidden one; `kind` is a mistake, or none."""
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
    if kind.startswith("local"):
        row, key = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
        row = row % tile[0] if kind != "local keys" else row
        key = key % tile[1] if kind != "local rows" else key
        found = key <= row + offset
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
    bounded = setting.causal or setting.window != (-1, -1)
    if setting.rows != setting.keys and bounded:
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
    whole = []
    for mistake, kind in kinds:
        mask = seen(setting, kind)
        whole += [mask] if mistake == "no_mask" else []
        yield mistake, mask
    if not bounded:
        return
    for tile in setting.all_tiles:
        visited = seen(setting, "whole_tiles", tile)
        if not any(torch.equal(visited, mask) for mask in whole):
            yield "edge", visited
        yield "skipped", seen(setting, "full_tiles", tile)
        if setting.causal:
            for kind in ("local", "local keys", "local rows"):
                mask = seen(setting, kind, tile)
                for wrong in (mask, mask * visited):
                    if not torch.equal(wrong, seen(setting)):
                        yield "local", wrong
