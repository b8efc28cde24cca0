"""Hugging Face models on what `ContextParallel.shard` returns give what they give on one rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

pytest.importorskip("transformers")

from tiny_hf import (
    FAMILIES,
    assert_near,
    batch_of,
    build,
    choose,
    gradients,
    is_known,
    on_one_rank,
)
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import modeling_flash_attention_utils as flash_utils

from ring_flash_attn import ContextParallel, prepare_hf_model, use_ring_attn
from ring_flash_attn.adapters import hf_adapter, hf_documents
from ring_flash_attn.adapters.hf_documents import DocumentsMask
from ring_flash_attn.adapters.hf_models import has_interface
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names

LENGTHS = (5, 1, 13, 4, 9)  # no border of documents is one of shards
CHECKPOINTING = {"stored": None, "recomputed": False, "reentrant": True}


def signature(function: Callable[..., Any]) -> Any:
    return inspect.signature(function).parameters


def axes_of(family: str) -> int:
    return 3 if "three axes" in family else 1


def compare(
    model: Any, cp: ContextParallel, batches: Sequence[dict[str, Any]], right: dict[str, Any]
) -> None:
    """One optimiser step over micro-batches that are all under way at once."""
    model.zero_grad()
    parts = [cp.shard(batch) for batch in batches]
    count = sum(part["num_items_in_batch"] for part in parts)
    outputs = [model(**{**part, "num_items_in_batch": count}) for part in parts]
    for output in outputs:
        output.loss.backward()
    loss = cp.sum(sum(output.loss for output in outputs))
    assert_near(loss, right["loss"], "loss")
    for part, output, logits in zip(parts, outputs, right["logits"], strict=True):
        assert_near(cp.gather(output.logits.detach(), part["documents"])[0], logits, "logits")
    grads = gradients(model)
    assert grads.keys() == right["grads"].keys()
    for name, grad in grads.items():
        dist.all_reduce(grad, group=cp.group)
        assert_near(grad, right["grads"][name], name)


def every_layout(rank: int, world_size: int, family: str) -> None:
    axes = axes_of(family)
    batches = [batch_of(LENGTHS, axes), batch_of((20, 7), axes, seed=2)]
    model = build(family)
    right = on_one_rank(model, batches)
    prepare_hf_model(model).train()
    modes = cycle(CHECKPOINTING.items())
    for layout, (mode, use_reentrant) in zip(["zigzag", *layout_names()], modes):
        model.gradient_checkpointing_disable()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if family == "gpt2" and not has_interface() and use_reentrant is not None:
            with pytest.raises(ValueError, match="does not receive its documents"):
                compare(model, ContextParallel(layout=layout), batches, right)
            continue
        try:
            compare(model, ContextParallel(layout=layout), batches, right)
        except AssertionError as error:
            raise AssertionError(f"{layout}, {mode}: {error}") from error


@pytest.mark.product(4)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_one_rank(
    family: str, world_size: int, ranks: Callable[[int], Ranks]
) -> None:
    """Every layout, forward and backward, with checkpointing of both kinds and without."""
    if not is_known(family):
        pytest.skip("not in this version of transformers")
    ranks(world_size).run(every_layout, family)


def sharded_parameters(rank: int, world_size: int, family: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    axes = axes_of(family)
    # one for each data-parallel index
    batches = [batch_of(LENGTHS, axes), batch_of((17, 6), axes, seed=2)]
    model = build(family)
    right = on_one_rank(model, batches)
    model = prepare_hf_model(build(family)).train()
    if family != "gpt2" or has_interface():
        model.gradient_checkpointing_enable({"use_reentrant": False})
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    for layers in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    for layout in layout_names():
        model.zero_grad()
        cp = ContextParallel(mesh["cp"], layout)
        part = cp.shard(batches[rank // 2])
        dist.all_reduce(part["num_items_in_batch"], group=mesh.get_group("dp"))
        loss = model(**part).loss
        (loss * everyone.size()).backward()  # FSDP averages gradients
        loss = loss.detach()
        dist.all_reduce(loss)
        assert_near(loss, right["loss"], f"loss, {layout}")
        for name, parameter in model.named_parameters():
            if name in right["grads"]:
                grad = parameter.grad.full_tensor()
                assert_near(grad, right["grads"][name], f"{name}, {layout}")


@pytest.mark.product(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_fsdp2_over_data_and_context(family: str, ranks: Callable[[int], Ranks]) -> None:
    """dp 2 × cp 2, with checkpointing, every layout."""
    if not is_known(family):
        pytest.skip("not in this version of transformers")
    ranks(4).run(sharded_parameters, family)


# Batches, routes, names.


def every_route(rank: int, world_size: int) -> None:
    model = build("llama")
    batches = [batch_of(LENGTHS)]
    right = on_one_rank(model, batches)
    prepare_hf_model(model)
    for route in route_names():
        compare(model, ContextParallel(route=route, kernel="reference"), batches, right)
    model.config._attn_implementation = "ring_flash_attn"
    compare(model, ContextParallel(divisor=4), batches, right)


def test_every_route_and_both_names(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(every_route)


def other_batches(rank: int, world_size: int) -> None:
    """Equal sequences, and padding on the left, give what the packed documents do."""
    packed = batch_of((7, 7, 7))
    rows = {name: packed[name].view(3, 7) for name in ("input_ids", "labels")}
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    whole = {**rows, "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
    padded = {name: F.pad(x, (2, 0), value=fill[name]) for name, x in whole.items()}
    model = build("mistral, window")
    right = on_one_rank(model, [packed])
    logits = right["logits"][0].view(3, 7, -1)
    prepare_hf_model(model)
    for batch, start in ((rows, 0), (padded, 2)):
        cp = ContextParallel()
        part = cp.shard(batch)
        output = model(**part)
        found = cp.gather(output.logits.detach(), part["documents"])
        assert_near(found[:, start:], logits, "logits")
        assert_near(cp.sum(output.loss), right["loss"], "loss")
        again = model(**part, return_dict=False)
        assert torch.equal(again[0], output.loss)


def test_batches_of_equal_and_of_padded_sequences(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(other_batches)


def collated(rank: int, world_size: int) -> None:
    """Each way in which transformers' collator tells of packed documents."""
    cp, samples = ContextParallel(), [{"input_ids": list(range(n))} for n in (5, 1, 6)]
    names = ("return_position_ids", "return_flash_attn_kwargs", "return_seq_idx")
    for flags in product((False, True), repeat=3):
        if any(flags):
            batch = DataCollatorWithFlattening(**dict(zip(names, flags, strict=True)))(samples)
            part = cp.shard(batch)
            assert part["documents"].cu_seqlens == (0, 5, 6, 12)
            assert part["num_items_in_batch"] == 9
            targets = cp.gather(part["shift_labels"], part["documents"])
            assert targets.tolist() == [[1, 2, 3, 4, -100, -100, 1, 2, 3, 4, 5, -100]]
            kept = {"input_ids", "position_ids", "shift_labels", "num_items_in_batch", "documents"}
            assert set(part) == kept


