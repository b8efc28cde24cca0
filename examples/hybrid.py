"""One step of a hybrid model, attention and a state-space layer, compared with one device.

    torchrun --nproc-per-node 4 examples/hybrid.py

Attention balances work best in a layout that gives every rank early and late tokens. A recurrence
wants consecutive tokens, so that one state goes from rank to rank. `relayout` moves the hidden
states between the two. Uses GPUs and NCCL if there is a GPU for each rank of the machine, the CPU
and gloo otherwise.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ring_flash_attn import ContextParallel, relayout, unshard

VOCABULARY, WIDTH, NHEADS = 64, 32, 4


class Tokens(Protocol):
    """How layers reach the other tokens of a document; x is (batch, tokens, …)."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def consecutive(self, x: Tensor) -> Tensor: ...

    def restored(self, x: Tensor) -> Tensor: ...

    def recurrence(self, decay: Tensor, x: Tensor) -> Tensor: ...


class AttentionLayer(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, NHEADS, -1)).unbind(-3)
        return x + self.out(tokens.attention(q, k, v).flatten(-2))


class StateSpaceLayer(nn.Module):
    """h[t] = decay[t] · h[t - 1] + x[t], with a decay that depends on the token; starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, tokens: Tokens) -> Tensor:
        decay, value, gate = self.inputs(self.norm(x)).chunk(3, dim=-1)
        first = (positions == 0)[..., None]  # of a document, which sees nothing of those before
        states = tokens.recurrence(decay.sigmoid().masked_fill(first, 0), value)
        return x + self.out(states * F.silu(gate))


class HybridModel(nn.Module):
    """Token ids → logits. Positions go to both layers, each in its own order of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.attention, self.state_space = AttentionLayer(), StateSpaceLayer()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, positions: Tensor, tokens: Tokens) -> Tensor:
        x = self.attention(self.embed(input_ids) + self.positions(positions), tokens)
        x = self.state_space(tokens.consecutive(x), tokens.consecutive(positions), tokens)
        return self.head(tokens.restored(x))


@dataclass(frozen=True)
class ShardedTokens:
    """The tokens of a batch over the ranks of a group."""

    cp: ContextParallel
    documents: Any  # of cp.shard

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cp.attention(q, k, v, self.documents, causal=True)

    def consecutive(self, x: Tensor) -> Tensor:
        """From the layout of attention to one run of tokens for each rank."""
        return self._moved(x, self.documents.layout, "flat_contiguous")

    def restored(self, x: Tensor) -> Tensor:
        """And back."""
        return self._moved(x, "flat_contiguous", self.documents.layout)

    def recurrence(self, decay: Tensor, x: Tensor) -> Tensor:
        """Each rank starts from 0, and adds what the state at the end of the one before leaves."""
        decay, x = scan(decay, x)  # a row more than tokens
        end = torch.stack([decay[:, -1], x[:, -1]])[None]
        ends = unshard(end, "contiguous", dim=0, group=self.cp.group, grad="sum")
        # The first rank needs none of them, but has to take part in the backward pass: so every
        # rank computes the states at the starts of all, and takes its own.
        _, starts = scan(*ends.permute(1, 2, 0, 3))
        return x[:, 1:] + decay[:, 1:] * starts[:, dist.get_rank(self.cp.group), None]

    def _moved(self, x: Tensor, before: Any, after: Any) -> Tensor:
        return relayout(
            x,
            before,
            after,
            cu_seqlens=self.documents.cu_seqlens,
            seqlen=self.documents.seqlen,
            dim=1,
            group=self.cp.group,
        )


def scan(decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Products of all decays so far, and states from 0, by doubling; after a row for no token."""
    decay, x = F.pad(decay, (0, 0, 1, 0), value=1.0), F.pad(x, (0, 0, 1, 0))
    step = 1
    while step < x.shape[1]:
        x = x + decay * F.pad(x, (0, 0, step, 0))[:, :-step]
        decay = decay * F.pad(decay, (0, 0, step, 0), value=1.0)[:, :-step]
        step *= 2
    return decay, x


class WholeDocument:
    """All tokens of one document on one device, without any code of the above."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def consecutive(self, x: Tensor) -> Tensor:
        return x

    restored = consecutive

    def recurrence(self, decay: Tensor, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for t in range(1, x.shape[1]):
            states.append(decay[:, t] * states[-1] + x[:, t])
        return torch.stack(states, dim=1)


def on_ranks(model: HybridModel, batch: dict[str, Any], cp: ContextParallel) -> tuple[Tensor, ...]:
    """Logits of all tokens, the loss, and the gradients of all parameters."""
    part = cp.shard(batch, device=next(model.parameters()).device)
    tokens = ShardedTokens(cp, part["documents"])
    logits = model(part["input_ids"], part["position_ids"], tokens)
    loss = cp.loss(logits, part["shift_labels"], num_items=part["num_items_in_batch"])
    model.zero_grad(set_to_none=False)
    loss.backward()
    grads = [cp.sum(parameter.grad) for parameter in model.parameters()]
    return cp.gather(logits.detach(), part["documents"]), cp.sum(loss), *grads


def on_one_device(model: HybridModel, documents: list[Tensor]) -> tuple[Tensor, ...]:
    """The same, document by document."""
    logits, total = [], torch.zeros((), device=documents[0].device)
    for ids in documents:
        positions = torch.arange(len(ids), device=ids.device)[None]
        logits.append(model(ids[None], positions, WholeDocument())[0])
        total = total + F.cross_entropy(logits[-1][:-1], ids[1:], reduction="sum")
    loss = total / sum(len(ids) - 1 for ids in documents)
    model.zero_grad()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat(logits).detach()[None], loss.detach(), *grads


def main() -> None:
    """Every rank computes both; rank 0 prints how far they are apart."""
    args = _arguments()
    device = _start()
    torch.manual_seed(0)  # the same parameters and the same batch on all ranks
    model = HybridModel().to(device)
    documents = [torch.randint(VOCABULARY, (length,)) for length in args.lengths]
    ids = torch.cat(documents)[None]
    ends = torch.tensor(args.lengths).cumsum(0).tolist()
    batch = {"input_ids": ids, "labels": ids, "cu_seqlens": [0, *ends]}
    found = on_ranks(model, batch, ContextParallel(layout=args.layout))
    expected = on_one_device(model, [ids.to(device) for ids in documents])
    names = ["logits", "loss", *(f"gradient of {name}" for name, _ in model.named_parameters())]
    for name, ours, theirs in zip(names, found, expected, strict=True):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if dist.get_rank() == 0:
            print(f"{name}: max |ranks - one device| / max |one device| = {error:.1e}")
    dist.destroy_process_group()


def _start() -> torch.device:
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < ranks_here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[70, 3, 190, 24, 11])
    parser.add_argument("--layout", default="auto", help="of attention; auto: balanced")
    return parser.parse_args()


if __name__ == "__main__":
    main()
