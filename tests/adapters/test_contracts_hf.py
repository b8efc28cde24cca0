"""OpenRLHF, verl, axolotl and prime-rl on the lines that docs/swap_in.md gives them.

Their code was read, and what it does is written here in other words, around tiny models whose
results are known document by document:

- OpenRLHF at commit 3c3be62 (2026-08): `openrlhf/models/ring_attn_utils.py`, `models/actor.py`
- verl at 1dda039 (2026-08): `verl/utils/ulysses.py`, `workers/engine/fsdp/transformer_impl.py`
- axolotl at 067b021 (2026-07): `src/axolotl/monkeypatch/ring_attn/patch.py`, `adapters/batch.py`,
  `utils/ctx_managers/sequence_parallel.py`
- prime-rl at 559b447 (2026-08): `src/prime_rl/trainer/models/layers/attn.py`, `ring_attn.py`,
  `utils/cp.py`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from documents import block
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

pytest.importorskip("transformers", minversion="4.48")  # what these projects ask for

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    modeling_flash_attention_utils,
    modeling_utils,
)

import ring_flash_attn
from ring_flash_attn import flash_attn_varlen_func, ring_flash_attn_func, unshard
from ring_flash_attn.adapters import hf_adapter
from ring_flash_attn.bert_padding import pad_input, unpad_input
from ring_flash_attn.utils import AllGatherComm, get_default_args
from ring_flash_attn.verify.oracle import Rules, oracle

PAGE = "docs/swap_in.md"
SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]])  # 11 tokens
DOCUMENTS = (5, 1, 10)  # of a row without padding: 16 tokens


def llama(implementation: str = "eager") -> Any:
    """Make the same model on every rank, in fp64, with scores large enough to matter."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.normal_(std=0.3)
    model.config._attn_implementation = implementation
    return model


def grads_of(model: nn.Module, over: int = 1) -> dict[str, Tensor]:
    """Gradients, summed over all ranks and divided by `over`."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in sorted(found):
        dist.all_reduce(found[name])
        found[name] /= over
    return found


def assert_near(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """To fp32's accuracy: transformers computes norms and eager softmax in it."""
    assert found.keys() == right.keys()
    for name, x in right.items():
        error = (found[name] - x).abs().max() / x.abs().max().clamp(min=1e-3)
        assert error < 1e-5, f"{name}: {error:.1e}"


def run_page(project: str, **names: Any) -> dict[str, Any]:
    exec(block(PAGE, project), names)
    return names


# Reinforcement learning: log-probabilities of a padded batch.


