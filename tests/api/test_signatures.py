"""The public names: parameters as in ring-flash-attn 0.1.8 and flash-attn, docstrings, pickles."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import FUNCTIONS, extra_arguments, held_of, packed_inputs, sample_for, shard_of

import ring_flash_attn
from ring_flash_attn import api
from ring_flash_attn.api import families
from ring_flash_attn.cache import Cache
from ring_flash_attn.kernels import base

# "name=default" in order; * as in Python. 0.1.8's own, then what is new.
COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, group=None"
)
NEW = "*, softcap=0.0, sink=None, kernel='auto'"
FLASH = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
NODES = NEW.replace("*", "*, ranks_per_node=None")
NEW_FLASH = "*, sink=None, kernel='auto'"
FORMS = {"func": "q, k, v", "kvpacked_func": "q, kv", "qkvpacked_func": "qkv"}
LLAMA3 = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice"
BOTH = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"

# family: (arguments between the tensors and the common ones, the common ones, the new ones)
HISTORIC = {
    "ring_flash_attn": ("", COMMON, NEW),
    "zigzag_ring_flash_attn": ("", COMMON, NEW),
    "stripe_flash_attn": ("", COMMON, NEW),
    "ring_flash_attn_varlen": ("cu_seqlens, max_seqlen", COMMON, NEW),
    "zigzag_ring_flash_attn_varlen": ("cu_seqlens, max_seqlen", COMMON, NEW),
    "llama3_flash_attn_varlen": (LLAMA3, COMMON, NEW),
}
OURS = {
    "stripe_flash_attn_varlen": ("cu_seqlens, max_seqlen", COMMON, NEW),
    "zigzag_llama3_flash_attn_varlen": ("cu_seqlens, heads_k_stride", COMMON, NEW),
    "ulysses_flash_attn": ("", COMMON, NEW),
    "ulysses_flash_attn_varlen": ("cu_seqlens, max_seqlen", COMMON, NEW),
    "usp_flash_attn": ("", COMMON, NODES),
    "usp_flash_attn_varlen": ("cu_seqlens, max_seqlen", COMMON, NODES),
    "double_ring_flash_attn": ("", COMMON, NODES),
    "double_ring_flash_attn_varlen": ("cu_seqlens, max_seqlen", COMMON, NODES),
    "flash_attn": ("", FLASH, NEW_FLASH),
}
EXPECTED = {
    f"{family}_{form}": ", ".join(part for part in (tensors, *parts) if part)
    for family, parts in {**HISTORIC, **OURS}.items()
    for form, tensors in FORMS.items()
} | {
    "ring_flash_attn_qkvpacked_func_v2": f"qkv, {COMMON}, {NEW}",
    "flash_attn_varlen_func": f"q, k, v, {BOTH}, {FLASH}, block_table=None, {NEW_FLASH}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {BOTH}, {FLASH}, {NEW_FLASH}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {FLASH}, {NEW_FLASH}",
}
# The other three of the 21 exports.
HELPERS = {
    "llama3_flash_attn_prepare_cu_seqlens": "cu_seqlens, causal, rank, world_size",
    "substitute_hf_flash_attn": "process_group, heads_k_stride",
    "update_ring_flash_attn_params": "cu_seqlens, process_group",
}
PREFIXED = [f"{prefix}_{name}" for prefix in families.PREFIXES for name in FUNCTIONS]


def parameters(function: Any) -> str:
    """The signature without annotations."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(parameter.name + default)
    return ", ".join(parts)


@pytest.mark.parametrize("name", [*EXPECTED, *HELPERS])
def test_parameters_have_the_known_names_order_and_defaults(name: str) -> None:
    assert parameters(getattr(ring_flash_attn, name)) == {**EXPECTED, **HELPERS}[name]


