"""The problems that `rfa verify` poses: sizes, masks and features, whoever has to solve them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

FEATURES = {
    "causal": "queries see no later keys; two query heads share a KV head",
    "full": "no mask",
    "window": "a window to both sides",
    "causal_window": "a window to the left",
    "softcap": "scores go through a tanh",
    "alibi": "a slope for every head, in a batch for every sequence",
    "sink": "one more score for each head",
    "dropout": "a quarter of the entries is dropped",
    "lse_grad": "the loss depends on lse, too",
    "mqa": "all query heads share one KV head",
    "headdim_v": "values have a head dimension of their own",
    "cross": "more keys than queries, fewer, and none",
    "tiny": "fewer tokens than ranks",
    "together": "window, softcap, ALiBi, sink, dropout, scale and gradient of lse at once",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes over all ranks, before a feature or a function changes them."""

    batch: int = 2
    seqlen: int = 51
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 16


@dataclass(frozen=True, slots=True)
class Question:
    """One attention problem over all ranks; its answer does not depend on who computes it.

    Attributes:
        dtype: name of the dtype of q, k and v.
        batch: number of sequences; None for packed documents.
        lengths_q, lengths_k: tokens of the documents (of the one sequence of a batch).
        seed: of the inputs; dropout's own is drawn from it.
    """

    dtype: str
    batch: int | None
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    seed: int
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: bool = False
    sink: bool = False
    lse_grad: bool = False


def make_question(
    signature: str, form: str, feature: str, packed: bool, size: Size, world_size: int, seed: int
) -> Question:
    """The problem for a function and a feature, in any dtype."""
    lengths = _lengths(signature, feature, packed, size.seqlen, world_size)
    question = Question(
        dtype="",
        batch=None if packed else size.batch,
        lengths_q=lengths,
        lengths_k=_other_lengths(lengths) if feature == "cross" else lengths,
        nheads=size.nheads,
        nheads_k=size.nheads if form.startswith("qkv") else size.nheads_k,
        headdim=size.headdim,
        headdim_v=size.headdim,
        seed=seed,
    )
    return replace(question, **_changes(feature, size))


def _changes(feature: str, size: Size) -> dict[str, Any]:
    """What a feature changes in a question, lengths aside."""
    left, right = max(1, size.seqlen // 6), max(1, size.seqlen // 12)
    changes: dict[str, dict[str, Any]] = {
        "full": {"causal": False},
        "window": {"causal": False, "window_size": (left, right)},
        "causal_window": {"window_size": (left, -1)},
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi": True},
        "sink": {"sink": True},
        "dropout": {"dropout_p": 0.25},
        "lse_grad": {"lse_grad": True},
        "mqa": {"nheads_k": 1},
        "headdim_v": {"headdim_v": max(1, size.headdim // 2)},
    }
    together = ("causal_window", "softcap", "alibi", "sink", "dropout", "lse_grad")
    changes["together"] = {"softmax_scale": 0.3}
    for part in together:
        changes["together"].update(changes[part])
    return changes.get(feature, {})


def _lengths(
    signature: str, feature: str, packed: bool, seqlen: int, world_size: int
) -> tuple[int, ...]:
    """Documents as uneven as the function allows: odd, empty, of one token."""
    if feature == "tiny":
        return (max(1, world_size - 2), 0, 1)
    local = -(-seqlen // world_size)
    if signature == "batch":
        return (local * world_size,)
    if signature == "local_documents":
        return tuple(world_size * length for length in _documents(local))
    if signature == "llama3":
        return _documents(local * world_size)
    return _documents(seqlen) if packed else (seqlen,)


def _documents(total: int) -> tuple[int, ...]:
    if total < 9:
        return (total,)
    first = total * 5 // 9
    return (first, 0, 3, 1, total - first - 4)


def _other_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Keys of documents with these queries: more, some for none, fewer, none."""
    if len(lengths) == 1:
        return (lengths[0] + lengths[0] // 2 + 1,)
    first, _, third, _, *rest = lengths
    return (first + first // 2, 4, third - 2, 0, *rest)
