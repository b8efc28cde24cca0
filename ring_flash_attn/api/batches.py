"""A training batch as a stream of documents: which token lies where, and which one it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine import checks
from ..engine.checks import document_lengths
from ..engine.tokens import held_tokens
from ..plan.layout import Layout, SplitLayout
from ..plan.problem import Problem
from ..plan.tiles import Mask

if TYPE_CHECKING:
    from .context_parallel import BatchPlacement, ContextParallel

IGNORE = -100  # a target that counts in no loss, as in torch and transformers
_OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")  # ours, and transformers'
_LONGEST = ("max_length_q", "max_length_k")
# What tells of documents, and is left out of a rank's part.
DOCUMENTS = (*_OFFSETS, *_LONGEST, "seq_idx")


@dataclass(frozen=True, slots=True, eq=False)
class BatchDocuments:
    """How a batch is spread over the ranks: what attention and `gather` have to know of it.

    Attributes:
        layout: which rank holds which tokens.
        route, parameters: what travels in attention over them, and when.
        cu_seqlens: (documents + 1,) of the whole stream; None for a batch of equal sequences.
        seqlen: tokens of the whole stream, or of each sequence of the batch.
        size: tokens of this rank in it.
        shape: of the tokens of the batch as it came: (batch, seqlen) or (total,).
        source: for every token of the stream, its place in that batch, -1 for padding that was
            added; of a sequence without cu_seqlens. On the CPU.
        causal_only: documents end in padding that only a causal mask hides.
        cp: what sharded the batch, for those who get the documents alone.
        digest: of input_ids, while the ranks have not compared them yet.
        offsets: cu_seqlens as a tensor, on the CPU: torch.compile traces it, whatever it holds,
            and would compile integers anew.
    """

    layout: Layout
    route: str
    parameters: Mapping[str, int]
    cu_seqlens: tuple[int, ...] | None
    seqlen: int
    size: int
    shape: tuple[int, ...]
    source: Tensor
    causal_only: bool
    cp: ContextParallel
    digest: str | None = None
    offsets: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        offsets = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, device="cpu")
        object.__setattr__(self, "offsets", offsets)

    @property
    def packed(self) -> bool:
        """Documents lie in one stream."""
        return self.offsets is not None


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A batch as one stream of documents, or, if not `packed`, one sequence of a batch.

    `source` says of each token where it was, -1 for padding that was added.
    """

    shape: tuple[int, ...]
    packed: bool
    lengths: tuple[int, ...]
    source: Tensor
    causal_only: bool = False

    @property
    def following(self) -> Tensor:
        """Where the token after each was; -1 at the end of a document."""
        found = torch.cat([self.source[1:], self.source.new_full((1,), -1)])[: len(self.source)]
        ends = [end - 1 for end, n in zip(accumulate(self.lengths), self.lengths) if n]
        found[ends] = -1
        return found

    @property
    def positions(self) -> Tensor:
        """Of each token in its document as it came: padding that was left out counts."""
        counts = torch.tensor(self.lengths)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        return torch.where(self.source < 0, 0, self.source - self.source[starts])

    def padded(self, layout: Layout, multiple: int) -> Stream:
        """With padding, so that shards are equal and a multiple of something.

        Layouts that split every document by itself need it at the end of each. Others get a
        document of padding at the end of the stream.
        """
        each = not self.packed or (isinstance(layout, SplitLayout) and not layout.flat)
        parts: list[Tensor] = []
        lengths: list[int] = []
        for part in self.source.split(list(self.lengths)) if each else [self.source]:
            extra = -len(part) % multiple
            parts += part, part.new_full((extra,), -1)
            lengths += [len(part) + extra] if each else [*self.lengths, *([extra] if extra else [])]
        source, hidden = torch.cat(parts), each and sum(lengths) > len(self.source)
        return Stream(self.shape, self.packed, tuple(lengths), source, hidden)

    def spread(
        self,
        choice: BatchPlacement,
        rank: int,
        world_size: int,
        cp: ContextParallel,
        digest: str | None,
    ) -> tuple[BatchDocuments, Tensor]:
        """What attention has to know, and the places in the stream of the rank's tokens.

        They are shared by all that ask: do not write to them.
        """
        problem = Problem(choice.layout, self.lengths, self.lengths, world_size, Mask())
        held = held_tokens(problem, rank, self.source.device)
        offsets = (0, *accumulate(self.lengths)) if self.packed else None
        total = len(self.source)
        documents = BatchDocuments(
            *choice,
            offsets,
            total,
            len(held),
            self.shape,
            self.source,
            self.causal_only,
            cp,
            digest,
        )
        return documents, held


def read_stream(batch: Mapping[str, Any]) -> Stream:
    """The documents of a batch, by cu_seqlens, seq_idx, attention_mask and position_ids."""
    shape = token_shape(batch)
    rows = torch.arange(shape[0] if len(shape) == 2 else 1)
    numbers = [rows.repeat_interleave(shape[-1])]  # each splits documents where it changes
    told = _told_lengths(batch, shape)
    if told is not None:
        numbers = [torch.arange(len(told)).repeat_interleave(torch.tensor(told))]
    kept = torch.arange(shape.numel())
    mask = _values(batch, "attention_mask", shape)
    if mask is not None:
        if mask.dtype.is_floating_point or bool((mask < 0).any()):
            raise ValueError(
                "attention_mask must be 0 at padding, and 1 or the number of a document elsewhere, "
                f"but it is {mask.dtype}, or has negative values"
            )
        kept = mask.nonzero().flatten()
        numbers.append(mask.long())
        _check_padding(batch, mask == 0, shape)
    numbered = mask is not None and bool((mask > 1).any())
    named = told is not None or numbered or batch.get("seq_idx") is not None
    change = torch.zeros(max(0, len(kept) - 1), dtype=torch.bool)
    for number in numbers:
        change |= number[kept].diff() != 0
    change = _with_seq_idx(batch, shape, kept, change, told is not None or numbered)
    change = _with_restarts(batch, shape, kept, change, named)
    ends = [*(change.nonzero().flatten() + 1).tolist(), len(kept)]
    lengths = tuple(end - start for start, end in zip([0, *ends], ends))
    for name in _LONGEST:
        if batch.get(name) is not None:
            checks.check_max_seqlen(name, batch[name], lengths)
    whole_rows = len(shape) == 2 and len(kept) == shape.numel() and set(lengths) <= {shape[1]}
    if whole_rows and told is None and len(lengths) == shape[0]:
        return Stream(tuple(shape), False, (shape[1],), torch.arange(shape[1]))
    return Stream(tuple(shape), True, lengths, kept)