def padded_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, the next token of each place in its row, loss weights; all (3, 6)."""
    torch.manual_seed(1)
    ids = torch.randint(SIZES["vocab_size"], MASK.shape)
    return ids, ids.roll(-1, dims=1), torch.randn(MASK.shape, dtype=torch.float64)


def log_probs_of(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def right_log_probs() -> dict[str, Tensor]:
    """Document by document, on one device: log-probabilities, 0 at padding, and gradients."""
    model, (ids, following, weights) = llama(), padded_batch()
    found = torch.zeros_like(weights)
    for row in range(len(ids)):
        tokens = MASK[row].bool()
        logits = model(ids[row, tokens][None], use_cache=False).logits
        found[row, tokens] = log_probs_of(logits, following[row, tokens][None])[0]
    (found * weights).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"log_probs": found.detach(), **grads}


def openrlhf(rank: int, world_size: int) -> dict[str, Tensor]:
    page = run_page("OpenRLHF")
    mesh = init_device_mesh("cpu", (1, world_size, 1), mesh_dim_names=("dp", "sp", "tp"))
    group = mesh["sp"].get_group()
    ring_flash_attn.substitute_hf_flash_attn(group, 1)
    model = llama("ring_attention")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ids, following, weights = padded_batch()

    def packed(x: Tensor) -> Tensor:  # (1, tokens)
        return page["index_first_axis"](x.unsqueeze(-1).flatten(0, 1), indices).transpose(0, 1)

    sequences, indices, cu_seqlens, _, _ = page["unpad_input"](ids.unsqueeze(-1), MASK)
    sequences = sequences.transpose(0, 1)
    positions, following = packed((MASK.cumsum(-1) - 1).clip(min=0)), packed(following)
    padding = -sequences.shape[1] % world_size
    sequences, positions, following = (
        F.pad(x, (0, padding)).chunk(world_size, dim=1)[rank]
        for x in (sequences, positions, following)
    )
    cu_seqlens[-1] += padding
    ring_flash_attn.update_ring_flash_attn_params(cu_seqlens, group)
    logits = model(sequences, attention_mask=None, position_ids=positions)["logits"]
    gathered = page["gather"](log_probs_of(logits, following), group)[:, : len(indices)]
    log_probs = page["pad_input"](gathered.transpose(0, 1), indices, *MASK.shape).squeeze(-1)
    (log_probs * weights).sum().backward()  # the same on all ranks, over which DeepSpeed averages
    return {"log_probs": log_probs.detach(), **grads_of(model, over=world_size)}


def test_openrlhf(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(openrlhf):
        assert_near(found, right_log_probs())


def verl(rank: int, world_size: int) -> dict[str, Tensor]:
    page, group = run_page("verl"), dist.group.WORLD
    page["apply_ring_attention"](group)
    model = llama("flash_attention_2")
    ids, following, weights = padded_batch()
    packed, indices, cu_seqlens, *_ = unpad_input(ids.unsqueeze(-1), attention_mask=MASK)
    positions, following = ((x.flatten()[indices]) for x in (MASK.cumsum(-1) - 1, following))
    pad_size = -len(indices) % world_size
    mine = [
        torch.cat([x, end]).chunk(world_size)[rank][None]
        for x, end in (
            (packed[:, 0], torch.zeros(pad_size, dtype=torch.int64)),
            (positions, torch.arange(pad_size)),
            (following, torch.zeros(pad_size, dtype=torch.int64)),
        )
    ]
    page["tell_documents"](cu_seqlens, pad_size, group)
    logits = model(input_ids=mine[0], attention_mask=None, position_ids=mine[1], use_cache=False)
    local = log_probs_of(logits.logits, mine[2])[0]
    gathered = unshard(local, "flat_contiguous", cu_seqlens=[0, 12], grad="slice")[: len(indices)]
    batch, seqlen = MASK.shape
    log_probs = pad_input(
        hidden_states=gathered.unsqueeze(-1), indices=indices, batch=batch, seqlen=seqlen
    ).squeeze(-1)
    (log_probs * weights).sum().backward()
    return {"log_probs": log_probs.detach(), **grads_of(model)}


def test_verl(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(verl):
        assert_near(found, right_log_probs())


# axolotl


def packed_row() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and positions (1, 16), loss weights (1, 16, vocabulary)."""
    torch.manual_seed(2)
    total = sum(DOCUMENTS)
    ids = torch.randint(SIZES["vocab_size"], (1, total))
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    return ids, positions, torch.randn(1, total, SIZES["vocab_size"], dtype=torch.float64)


def right_logits(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Document by document, on one device."""
    model, (ids, _, weights) = llama(), packed_row()
    logits = [model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    found = torch.cat(logits, dim=1)
    (found * weights).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": found.detach(), **grads}


@contextmanager
def untouched_transformers() -> Iterator[pytest.MonkeyPatch]:
    """What this process substituted before is taken out, and what happens inside afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        original = hf_adapter._original
        forward = original(modeling_flash_attention_utils._flash_attention_forward)
        patch.setattr(modeling_flash_attention_utils, "_flash_attention_forward", forward)
        patch.setattr(PreTrainedModel, "__call__", original(PreTrainedModel.__call__))
        interfaces = modeling_utils.ALL_ATTENTION_FUNCTIONS
        for name in [name for name in interfaces if name.startswith("flash_attention")]:
            patch.setitem(interfaces, name, interfaces[name])  # type: ignore[arg-type]
        factory = hf_adapter.create_ring_flash_attention_forward
        patch.setattr(hf_adapter, "create_ring_flash_attention_forward", factory)
        yield patch


def axolotl_factory(process_group: Any, heads_k_stride: int) -> list[Callable[..., Tensor]]:
    """The list of candidates that axolotl assigns."""

    def forward(
        query_states: Tensor,
        key_states: Tensor,
        value_states: Tensor,
        attention_mask: Tensor,
        query_length: int,
        is_causal: bool,
        dropout: float = 0.0,
        position_ids: Tensor | None = None,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        use_top_left_mask: bool = False,
        softcap: float | None = None,
        deterministic: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        target_dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert softcap is None
        assert is_causal
        assert len(query_states) == 1
        if deterministic is None:
            deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
        documents = hf_adapter.DATA_PARAMS
        out = ring_flash_attn.llama3_flash_attn_varlen_func(
            query_states.squeeze(dim=0),
            key_states.squeeze(dim=0),
            value_states.squeeze(dim=0),
            cu_seqlens_q=documents["cu_seqlens_q"],
            cu_seqlens_k=documents["cu_seqlens_k"],
            max_seqlen_q=documents["max_seqlen_q"],
            max_seqlen_k=documents["max_seqlen_k"],
            heads_k_stride=heads_k_stride,
            local_k_slice=documents["local_k_slice"],
            dropout_p=dropout,
            softmax_scale=softmax_scale,
            causal=is_causal,
            deterministic=deterministic,
            group=process_group,
        )
        calls.append(out)
        return out.unsqueeze(dim=0)

    calls: list[Tensor] = []
    forward.calls = calls  # type: ignore[attr-defined]
    return [forward]


def sharded_by_hooks(model: Any, rank: int, world_size: int) -> Tensor:
    """Hooks slice what goes into the model and gather, with gradients, what comes out of it."""

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        slices = {
            name: x.chunk(world_size, dim=1)[rank].contiguous() if isinstance(x, Tensor) else x
            for name, x in kwargs.items()
        }
        return args, slices

    def after(_: Any, __: Any, output: Any) -> Any:
        output["logits"] = unshard(output["logits"], "contiguous", grad="slice")
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
    ids, positions, _ = packed_row()
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits


def axolotl_varlen(rank: int, world_size: int) -> dict[str, Tensor]:
    group = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))["cp"].get_group()
    made = []

    def factory(*args: Any, **kwargs: Any) -> list[Any]:
        made.extend(axolotl_factory(*args, **kwargs))
        return made

    with untouched_transformers():
        run_page("axolotl", create_ring_flash_attention_forward=factory, group=group)
        model = llama("flash_attention_2")
        _, positions, weights = packed_row()
        starts = (positions.flatten() == 0).nonzero().flatten()
        cu_seqlens = F.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
        ring_flash_attn.update_ring_flash_attn_params(cu_seqlens, group)
        logits = sharded_by_hooks(model, rank, world_size)
        (logits * weights).sum().backward()
    assert len(made[0].calls) == SIZES["num_hidden_layers"]  # theirs, and no other
    return {"logits": logits.detach(), **grads_of(model)}


