"""EasyContext and 360-LLaMA-Factory on the lines that docs/swap_in.md gives them.

Their code was read, and what it does is written here in other words: EasyContext at commit 6b0d310
(2024-09), `easy_context/zigzag_ring_attn/`; 360-LLaMA-Factory at 6fd8b28 (branch sp, 2025-02),
`src/llamafactory/model/model_utils/sequence_parallel.py`, `train/sft/trainer.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from documents import block, text
from ranks import Ranks
from tiny_model import Document, TinyModel, expected, gradients, random_documents, without_weights
from torch import Tensor
from torch.nn import functional as F

import ring_flash_attn

PAGE = "docs/swap_in.md"
HERE = ("EasyContext", "360-LLaMA-Factory")
WITH_TRANSFORMERS = ("OpenRLHF", "verl", "axolotl", "prime-rl")  # test_contracts_hf.py


def test_every_project_of_the_page_is_run() -> None:
    assert re.findall(r"<!-- (.*) -->", text(PAGE)) == [*HERE, *WITH_TRANSFORMERS]


def sequences(seed: int) -> list[Document]:
    """Two sequences of 17 tokens, of which 16 have a target, each a label."""
    found = without_weights(random_documents((17, 17), seed))
    return [(ids, ids, weights) for ids, _, weights in found]


def shifted(documents: list[Document]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, positions and targets, (2, 16)."""
    ids = torch.stack([each[0] for each in documents])
    positions = torch.arange(16).expand(2, -1)
    return ids[:, :-1], positions, ids[:, 1:]


def check_gradients(found: dict[str, Tensor], documents: list[Document]) -> None:
    for name, right in expected(documents)["grads"].items():
        torch.testing.assert_close(found[name], right, rtol=0, atol=1e-12)


# EasyContext


def extract_local(x: Tensor, rank: int, world_size: int) -> Tensor:
    parts = x.chunk(2 * world_size, dim=1)
    return torch.cat([parts[rank], parts[2 * world_size - 1 - rank]], dim=1)


class FlashAttention2:
    """A stand-in for transformers' class of this name, whose method is assigned."""

    _flash_attn_uses_top_left_mask = False
    is_causal = True
    _flash_attention_forward: Callable[..., Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._flash_attention_forward(
            q, k, v, None, q.shape[1], dropout=0.0, softmax_scale=None, use_sliding_windows=False
        )


def easy_context(rank: int, world_size: int, code: str) -> dict[str, Tensor]:
    compiled = compile(code, PAGE, "exec")

    def patched(
        self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, length: int, **options: Any
    ) -> Tensor:
        assert mask is None
        assert not options.pop("use_sliding_windows")
        names = {"q": q, "k": k, "v": v, **options}
        exec(compiled, names)
        return names["out"]

    attention = type("Patched", (FlashAttention2,), {"_flash_attention_forward": patched})()
    inputs, positions, targets = (
        extract_local(x, rank, world_size) for x in shifted(sequences(seed=0))
    )
    assert torch.equal(inputs, ring_flash_attn.shard(shifted(sequences(seed=0))[0], "zigzag"))
    model = TinyModel()
    logits = model(inputs, positions, attention)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= world_size  # as DeepSpeed and DDP do
    return grads


def test_easy_context(ranks: Callable[[int], Ranks]) -> None:
    for grads in ranks(2).run(easy_context, block(PAGE, "EasyContext")):
        check_gradients(grads, sequences(seed=0))


# 360-LLaMA-Factory


def local_rows(row: list[int], world_size: int) -> list[list[int]]:
    """Of a row of token ids, what each rank gets."""
    step = len(row) // (2 * world_size)
    parts = [row[start : start + step] for start in range(0, len(row), step)]
    return [parts[rank] + parts[2 * world_size - 1 - rank] for rank in range(world_size)]


def llama_factory(rank: int, world_size: int, code: str) -> dict[str, Tensor]:
    compiled = compile(code, PAGE, "exec")
    size = 2
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world_size, size)]
    number = rank // size

    def patched(
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Tensor | None,
        q_len: int,
        dropout: float = 0,
        sliding_window: int | None = None,
        is_causal: bool = True,
        group: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        names = {"q": query_states, "k": key_states, "v": value_states, "dropout": dropout}
        exec(compiled, names := {**names, "is_causal": is_causal, "group": group})
        return names["out"]

    forward = functools.partial(patched, group=groups[number])

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # as LlamaFlashAttention2 calls it
        return forward(q, k, v, None, q.shape[1], dropout=0.0, use_top_left_mask=False)

    inputs, positions, targets = (
        torch.tensor([local_rows(row, size)[rank % size] for row in x.tolist()])
        for x in shifted(sequences(seed=number))
    )
    model = TinyModel()
    with torch.no_grad():  # it runs once before the first step
        model.eval()(inputs, positions, attention)
    logits = model.train()(inputs, positions, attention)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    count = torch.tensor(targets.numel())
    for x in (loss, count):  # in place
        dist.all_reduce(x, group=groups[number])
    loss /= count
    loss.backward()
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad, group=groups[number])
    return {**grads, "loss": loss.detach()}


def test_360_llama_factory(ranks: Callable[[int], Ranks]) -> None:
    """Two groups of two ranks, each with sequences of its own."""
    for rank, found in enumerate(ranks(4).run(llama_factory, block(PAGE, "360-LLaMA-Factory"))):
        documents = sequences(seed=rank // 2)
        torch.testing.assert_close(found["loss"], expected(documents)["loss"], rtol=0, atol=1e-12)
        check_gradients(found, documents)
