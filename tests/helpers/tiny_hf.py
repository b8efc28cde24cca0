"""Tiny random Hugging Face models, one for each kind of attention, and their results on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from ring_flash_attn.adapters.hf_models import has_interface, set_implementation

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
WINDOW = {"sliding_window": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def _of(name: str, config: str, **options: Any) -> Callable[[], Any]:
    """A model by the names of its classes, which old versions may not have."""

    def make() -> Any:
        kind = getattr(transformers, name)
        return kind(getattr(transformers, config)(**{**SIZES, **options}))

    make.needs = name  # type: ignore[attr-defined]
    return make


def _vision_language() -> Any:
    """Positions of its text have three axes: time, height and width."""
    text = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    del text["head_dim"]  # hidden_size over heads
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 32, "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    config.text_config.vocab_size = VOCABULARY
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


_vision_language.needs = "Qwen2_5_VLForConditionalGeneration"  # type: ignore[attr-defined]

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _of("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": _of("Qwen3ForCausalLM", "Qwen3Config"),
    "mistral, window": _of("MistralForCausalLM", "MistralConfig", **WINDOW),
    # a cap near the size of the scores, so that it bends them
    "gemma2, window, softcap": _of(
        "Gemma2ForCausalLM", "Gemma2Config", **WINDOW, attn_logit_softcapping=0.5
    ),
    "gemma3, windows in some layers": _of(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt-oss, window, sinks": _of("GptOssForCausalLM", "GptOssConfig", **WINDOW, **EXPERTS),
    "qwen2.5-vl, three axes": _vision_language,
    "gpt2": _of(
        "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    ),
}  # fmt: skip


def is_known(family: str) -> bool:
    """Whether the installed version has it."""
    return hasattr(transformers, FAMILIES[family].needs)  # type: ignore[attr-defined]


def choose(model: Any, implementation: str) -> None:
    """Set the attention of all layers; before 4.53, "ring_attention" goes by another name."""
    if implementation == "ring_attention" and not has_interface():
        implementation = "flash_attention_2"
    parts = (getattr(model.config, name, None) for name in ("text_config", "vision_config"))
    for config in (model.config, *(part for part in parts if part is not None)):
        set_implementation(model, config, implementation)


def build(family: str, implementation: str = "eager") -> Any:
    """The same model on every rank, in fp32."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    choose(model, implementation)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "proj" in key or "sinks" in key:  # scores and sinks large enough to matter
                parameter.normal_(std=0.3)
    return model


def batch_of(lengths: Sequence[int], axes: int = 1, seed: int = 1) -> dict[str, Tensor]:
    """Packed documents in one row; some tokens nobody has to predict. Positions may have axes."""
    torch.manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(VOCABULARY, (1, total))
    found = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(1, total) < 0.2, -100)}
    found["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    if axes > 1:
        steps = [torch.randint(2, (axes, 1, n)).cumsum(-1) for n in lengths]
        found["position_ids"] = torch.cat([each - each[..., :1] for each in steps], dim=-1)
    return found


def on_one_rank(model: Any, batches: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Logits of each batch (total, vocabulary), loss and gradients; one document at a time."""
    model.zero_grad()
    logits, total, count = [], torch.zeros(()), 0
    for batch in batches:
        lengths, rows = batch["cu_seqlens"].diff().tolist(), []
        positions = batch.get("position_ids")
        wheres = [None] * len(lengths) if positions is None else positions.split(lengths, dim=-1)
        parts = [batch[name].split(lengths, dim=-1) for name in ("input_ids", "labels")]
        for ids, labels, where in zip(*parts, wheres, strict=True):
            own = {} if where is None else {"position_ids": where}
            found = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **own).logits
            rows.append(found[0])
            total = total + F.cross_entropy(found[0, :-1], labels[0, 1:], reduction="sum")
            count += int((labels[0, 1:] != -100).sum())
        logits.append(torch.cat(rows).detach())
    loss = total / count
    loss.backward()
    return {"logits": logits, "loss": loss.detach(), "grads": gradients(model)}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    """To fp32's rounding, relative to the largest: 1.0e-5 is the most that was measured."""
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 3e-5, f"{what}: {error:.1e}"
