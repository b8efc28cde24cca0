"""Every argument of every public function is honoured or refused by name, whatever is passed.

The calls are generated: each function's signature says which arguments it has, an argument's name
says of which kind it is, and a kind says what the values of one common pool mean to it. What a kind
does not list has to raise a TypeError or ValueError that names the argument; what it lists has to
give the result of the plain Python value that it means.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from calls import FUNCTIONS, extra_arguments, packed_inputs
from samples import make_sample
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.nn import functional as F

import ring_flash_attn
from ring_flash_attn.api.families import PREFIXES
from ring_flash_attn.engine.prepare import Options

pytestmark = [  # torch warns of the tensors that are made here
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
Arguments = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nested(*shape: int) -> Tensor:
    """A nested tensor, which torch takes for a strided one."""
    return torch.nested.nested_tensor([torch.randn(shape), torch.randn(shape)])


def quantized(x: Tensor) -> Tensor:
    """The tensor in 8 bits with a scale."""
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)


def dtensor(x: Tensor) -> Tensor:
    """The tensor on a mesh of one device."""
    mesh = init_device_mesh("cpu", (1,))
    return DTensor.from_local(x, mesh, [Replicate()])


@functools.cache
def pool() -> dict[str, Any]:
    """What is tried for every argument."""
    return {
        "None": None,
        "True": True,
        "0": 0,
        "1": 1,
        "-5": -5,
        "10**30": 10**30,
        "1.0": 1.0,
        "0.5": 0.5,
        "1.5": 1.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "1j": 1j,
        "'False'": "False",
        "''": "",
        "b'1'": b"1",
        "[]": [],
        "[1]": [1],
        "(1, 2)": (1, 2),
        "{}": {},
        "{1}": {1},
        "object": object(),
        "type": int,
        "slice": slice(0, 1),
        "range": range(2),
        "generator": (x for x in ()),
        "NumPy 1": np.int64(1),
        "NumPy 0.5": np.float64(0.5),
        "NumPy True": np.bool_(True),
        "NumPy nan": np.float32("nan"),
        "NumPy text": np.str_("1"),
        "array": np.array([1, 2]),
        "tensor of 1": torch.tensor(1),
        "tensor of 0.5": torch.tensor(0.5),
        "tensor of True": torch.tensor(True),
        "tensor of 1j": torch.tensor(1j),
        "tensor of nan": torch.tensor(float("nan")),
        "two elements": torch.tensor([1, 2]),
        "on meta": torch.tensor(1, device="meta"),
        "with gradient": torch.tensor(0.5, requires_grad=True),
        "sparse": torch.eye(2).to_sparse(),
        "nested": nested(2, 3),
        "quantized": quantized(torch.eye(2)),
        "DTensor": dtensor(torch.tensor(1)),
    }


ONES = {"1": 1, "NumPy 1": 1, "tensor of 1": 1}  # what an integer 1 may come as
HALVES = {"0.5": 0.5, "NumPy 0.5": 0.5, "tensor of 0.5": 0.5}


@dataclass
class Kind:
    """What values mean to a kind of argument.

    Attributes:
        means: of the pool, by name: the plain values that they stand for.
        like: from a right value, others that mean the same.
        unlike: from a right value, wrong ones that the pool does not have.
    """

    means: dict[str, Any] = field(default_factory=dict)
    like: Callable[[Any], list[Any]] = lambda right: []
    unlike: Callable[[Any], list[Any]] = lambda right: []


def spoilt_tensors(x: Tensor) -> list[Any]:
    """Tensors of a right shape, or almost, that kernels cannot take."""
    return [
        x.to(torch.float8_e4m3fn),
        x.to(torch.float8_e5m2),
        x.to(torch.int64),
        x.bool(),
        x.to(torch.complex64),
        x.to_sparse(),
        quantized(x),
        dtensor(x),
        x[None, None],
        x.to("meta"),
        nested(*x.shape[1:]),
        x.tolist(),
        x.numpy(),
    ]


def integers_like(right: int | None) -> list[Any]:
    """A right integer in other clothes."""
    return [] if right is None else [np.int32(right), torch.tensor(right), np.array(right)]


def integers_unlike(right: int | None) -> list[Any]:
    """What only looks like a right integer."""
    if right is None:
        return []
    return [float(right), str(right), [right], torch.tensor([right]), torch.tensor(float(right))]


def offsets_like(right: Any) -> list[Any]:
    """Right offsets in other clothes."""
    if right is None:
        return []
    values = [int(x) for x in right]
    every = [torch.tensor(values), torch.tensor(values).int(), np.array(values), tuple(values)]
    return [*every, [*map(np.int64, values)], [*map(torch.tensor, values)]]


def offsets_unlike(right: Any) -> list[Any]:
    """What only looks like right offsets."""
    if right is None:
        return []
    values = torch.tensor([int(x) for x in right])
    tensors = [values.float(), values.short(), values[None], values.to("meta"), values + 1]
    tensors += [values.to_sparse(), dtensor(values), values[:1], values.flip(0), values.double()]
    lists = [values.float().tolist(), [str(x) for x in values.tolist()], [values.tolist()]]
    return [*tensors, *lists, {*values.tolist()}, iter(values.tolist()), values.numpy() * 1.0]


def slices_like(right: slice) -> list[Any]:
    """A right slice in other clothes."""
    return [slice(np.int64(right.start), torch.tensor(right.stop)), slice(*right.indices(10**6))]


def slices_unlike(right: slice) -> list[Any]:
    """What only looks like a right slice."""
    bounds = [(0.0, right.stop), ("0", right.stop), (False, right.stop), (0, right.stop, 0)]
    return [slice(*bound) for bound in bounds] + [slice(right.stop, right.start, -1)]


FLAG = Kind({"0": False, **dict.fromkeys(("True", "NumPy True", "tensor of True", *ONES), True)})
INTEGER = Kind({}, integers_like, integers_unlike)
TENSOR = Kind({}, unlike=spoilt_tensors)
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
BY_HEAD = Kind({"None": None}, lambda right: [right.double()], spoilt_tensors)
NAME = Kind({}, unlike=lambda right: [[right], right.encode(), right.upper(), {right: 1}])
OFFSETS = Kind({}, offsets_like, offsets_unlike)
MAYBE_OFFSETS = Kind({"None": None}, offsets_like, offsets_unlike)
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("q", "k", "v", "kv", "qkv"), TENSOR),
    **dict.fromkeys(("causal", "deterministic", "return_attn_probs"), FLAG),
    "dropout_p": Kind({"0": 0.0, **HALVES}),
    "softmax_scale": Kind(
        {"None": None, "0": 0.0, "-5": -5.0, "10**30": 1e30, "1.0": 1.0, "1.5": 1.5} | ONES | HALVES
    ),
    "softcap": Kind(
        {"None": 0.0, "0": 0.0, "10**30": 1e30, "1.0": 1.0, "1.5": 1.5} | ONES | HALVES
    ),
    "window_size": Kind(
        {"(1, 2)": (1, 2)},
        like=lambda right: [[*right], (np.int64(right[0]), torch.tensor(right[1]))],
        unlike=lambda _: [(True, 2), (1.5, 2), (1,), (1, 2, 3), ("1", "2"), (-2, 0), (None, 0)],
    ),
    "alibi_slopes": BY_HEAD,
    "sink": BY_HEAD,
    "kernel": NAME,
    "layout": NAME,
    "route": NAME,
    **dict.fromkeys(("group", "mesh"), Kind({"None": None}, like=lambda _: [dist.group.WORLD])),
    "block_table": Kind({"None": None}),
    "cu_seqlens": OFFSETS,
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), INTEGER),
    "local_k_slice": Kind({}, slices_like, slices_unlike),
}


@dataclass
class Case:
    """A function with right arguments, and what is particular to them."""

    function: Callable[..., Any]
    right: Arguments
    parameters: tuple[str, ...]  # those that are tried
    kinds: dict[str, Kind] = field(default_factory=dict)  # where they are not those of KINDS

    def kind(self, parameter: str) -> Kind:
        return self.kinds.get(parameter) or KINDS[parameter]

    def result(self, **changes: Any) -> list[Any]:
        torch.default_generator.manual_seed(0)  # of dropout
        found = self.function(**{**self.right, **changes})
        return list(found) if isinstance(found, (tuple, list)) else [found]


def cases_of(name: str) -> Iterator[tuple[str, Case]]:
    """The right calls of an attention function, which are then spoilt."""
    prefix, _, rest = name.partition("_")
    base = rest if prefix in PREFIXES else name
    function = getattr(ring_flash_attn, name)
    names = tuple(inspect.signature(function).parameters)
    family, form = FUNCTIONS[base]
    lengths = (3, 1) if family.packed else None
    heads = 4 if form.startswith("qkvpacked") else 2
    sample = make_sample(lengths, batch=2, seqlen_q=3, nheads_k=heads, headdim=2)
    tensors = dict(zip(names, packed_inputs(form, sample)))
    common = {"window_size": (1, 1), "alibi_slopes": SLOPES, "sink": SLOPES}
    tensors = {**tensors, **common}
    if base != "ring_attention":
        right = {**tensors, **extra_arguments(base, sample, 0, 1)}
        strides = {"heads_k_stride": Kind(ONES, integers_like, integers_unlike)}
        if base.startswith(("usp", "double_ring")):
            strides["ranks_per_node"] = Kind({**NOTHING, **ONES})
        if base.startswith(("stripe", "ulysses", "usp", "double_ring")):  # None: no limit
            strides["max_seqlen"] = Kind({"None": None}, integers_like, integers_unlike)
        if base.startswith("zigzag_llama3"):  # None: all heads at once
            strides["heads_k_stride"] = Kind({"None": None, **ONES}, integers_like, integers_unlike)
        yield name, Case(function, right, names, strides)
        return
    shape = sample.q.shape[1]
    batch = {**tensors, "layout": "zigzag", "seqlen": shape, "seqlen_k": shape}
    optional = {"None": None}
    integer = Kind(optional, integers_like, integers_unlike)
    counts = Kind({**optional, **ONES}, integers_like, integers_unlike)
    kinds = {"seqlen": integer, "seqlen_k": integer}
    ring = {"sources_per_launch": Kind(counts.means), "heads_k_stride": Kind(optional)}
    gathered = {"sources_per_launch": Kind(optional), "heads_k_stride": counts}
    kinds["ranks_per_node"] = Kind(optional)
    most = tuple(each for each in names if not each.startswith("cu_seqlens"))
    yield f"{name}, ring", Case(function, {**batch, "route": "ring"}, most, {**kinds, **ring})
    right = {**batch, "route": "all_gather"}
    yield f"{name}, gathered", Case(function, right, most, {**kinds, **gathered})
    packed = {each: tensors[each].flatten(0, 1) for each in ("q", "k", "v")}
    offsets = {"cu_seqlens": [0, shape, 2 * shape], "cu_seqlens_k": [0, shape, 2 * shape]}
    right = {**packed, **offsets, "layout": "flat_stripe", "route": "query_ring"}
    own = ("q", "k", "v", "layout", "route", "cu_seqlens", "cu_seqlens_k")
    yield f"{name}, packed", Case(function, right, own, {"cu_seqlens_k": MAYBE_OFFSETS})


DIM = Kind({"None": None, "0": 0, **ONES}, integers_like, integers_unlike)
WHO = {
    "rank": Kind({"0": 0}, integers_like, integers_unlike),
    "world_size": Kind(ONES, integers_like, integers_unlike),
}
NOTHING = {"None": None}


def context_parallel(buffers: Any, **arguments: Any) -> list[Tensor]:
    """What the context does to buffers and to torch's attention."""
    with ring_flash_attn.context_parallel(buffers=buffers, **arguments):
        shards = [x.clone() for x in buffers]
        x = torch.linspace(-1, 1, 7 * 4).view(1, 1, 7, 4)
        return [*shards, F.scaled_dot_product_attention(x, x, x)]


