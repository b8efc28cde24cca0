"""Trains a small language model on packed documents; losses do not depend on the number of ranks.

    python examples/train.py --world-size 4 --json four.json
    torchrun --nproc-per-node 4 examples/train.py --data-parallel 2 --fsdp --json fsdp.json
    python examples/train.py --plot curves.html four.json fsdp.json

Uses GPUs and NCCL if there is a GPU for each rank of the machine, the CPU and gloo otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_flash_attn import ContextParallel

TEXT = Path(__file__).parent / "data" / "poems.txt"  # documents are separated by lines of ***
BYTES = 256  # the vocabulary
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Batch = dict[str, "Tensor | list[int]"]


class Layer(nn.Module):
    """Attention with RoPE and grouped queries, then an MLP."""

    def __init__(self, width: int, nheads: int, nheads_k: int) -> None:
        super().__init__()
        self.headdim = width // nheads
        self.heads = nheads, nheads_k, nheads_k
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.heads) * self.headdim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.headdim))
        q, k, v = qkv.split(self.heads, dim=-2)  # (batch, tokens, nheads, headdim)
        x = x + self.out(attention(rotate(q, positions), rotate(k, positions), v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """(batch, tokens) of bytes → logits. What it knows of context parallelism is `attention`."""

    def __init__(self, width: int, layers: int, nheads: int = 4, nheads_k: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Layer(width, nheads, nheads_k) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.head(self.norm(x))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of (batch, tokens, nheads, headdim) at positions (batch, tokens)."""
    half = x.shape[-1] // 2
    frequencies = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def packs(text: str, tokens: int) -> Iterator[Batch]:
    """Endless micro-batches: documents in random order, packed into one row, the last one cut."""
    documents = [document.strip().encode() for document in text.split("\n***\n")]
    order, rest = random.Random(0), b""
    while True:
        parts: list[bytes] = []
        while (room := tokens - sum(map(len, parts))) > 0:
            document = rest or order.choice(documents)
            parts.append(document[:room])
            rest = document[room:]
        ids = torch.tensor([list(b"".join(parts))])
        ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        yield {"input_ids": ids, "labels": ids, "cu_seqlens": [0, *ends.tolist()]}


def train(options: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Losses and norms of gradients of all steps, the same on every rank of the default group."""
    world_size, dp = dist.get_world_size(), options.data_parallel
    if world_size % dp or options.packs % dp:
        raise ValueError(
            f"data_parallel = {dp} must divide the {world_size} ranks and the {options.packs} packs"
        )
    mesh = init_device_mesh(device.type, (dp, world_size // dp), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    cp = ContextParallel(
        mesh["cp"],
        layout=options.layout,
        route=options.route,
        kernel=options.kernel,
        divisor=options.divisor,
    )
    torch.manual_seed(0)  # all ranks start from the same parameters
    model = LanguageModel(options.width, options.layers).to(device)
    if options.fsdp:  # parameters are sharded over all ranks, whatever these share of a sequence
        for layer in model.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    averaged_over = everyone.size() if options.fsdp else 1  # FSDP averages gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    source = packs(options.text.read_text(encoding="utf-8"), options.tokens)
    losses: list[float] = []
    grad_norms: list[float] = []
    for step in range(options.steps):
        batches = [next(source) for _ in range(options.packs)]  # of one optimiser step
        mine = batches[mesh.get_local_rank("dp") :: dp]  # whole packs; cp.shard cuts them
        parts = [cp.shard(batch, device=device) for batch in mine]
        num_items = sum(part["num_items_in_batch"] for part in parts)
        dist.all_reduce(num_items, group=mesh.get_group("dp"))
        total = torch.zeros((), device=device)
        for part in parts:

            def attention(q: Tensor, k: Tensor, v: Tensor, documents=part["documents"]) -> Tensor:
                return cp.attention(q, k, v, documents, causal=True)

            logits = model(part["input_ids"], part["position_ids"], attention)
            targets = part["shift_labels"]
            loss = cp.loss(logits, targets, num_items=num_items, averaged_over=averaged_over)
            loss.backward()
            total += loss.detach() / averaged_over
        if not options.fsdp:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        grad_norms.append((norm.full_tensor() if options.fsdp else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # each rank has its part of the loss
        losses.append(total.item())
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {losses[-1]:.6f}", flush=True)
    return {"losses": losses, "grad_norms": grad_norms}


def plot(runs: list[Path], page: Path) -> None:
    """Draws the loss curves of several runs into one HTML file."""
    try:
        from plotly import graph_objects as go
    except ImportError as error:
        raise SystemExit('--plot needs plotly: pip install ".[report]"') from error

    figure = go.Figure()
    for path in runs:
        run = json.loads(path.read_text(encoding="utf-8"))
        figure.add_scatter(y=run["losses"], name=f"{path.stem}, {run['world_size']} ranks")
    figure.update_layout(xaxis_title="step", yaxis_title="loss", showlegend=True)
    figure.write_html(page)


def run_rank(rank: int, world_size: int, options: argparse.Namespace, store: str | None) -> None:
    """One rank, from its process group to its losses; under torchrun, `store` is None."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    how = {} if store is None else {"init_method": f"file://{store}"}
    if torch.cuda.device_count() >= here:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        how |= {"backend": "nccl", "device_id": device}
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
        how |= {"backend": "gloo"}
    dist.init_process_group(rank=rank, world_size=world_size, **how)
    try:
        found = train(options, device)
        if rank == 0 and options.json:
            record = {"world_size": world_size, **found, "options": vars(options)}
            options.json.write_text(json.dumps(record, default=str, indent=1), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Trains under torchrun, or in processes of its own; or draws what runs have written."""
    options = parse_options()
    if options.plot:
        plot(options.runs, options.plot)
    elif "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options, None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments = options.world_size, options, f"{folder}/store"
            mp.spawn(run_rank, arguments, nprocs=options.world_size)


def count(text: str) -> int:
    """A number from 1 on."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--world-size", type=count, help="start so many ranks here; not under torchrun (1)")
    add("--data-parallel", type=count, default=1, help="groups of ranks with packs of their own")
    add("--fsdp", action="store_true", help="shard parameters over all ranks, with FSDP2")
    add("--layout", default="auto", help="of ring_attention; auto: balanced")
    add("--route", default="auto", help="of ring_attention; auto: ring")
    add("--kernel", default="auto", help="of ring_attention")
    add("--divisor", type=count, help="pad shards to a multiple")
    add("--text", type=Path, default=TEXT, help="documents, separated by lines of ***")
    add("--tokens", type=count, default=512, help="of a pack")
    add("--packs", type=count, default=4, help="of one optimiser step, over all ranks")
    add("--steps", type=count, default=100)
    add("--width", type=count, default=64)
    add("--layers", type=count, default=2)
    add("--lr", type=float, default=3e-3)
    add("--max-norm", type=float, default=1.0, help="to which gradients are clipped")
    add("--json", type=Path, help="write the losses here")
    add("--plot", type=Path, metavar="PAGE", help="draw RUNs into this HTML file; train nothing")
    add("runs", nargs="*", type=Path, metavar="RUN", help="what --json has written, for --plot")
    options = parser.parse_args(arguments)
    if bool(options.runs) != bool(options.plot):
        parser.error("--plot takes one RUN or more, and RUNs need --plot")
    if "RANK" in os.environ and options.world_size is not None:
        parser.error("--world-size: torchrun has started the ranks already")
    options.world_size = options.world_size or 1
    return options


if __name__ == "__main__":
    main()