def test_axolotl_on_packed_samples(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(axolotl_varlen):
        assert_near(found, right_logits(DOCUMENTS))


def axolotl_batch(rank: int, world_size: int) -> dict[str, Tensor]:
    """`ring_attn_func: batch_ring`: a compiled function of ours, under our interface."""
    compiled = torch.compile(ring_flash_attn_func, backend="eager")

    def forward(
        query_states: Tensor, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        return compiled(
            query_states,
            key_states,
            value_states,
            dropout_p=kwargs["dropout"],
            softmax_scale=kwargs["softmax_scale"],
            causal=args[2],
            window_size=(-1, -1),
            alibi_slopes=None,
            deterministic=False,
            return_attn_probs=False,
            group=dist.group.WORLD,
        )

    with untouched_transformers() as patch:
        installed = modeling_flash_attention_utils._flash_attention_forward
        assert hf_adapter.check_params(installed, lambda *args: None) is False  # they would stop
        patch.setattr(modeling_flash_attention_utils, "_flash_attention_forward", forward)
        interfaces = modeling_utils.ALL_ATTENTION_FUNCTIONS
        interfaces["flash_attention_2"] = hf_adapter.flash_attention_forward
        model = llama("flash_attention_2")
        ids, _, weights = packed_row()
        positions = torch.arange(ids.shape[1])[None]
        local, where = (x.chunk(world_size, dim=1)[rank] for x in (ids, positions))
        logits = model(local, position_ids=where, use_cache=False).logits
        (logits * weights.chunk(world_size, dim=1)[rank]).sum().backward()
    return {"logits": unshard(logits.detach(), "contiguous"), **grads_of(model)}


def test_axolotl_on_a_batch(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(axolotl_batch):
        assert_near(found, right_logits((sum(DOCUMENTS),)))


# prime-rl


class FlashAttention(nn.Module):
    """A layer of another project: it calls no attention of transformers."""

    def __init__(self, config: Any, sliding_window: int | None) -> None:
        super().__init__()
        width, nheads = config.hidden_size, config.num_attention_heads
        self.sliding_window, self.sizes = (
            sliding_window,
            (nheads, *[config.num_key_value_heads] * 2),
        )
        self.qkv = nn.Linear(width, sum(self.sizes) * config.head_dim)
        self.o_proj = nn.Linear(nheads * config.head_dim, width)
        self.sinks = nn.Parameter(torch.linspace(-1, 2, nheads))

    def _compute_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            causal=True,
            window_size=self.window_size,
            sink=self.sinks,
        )

    @property
    def window_size(self) -> tuple[int, int]:
        return (-1, -1) if self.sliding_window is None else (self.sliding_window - 1, 0)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.sizes), -1)).split(self.sizes, dim=2)
        out = self._compute_attention(q[0], k[0], v[0], cu_seqlens, max_seqlen)
        return x + self.o_proj(out.contiguous().view(1, out.shape[0], -1))


