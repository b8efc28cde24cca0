"""The import paths of the original library, and what is behind them."""

import importlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import ring_flash_attn
from ring_flash_attn.adapters import bert_padding, historic, module_paths
from ring_flash_attn.comm import historic as communicators
from ring_flash_attn.plan import layout

STEMS = [
    "ring_flash_attn",
    "ring_flash_attn_varlen",
    "zigzag_ring_flash_attn",
    "zigzag_ring_flash_attn_varlen",
    "stripe_flash_attn",
    "llama3_flash_attn_varlen",
]
FUNCTIONS = [
    (stem, f"{stem}_{suffix}")
    for stem in STEMS
    for suffix in ("func", "kvpacked_func", "qkvpacked_func")
] + [("llama3_flash_attn_varlen", "llama3_flash_attn_prepare_cu_seqlens")]
UTILITIES = [
    ("utils", "get_default_args", historic),
    ("utils", "update_out_and_lse", historic),
    ("utils", "flatten_varlen_lse", historic),
    ("utils", "unflatten_varlen_lse", historic),
    ("utils", "RingComm", communicators),
    ("utils", "AllGatherComm", communicators),
    ("triton_utils", "flatten_varlen_lse", historic),
    ("triton_utils", "unflatten_varlen_lse", historic),
    *(("bert_padding", name, bert_padding) for name in bert_padding.__all__),
    ("layout", "get_layout", layout),
    ("layout", "layout_names", layout),
    ("layout", "register_layout", layout),
]
HF_ADAPTER = [
    "DATA_PARAMS",
    "RING_ATTN_SWITCH",
    "check_params",
    "create_ring_flash_attention_forward",
    "flash_attention_forward",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "use_ring_attn",
]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_a_function_is_the_public_one(module: str, name: str) -> None:
    found = getattr(importlib.import_module(f"ring_flash_attn.{module}"), name)
    assert found is getattr(ring_flash_attn, name)
    assert found.__name__ == name


@pytest.mark.parametrize(("module", "name", "home"), UTILITIES)
def test_a_utility_is_the_one_at_home(module: str, name: str, home: object) -> None:
    found = getattr(importlib.import_module(f"ring_flash_attn.{module}"), name)
    assert found is getattr(home, name)


def test_every_path_is_covered_here() -> None:
    covered = {*FUNCTIONS, *((module, name) for module, name, _ in UTILITIES)}
    table = module_paths.MODULE_PATHS.items()
    assert covered == {(module, name) for module, sources in table for name in sources}


@pytest.mark.parametrize("name", HF_ADAPTER)
def test_the_hugging_face_adapter_has(name: str) -> None:
    assert hasattr(importlib.import_module("ring_flash_attn.adapters.hf_adapter"), name)


@pytest.mark.parametrize("module", module_paths.MODULE_PATHS)
def test_a_star_import_brings_the_names(module: str) -> None:
    names: dict[str, object] = {}
    exec(f"from ring_flash_attn.{module} import *", names)
    assert set(module_paths.MODULE_PATHS[module]) <= set(names)


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="no_such_function"):
        exec("from ring_flash_attn.utils import no_such_function")


STATEMENTS = """
import sys
sys.modules["transformers"] = None  # importing it raises
import ring_flash_attn.utils as u
assert u.RingComm and u.__name__ == "ring_flash_attn.utils"
from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func
from ring_flash_attn.triton_utils import flatten_varlen_lse, unflatten_varlen_lse
import ring_flash_attn
assert ring_flash_attn.ring_flash_attn.ring_flash_attn_func is ring_flash_attn.ring_flash_attn_func
import ring_flash_attn.adapters.hf_adapter
from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
import importlib.util
assert importlib.util.find_spec("ring_flash_attn.utils") is not None
assert "triton" not in sys.modules
"""


def test_the_statements_projects_write_work_in_a_fresh_process() -> None:
    subprocess.run([sys.executable, "-c", STATEMENTS], check=True)


def test_default_args_of_a_function() -> None:
    def function(q, k, causal=False, softcap=None, *, keyword=1):
        pass

    expected = {"q": None, "k": None, "causal": False, "softcap": 0.0}
    assert historic.get_default_args(function) == expected
    historic.get_default_args(function)["causal"] = True
    assert historic.get_default_args(function) == expected


def test_default_args_of_a_custom_operator() -> None:
    @torch.library.custom_op("ring_flash_attn_test::scale", mutates_args=())
    def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    assert historic.get_default_args(scale) == {"x": None, "factor": 2.0}


