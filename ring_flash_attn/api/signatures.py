"""The signatures: one for each list of arguments; `families.py` makes the public functions of them.

A parameter is written as it stands in the head of the function, and with what the docstring says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..engine import entry
from ..engine.prepare import Output

Parameters = tuple[tuple[str, str], ...]

COMMON: Parameters = (
    ("dropout_p: float = 0.0", "probability that an entry of the softmax is dropped."),
    ("softmax_scale: float | None = None", "factor on the scores; headdim ** -0.5 if None."),
    (
        "causal: bool = False",
        "queries see no later keys (positions count from the end of both sequences).",
    ),
    (
        "window_size: tuple[int, int] = (-1, -1)",
        "how many keys a query sees to its left and right, besides its own; -1: all.",
    ),
    (
        "alibi_slopes: Tensor | None = None",
        "(nheads,) or ({rows}, nheads); -slope * |distance| is added to the scores.",
    ),
    ("deterministic: bool = False", "the same input gives the same bits, gradients too."),
    (
        "return_attn_probs: bool = False",
        "return (out, lse, None); lse in fp32, natural log, {lse}.",
    ),
    ("softcap: float = 0.0", "scores become softcap * tanh(score / softcap); 0 means off."),
    (
        "sink: Tensor | None = None",
        "(nheads,), an attention sink: one more score for each head, without a value.",
    ),
    (
        "group: ProcessGroup | DeviceMesh | None = None",
        "process group, or a DeviceMesh of one axis; the default group if None.",
    ),
    ('kernel: str = "auto"', '"auto", "native", "triton", "cute", "reference", or a library.'),
)

_SHARED = "dropout_p softmax_scale causal window_size"
_FLAGS = "alibi_slopes deterministic return_attn_probs"
_RING = f"{_SHARED} {_FLAGS} group * softcap sink kernel"  # as in ring-flash-attn 0.1.8
_SINGLE = f"{_SHARED} softcap {_FLAGS} * sink kernel"  # as in flash-attn


@dataclass(frozen=True, slots=True)
class Signature:
    """One list of arguments, and what runs a call of it.

    Attributes:
        run: takes q, k, v, and all else by name.
        order: names of parameters after those of q, k and v; * as in Python.
        own: parameters that are not in `COMMON`, in the order of the docstring.
        about: what the docstring says after its first sentence.
        fixed: what `run` gets besides.
    """

    name: str
    run: Callable[..., Output]
    order: str
    own: Parameters = ()
    about: str = ""
    fixed: str = ""


_ANY_LENGTH = "Documents may have any length, and shards may differ in size (see `shard`)."
_WHOLE_STREAM = ("cu_seqlens: CuSeqlens", "(documents + 1,) of the whole stream, over all ranks.")
_STRIDE = ("heads_k_stride: int", "KV heads that are gathered together; divides nheads_k.")

_NODE = (
    "ranks_per_node: int | None = None",
    'for routes "mesh" and "double_ring", ranks of a node, next to each other in the group: those\n'
    "    that exchange heads, or to whom keys go once together. By default the inner axis of a\n"
    "    DeviceMesh of two axes, or all.",
)
_NODES = _RING.replace("*", "* ranks_per_node")

BATCH = Signature("batch", entry.run_ring, _RING)
NODES_BATCH = Signature("batch", entry.run_ring, _NODES, (_NODE,))
LOCAL_DOCUMENTS = Signature(
    "local_documents",
    entry.run_ring,
    f"cu_seqlens max_seqlen {_RING}",
    (
        ("cu_seqlens: CuSeqlens", "(documents + 1,) of this rank's shard, equal on all ranks."),
        ("max_seqlen: int", "at least the longest document's tokens on this rank."),
    ),
    "Every rank holds the same number of tokens of every document. For documents of any length\n"
    "see `ring_attention`.",
    fixed="equal_shards=True",
)
DOCUMENTS = Signature(
    "documents",
    entry.run_ring,
    f"cu_seqlens max_seqlen {_RING}",
    (
        _WHOLE_STREAM,
        ("max_seqlen: int", "at least the longest document's tokens, over all ranks."),
    ),
    _ANY_LENGTH,
)
NODES_DOCUMENTS = replace(
    DOCUMENTS,
    order=f"cu_seqlens max_seqlen {_NODES}",
    own=(*DOCUMENTS.own, _NODE),
)
GATHERED_DOCUMENTS = Signature(
    "gathered_documents",
    entry.run_ring,
    f"cu_seqlens heads_k_stride {_RING}",
    (_WHOLE_STREAM, _STRIDE),
    _ANY_LENGTH,
)
LLAMA3 = Signature(
    "llama3",
    entry.run_llama3,
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice " + _RING,
    (
        ("cu_seqlens_q: CuSeqlens", "(documents + 1,) of this rank's queries."),
        ("cu_seqlens_k: CuSeqlens", "(documents + 1,) of the gathered keys in local_k_slice."),
        ("max_seqlen_q: int", "at least the longest document's queries on this rank."),
        ("max_seqlen_k: int", "at least the longest document's keys in local_k_slice."),
        _STRIDE,
        ("local_k_slice: slice", "the part of all ranks' keys that this rank's queries need."),
    ),
    "`llama3_flash_attn_prepare_cu_seqlens` makes the arguments from cu_seqlens_q to\n"
    "max_seqlen_k, and local_k_slice; they differ between ranks.",
)
SINGLE = Signature("single", entry.run_single, _SINGLE)
SINGLE_DOCUMENTS = Signature(
    "single_documents",
    entry.run_single,
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k " + _SINGLE.replace("*", "block_table *"),
    (
        ("cu_seqlens_q: CuSeqlens", "(documents + 1,) of the queries."),
        ("cu_seqlens_k: CuSeqlens", "(documents + 1,) of the keys."),
        ("max_seqlen_q: int", "at least the longest document's queries."),
        ("max_seqlen_k: int", "at least the longest document's keys."),
        ("block_table: Tensor | None = None", "must be None: no paged keys and values."),
    ),
)
SINGLE_DOCUMENTS_KV = replace(  # no block_table there
    SINGLE_DOCUMENTS, order="cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k " + _SINGLE
)
SINGLE_DOCUMENTS_QKV = Signature(
    "single_documents_qkv",
    entry.run_single,
    f"cu_seqlens max_seqlen {_SINGLE}",
    (
        ("cu_seqlens: CuSeqlens", "(documents + 1,)."),
        ("max_seqlen: int", "at least the longest document's tokens."),
    ),
)
ANYTHING = Signature(
    "anything",
    entry.run_ring,
    "* layout route kernel cu_seqlens cu_seqlens_k seqlen seqlen_k heads_k_stride "
    f"sources_per_launch ranks_per_node {_SHARED} {_FLAGS} group softcap sink",
    (
        (
            "layout: str | Layout",
            'who holds what: "contiguous", "zigzag" or "stripe" (every document by itself),\n'
            '    "flat_contiguous", "flat_zigzag", "flat_stripe" (the whole packed stream), or\n'
            '    "balanced" (documents by their lengths), which means `Balanced()`.',
        ),
        (
            "route: str",
            'what travels: "ring", "all_gather", "all_to_all", "mesh", "double_ring" or\n'
            '    "query_ring".',
        ),
        (
            "cu_seqlens: CuSeqlens | None = None",
            "(documents + 1,) of the whole stream, over all ranks; a tensor or a sequence.",
        ),
        ("cu_seqlens_k: CuSeqlens | None = None", "the same for the keys, where it differs."),
        (
            "seqlen: int | None = None",
            "without cu_seqlens, queries of the whole sequence; by default all shards are equal.",
        ),
        ("seqlen_k: int | None = None", "the same for the keys."),
        (
            "heads_k_stride: int | None = None",
            'for routes "all_gather" and "all_to_all", KV heads that travel together; by default\n'
            "    all.",
        ),
        _NODE,
        (
            "sources_per_launch: int | None = None",
            'for route "ring", ranks (for "mesh" and "double_ring", nodes) whose keys one launch\n'
            "    takes at most: fewer and larger launches, and as many more buffers. Unless it is\n"
            "    1, the ring gets keys straight from their owners. By default as many as bring up\n"
            "    to 4 shards, or 2 with more than 8192 tokens a rank; more on many ranks, so that\n"
            "    there are at most 8 launches; 1 where a rank would talk to more than 64 others.",
        ),
    ),
    "A batch of sequences of one length, or with cu_seqlens packed documents; any length, and\n"
    "shards may differ in size (see `shard`). Queries and keys may differ in number: query i of a\n"
    "document then has position i + keys - queries.",
)