class PrimeModel(PreTrainedModel):
    config_class = LlamaConfig
    _supports_flash_attn = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FlashAttention(config, window) for window in (None, 3))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        cu_seqlens, max_seqlen = cu_seqlens_of(position_ids)  # of a slice: not those of documents
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        logits: Tensor = self.lm_head(x)
        return logits


def cu_seqlens_of(positions: Tensor) -> tuple[Tensor, int]:
    total = positions.numel()
    starts = (positions.flatten()[1:] == 0).nonzero().flatten() + 1
    cu_seqlens = torch.cat([torch.tensor([0]), starts, torch.tensor([total])]).to(torch.int32)
    return cu_seqlens, int(cu_seqlens.diff().max())


def prime_model() -> PrimeModel:
    torch.manual_seed(3)
    model = PrimeModel(LlamaConfig(**SIZES)).double()
    model.config._attn_implementation = "flash_attention_2"
    return model


def right_prime() -> dict[str, Tensor]:
    """On one device, by the oracle: log-probabilities and gradients."""

    def by_oracle(
        self: FlashAttention, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int
    ) -> Tensor:
        rules = Rules(causal=True, window_size=self.window_size, sink=self.sinks)
        return oracle(q, k, v, rules, cu.tolist(), cu.tolist())[0]

    model, (ids, positions, weights) = prime_model(), packed_row()
    single = log_probs_of(model(ids, position_ids=positions), ids).detach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashAttention, "_compute_attention", by_oracle)
        found = log_probs_of(model(ids, position_ids=positions), ids)
    torch.testing.assert_close(
        single, found.detach()
    )  # flash-attn's function, as prime-rl calls it
    (found * weights[..., 0]).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"log_probs": found.detach(), **grads}


def prime_rl(rank: int, world_size: int) -> dict[str, Tensor]:
    page, cp_group = run_page("prime-rl"), dist.group.WORLD

    def ring(
        self: FlashAttention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, max_seqlen: Any
    ) -> Tensor:
        return page["ring_attention"](q, k, v, self.window_size, cp_group, sink=self.sinks)

    ring_flash_attn.substitute_hf_flash_attn(cp_group, heads_k_stride=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashAttention, "_compute_attention", ring)
        model, (ids, positions, weights) = prime_model(), packed_row()
        ring_flash_attn.update_ring_flash_attn_params(cu_seqlens_of(positions)[0], cp_group)
        local, where = (torch.chunk(x, world_size, dim=1)[rank] for x in (ids, positions))
        log_probs = log_probs_of(model(local, position_ids=where), local)
        gathered = torch.cat(torch.distributed.nn.all_gather(log_probs, group=cp_group), dim=1)
        (gathered * weights[..., 0]).sum().backward()  # FSDP averages over the ranks
    ours = unshard(log_probs.detach(), "contiguous", group=cp_group)
    torch.testing.assert_close(ours, gathered.detach(), rtol=0, atol=0)
    return {"log_probs": gathered.detach(), **grads_of(model, over=world_size)}


def test_prime_rl_with_sinks_and_a_window(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(prime_rl):
        assert "layers.1.sinks" in found
        assert_near(found, right_prime())


def prime_rl_on_another_kernel(rank: int, world_size: int) -> None:
    """Its own ring over our communicator: keys of all ranks, one head at a time."""
    torch.manual_seed(4)
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).to(torch.int32)
    total = int(cu_seqlens[-1])
    whole = [torch.randn(total, n, 8, dtype=torch.float64) for n in (4, 2, 2)]
    q, k, v = (x.chunk(world_size)[rank] for x in whole)
    hf_adapter.update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    documents = dict(hf_adapter.DATA_PARAMS)
    local_k_slice = documents.pop("local_k_slice")
    comm, outs = AllGatherComm(dist.group.WORLD), []
    for head in range(2):
        buffers = torch.empty(2, total, 1, 8, dtype=torch.float64)
        for buffer, x in zip(buffers, (k, v)):
            comm.all_gather(buffer, x[:, head : head + 1].contiguous())
        comm.wait()
        params = get_default_args(flash_attn_varlen_func).copy()
        keys, values = (buffer[local_k_slice] for buffer in buffers)
        params.update(q=q[:, 2 * head : 2 * head + 2], k=keys, v=values, causal=True, **documents)
        outs.append(flash_attn_varlen_func(**params))
    cu = cu_seqlens.tolist()
    right = oracle(*whole, Rules(causal=True), cu, cu)[0].chunk(world_size)[rank]
    torch.testing.assert_close(torch.cat(outs, dim=1), right)


def test_prime_rl_on_another_kernel(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(prime_rl_on_another_kernel)