def token_shape(batch: Mapping[str, Any]) -> torch.Size:
    """(batch, seqlen), or (total,); that of input_ids, or of what stands for them."""
    for name, dims in (("input_ids", 0), ("inputs_embeds", 1)):
        if name in batch:
            checks.check_tensor(name, batch[name])
            shape: torch.Size = batch[name].shape
            if len(shape) - dims not in (1, 2):
                form = "(batch, seqlen{0}) or (total{0})".format(", width" if dims else "")
                raise ValueError(f"{name} must be {form}, but has shape {tuple(shape)}")
            return shape[: len(shape) - dims]
    raise ValueError(f"batch has neither input_ids nor inputs_embeds, but {sorted(batch)}")


def _values(batch: Mapping[str, Any], name: str, shape: torch.Size) -> Tensor | None:
    """Of every token, on the CPU, flat; a row may stand for all."""
    if batch.get(name) is None:
        return None
    checks.check_tensor(name, batch[name])
    found: Tensor = batch[name]
    if found.shape not in (shape, shape[-1:], (1, *shape[-1:])):
        raise ValueError(
            f"{name} must be {tuple(shape)}, as the tokens are, but has shape {tuple(found.shape)}"
        )
    return found.detach().cpu().expand(shape).flatten()


def _told_lengths(batch: Mapping[str, Any], shape: torch.Size) -> tuple[int, ...] | None:
    """Lengths of the documents that cu_seqlens delimits, by any of its names."""
    given = {name: batch[name] for name in _OFFSETS if batch.get(name) is not None}
    found = {name: document_lengths(value, name=name, fresh=True) for name, value in given.items()}
    for name, lengths in found.items():
        if sum(lengths) != shape.numel():
            raise ValueError(
                f"{name} ends at {sum(lengths)}, but there are {shape.numel()} tokens "
                f"(shape {tuple(shape)})"
            )
        if lengths != next(iter(found.values())):
            raise ValueError(f"{' and '.join(found)} must be equal: queries and keys are the same")
    return next(iter(found.values()), None)


def _with_seq_idx(
    batch: Mapping[str, Any], shape: torch.Size, kept: Tensor, change: Tensor, named: bool
) -> Tensor:
    """Documents also start where seq_idx changes; if something `named` them, at the same tokens."""
    numbers = _values(batch, "seq_idx", shape)
    if numbers is None:
        return change
    if numbers.dtype.is_floating_point or bool((numbers[kept] < 0).any()):
        raise ValueError(
            "seq_idx must be the number of each token's document, from 0 on, but it is "
            f"{numbers.dtype}, or has negative values: mark padding in attention_mask"
        )
    starts = numbers[kept].diff() != 0
    rows = (kept // shape[-1]).diff() != 0  # each may count from 0
    wrong = ((starts != change) & ~rows).nonzero().flatten().tolist()
    if not named:
        return change | starts
    if wrong:
        token = int(kept[wrong[0] + 1])
        here, other = ("a", "no") if starts[wrong[0]] else ("no", "a")
        raise ValueError(
            f"seq_idx has {here} new document at token {token}, but cu_seqlens (or attention_mask) "
            f"has {other} new one there: they must tell of the same documents"
        )
    return change


def _with_restarts(
    batch: Mapping[str, Any], shape: torch.Size, kept: Tensor, change: Tensor, named: bool
) -> Tensor:
    """Documents also start where position_ids go back to 0, unless something else said where.

    Positions that jump otherwise could be anything, and are refused.
    """
    given = batch.get("position_ids")
    if given is None or named:
        return change
    if isinstance(given, Tensor) and given.dim() > max(2, len(shape)):
        raise ValueError(
            f"position_ids has shape {tuple(given.shape)}: documents cannot be read from positions "
            "of several axes; give cu_seqlens as well"
        )
    positions = _values(batch, "position_ids", shape)
    assert positions is not None
    positions = positions[kept]
    jumps = (positions.diff() != 1) & ~change
    wrong = (jumps & (positions[1:] != 0)).nonzero().flatten().tolist()
    if wrong:
        before, after = positions[wrong[0]].item(), positions[wrong[0] + 1].item()
        raise ValueError(
            f"position_ids go from {before} to {after}: they must count on, or start again at 0 "
            "where a document starts; if they skip positions on purpose, give cu_seqlens as well"
        )
    return change | jumps


def _check_padding(batch: Mapping[str, Any], hidden: Tensor, shape: torch.Size) -> None:
    """Padding is no target: the model would never have been asked for it."""
    labels = _values(batch, "labels", shape)
    if labels is not None and bool((labels[hidden] != IGNORE).any()):
        wrong = int((labels[hidden] != IGNORE).sum())
        raise ValueError(
            f"labels has {wrong} targets where attention_mask is 0: set labels of padding to "
            f"{IGNORE}"
        )