@pytest.mark.skipif(
    "return_seq_idx" not in signature(DataCollatorWithFlattening.__init__),
    reason="not in this version of transformers",
)
def test_what_the_collator_says_of_documents(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(collated)


def few_tokens(rank: int, world_size: int) -> None:
    for family in ("llama", "gpt-oss, window, sinks"):
        if is_known(family):
            model = build(family)
            batches = [batch_of((2, 1)), batch_of(LENGTHS, seed=2)]
            right = on_one_rank(model, batches)
            prepare_hf_model(model)
            compare(model, ContextParallel(layout="flat_contiguous"), batches, right)


def test_a_rank_without_tokens(ranks: Callable[[int], Ranks]) -> None:
    ranks(4).run(few_tokens)


def past_the_hooks(rank: int, world_size: int) -> None:
    """As releases of PEFT call the model inside of theirs."""
    model = build("llama")
    batches = [batch_of(LENGTHS)]
    right = on_one_rank(model, batches)
    prepare_hf_model(model)
    with pytest.MonkeyPatch.context() as patch:
        past = lambda self, *args, **kwargs: self.forward(*args, **kwargs)  # noqa: E731
        patch.setattr(type(model), "__call__", past)
        compare(model, ContextParallel(), batches, right)


def test_a_model_whose_forward_is_called_by_itself(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(past_the_hooks)


def adapted(rank: int, world_size: int, first: bool) -> None:
    """LoRA trains its own matrices alone; the model is prepared before it, or after."""
    from peft import LoraConfig, get_peft_model

    batches = [batch_of(LENGTHS), batch_of((20, 7), seed=2)]
    torch.manual_seed(1)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        init_lora_weights=False,
        target_modules=["q_proj", "up_proj"],
    )
    model = build("llama")
    if not first:
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(prepare_hf_model(model), config)
        hf_adapter.use_ring_attn(False)
    right = on_one_rank(model, batches)
    hf_adapter.use_ring_attn(True)
    if not first:
        prepare_hf_model(model)
    model.train()
    model.enable_input_require_grads()
    for use_reentrant in (None, False, True):
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        compare(model, ContextParallel(), batches, right)


@pytest.mark.parametrize("first", [True, False])
def test_peft(first: bool, ranks: Callable[[int], Ranks]) -> None:
    pytest.importorskip("peft")
    ranks(2).run(adapted, first)


def dropped(rank: int, world_size: int) -> Tensor:
    model = prepare_hf_model(build("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.4
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cp = ContextParallel()
    torch.manual_seed(5)
    loss = model(**cp.shard(batch_of(LENGTHS))).loss
    loss.backward()
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    dist.all_reduce(grad)
    return torch.cat([cp.sum(loss)[None], grad.flatten()])


def test_dropout_is_the_same_on_any_number_of_ranks(ranks: Callable[[int], Ranks]) -> None:
    (one,) = ranks(1).run(dropped)
    for found in ranks(2).run(dropped):
        assert_near(found, one, "loss and a gradient")


# What is refused, before anything is sent.


def refusals(rank: int, world_size: int) -> None:
    batch, cp = batch_of(LENGTHS), ContextParallel()
    part = cp.shard(batch)
    model = build("llama")
    with pytest.raises(ValueError, match=r"attn_implementation='eager': call prepare_hf_model"):
        model(**part)
    assert prepare_hf_model(model) is model
    with pytest.MonkeyPatch.context() as patch:  # other tests may have substituted it
        name = "_flash_attention_forward"
        patch.setattr(flash_utils, name, hf_adapter._original(getattr(flash_utils, name)))
        with pytest.raises(ValueError, match=r"not told which documents.*model\(\*\*part\)"):
            model(part["input_ids"], position_ids=part["position_ids"])
    with pytest.raises(ValueError, match=r"documents: generate\(\) is not spread over ranks"):
        model.generate(**part)
    size = part["documents"].size
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("labels beside documents", {"labels": part["shift_labels"], "shift_labels": None}),
        ("attention_mask beside documents", {"attention_mask": torch.ones(1, size)}),
        ("past_key_values beside documents", {"past_key_values": DynamicCache()}),
        ("pixel_values beside documents", {"pixel_values": torch.ones(1)}),
        ("use_cache=True beside documents", {"use_cache": True}),
        ("logits_to_keep=1 beside documents: the last tokens", {"logits_to_keep": 1}),
        ("output_attentions=True beside documents", {"output_attentions": True}),
        (r"input_ids has shape \(1, 32\)", {"input_ids": batch["input_ids"]}),
        (r"input_ids has shape \(\d+,\)", {"input_ids": part["input_ids"][0]}),
        (r"position_ids \(None\) must be those", {"position_ids": None}),
        (r"position_ids \(\(1, 32\)\) must be", {"position_ids": torch.arange(32)[None]}),
        ("shift_loss_weights: a model's loss has none", {"shift_loss_weights": torch.ones(1)}),
        ("output_router_logits=True adds a loss", {"output_router_logits": True}),
        (r"head_mask=\(2, 4\): head masks", {"head_mask": torch.ones(2, 4)}),
    ]
    for message, change in wrong:
        with pytest.raises(ValueError, match=message):
            model(**{**part, **change})
    mask, short = DocumentsMask(part["documents"], 2), torch.zeros(1, size - 1, 4, 8)
    with pytest.raises(ValueError, match="this rank holds"):
        hf_documents.attend(*[short] * 3, mask)
    with pytest.raises(ValueError, match="sliding_window=3, but the model's mask has the window 2"):
        hf_documents.attend(*[torch.zeros(1, size, 4, 8)] * 3, mask, sliding_window=3)
    hf_adapter.use_ring_attn(False)
    with pytest.raises(ValueError, match=r"use_ring_attn\(False\), but"):
        model(**part)
    hf_adapter.use_ring_attn(True)
    same = model(**{**part, "labels": part["shift_labels"]}).loss  # as some have to pass both
    assert torch.equal(same, model(**part).loss)


def test_what_cannot_be_done_is_refused(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(refusals)


def test_masks_that_are_not_causal_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    make = hf_documents.mask_function(lambda **_: "none")
    causal = masking.causal_mask_function
    window = masking.sliding_window_causal_mask_function(3)
    packed = masking.packed_sequence_mask_function(torch.zeros(1, 4))
    assert make(mask_function=causal) == "none"
    documents: Any = object()
    monkeypatch.setattr(hf_documents._current, "documents", documents)
    for right, size in ((causal, None), (masking.and_masks(window, packed), 3)):
        found = make(mask_function=right, local_size=size)
        assert (found.documents, found.window) == (documents, size)
    padding = (torch.zeros(1),) if "left_padding" in signature(masking.chunked_overlay) else ()
    chunked = masking.chunked_overlay(2, *padding)
    for wrong in (
        masking.or_masks(causal, packed),
        masking.and_masks(causal, chunked),
        lambda *_: True,
    ):
        with pytest.raises(
            ValueError, match=r"asks for a mask by (or_masks|chunked_overlay|test_)"
        ):
            make(mask_function=wrong)


# One device.


@pytest.fixture
def without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """What registers itself in transformers is taken out again."""
    monkeypatch.setattr(PreTrainedModel, "__call__", PreTrainedModel.__call__)
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)
    monkeypatch.setattr(hf_adapter, "RING_ATTN_SWITCH", True)


@pytest.mark.parametrize("family", ["llama", "gemma2, window, softcap"])
def test_generate_runs_on_one_device_and_says_so(without_us: None, family: str) -> None:
    model = build(family)
    ids = batch_of((9,))["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    logits = model(ids).logits
    prepare_hf_model(model)
    name = model.config._attn_implementation
    own = "sdpa" if family == "llama" else "eager"
    with pytest.warns(UserWarning, match=f"not spread over ranks.*attn_implementation='{own}'"):
        assert torch.equal(model.generate(ids, **options), expected)
    assert model.config._attn_implementation == name
    use_ring_attn(False)
    assert_near(model(ids).logits, logits, "logits")
    assert model.config._attn_implementation == name


@pytest.mark.skipif(not has_interface(), reason="needs flash_attn before transformers 4.53")
def test_generate_of_a_model_that_was_substituted(
    without_us: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hf_adapter._original(flash_utils._flash_attention_forward)
    monkeypatch.setattr(flash_utils, "_flash_attention_forward", original)
    model = build("llama")
    ids = batch_of((9,))["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    hf_adapter.substitute_hf_flash_attn(None, heads_k_stride=1)
    for name in ("flash_attention_2", "ring_attention"):
        choose(model, name)
        with pytest.warns(UserWarning, match="not spread over ranks"):
            assert torch.equal(model.generate(ids, **options), expected)
        assert model.config._attn_implementation == name


def test_what_contains_no_model_is_refused(without_us: None) -> None:
    with pytest.raises(TypeError, match="Linear is no Hugging Face model, and contains none"):
        prepare_hf_model(torch.nn.Linear(2, 2))


def test_a_model_that_cannot_be_served_stays_as_it_was(without_us: None) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    model = BloomForCausalLM(BloomConfig(**sizes))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"h\.0 \(BloomBlock\) does not call"):
        prepare_hf_model(model)
    assert model.config._attn_implementation == before


def test_a_model_inside_of_another_module(without_us: None) -> None:
    """As a wrapper holds it; its vision tower keeps its attention."""
    model = build("llama")
    outer = torch.nn.Sequential(model)
    assert prepare_hf_model(outer) is outer
    ring = model.config._attn_implementation
    assert model.model.config._attn_implementation == ring != "eager"
    family = "qwen2.5-vl, three axes"
    if is_known(family):
        model = prepare_hf_model(build(family))
        assert model.config.text_config._attn_implementation == ring
        assert model.config.vision_config._attn_implementation == "eager"
    twin = copy.deepcopy(model)
    assert twin.config.get_text_config()._attn_implementation == ring