def blocks(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three blocks' out (3, *lead, 7, 2, 4) and lse (3, *lead, 2, 7)."""
    torch.manual_seed(0)
    return torch.randn(3, *lead, 7, 2, 4), torch.randn(3, *lead, 2, 7) * 5


def merged_at_once(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge in fp64, all blocks in one softmax; rows without a key give 0 and −inf."""
    lses = lses.double().transpose(-2, -1).unsqueeze(-1)
    weights = lses.softmax(0).nan_to_num(0.0)
    return (weights * outs.double()).sum(0).float(), lses.logsumexp(0).float()


@pytest.mark.parametrize("lead", [(), (2,)])
def test_update_out_and_lse(lead: tuple[int, ...]) -> None:
    outs, lses = blocks(*lead)
    out = lse = None
    for block_out, block_lse in zip(outs, lses):
        out, lse = historic.update_out_and_lse(out, lse, block_out, block_lse)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close((out, lse), merged_at_once(outs, lses))


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_update_out_and_lse_of_rows_without_a_key(empty: float) -> None:
    outs, lses = blocks()
    lses[0, :, :3] = lses[1, :, 1:4] = lses[2, :, 2] = empty  # row 2 never sees one
    outs.masked_fill_((lses == empty).transpose(-2, -1)[..., None], 0.0)
    out = lse = None
    for block_out, block_lse in zip(outs, lses):
        out, lse = historic.update_out_and_lse(out, lse, block_out, block_lse)
    expected = merged_at_once(outs, lses.masked_fill(lses == empty, -torch.inf))
    torch.testing.assert_close((out, lse), expected)


def test_update_out_and_lse_of_a_slice() -> None:
    outs, lses = blocks(1)
    out, lse = historic.update_out_and_lse(None, None, outs[0], lses[0])
    rows = (slice(None), slice(4, None))
    historic.update_out_and_lse(out, lse, outs[1][:, 4:], lses[1][:, :, 4:], slice_=rows)
    both, first = merged_at_once(outs[:2], lses[:2]), merged_at_once(outs[:1], lses[:1])
    for found, last, start in zip((out, lse), both, first):
        torch.testing.assert_close(found, torch.cat([start[:, :4], last[:, 4:]], 1))
    with pytest.raises(ValueError, match="slice_"):
        historic.update_out_and_lse(None, None, outs[0], lses[0], slice_=rows)


def test_varlen_lse_round_trip() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)  # one document is empty
    packed = torch.randn(9, 2)
    padded = historic.unflatten_varlen_lse(packed.unsqueeze(-1), cu_seqlens, 6)
    assert padded.shape == (4, 2, 6)
    torch.testing.assert_close(padded[2, :, :5], packed[3:8].T)
    assert padded[1].eq(0).all()
    torch.testing.assert_close(historic.flatten_varlen_lse(padded, cu_seqlens), packed.T)
    torch.testing.assert_close(historic.unflatten_varlen_lse(packed, cu_seqlens, 6), padded)


def communicate(rank: int, world_size: int) -> None:
    ring = communicators.RingComm(None)
    assert (ring.rank, ring.world_size) == (rank, world_size)
    k, v = torch.full((3,), float(rank)), torch.full((2,), 10.0 + rank)
    for step in range(1, world_size):
        k, v = ring.send_recv_kv(k, v, v_buffer=torch.empty(2))
        with pytest.raises(RuntimeError, match="commit"):
            ring.commit()
        ring.wait()
        source = (rank - step) % world_size
        assert k.tolist() == [source] * 3
        assert v.tolist() == [10 + source] * 2
    with pytest.raises(RuntimeError, match="wait"):
        ring.wait()
    gather = communicators.AllGatherComm(dist.group.WORLD)
    gathered = torch.empty(world_size * 3)
    gather.all_gather(gathered, torch.full((3,), float(rank)))
    gather.wait()
    assert gathered[::3].tolist() == list(range(world_size))
    assert gather.handles == []


def test_the_communicators(ranks) -> None:
    ranks(3).run(communicate)


# The package loads its names when they are used.


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_waits_with_torch_until_a_name_is_used() -> None:
    run(
        "import sys, ring_flash_attn, ring_flash_attn.utils\n"
        "from ring_flash_attn.plan import routes\n"
        "from ring_flash_attn import zigzag_ring_flash_attn\n"
        "assert not hasattr(ring_flash_attn, '__wrapped__') and ring_flash_attn.__version__\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'shard', 'ring_attention', '__version__'} <= set(dir(ring_flash_attn))\n"
        "assert not hasattr(ring_flash_attn, 'nonsense')\n"
        "assert ring_flash_attn.adapters.hf_adapter.DATA_PARAMS == {}\n"
        "from ring_flash_attn.api import sharding\n"
        "assert sharding.shard is ring_flash_attn.shard\n"
        "from ring_flash_attn import *\n"
        "assert zigzag_ring_flash_attn_func is zigzag_ring_flash_attn.zigzag_ring_flash_attn_func\n"
        "assert update_ring_flash_attn_params is ring_flash_attn.update_ring_flash_attn_params\n"
    )


def test_where_torch_is_there_operators_are_registered_by_the_import() -> None:
    run("import torch, ring_flash_attn; torch.ops.ring_flash_attn.attention")


def test_torch_compile_finds_a_name_that_was_never_used() -> None:
    run(
        "import ring_flash_attn, torch\n"
        "f = torch.compile(lambda q: ring_flash_attn.flash_attn_func(q, q, q), fullgraph=True,\n"
        "                  backend='eager')\n"
        "assert f(torch.randn(1, 8, 2, 8)).shape == (1, 8, 2, 8)\n"
    )
