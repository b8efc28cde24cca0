"""Hugging Face models on a sharded sequence give what they give on the whole one."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

import transformers
from tiny_hf import choose
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    modeling_flash_attention_utils,
    modeling_utils,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaAttention

from ring_flash_attn import (
    flash_attn_func,
    llama3_flash_attn_prepare_cu_seqlens,
    position_ids,
    shard,
)
from ring_flash_attn.adapters import (
    hf_adapter,
    hf_documents,
    hf_forward,
    hf_models,
    shift_labels,
)
from ring_flash_attn.adapters.hf_models import has_interface

# Before 4.53 models have no names of ours.
ALL_ATTENTION_FUNCTIONS: Any = getattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", None)
needs_interface = pytest.mark.skipif(not has_interface(), reason="before transformers 4.53")
if has_interface():
    from transformers.integrations import flash_attention as hf_flash_attention

DOCUMENTS = [5, 1, 13, 4, 9]  # 32 tokens; no boundary falls on that of a shard
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "gemma2 with a window and softcap": lambda: Gemma2ForCausalLM(
        # a cap near the size of the scores, so that it bends them
        Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=0.5)
    ),
}
if hasattr(transformers, "GptOssConfig"):
    MODELS["gpt-oss with a window and sinks"] = lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
        )
    )


MODELS_ON_REQUEST: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(  # in transformers 4 its layers receive no position_ids
        GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    ),
}


def build(name: str) -> Any:
    """Make the same model on every rank, with eager attention."""
    torch.manual_seed(0)
    model = (MODELS | MODELS_ON_REQUEST)[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "proj" in key or "sinks" in key:  # scores and sinks large enough to matter
                parameter.normal_(std=0.3)
    choose(model, "eager")
    return model


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make input and position ids (1, total), loss weights (total, vocab), and cu_seqlens."""
    torch.manual_seed(1)
    total = sum(DOCUMENTS)
    input_ids = torch.randint(SIZES["vocab_size"], (1, total))
    position_ids = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    weights = torch.randn(total, SIZES["vocab_size"]) / total
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).to(torch.int32)
    return input_ids, position_ids, weights, cu_seqlens


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_document_at_a_time(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (total, vocab) and gradients of the whole model, no document seeing another."""
    input_ids, _, weights, _ = batch()
    parts = input_ids.split(DOCUMENTS, dim=1)
    logits = torch.cat([model(part, use_cache=False).logits[0] for part in parts])
    return logits.detach(), gradients(model, (logits * weights).sum())


def sharded(model: Any, rank: int, world_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of this rank's tokens, and gradients summed over the ranks."""
    input_ids, position_ids, weights, cu_seqlens = batch()
    mine = input_ids.chunk(world_size, dim=1)[rank]
    positions = position_ids.chunk(world_size, dim=1)[rank]
    hf_adapter.update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    logits = model(mine, position_ids=positions, use_cache=False).logits[0]
    grads = gradients(model, (logits * weights.chunk(world_size)[rank]).sum())
    for name in sorted(grads):
        dist.all_reduce(grads[name])
    return logits.detach(), grads


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 1e-5, f"{what}: {error:.1e}"


def check_model(rank: int, world_size: int, name: str, implementation: str) -> None:
    model = build(name)
    logits, grads = one_document_at_a_time(model)
    hf_adapter.use_ring_attn(True)
    hf_adapter.substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    choose(model, implementation)
    found, found_grads = sharded(model, rank, world_size)
    assert_near(found, logits.chunk(world_size)[rank], "logits")
    assert found_grads.keys() == grads.keys()
    for key, expected in grads.items():
        assert_near(found_grads[key], expected, key)


@pytest.mark.product(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_equals_the_whole_one(ranks, name: str) -> None:
    ranks(2).run(check_model, name, "ring_attention")


def test_flash_attention_2_is_substituted_without_flash_attn(ranks) -> None:
    ranks(2).run(check_model, "llama", "flash_attention_2")


def check_all_ways(rank: int, world_size: int) -> None:
    model = build("llama")
    logits, _ = one_document_at_a_time(model)
    hf_adapter.use_ring_attn(True)
    hf_adapter.substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    hf_adapter.substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=2)
    model.set_attn_implementation("ring_attention")  # with transformers' own checks
    found, _ = sharded(model, rank, world_size)
    assert_near(found, logits.chunk(world_size)[rank], "set_attn_implementation")
    config = LlamaConfig(**SIZES, attn_implementation="ring_attention")
    again = LlamaForCausalLM(config)
    again.load_state_dict(model.state_dict())
    again.gradient_checkpointing_enable()
    assert_near(sharded(again, rank, world_size)[0], found, "built with it")
    # transformers' own interface, which hub kernels use, reaches the ring too
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = hf_flash_attention.flash_attention_forward
    choose(model, "flash_attention_2")
    assert_near(sharded(model, rank, world_size)[0], found, "transformers' interface")
    del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]


