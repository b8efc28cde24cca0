"""The contract of CS336: the checks that the course makes, and harder ones; Triton interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from ring_flash_attn.lab import adapters
from ring_flash_attn.lab.definition import attention

pytestmark = pytest.mark.product(4)  # the others run in `make test-all`

COURSE = (4, 128, 128, 64)  # batch, queries, keys, d
CASES = [
    COURSE,
    (3, 37, 37, 24),
    (2, 45, 101, 24),  # more keys: both end together
    (2, 101, 45, 40),  # fewer: causally, the first 56 rows see nothing
    (1, 1, 130, 8),
    (2, 1, 1, 100),
]
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def function(kind: str) -> Any:
    return getattr(adapters, f"get_flashattention_autograd_function_{kind}")()


def results(
    kind: str,
    case: tuple[int, int, int, int],
    causal: bool,
    dtype: torch.dtype,
    device: str = "cpu",
) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: what an adapter gives, and what the definition gives in fp64."""
    torch.manual_seed(0)
    batch, queries, keys, d = case
    leaves = [torch.randn(batch, n, d, device=device).to(dtype) for n in (queries, keys, keys)]
    dout = torch.randn(batch, queries, d, device=device).to(dtype)
    own = [x.clone().requires_grad_() for x in leaves]
    exact = [x.double().requires_grad_() for x in leaves]

    out = function(kind).apply(*own, causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == (batch, queries)]
    assert len(saved) == 1, "exactly one saved tensor is the lse"
    assert (out.dtype, out.shape) == (dtype, own[0].shape)
    out.backward(dout)
    expected, lse = attention(*exact, causal=causal)
    expected.backward(dout.double())

    found = {"out": (out.detach(), expected.detach()), "lse": (saved[0], lse.detach())}
    for name, a, b in zip("qkv", own, exact):
        assert a.grad is not None
        assert a.grad.dtype == dtype
        assert b.grad is not None
        found[f"d{name}"] = (a.grad, b.grad)
    return found


def compare(kind: str, case: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    """Causal and full; the course's tolerance is 1e-2."""
    limit = ROUNDING[dtype]
    for causal in (False, True):
        for name, (a, b) in results(kind, case, causal, dtype, device).items():
            try:
                torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)
            except AssertionError as error:
                raise AssertionError(f"{kind}, {name}, {causal=}: {error}") from None


def _compare(rank: int, world_size: int, *args: Any) -> None:
    compare(*args)


each_case = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, dtype) for case in CASES[1:4] for dtype in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)


@each_case
def test_tiles_in_pytorch(case: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    compare("pytorch", case, dtype, "cpu")


@each_case
def test_triton_in_the_interpreter(
    pool: Ranks, case: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    pool.run(_compare, "triton", case, dtype, "cpu")


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("kind", ["pytorch", "triton"])
def test_on_a_gpu(kind: str, case: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    compare(kind, case, dtype, "cuda")


def _launches(rank: int, world_size: int) -> list[str]:
    """The names of the kernels that one forward and one backward pass launch."""
    from ring_flash_attn.lab.steps import s07_triton_forward, s08_triton_backward

    launched = []

    class Recorder:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self.name)
            return self.kernel[grid]

    own = [(s07_triton_forward, "forward_kernel")]
    own += [(s08_triton_backward, name) for name in ("dq_kernel", "dkdv_kernel")]
    kernels = [getattr(module, name) for module, name in own]
    try:
        for (module, name), kernel in zip(own, kernels):
            setattr(module, name, Recorder(name, kernel))
        results("triton", CASES[1], True, torch.float32)
    finally:
        for (module, name), kernel in zip(own, kernels):
            setattr(module, name, kernel)
    return launched


def test_triton_launches_triton(pool: Ranks) -> None:
    assert pool.run(_launches) == [["forward_kernel", "dq_kernel", "dkdv_kernel"]]


def _strided(rank: int, world_size: int, kind: str) -> list[Tensor]:
    """Gradients with inputs that are transposes, and a dout that is one number, expanded."""
    found = []
    for copied in (True, False):
        torch.manual_seed(1)
        leaves = [torch.randn(2, 24, n).requires_grad_() for n in (37, 45, 45)]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        if copied:
            q, k, v = (x.contiguous() for x in (q, k, v))
        function(kind).apply(q, k, v, True).sum().backward()
        found.append(torch.cat([x.grad.flatten() for x in leaves if x.grad is not None]))
    return found


@pytest.mark.parametrize("kind", ["pytorch", "triton"])
def test_inputs_need_not_be_contiguous(pool: Ranks, kind: str) -> None:
    ((expected, found),) = pool.run(_strided, kind)
    assert expected.numel() == 2 * 24 * (37 + 45 + 45)
    torch.testing.assert_close(found, expected)


def test_is_causal_may_be_left_out() -> None:
    q, k, v = (torch.randn(1, 9, 8, requires_grad=True) for _ in range(3))
    out = function("pytorch").apply(q, k, v)
    out.sum().backward()
    torch.testing.assert_close(out, attention(q, k, v)[0].float())


def test_tiles_in_pytorch_load_no_triton() -> None:
    code = (
        "import sys\n"
        "from ring_flash_attn.lab.adapters import *\n"
        "get_flashattention_autograd_function_pytorch()\n"
        "print('triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.slow
@pytest.mark.skipif("CS336_ASSIGNMENT2" not in os.environ, reason="CS336_ASSIGNMENT2: where it is")
def test_the_tests_of_the_course(tmp_path: Path) -> None:
    """CS336_ASSIGNMENT2 is a checkout of the course's assignment; its Triton tests need a GPU."""
    pytest.importorskip("einops")
    package = tmp_path / "course"
    package.mkdir()
    source = Path(os.environ["CS336_ASSIGNMENT2"]) / "tests" / "test_attention.py"
    shutil.copy(source, package / source.name)
    (package / "__init__.py").touch()
    (package / "adapters.py").write_text("from ring_flash_attn.lab.adapters import *\n")
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