# flash-attn 2.8.3: flash_attn/flash_attn_interface.py, flash_attn/bert_padding.py.
FLASH_ATTN = {
    "flash_attn.flash_attn_func": f"q, k, v, {FLASH}",
    "flash_attn.flash_attn_kvpacked_func": f"q, kv, {FLASH}",
    "flash_attn.flash_attn_qkvpacked_func": f"qkv, {FLASH}",
    "flash_attn.flash_attn_varlen_func": f"q, k, v, {BOTH}, {FLASH}, block_table=None",
    "flash_attn.flash_attn_varlen_kvpacked_func": f"q, kv, {BOTH}, {FLASH}",
    "flash_attn.flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {FLASH}",
    "flash_attn.bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "flash_attn.bert_padding.unpad_input_for_concatenated_sequences": (
        "hidden_states, attention_mask_in_length"
    ),
    "flash_attn.bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
}


@pytest.mark.parametrize("path", FLASH_ATTN)
def test_flash_attns_parameters_come_first(path: str) -> None:
    """In its order, so that positional calls mean the same; what is ours comes by name."""
    module, _, name = path.rpartition(".")
    ours = importlib.import_module(module.replace("flash_attn", "ring_flash_attn", 1))
    found, _, _ = parameters(getattr(ours, name)).partition(", *")
    assert found == FLASH_ATTN[path]
    if importlib.util.find_spec("flash_attn") is not None:  # what is written above is still true
        theirs = importlib.import_module(module)
        assert parameters(getattr(theirs, name)) == FLASH_ATTN[path]


def test_all_21_exports_are_there() -> None:
    historic = [f"{family}_{form}" for family in HISTORIC for form in FORMS]
    assert len({*historic, *HELPERS}) == 21
    assert set(ring_flash_attn.__all__) >= {*historic, *HELPERS}


def test_the_set_of_functions() -> None:
    """No more and no fewer: those above, `ring_attention`, and each with three prefixes."""
    plain = {*EXPECTED, "ring_attention"}
    prefixed = {f"{prefix}_{name}" for prefix in ("triton", "native", "cute") for name in plain}
    assert set(api.__all__) == plain | prefixed
    assert len(api.__all__) == len(set(api.__all__))
    assert set(FUNCTIONS) == plain


def test_the_general_function_takes_everything_by_name() -> None:
    found = inspect.signature(ring_flash_attn.ring_attention).parameters
    assert list(found)[:6] == ["q", "k", "v", "layout", "route", "kernel"]
    assert found["kernel"].default == "auto"
    assert all(p.kind is p.KEYWORD_ONLY for p in list(found.values())[3:])
    assert set(re.findall(r"(\w+)=", f"{COMMON}, {NEW}")) <= set(found)


@pytest.mark.parametrize("name", PREFIXED)
def test_a_prefixed_function_has_no_kernel_argument(name: str) -> None:
    plain = inspect.signature(getattr(ring_flash_attn, name.split("_", 1)[1]))
    prefixed = inspect.signature(getattr(ring_flash_attn, name))
    expected = [p for p in plain.parameters.values() if p.name != "kernel"]
    assert list(prefixed.parameters.values()) == expected
    assert prefixed.return_annotation == plain.return_annotation


@pytest.mark.parametrize("name", ring_flash_attn.__all__)
def test_a_public_function_is_like_one_written_by_hand(name: str) -> None:
    function = getattr(ring_flash_attn, name)
    assert (function.__name__, function.__qualname__) == (name, name)
    assert getattr(inspect.getmodule(function), name) is function, "what pickle relies on"
    assert pickle.loads(pickle.dumps(function)) is function
    if name in api.__all__:
        assert function.__module__ == "ring_flash_attn.api"
        assert getattr(api, name) is function


@pytest.mark.parametrize("name", ring_flash_attn.__all__)
def test_a_docstring_describes_every_parameter_and_no_other(name: str) -> None:
    function = getattr(ring_flash_attn, name)
    doc = inspect.getdoc(function) or ""
    first, _, rest = doc.partition("\n")
    assert first.endswith((".", "…")), "one sentence first"
    assert "{" not in rest, "a placeholder is left"
    lines = re.split(r"Returns:|Raises:", doc.partition("Args:")[2])[0].splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    entries = [line.strip() for line in lines if line[indent : indent + 1].strip()]
    described = [n for entry in entries for n in entry.split(":")[0].split(", ")]
    assert sorted(described) == sorted(inspect.signature(function).parameters)
    assert all(entry.partition(":")[2].strip() for entry in entries)