@needs_interface
def test_every_way_to_choose_it(ranks) -> None:
    ranks(2).run(check_all_ways)


def ring_model(name: str = "llama") -> Any:
    """Build a model on ring attention."""
    hf_adapter.use_ring_attn(True)
    hf_adapter.substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    model = build(name)
    choose(model, "ring_attention")
    return model


def check_refused_positions(rank: int, world_size: int) -> None:
    input_ids, positions, _, cu_seqlens = batch()
    total = input_ids.shape[1]
    mine = input_ids.chunk(world_size, dim=1)[rank]
    for name in ("llama", "gpt2"):
        model = ring_model(name)
        hf_adapter.update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
        with pytest.raises(ValueError, match=r"without position_ids.*position_ids\[:, mine\]"):
            model(mine)
        hf_adapter.update_ring_flash_attn_params([0, total], dist.group.WORLD)
        for layout in ("zigzag", "stripe"):
            with pytest.raises(ValueError, match=r"position_ids: token \d+ of this rank"):
                model(
                    shard(input_ids, layout),
                    position_ids=position_ids(layout, seqlen=total)[None],
                    use_cache=False,
                )
    model = ring_model()
    hf_adapter.update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    found = position_ids("flat_contiguous", cu_seqlens=cu_seqlens)[None]
    assert torch.equal(found, positions.chunk(world_size, dim=1)[rank])
    reads, check = [], hf_forward.check_positions
    with pytest.MonkeyPatch.context() as patch:
        record = lambda *args: reads.append(1) or check(*args)  # noqa: E731
        patch.setattr(hf_forward, "check_positions", record)
        for count in (1, 2):  # the same tensor again: it may hold other values by now
            model(mine, position_ids=found, use_cache=False)
            assert len(reads) == count


def test_positions_that_contradict_the_documents_are_refused(ranks) -> None:
    ranks(2).run(check_refused_positions)


def check_recomputation(rank: int, world_size: int, name: str) -> None:
    input_ids, positions, _, cu_seqlens = batch()
    total = input_ids.shape[1]
    packs = [(cu_seqlens, positions), ([0, total], torch.arange(total)[None])]
    model = ring_model(name).train()

    def grads(one_after_the_other: bool) -> dict[str, Tensor]:
        model.zero_grad()
        losses = []
        for cu, whole in packs:
            hf_adapter.update_ring_flash_attn_params(cu, dist.group.WORLD)
            mine, where = (x.chunk(world_size, dim=1)[rank] for x in (input_ids, whole))
            losses.append(model(mine, position_ids=where, use_cache=False).logits.square().mean())
            if one_after_the_other:
                losses.pop().backward()
        for loss in losses:  # the first one's documents are not the latest any more
            loss.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters()}

    expected = grads(one_after_the_other=True)
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        in_order = (True, False) if has_interface() or not use_reentrant else (True,)
        # before 4.53, reentrant checkpointing makes new tensors of position_ids: an error says so
        for one_after_the_other in in_order:
            for key, found in grads(one_after_the_other).items():
                assert_near(found, expected[key], f"{key}, {use_reentrant=}")


