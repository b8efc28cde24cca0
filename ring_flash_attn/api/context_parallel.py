"""`ContextParallel`: a training step over a sequence that is spread over ranks, in one object."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import comm
from ..engine import checks
from ..engine.entry import check_ranks_per_node, document_values, run_ring
from ..engine.prepare import Output
from ..plan.balanced import Balanced
from ..plan.build import BY_NODES, check_route
from ..plan.layout import Layout, get_layout
from .batch_parts import CONSUMED, check_dims, check_sizes, count, take, targets
from .batches import IGNORE, BatchDocuments, Stream, read_stream
from .operators import compilable
from .sdpa import routed
from .sharding import unshard

if TYPE_CHECKING:
    from ..comm import Group

_run_ring = compilable(run_ring)
before_shard: list[Callable[[], None]] = []
"""Called by `shard` first, for adapters: models that were not prepared have to refuse a part."""
_compared: WeakSet[Any] = WeakSet()  # groups whose ranks have compared their first batches


class BatchPlacement(NamedTuple):
    """How a batch is spread, and what travels."""

    layout: Layout
    route: str
    parameters: Mapping[str, int]  # of the route


@runtime_checkable
class ChoosesRoutes(Protocol):
    """What chooses where "auto" is given; `ring_flash_attn.Planner` is one."""

    def choose(
        self,
        lengths: Sequence[int],
        batch: int | None,
        world_size: int,
        layout: Layout | None,
        route: str | None,
        kernel: str,
    ) -> BatchPlacement:
        """For documents of these lengths, or `batch` sequences; None is to be chosen."""


@dataclass(frozen=True)
class ContextParallel:
    """Shards batches, computes attention and the loss, and gathers results over a group.

    Every rank of the group passes the same whole batch, and gets its part. Nothing is kept from one
    batch to the next: `shard` may run ahead of the model, and in another thread.

    Args:
        group: the ranks that share a sequence: a process group, or a DeviceMesh of one axis, such
            as mesh["cp"] (of two axes for routes "mesh" and "double_ring"); the default group if
            None.
        layout: as in `ring_attention`; "auto" is what the planner chooses. Without one, it is
            `Balanced(ranks_per_node=…)` for packed documents and "zigzag" for equal sequences.
        route: as in `ring_attention`; "auto" is what the planner chooses, or "ring".
        kernel: as in `ring_attention`.
        divisor: if given, padding is added so that all ranks hold as many tokens, a multiple of it.
        pad_token_id: what that padding has as input_ids.
        ranks_per_node: as in `ring_attention`, for routes "mesh" and "double_ring".
        planner: `ring_flash_attn.Planner(model, topology)`: it chooses by predicted time, once for
            each kind of batch.
    """

    group: Group | None = None
    layout: str | Layout = "auto"
    route: str = "auto"
    kernel: str = "auto"
    divisor: int | None = None
    pad_token_id: int = 0
    ranks_per_node: int | None = None
    planner: ChoosesRoutes | None = None

    def __post_init__(self) -> None:
        route = "ring" if _is_auto(self.route) else self.route
        check_route(route)
        if route in BY_NODES:
            group, nodes = comm.group_and_node(self.group, self.ranks_per_node)
            object.__setattr__(self, "group", group)
            object.__setattr__(self, "ranks_per_node", nodes)
        _, world_size = comm.rank_and_size(self.group)
        check_ranks_per_node(self.ranks_per_node, route, world_size)
        if not _is_auto(self.layout):
            get_layout(self.layout)
        if self.divisor is not None:
            checks.check_integer("divisor", self.divisor, 1)
        checks.check_integer("pad_token_id", self.pad_token_id)
        self._check_planner()

    def _check_planner(self) -> None:
        if self.planner is None:
            return
        if not isinstance(self.planner, ChoosesRoutes):
            given = type(self.planner).__name__
            raise TypeError(f"planner must be a ring_flash_attn.Planner, not {given}")
        if not (_is_auto(self.layout) or _is_auto(self.route)):
            raise ValueError(
                f"planner: layout = {self.layout!r} and route = {self.route!r} leave it no choice"
            )
        if self.ranks_per_node is not None:
            raise ValueError(
                f"ranks_per_node = {self.ranks_per_node}: the planner chooses it; its topology "
                "says what a node is"
            )

    def shard(
        self,
        batch: Mapping[str, Any],
        dims: Mapping[str, int | None] | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a batch. Every rank passes the same; nothing is sent.

        Values are read on the host, so a batch on the CPU spares synchronisations. Padding (0 in
        attention_mask) is left out: rows with padding become packed documents, in one row.

        Args:
            batch: a dict, or what has `items()` like one. Tokens are (batch, seqlen) or (total,):
                input_ids or inputs_embeds; labels (not shifted) or shift_labels; position_ids;
                attention_mask, 0 at padding, 1 or the number of a document elsewhere; cu_seqlens
                or seq_idx, the number of each token's document; loss_weights, one for each label.
                What is no tensor is passed on.
            dims: for each other tensor, its dimension of tokens (after that of the batch), or None
                to pass it on as it is.
            device: where all tensors of the part go; they stay on theirs if None.

        Returns:
            The tensors of this rank's tokens, (batch, tokens) or packed (1, tokens), without
            attention_mask and what tells of documents, and

            - documents: for `attention`, `gather` and `scaled_dot_product_attention`.
            - position_ids: within documents.
            - shift_labels: the label of the token after each; -100 at the end of a document. There
              are no `labels`: a model would shift them again.
            - shift_loss_weights: the weight of that label.
            - num_items_in_batch: labels that count in the whole batch (their weights, if given),
              over all ranks of the group.
        """
        if not hasattr(batch, "items"):
            raise TypeError(f"batch must be a dict, or like one, not {type(batch).__name__}")
        for prepare in list(before_shard):
            prepare()
        given = {name: value for name, value in batch.items() if value is not None}
        device = checks.check_device("device", device)
        dims = check_dims(given, dims)
        stream = read_stream(given)
        rank, world_size = comm.rank_and_size(self.group)
        choice = self._choose(stream, world_size)
        if self.divisor is not None:
            stream = stream.padded(choice.layout, world_size * self.divisor)
            check_sizes(stream, choice.layout, world_size, self.divisor)
        self._compare(given, stream)
        first = world_size > 1 and comm.resolve_group(self.group) not in _compared
        digest = _digest(given["input_ids"]) if first and "input_ids" in given else None
        documents, held = stream.spread(choice, rank, world_size, self, digest)
        part = {name: x for name, x in given.items() if name not in (*dims, *CONSUMED)}
        here, after = stream.source[held], stream.following[held]
        fill = {"input_ids": self.pad_token_id, "shift_labels": IGNORE}
        for name, dim in dims.items():
            x = given[name]
            part[name] = x if dim is None else take(name, x, dim, here, stream, fill.get(name, 0))
        home = next(given[name] for name in ("input_ids", "inputs_embeds") if name in given).device
        if "position_ids" not in part:
            positions = stream.positions[held].to(home)
            rows = () if len(stream.shape) == 1 else (1 if stream.packed else stream.shape[0],)
            part["position_ids"] = positions.expand(*rows, -1).contiguous()
        part |= targets(given, stream, after)
        if device is not None:
            part = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in part.items()}
        return {**part, "documents": documents}

    def _choose(self, stream: Stream, world_size: int) -> BatchPlacement:
        """Layout and route of a batch."""
        layout = None if _is_auto(self.layout) else get_layout(self.layout)
        route = None if _is_auto(self.route) else self.route
        if self.planner is not None and world_size > 1 and len(stream.source):
            lengths, batch = stream.lengths, None if stream.packed else stream.shape[0]
            return self.planner.choose(lengths, batch, world_size, layout, route, self.kernel)
        nodes = self.ranks_per_node
        if layout is None:
            layout = Balanced(ranks_per_node=nodes) if stream.packed else get_layout("zigzag")
        parameters = {} if nodes is None else {"ranks_per_node": nodes}
        return BatchPlacement(layout, route or "ring", parameters)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: BatchDocuments,
        *,
        causal: bool = True,
        **options: Any,
    ) -> Output:
        """`ring_attention` over the documents of a batch.

        Args:
            q: queries of this rank's tokens, (batch, tokens, nheads, headdim); packed documents may
                come as (1, tokens, …) or (tokens, …).
            k, v: keys and values of the same tokens, with nheads_k heads.
            documents: what `shard` returned with the tokens.
            causal: queries see no later keys.
            options: the other arguments of `ring_attention`, such as window_size or softmax_scale.
        """
        _check_documents(documents)
        if not torch.compiler.is_compiling():
            self._compare_first(documents)
        if not checks.check_flag("causal", causal) and documents.causal_only:
            raise ValueError(
                "causal = False, but documents end in padding (divisor = "
                f"{self.divisor}), which would be seen: take a layout that splits the whole "
                "stream, such as 'balanced', or no divisor"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.check_tensor(name, x)
        row = documents.packed and q.dim() == 4
        if row:
            for name, x in (("q", q), ("k", k), ("v", v)):
                if x.dim() != 4 or x.shape[0] != 1:
                    raise ValueError(
                        f"{name} of packed documents must be (1, tokens, nheads, headdim), but has "
                        f"shape {tuple(x.shape)}"
                    )
            q, k, v = q[0], k[0], v[0]
        where: dict[str, Any]
        if documents.packed:
            tracing = torch.compiler.is_compiling()
            where = {"cu_seqlens": documents.offsets if tracing else documents.cu_seqlens}
        else:
            where = {"seqlen": documents.seqlen, "seqlen_k": documents.seqlen}
        out = _run_ring(
            q,
            k,
            v,
            layout=documents.layout,
            route=documents.route,
            kernel=self.kernel,
            group=self.group,
            causal=causal,
            **where,
            **{**documents.parameters, **options},
        )
        if not row:
            return out
        return out[None] if isinstance(out, Tensor) else (out[0][None], out[1][None], None)

    def scaled_dot_product_attention(
        self, documents: BatchDocuments
    ) -> AbstractContextManager[None]:
        """Within it, F.scaled_dot_product_attention is `attention` over the documents of a batch.

        For models that call it for this rank's tokens, (batch, nheads, tokens, headdim). is_causal,
        scale, dropout_p and enable_gqa are honoured, attn_mask is refused. Under activation
        checkpointing the backward pass computes attention again, so it belongs inside as well. One
        context at a time in a process. Leaving it raises a RuntimeError if nothing was routed.

        Args:
            documents: what `shard` returned with the tokens.
        """
        _check_documents(documents)
        return routed(self.attention, documents)

    def loss(
        self,
        logits: Tensor,
        shift_labels: Tensor,
        *,
        num_items: Tensor | int | float | None = None,
        weights: Tensor | None = None,
        averaged_over: int = 1,
    ) -> Tensor:
        """This rank's part of the cross-entropy: the sum over all ranks is that of the whole batch.

        So gradients of parameters have to be summed over the ranks. Where something averages them
        (FSDP, DDP), say over how many ranks. A rank without targets gets 0, and its backward pass
        takes part in that of the others.

        Args:
            logits: (…, tokens, vocabulary) of this rank's tokens.
            shift_labels: (…, tokens) as `shard` returns them; -100 counts nothing.
            num_items: what the sum is divided by: num_items_in_batch, or, with gradient
                accumulation or data parallelism, its sum over all that make one step. If None, the
                targets of the group's ranks are counted, which is one all-reduce.
            weights: shift_loss_weights, if the batch has them.
            averaged_over: ranks over which gradients will be averaged; 1 if they are summed.

        Returns:
            A scalar, in fp32 or wider.
        """
        for name, x in (("logits", logits), ("shift_labels", shift_labels)):
            checks.check_tensor(name, x)
        if logits.shape[:-1] != shift_labels.shape or not shift_labels.dim():
            raise ValueError(
                f"logits must be shift_labels' shape {tuple(shift_labels.shape)} and the "
                f"vocabulary, but have shape {tuple(logits.shape)}"
            )
        if weights is not None:
            checks.check_tensor("weights", weights)
            if weights.shape != shift_labels.shape:
                raise ValueError(
                    f"weights must be {tuple(shift_labels.shape)}, as shift_labels are, but have "
                    f"shape {tuple(weights.shape)}"
                )
        averaged_over = checks.check_integer("averaged_over", averaged_over, 1)
        if num_items is None:
            num_items = self.sum(count(shift_labels, weights))
        elif not isinstance(num_items, Tensor):
            num_items = checks.check_number("num_items", num_items, 0.0, rule="a number from 0 on")
        elif num_items.numel() != 1:
            raise ValueError(f"num_items must be one number, not {tuple(num_items.shape)}")
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        kind = "sum" if weights is None else "none"
        total = F.cross_entropy(wide, shift_labels.flatten(), ignore_index=IGNORE, reduction=kind)
        if weights is not None:
            total = (total * weights.flatten().to(total.dtype)).sum()
        items = torch.as_tensor(num_items, device=total.device).to(total.dtype)
        return total * (averaged_over / torch.where(items == 0, 1, items))  # no targets: 0, not NaN

    def gather(
        self,
        x: Tensor,
        documents: BatchDocuments,
        *,
        dim: int | None = None,
        grad: str | None = None,
    ) -> Tensor:
        """All ranks' tokens on every rank, in the shape and order of the batch; 0 at its padding.

        Args:
            x: this rank's tokens: log-probabilities, hidden states, …
            documents: what `shard` returned with them.
            dim: the dimension of tokens; 1, or 0 if the batch's tokens are (total,).
            grad: as in `unshard`: "sum" or "slice", where x requires a gradient.
        """
        _check_documents(documents)
        checks.check_tensor("x", x)
        dim = checks.check_integer("dim", len(documents.shape) - 1 if dim is None else dim)
        dim = dim + x.dim() if dim < 0 else dim
        if not len(documents.shape) - 1 <= dim < x.dim():
            raise ValueError(f"dim = {dim} holds no tokens in x of shape {tuple(x.shape)}")
        rows = documents.packed and len(documents.shape) == 2
        if rows and x.shape[dim - 1] != 1:
            raise ValueError(
                f"x of packed documents must have 1 row, but has shape {tuple(x.shape)}, with "
                f"tokens in dim = {dim}"
            )
        whole = unshard(
            x,
            documents.layout,
            cu_seqlens=documents.cu_seqlens,
            seqlen=documents.seqlen,
            dim=dim,
            group=self.group,
            grad=grad,
        )
        if not documents.packed:
            return whole.narrow(dim, 0, documents.shape[1])  # padding is at the end
        if rows:
            dim, whole = dim - 1, whole.squeeze(dim - 1)
        total = torch.Size(documents.shape).numel()
        kept = (documents.source >= 0).nonzero().flatten()
        places = documents.source[kept].to(x.device)
        empty = whole.new_zeros((*whole.shape[:dim], total, *whole.shape[dim + 1 :]))
        found = empty.index_copy(dim, places, whole.index_select(dim, kept.to(x.device)))
        return found.unflatten(dim, documents.shape) if rows else found

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks of the group, detached: for counts, and for the logged loss."""
        checks.check_tensor("x", x)
        return comm.sum_over(x.detach(), comm.resolve_group(self.group))

    def _compare_first(self, documents: BatchDocuments) -> None:
        """Whether all ranks load the same batches, asked once, before their first attention."""
        if documents.digest is None:
            return
        group = comm.resolve_group(self.group)
        if group not in _compared:
            call = "attention over the first batch"
            field = "digest of input_ids (every rank of the group loads the same batches)"
            comm.agree((("call", call), (field, documents.digest)), group)
            _compared.add(group)

    def _compare(self, batch: Mapping[str, Any], stream: Stream) -> None:
        """Whether all ranks have the same batch; asked with RFA_CHECK=values alone."""
        if comm.check_mode() != "values":
            return
        name = "input_ids" if "input_ids" in batch else "inputs_embeds"
        call = ("call", "ContextParallel.shard"), ("shape", stream.shape)
        fields = (
            *call,
            (name, _digest(batch[name])),
            *document_values(documents=stream.lengths).items(),
        )
        rank, _ = comm.rank_and_size(self.group)
        comm.agree(fields, comm.resolve_group(self.group), part=rank)


def _digest(x: Tensor) -> str:
    raw = x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha1(raw).hexdigest()[:12]


def _is_auto(given: object) -> bool:
    return isinstance(given, str) and given == "auto"


def _check_documents(documents: object) -> None:
    if not isinstance(documents, BatchDocuments):
        raise TypeError(
            "documents must be what ContextParallel.shard returned as 'documents', not "
            f"{type(documents).__name__}"
        )