@pytest.mark.parametrize("name", PREFIXED)
def test_a_prefixed_docstring_names_its_kernel(name: str) -> None:
    prefix = name.split("_", 1)[0]
    assert f"Always uses the kernel {prefix!r}" in getattr(ring_flash_attn, name).__doc__


def test_the_v2_docstring_says_what_it_is_here() -> None:
    doc = ring_flash_attn.ring_flash_attn_qkvpacked_func_v2.__doc__ or ""
    assert "query ring" in doc
    assert "historic" in doc


def test_the_stub_is_current() -> None:
    """`make format` writes it."""
    assert Path(api.__file__).with_suffix(".pyi").read_text() == families.stub()


def test_the_stub_has_the_real_signatures() -> None:
    """Executed as Python, its functions have the parameters of the real ones."""
    text = Path(api.__file__).with_suffix(".pyi").read_text()
    scope: dict[str, Any] = {
        "__name__": "ring_flash_attn.api.stub",
        "__package__": "ring_flash_attn.api",
    }
    exec(compile("from __future__ import annotations\n" + text, "api.pyi", "exec"), scope)
    assert scope["__all__"] == api.__all__
    for name in api.__all__:
        assert inspect.signature(scope[name]) == inspect.signature(getattr(api, name)), name


def missing_kernels(rank: int, n: int) -> dict[str, str]:
    """Call every prefixed function and collect what it says."""
    said = {}
    for name in PREFIXED:
        plain = name.split("_", 1)[1]
        sample = sample_for(plain)
        layout = FUNCTIONS[plain][0].layout or "zigzag"
        if not plain.startswith("flash_attn"):
            tokens = held_of(layout, sample.cu_seqlens_q, sample.q.shape[-3], rank, n)
            arguments = extra_arguments(plain, sample, rank, n)
            sample = shard_of(sample, tokens)
        else:
            arguments = extra_arguments(plain, sample, 0, 1)
        inputs = [x.half() for x in packed_inputs(FUNCTIONS[plain][1], sample)]
        try:
            getattr(ring_flash_attn, name)(*inputs, **arguments)
        except NotImplementedError as error:
            said[name] = str(error)
    return said


def test_a_kernel_that_is_not_there_says_how_to_get_it(ranks: Any) -> None:
    """On every rank, and before anything is sent; nothing falls back to another kernel."""
    for said in ranks(3).run(missing_kernels):
        for name in PREFIXED:
            prefix = name.split("_", 1)[0]
            if prefix == base.NATIVE:
                for library in base.LIBRARIES:
                    assert f"{library}: it needs an NVIDIA GPU, not cpu" in said[name]
                continue
            if prefix == "cute":
                assert "cute: it needs a Hopper GPU, not cpu" in said[name]
            why = base.load_kernel(prefix)
            if isinstance(why, str):
                assert why in said[name]
                assert base._ENTRIES[prefix].hint in said[name]
                assert f"kernel {prefix!r} cannot do this call" in said[name]


def test_auto_lists_every_kernels_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nobody who can, each candidate says why."""
    monkeypatch.setattr(base.load_kernel("reference"), "why_not", lambda call: ["a", "b"], False)
    monkeypatch.setattr("ring_flash_attn.engine.entry._ready", Cache(1))
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError) as raised:
        ring_flash_attn.flash_attn_func(x, x, x)
    lines = str(raised.value).splitlines()
    assert lines[0] == "kernel 'auto' cannot do this call:"
    for name in {*base.kernel_names()} - {"cute"}:
        assert any(line.strip().startswith(f"{name}: ") for line in lines), name
    assert "  reference: a" in lines
    assert "  reference: b" in lines