@pytest.mark.product(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_recomputation_has_the_documents_of_its_forward_pass(ranks, name: str) -> None:
    ranks(2).run(check_recomputation, name)


def check_whole_recomputation(rank: int, world_size: int) -> None:
    input_ids, positions, _, cu_seqlens = batch()
    model = ring_model()
    mine, where = (x.chunk(world_size, dim=1)[rank] for x in (input_ids, positions))
    hf_adapter.update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    run = functools.partial(model, use_cache=False)
    out = checkpoint(lambda x: run(x, position_ids=where).logits, mine, use_reentrant=False)
    hf_adapter.update_ring_flash_attn_params([0, input_ids.shape[1]], dist.group.WORLD)
    with pytest.raises(ValueError, match="other documents have been given"):
        out.sum().backward()


def test_a_recomputation_of_the_whole_model_over_other_documents_is_refused(ranks) -> None:
    ranks(2).run(check_whole_recomputation)


def check_values(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RFA_CHECK", "values")
        for _ in range(2):
            hf_adapter.update_ring_flash_attn_params([0, 12, 32], dist.group.WORLD)
        for other in ([0, 20, 32], [0, 12, 33]):  # on rank 1; rank 0 has what they agreed upon
            mine = other if rank else [0, 12, 32]
            with pytest.raises(ValueError, match=r"of \(12, 20\).* on rank 0\n.* on rank 1"):
                hf_adapter.update_ring_flash_attn_params(mine, dist.group.WORLD)
        hf_adapter.update_ring_flash_attn_params([0, 12, 32], dist.group.WORLD)


def test_ranks_that_are_told_different_documents_notice(ranks) -> None:
    ranks(2).run(check_values)


def check_losses(rank: int, world_size: int) -> None:
    input_ids, positions, _, cu_seqlens = batch()
    labels = input_ids.clone()
    labels[:, 7] = -100  # a token that nobody has to predict
    count = sum(DOCUMENTS) - len(DOCUMENTS) - 1
    model = build("llama")
    parts = zip(input_ids.split(DOCUMENTS, dim=1), labels.split(DOCUMENTS, dim=1))
    losses = [model(x, labels=y, num_items_in_batch=count).loss for x, y in parts if x.numel() > 1]
    model = ring_model()
    hf_adapter.update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    targets = shift_labels(labels, cu_seqlens, dist.group.WORLD)
    mine, where = (x.chunk(world_size, dim=1)[rank] for x in (input_ids, positions))
    run = functools.partial(model, mine, position_ids=where, use_cache=False)
    if "shift_labels" not in inspect.signature(ForCausalLMLoss).parameters:
        with pytest.raises(ValueError, match="shifts them once more"):
            run(labels=targets, shift_labels=targets)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss = run(labels=targets, shift_labels=targets, num_items_in_batch=count).loss.detach()
    dist.all_reduce(loss)
    assert_near(loss, torch.stack(losses).sum().detach(), "loss")
    with pytest.warns(UserWarning, match="loses its target"):
        run(labels=labels.chunk(world_size, dim=1)[rank])
    with pytest.raises(ValueError, match="labels has 16 tokens"):
        shift_labels(labels[:, :16], cu_seqlens, dist.group.WORLD)


def test_shifted_labels_make_the_loss_of_the_whole_sequence(ranks) -> None:
    ranks(2).run(check_losses)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the adapter's and transformers' global state back as it was."""
    forward = modeling_flash_attention_utils._flash_attention_forward
    for module in [m for n, m in sys.modules.items() if n.startswith("transformers.")]:
        if "_flash_attention_forward" in vars(module):
            monkeypatch.setattr(module, "_flash_attention_forward", forward)
    if has_interface():
        interfaces = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
        monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", interfaces)
    monkeypatch.setattr(PreTrainedModel, "__call__", PreTrainedModel.__call__)
    for name in ("_interfaces", "DATA_PARAMS"):
        monkeypatch.setattr(hf_adapter, name, dict(getattr(hf_adapter, name)))
    monkeypatch.setattr(hf_adapter, "RING_ATTN_SWITCH", True)


@pytest.fixture
def calls(restored: None, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the calls that reach the attention function, which then returns its queries."""
    recorded: list[dict[str, Any]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        recorded.append({"q": q, "k": k, "v": v, **kwargs})
        return q

    monkeypatch.setattr(hf_adapter, "llama3_flash_attn_varlen_func", record)
    documents = torch.tensor([0, 6], dtype=torch.int32)
    hf_adapter.DATA_PARAMS.update(
        cu_seqlens_q=documents, cu_seqlens_k=documents, max_seqlen_q=6, max_seqlen_k=6,
        local_k_slice=slice(0, 6),
    )  # fmt: skip
    return recorded


def ring_forward(*shape: int, mask: Tensor | None = None, is_causal: bool = True, **kw: Any) -> Any:
    """Call the substitute with queries and keys of a shape, (1, 6, 2, 8) unless told."""
    q = torch.zeros(*(shape or (1, 6, 2, 8)))
    k = kw.pop("key", q)
    (forward,) = hf_adapter.create_ring_flash_attention_forward(None, heads_k_stride=2)
    return forward(q, k, k, mask, q.shape[1], is_causal, **kw)


def test_arguments_reach_the_attention_function(calls: list[dict[str, Any]]) -> None:
    sink = torch.ones(2)
    out = ring_forward(
        dropout=0.25, softmax_scale=0.5, sliding_window=3, softcap=7.0, deterministic=True,
        s_aux=sink, position_ids=torch.arange(6)[None], layer_idx=0, use_cache=True,
    )  # fmt: skip
    (call,) = calls
    assert out.shape == (1, 6, 2, 8)
    assert call["q"].shape == (6, 2, 8)
    expected = {
        "dropout_p": 0.25, "softmax_scale": 0.5, "causal": True, "window_size": (2, 0),
        "softcap": 7.0, "deterministic": True, "heads_k_stride": 2, "group": None,
    }  # fmt: skip
    assert {name: call[name] for name in expected} == expected
    assert call["sink"] is sink
    assert {name: call[name] for name in hf_adapter.DATA_PARAMS} == hf_adapter.DATA_PARAMS


def test_arguments_left_out(calls: list[dict[str, Any]]) -> None:
    ring_forward(mask=torch.ones(1, 6))
    expected = {
        "dropout_p": 0.0, "softmax_scale": None, "window_size": (-1, -1), "softcap": 0.0,
        "deterministic": False, "sink": None,
    }  # fmt: skip
    assert {name: calls[0][name] for name in expected} == expected


@pytest.mark.parametrize(("flag", "value", "expected"), [
    (None, "1", True), (None, "0", False), (False, "1", False), (True, "0", True),
])  # fmt: skip
def test_deterministic_by_environment(
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    flag: bool | None,
    value: str,
    expected: bool,
) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
    ring_forward(deterministic=flag)
    assert calls[0]["deterministic"] is expected


def test_fp32_inputs_are_cast_back(calls: list[dict[str, Any]]) -> None:
    assert ring_forward(target_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert calls[0]["k"].dtype == torch.bfloat16
    assert ring_forward(target_dtype=torch.float32).dtype == torch.float32


REFUSED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "hides 2 of 6": ((), {"mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}),
    r"shape \(1, 1, 6, 6\)": ((), {"mask": torch.zeros(1, 1, 6, 6)}),
    "is_causal=False": ((), {"is_causal": False}),
    "a batch of 3": ((3, 6, 2, 8), {}),
    "against 7 keys": ((), {"key": torch.zeros(1, 7, 2, 8)}),
    "sliding_window must be a positive integer .*not 0": ((), {"sliding_window": 0}),
    r"cu_seq_lens_q=\(2,\)": ((), {"cu_seq_lens_q": torch.tensor([0, 6])}),
    "output_attentions=True": ((), {"output_attentions": True}),
    "position_bias": ((), {"position_bias": torch.zeros(2, 6, 6)}),
    "head_mask": ((), {"head_mask": torch.ones(2)}),
    "block_table": ((), {"block_table": torch.ones(2)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_done_is_refused(calls: list[dict[str, Any]], message: str) -> None:
    shape, arguments = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        ring_forward(*shape, **arguments)
    assert not calls


def test_without_documents_the_error_says_what_to_call(calls: list[dict[str, Any]]) -> None:
    del hf_adapter.DATA_PARAMS["local_k_slice"]
    with pytest.raises(ValueError, match=r"local_k_slice.*update_ring_flash_attn_params"):
        ring_forward()


def test_a_padded_batch_is_refused_by_the_model(calls: list[dict[str, Any]]) -> None:
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    model = build("llama")
    choose(model, "ring_attention")
    ids = torch.zeros(1, 6, dtype=torch.long)
    model(ids, attention_mask=torch.ones(1, 6))
    assert len(calls) == 2
    with pytest.raises(ValueError, match="hides 1 of 6"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]))


def documents_of(cu_seqlens: list[int], rank: int, world_size: int) -> dict[str, Any]:
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
    return dict(zip(hf_adapter._DOCUMENT_KEYS, prepared))


POSITIONS = {  # cu_seqlens, rank of 2, positions, what is wrong with them
    "a slice": ([0, 3, 16], 1, list(range(5, 13)), None),
    "the whole sequence's": ([0, 3, 16], 1, list(range(8, 16)), None),
    "counted from 0": ([0, 3, 16], 1, list(range(8)), "token 0 of this rank has position 0"),
    "across documents": ([0, 3, 16], 0, list(range(8)), None),
    "a zigzag shard": ([0, 16], 0, [0, 1, 2, 3, 12, 13, 14, 15], "has position 12, but is at 4"),
    "padding from the first rank on": ([0, 16], 0, [0, 1, 2, 3, 4, 0, 0, 0], None),
    "padding alone on the second": ([0, 16], 1, [0] * 8, None),
    "padding in the last document": ([0, 3, 16], 1, [5, 6, 7, 8, 0, 0, 0, 0], None),
    "padding in the only document": ([0, 16], 1, [8, 9, 10, 11, 12, 13, 0, 0], None),
    "a document of padding": ([0, 3, 16], 0, [0, 1, 2, 0, 0, 0, 0, 0], None),
    "zeros within": ([0, 3, 16], 1, [5, 0, 0, 8, 9, 10, 11, 12], "token 1 "),
    "nothing but zeros": ([0, 16], 0, [0] * 8, "token 1 "),
    "an empty document": ([0, 3, 3, 16], 0, [0, 1, 2, 0, 1, 2, 3, 4], None),
    "too many": ([0, 16], 0, list(range(9)), r"shape \(1, 9\), but this rank holds 8 tokens"),
    "several axes": ([0, 3, 16], 0, [[0, 0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 4, 1, 2, 3]], None),
    "axes from 0": ([0, 16], 1, [[0, 0, 1], [0, 1, 2]], "no document starts at token 0"),
    "axes across": ([0, 3, 16], 0, [list(range(8))] * 3, "a document starts at token 3"),
}


@pytest.mark.parametrize("case", POSITIONS)
def test_positions(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    cu_seqlens, rank, values, message = POSITIONS[case]
    monkeypatch.setattr(hf_forward, "rank_and_size", lambda group: (rank, 2))
    positions = torch.tensor(values)
    positions = positions[:, None] if positions.ndim == 2 else positions[None]
    size = 3 if case == "axes from 0" else 8
    documents = documents_of(cu_seqlens, rank, 2)
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused:
        hf_forward.check_positions(positions, size, documents, None)
    monkeypatch.setenv("RFA_CHECK", "off")  # positions that are skipped on purpose
    hf_forward.check_positions(positions, size, documents, None)


def test_models_that_do_not_take_the_ring_can_be_compiled(calls: list[dict[str, Any]]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    choose(model, "sdpa")
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    ids = torch.arange(6)[None]

    def logits(ids: Tensor) -> Tensor:
        return model(ids, use_cache=False).logits

    compiled = torch.compile(logits, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids), logits(ids))
    assert not calls


@needs_interface
def test_attention_behind_a_partial_counts(calls: list[dict[str, Any]]) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).model
    choose(model, "ring_attention")
    for layer in model.layers:
        layer.self_attn.forward = functools.partial(type(layer.self_attn).forward, layer.self_attn)
    hf_models.check_model(model)
    for layer in model.layers:
        layer.self_attn.forward = functools.partial(torch.nn.functional.relu)
    with pytest.raises(ValueError, match="does not call transformers' attention interface"):
        hf_models.check_model(model)


MIXED: dict[str, Callable[[], Any]] = {
    r"BloomModel: h\.0 \(BloomBlock\) does not call": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    ),
    r"layers\.0\.mamba \(FalconH1Mixer\) carries a state": lambda: transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(
            **SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
        )
    ),
    r"layers\.1\.self_attn \(MiniMaxLightningAttention\) does not call": lambda: (
        transformers.MiniMaxForCausalLM(
            transformers.MiniMaxConfig(
                **SIZES, num_local_experts=2, layer_types=["full_attention", "linear_attention"]
            )
        )
    ),
    r"layers\.1 \(LlamaDecoderLayer\) is of type 'chunked_attention'": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, layer_types=["full_attention", "chunked_attention"])
    ),
}


@needs_interface
@pytest.mark.parametrize("message", MIXED)
@pytest.mark.parametrize("implementation", ["ring_attention", "flash_attention_2"])
def test_layers_that_mix_tokens_by_themselves_are_refused(
    calls: list[dict[str, Any]], message: str, implementation: str
) -> None:
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    model = MIXED[message]()
    choose(model, implementation)
    with pytest.raises(ValueError, match=message):
        model(torch.arange(6)[None])
    assert not calls
    hf_adapter.use_ring_attn(False)
    choose(model, "eager")
    model(torch.arange(6)[None], use_cache=False)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


@needs_interface
def test_layers_of_other_projects_are_theirs_to_answer_for(calls: list[dict[str, Any]]) -> None:
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    model = build("llama")
    model.model.layers[0].mlp = Recurrent()
    choose(model, "flash_attention_2")
    model(torch.arange(6)[None])
    assert len(calls) == 2
    choose(model, "ring_attention")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp.* carries a state"):
        model(torch.arange(6)[None])


class OwnAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return flash_attn_func(hidden_states, hidden_states, hidden_states), None


class WrappedAttention(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@needs_interface
def test_an_attention_layer_that_overrides_the_call_is_refused(
    calls: list[dict[str, Any]],
) -> None:
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    for kind, bound, served in (
        (OwnAttention, False, False),
        (WrappedAttention, False, True),
        (LlamaAttention, True, False),  # forward assigned to the module
    ):
        model = build("llama")
        choose(model, "ring_attention")
        for index, layer in enumerate(model.model.layers):
            layer.self_attn = kind(model.config, index)
            if bound:
                layer.self_attn.forward = OwnAttention.forward.__get__(layer.self_attn)
        refused = pytest.raises(ValueError, match=r"layers\.0 .* does not call")
        with nullcontext() if served else refused:
            model(torch.arange(6)[None])
    assert len(calls) == 2


@needs_interface
def test_a_layer_without_attention_is_no_harm(calls: list[dict[str, Any]]) -> None:
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    model = build("llama")
    choose(model, "ring_attention")
    model.model.layers[1].forward = lambda x, **_: x
    del model.model.layers[1].self_attn
    model(torch.arange(6)[None])
    assert len(calls) == 1


def test_one_backward_pass_over_different_documents_is_refused_where_it_cannot_be_told(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers that receive no position ids: whose is the one that is recomputed?"""
    query, x = torch.zeros(1, 6, 1, 8), torch.zeros(2, requires_grad=True)
    documents = [documents_of(cu, 0, 1) for cu in ([0, 6], [0, 2, 6])]
    found: list[Any] = []

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(hf_forward.documents_of_call(None, query, None, documents[1]))
            return grad

    outputs = [Recomputed.apply(x) * 1 for _ in documents]
    for output, its in zip(outputs, documents):
        hf_forward._note_backward((output, None), its)
    for output in outputs:
        output.sum().backward(retain_graph=True)
    assert found == documents
    with pytest.raises(ValueError, match="run backward of each loss by itself"):
        sum(output.sum() for output in outputs).backward()


def test_chunked_attention_is_refused(calls: list[dict[str, Any]]) -> None:
    config = types.SimpleNamespace(attention_chunk_size=4)
    module = types.SimpleNamespace(config=config)
    q = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="attention_chunk_size=4"):
        hf_adapter.flash_attention_forward(module, q, q, q, None)


@needs_interface
def test_autocast_decides_the_dtype(calls: list[dict[str, Any]]) -> None:
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    layer = build("llama").model.layers[0].self_attn
    q = torch.zeros(1, 2, 6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hf_adapter.flash_attention_forward(layer, q, q, q, None)
    hf_adapter.flash_attention_forward(layer.half(), q, q, q, None)
    assert [call["q"].dtype for call in calls] == [torch.bfloat16, torch.float16]


def candidate_like(original: Callable[..., Any], mark: str) -> Callable[..., Any]:
    def candidate(*args: Any, **kwargs: Any) -> str:
        return mark

    candidate.__signature__ = inspect.signature(original)
    return candidate


def test_an_assigned_factory_is_used(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As axolotl does it: assign the factory, substitute, by keywords."""
    original = modeling_flash_attention_utils._flash_attention_forward
    seen = []

    def factory(process_group: Any, heads_k_stride: int) -> list[Callable[..., Any]]:
        seen.append((process_group, heads_k_stride))
        return [lambda only_one: "wrong", candidate_like(original, "right")]

    monkeypatch.setattr(hf_adapter, "create_ring_flash_attention_forward", factory)
    hf_adapter.substitute_hf_flash_attn(process_group="a group", heads_k_stride=3)
    assert seen == [("a group", 3)]
    assert modeling_flash_attention_utils._flash_attention_forward() == "right"


@needs_interface
def test_a_candidate_is_called_by_position_where_names_differ(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As projects write them: the leading names their own, the rest by name or not at all."""

    def candidate(q, k, v, mask, q_len, causal, dropout=0.0, softmax_scale=None, **kwargs):
        return q_len, causal, dropout, kwargs["softcap"]

    monkeypatch.setattr(hf_adapter, "create_ring_flash_attention_forward", lambda *_: [candidate])
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    forward = modeling_flash_attention_utils._flash_attention_forward
    q = torch.zeros(1, 6, 2, 8)
    found = forward(q, q, q, None, is_causal=True, query_length=6, dropout=0.5, softcap=2.0)
    assert found == (6, True, 0.5, 2.0)
    module = build("llama").model.layers[0].self_attn
    out, _ = hf_adapter.flash_attention_forward(module, q, q, q, None, softcap=3.0)
    assert out == (2, True, 0.0, 3.0)  # its tensors are (1, nheads, seqlen, headdim)


def test_a_projects_own_forward_is_not_watched(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slices may be others than ours, and its layers too."""
    monkeypatch.setattr(
        hf_adapter, "create_ring_flash_attention_forward", lambda *_: [lambda q, *_, **__: q]
    )
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    hf_adapter.DATA_PARAMS.update(documents_of([0, 6], 0, 1))
    model = build("llama")
    choose(model, "ring_attention")
    model(torch.arange(6)[None], position_ids=torch.tensor([[0, 1, 4, 5, 2, 3]]))


@needs_interface
def test_no_candidate_fits(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_flash_attention_utils._flash_attention_forward
    monkeypatch.setattr(
        hf_adapter, "create_ring_flash_attention_forward", lambda *_: [lambda only_one: "wrong"]
    )
    with pytest.raises(ValueError, match=r"no candidate.*query_length.* too many positional"):
        hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    assert modeling_flash_attention_utils._flash_attention_forward is original


@needs_interface
def test_substituting_twice_and_switching_off(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = modeling_flash_attention_utils._flash_attention_forward
    original = candidate_like(installed, "original")
    remote = types.ModuleType("transformers_modules.remote_model")
    monkeypatch.setitem(sys.modules, remote.__name__, remote)
    for module in (modeling_flash_attention_utils, remote):
        monkeypatch.setattr(module, "_flash_attention_forward", original, raising=False)
    for mark in ("first", "second"):
        factory = functools.partial(lambda mark, *_: [candidate_like(original, mark)], mark)
        monkeypatch.setattr(hf_adapter, "create_ring_flash_attention_forward", factory)
        hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
        assert remote._flash_attention_forward() == mark
    hf_adapter.use_ring_attn(False)
    assert modeling_flash_attention_utils._flash_attention_forward() == "original"
    assert hf_adapter.check_params(
        modeling_flash_attention_utils._flash_attention_forward, installed
    )
    hf_adapter.use_ring_attn(True)
    assert modeling_flash_attention_utils._flash_attention_forward() == "second"
    # documents that came with the call of a model go before those of the global
    monkeypatch.setattr(hf_documents._current, "documents", object())
    assert modeling_flash_attention_utils._flash_attention_forward() == "original"


@needs_interface
def test_switched_off_a_model_takes_the_path_it_had(calls: list[dict[str, Any]]) -> None:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = sdpa  # stands for an installed flash_attn
    for _ in range(2):
        hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    model = build("llama")
    ids = torch.arange(6)[None]
    choose(model, "sdpa")
    expected = model(ids).logits
    choose(model, "flash_attention_2")
    hf_adapter.use_ring_attn(False)
    torch.testing.assert_close(model(ids).logits, expected)
    assert not calls
    choose(model, "ring_attention")
    torch.testing.assert_close(model(ids).logits, expected)
    assert model.config._attn_implementation == "ring_attention"
    hf_adapter.use_ring_attn(True)
    model(ids)
    assert len(calls) == 2


@needs_interface
def test_a_projects_own_forward_under_our_interface(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RL2 does it: only `flash_attention_forward` is ours, the function below it theirs."""
    monkeypatch.setattr(
        modeling_flash_attention_utils,
        "_flash_attention_forward",
        lambda query, key, value, mask, query_length, is_causal, **_: query * is_causal,
    )
    module = build("llama").model.layers[0].self_attn
    q = torch.randn(1, 4, 6, 8)
    out, weights = hf_adapter.flash_attention_forward(module, q, q[:, :2], q[:, :2], None)
    torch.testing.assert_close(out, q.transpose(1, 2))
    assert weights is None
    off, _ = hf_adapter.flash_attention_forward(module, q, q, q, None, is_causal=False)
    assert off.eq(0).all()