def other_cases() -> Iterator[tuple[str, Case]]:
    """The functions that are no attention functions, and virtual_ring_attention."""
    x, cu = torch.randn(6, 7), torch.tensor([0, 2, 6])
    one = {"rank": 0, "world_size": 1}
    tensors = Kind({}, unlike=lambda x: [v for v in spoilt_tensors(x) if not is_plain(v)])
    shard = ring_flash_attn.shard
    names = ("x", "layout", "dim", "rank", "world_size")
    kinds = {"x": tensors, "dim": DIM, **WHO}
    yield "shard", Case(shard, {"x": x, "layout": "zigzag", **one}, names, kinds)
    packed = {"x": x, "layout": "zigzag", "cu_seqlens": cu}
    kinds = {"x": tensors, "cu_seqlens": MAYBE_OFFSETS, "dim": Kind({"None": None, "0": 0})}
    yield "shard, packed", Case(shard, packed, (*kinds, "group", "layout"), kinds)
    keys = {**packed, "layout": "balanced", "cu_seqlens_q": cu}
    of_queries = {"cu_seqlens_q": MAYBE_OFFSETS}
    yield "shard, keys", Case(shard, keys, tuple(of_queries), of_queries)

    unshard = ring_flash_attn.unshard
    seqlen = Kind(NOTHING, integers_like, integers_unlike)
    kinds = {"x": tensors, "seqlen": seqlen, "dim": Kind(NOTHING | ONES)}
    right = {"x": x, "layout": "zigzag", "seqlen": 7}
    kinds["grad"] = Kind(NOTHING, like=lambda _: ["sum", "slice"])
    yield "unshard", Case(unshard, right, ("layout", "group", *kinds), kinds)
    shards = Kind({}, unlike=lambda x: [[x[0], x[1].double()], [x[0], x[1][:2]], [x[0], x[1][0]]])
    kinds = {"x": shards, "cu_seqlens": MAYBE_OFFSETS, "seqlen": Kind(NOTHING)}
    right = {"x": [x[:3], x[3:]], "layout": "zigzag", "cu_seqlens": cu}
    kinds["group"] = Kind(NOTHING)
    yield "unshard, list", Case(unshard, right, ("layout", *kinds), kinds)
    keys = {**right, "layout": "balanced", "cu_seqlens_q": cu}
    yield "unshard, keys", Case(unshard, keys, tuple(of_queries), of_queries)

    relayout = ring_flash_attn.relayout
    layouts = dict.fromkeys(("from_layout", "to_layout"), NAME)
    meta = Kind({}, unlike=lambda x: [*tensors.unlike(x), x.to("meta")])
    kinds = {"x": meta, **layouts, "seqlen": seqlen, "dim": Kind(NOTHING | ONES)}
    right = {"x": x, "from_layout": "zigzag", "to_layout": "stripe", "seqlen": 7}
    yield "relayout", Case(relayout, right, (*kinds, "group"), kinds)
    kinds = {"x": shards, **layouts, "cu_seqlens": MAYBE_OFFSETS, "seqlen": Kind(NOTHING)}
    right = {"x": [x[:3], x[3:]], "from_layout": "zigzag", "to_layout": "stripe", "cu_seqlens": cu}
    kinds |= {"group": Kind(NOTHING), "dim": Kind({"None": None, "0": 0})}
    yield "relayout, list", Case(relayout, right, tuple(kinds), kinds)

    position_ids = ring_flash_attn.position_ids
    device = Kind(NOTHING, like=lambda _: ["cpu", torch.device("cpu")])
    lengths = Kind({"0": 0, **ONES}, integers_like, integers_unlike)
    kinds = {"seqlen": lengths, "device": device, **WHO}
    right = {"layout": "zigzag", "seqlen": 6, "device": "cpu", **one}
    yield "position_ids", Case(position_ids, right, ("layout", *kinds), kinds)
    kinds = {"cu_seqlens": MAYBE_OFFSETS, "seqlen": seqlen}
    right = {"layout": "zigzag", "cu_seqlens": cu, "seqlen": 6}
    yield "position_ids, packed", Case(position_ids, right, ("layout", "group", *kinds), kinds)
    keys = {**right, "layout": "balanced", "cu_seqlens_q": cu}
    yield "position_ids, keys", Case(position_ids, keys, tuple(of_queries), of_queries)

    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    small = torch.tensor([0, 1], dtype=torch.int32)  # the results have its dtype
    offsets = Kind({"range": small}, lambda right: offsets_like(right)[1:], offsets_unlike)
    right = {"cu_seqlens": cu.int(), "causal": True, **one}
    yield "prepare", Case(prepare, right, tuple(right), {**WHO, "cu_seqlens": offsets})

    prepare = ring_flash_attn.prepare
    right = {"cu_seqlens": cu, "layout": "zigzag", "route": "ring", "nheads_k": 2, **one}
    right |= {"causal": True, "window_size": (1, 1), "sources_per_launch": 2, "group": None}
    kinds = {"cu_seqlens": Kind({"range": [0, 1]}, offsets_like, offsets_unlike), **WHO}
    kinds["nheads_k"] = Kind(ONES, integers_like, integers_unlike)
    kinds |= {"sources_per_launch": Kind({**NOTHING, **ONES}), "group": Kind(NOTHING)}
    yield "prepare ahead", Case(prepare, right, tuple(right), kinds)
    more = {"cu_seqlens_k": MAYBE_OFFSETS, "heads_k_stride": Kind({**NOTHING, **ONES})}
    right = {**right, "route": "all_gather", "sources_per_launch": None}
    right |= {"cu_seqlens_k": cu, "heads_k_stride": 2}
    yield "prepare ahead, keys", Case(prepare, right, tuple(more), more)

    update = ring_flash_attn.update_ring_flash_attn_params
    right = {"cu_seqlens": cu, "process_group": None}
    kinds = {"cu_seqlens": Kind({"range": [0, 1]}, offsets_like, offsets_unlike)}
    kinds["process_group"] = KINDS["group"]
    yield "update", Case(update, right, tuple(right), kinds)

    lists = Kind({}, unlike=lambda right: [right[0], {0: right[0]}, {*right}, [*right, *right]])
    dims = {"buffer_seq_dims": Kind({"[1]": [1]}), "seq_dims": Kind({"[1]": [1]})}
    kept = Kind({"None": None, "[]": []}, unlike=lambda _: [{x}, [x], x])
    routes = Kind(NOTHING, unlike=NAME.unlike)
    kinds = {"buffers": lists, **dims, "no_restore_buffers": kept, "route": routes}
    right = {"mesh": None, "buffers": [x.clone()], "buffer_seq_dims": [1], "layout": "zigzag"}
    names = ("mesh", "buffers", "buffer_seq_dims", "no_restore_buffers", "layout", "route")
    right |= {"kernel": "reference", "route": "ring"}
    yield "context_parallel", Case(context_parallel, right, (*names, "kernel"), kinds)
    gathered = ring_flash_attn.context_parallel_unshard
    kinds |= {"load_balancer": Kind(NOTHING), "seqlen": seqlen}
    right = {"mesh": None, "buffers": [x], "seq_dims": [1], "layout": "zigzag", "seqlen": 7}
    names = ("mesh", "buffers", "seq_dims", "load_balancer", "layout", "seqlen")
    yield "context_parallel_unshard", Case(gathered, right, names, kinds)
    rotate = ring_flash_attn.set_rotate_method
    right = {"rotate_method": "alltoall"}
    yield "set_rotate_method", Case(rotate, right, tuple(right), {"rotate_method": NAME})

    virtual = ring_flash_attn.virtual_ring_attention
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8)
    options = tuple(option.name for option in fields(Options))
    right = {"q": q, "k": k, "v": k, "world_size": 2, "layout": "zigzag", "route": "ring"}
    right |= {"window_size": (1, 1), "alibi_slopes": SLOPES, "sink": SLOPES, "kernel": "reference"}
    few = {"world_size": WHO["world_size"], "sources_per_launch": Kind({**NOTHING, **ONES})}
    kinds = {**few, "heads_k_stride": Kind(NOTHING), "ranks_per_node": Kind(NOTHING)}
    names = tuple(
        n
        for n in inspect.signature(virtual).parameters
        if n not in ("options", "cu_seqlens", "cu_seqlens_k")
    )
    yield "virtual", Case(virtual, right, tuple(dict.fromkeys((*names, *options))), kinds)
    right |= {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": k.flatten(0, 1)}
    right |= {"cu_seqlens": [0, 5, 12], "cu_seqlens_k": [0, 5, 12]}
    own = ("q", "cu_seqlens", "cu_seqlens_k")
    yield "virtual, packed", Case(virtual, right, own, {"cu_seqlens_k": MAYBE_OFFSETS})


def is_plain(value: Any) -> bool:
    """A dense tensor on a device, of any dtype."""
    dense = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_quantized
    return dense and not value.is_nested and value.layout is torch.strided


# What an error may call an argument, besides its name.
ALIASES = {
    "kv": ("k", "v"),
    "qkv": ("q", "k", "v"),
    "seqlen_k": ("seqlen",),
    "from_layout": ("layout",),
    "to_layout": ("layout",),
    "cu_seqlens_k": ("cu_seqlens",),
    "process_group": ("group",),
    "mesh": ("group",),
}


def names_it(parameter: str, message: str) -> bool:
    """Whether an error is about the argument."""
    names = (parameter, *ALIASES.get(parameter, ()))
    return any(re.search(rf"(?<!\w){each}(?!\w)", message) for each in names)


def same(a: Any, b: Any) -> bool:
    """Whether two results are, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def refuses(case: Case, parameter: str, value: Any) -> str | None:
    """None if the value is refused by name, else what happened."""
    try:
        case.result(**{parameter: value})
    except (TypeError, ValueError) as error:
        return None if names_it(parameter, str(error)) else f"{type(error).__name__}: {error}"
    except NotImplementedError as error:
        is_paged = parameter == "block_table" and "block_table" in str(error)
        return None if is_paged else f"NotImplementedError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def honours(case: Case, parameter: str, value: Any, expected: list[Any]) -> str | None:
    """None if the value gives the expected result, else what happened."""
    try:
        found = case.result(**{parameter: value})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    right = len(found) == len(expected) and all(map(same, found, expected))
    return None if right else "another result"


def problems(case: Case, parameter: str) -> Iterator[str]:
    """What does not go as it should, of one argument."""
    kind = case.kind(parameter)
    right = case.right.get(parameter)
    tries: list[tuple[str, Any, list[Any] | None]] = []
    meanings = {repr(x): x for x in kind.means.values()}
    right_results = {text: case.result(**{parameter: x}) for text, x in meanings.items()}
    for name, meaning in kind.means.items():
        tries.append((name, pool()[name], right_results[repr(meaning)]))
    expected = case.result()
    tries += [(f"like {i}", value, expected) for i, value in enumerate(kind.like(right))]
    for name, value in pool().items():
        if name not in kind.means:
            tries.append((name, value, None))
    tries += [(f"unlike {i}", value, None) for i, value in enumerate(kind.unlike(right))]
    for name, value, results in tries:
        if results is None:
            what = refuses(case, parameter, value)
        else:
            what = honours(case, parameter, value, results)
        if what:
            shown = "" if isinstance(value, Tensor) else f" {value!r}"
            yield f"{parameter} = {name}{shown}: {what}"


ATTENTION = tuple(ring_flash_attn.api.__all__)
# Those that take q, k and v and choose the kernel; the others share all but that with one of them.
WHOLE = [name for name, (_, form) in FUNCTIONS.items() if form in ("func", "")]


PLANNER = "plan_for"  # in tests/simulate: each of its calls takes a second


def test_every_public_function_is_tried() -> None:
    others = {case.function.__name__ for _, case in other_cases()}
    functions = {
        name
        for name in ring_flash_attn.__all__
        if not isinstance(getattr(ring_flash_attn, name), type)
    }
    assert {*ATTENTION, *others, *HUGGING_FACE, PLANNER} == functions


@pytest.mark.parametrize("name", WHOLE)
def test_attention_functions(name: str) -> None:
    for title, case in cases_of(name):
        case.right["kernel"] = "reference"
        found = [each for parameter in case.parameters for each in problems(case, parameter)]
        assert not found, f"{title}:\n" + "\n".join(found)


def test_other_functions() -> None:
    found = []
    for title, case in other_cases():
        for parameter in case.parameters:
            found += [f"{title}: {each}" for each in problems(case, parameter)]
    assert not found, "\n".join(found)


# Functions that change transformers: values of each argument that are right.
HUGGING_FACE: dict[str, dict[str, dict[str, Any]]] = {
    "substitute_hf_flash_attn": {"process_group": NOTHING, "heads_k_stride": ONES},
    "prepare_hf_model": {"model": {}},
    "use_ring_attn": {"flag": FLAG.means},
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_what_changes_transformers_refuses_wrong_arguments_before(name: str) -> None:
    rights = HUGGING_FACE[name]
    right = {parameter: next(iter(means.values()), None) for parameter, means in rights.items()}
    case = Case(getattr(ring_flash_attn, name), right, ())
    found = [
        f"{parameter} = {name}: {problem}"
        for parameter, means in rights.items()
        for name, value in pool().items()
        if name not in means and (problem := refuses(case, parameter, value))
    ]
    assert not found, "\n".join(found)


def test_other_forms_of_attention_functions() -> None:
    """Packed tensors, and functions of one kernel: a few wrong values for each argument."""
    found = []
    values = cycle(pool().items())
    for name in ATTENTION:
        for title, case in cases_of(name) if name not in WHOLE else ():
            for parameter in case.parameters:
                kind = case.kind(parameter)
                wrong = [(n, x) for n, x in islice(values, 4) if n not in kind.means]
                if isinstance(case.right.get(parameter), Tensor):
                    wrong += enumerate(kind.unlike(case.right[parameter]))
                for what, value in wrong:
                    problem = refuses(case, parameter, value)
                    found += [f"{title}: {parameter} = {what}: {problem}"] if problem else []
    assert not found, "\n".join(found)
