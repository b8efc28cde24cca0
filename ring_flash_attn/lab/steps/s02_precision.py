"""Step 2. Precision: what fp16 sums lose, and what autocast keeps in fp32.

What we want: to know which numbers of a model may have 16 bits. A float is a sign, an exponent and
a mantissa. The exponent decides how far it reaches, the mantissa how densely it lies:

    fp32  8 bits exponent, 23 bits mantissa
    fp16  5 bits exponent, 10 bits mantissa: dense, but ends at 65504
    bf16  8 bits exponent,  7 bits mantissa: reaches as far as fp32, but lies 8 times sparser

Between 2ᵉ and 2ᵉ⁺¹ neighbours are 2ᵉ⁻ᵐ apart, for a mantissa of m bits. A sum grows, its
neighbours move apart, and a small addend is rounded to a whole number of these gaps: to none at
all, in the end. So the rule of mixed precision is:

    operands may have 16 bits: each is rounded once, and its error stays as small as it is;
    the accumulator must have 32: it is rounded in every addition, the more the larger it gets.

Tensor cores do just that: they multiply fp16 or bf16 and add in fp32. Attention, too, in all later
steps: tiles of q, k, v may have 16 bits; the running sum, the output and the lse are fp32.

Autocast applies the rule to a whole model, op by op. On a GPU: 16 bits for matrix products, fp32
for sums, norms and losses. (The CPU's list is shorter.) We look through hooks, both ways.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..device import device

DEVICE = device()
FOUR_SUMS = (
    (torch.float32, torch.float32, False, 10.0001),
    (torch.float16, torch.float16, False, 9.9531),
    (torch.float32, torch.float16, False, 10.0021),
    (torch.float32, torch.float16, True, 10.0021),
)


def gap(x: float, dtype: torch.dtype) -> float:
    """From x > 0 to its next larger neighbour: 2ᵉ⁻ᵐ."""
    return float(torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(x)))  # eps is 2⁻ᵐ


def accumulate(
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    cast_first: bool,
    n: int = 1000,
    value: float = 0.01,
) -> float:
    """Add `value`, stored as value_dtype, n times to a sum of type dtype, one after the other."""
    total = torch.zeros((), dtype=dtype)
    x = torch.tensor(value, dtype=value_dtype)
    for _ in range(n):
        total += x.to(dtype) if cast_first else x
    return total.item()


def dtypes_under_autocast(low: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes that flow through linear → norm → linear → loss, and back; by name."""
    net = nn.ModuleDict(
        {
            "linear 1": nn.Linear(8, 16, bias=False),
            "norm": nn.LayerNorm(16),
            "linear 2": nn.Linear(16, 4, bias=False),
        }
    ).to(DEVICE)
    found = {"input": torch.float32}
    for name, module in net.items():

        def forward_hook(_: object, __: object, out: Tensor, name: str = name) -> None:
            found[f"{name}: output"] = out.dtype
            out.register_hook(lambda grad: found.update({f"{name}: output's grad": grad.dtype}))

        module.register_forward_hook(forward_hook)
    x, target = torch.randn(5, 8, device=DEVICE), torch.tensor([0, 1, 2, 3, 0], device=DEVICE)
    with torch.autocast(DEVICE.type, low):
        for module in net.values():
            x = module(x)
        loss = nn.functional.cross_entropy(x, target)
    found["loss"] = loss.dtype
    loss.backward()
    for name, parameter in net.named_parameters():
        found[name] = parameter.dtype
        if parameter.grad is not None:
            found[f"{name}'s grad"] = parameter.grad.dtype
    return found


def norm_by_hand(x: Tensor) -> Tensor:
    """A layer norm of which every intermediate tensor has the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


def norm_errors(low: torch.dtype, spread: float, shift: float) -> list[float]:
    """Largest errors of the norm of spread · N(0, 1) + shift: in `low`, in fp32, PyTorch's in low.

    All three get the same x, which is rounded already: what differs is the norm alone.
    """
    torch.manual_seed(0)
    x = (spread * torch.randn(8, 1024) + shift).to(low)
    found = (norm_by_hand(x), norm_by_hand(x.float()), nn.functional.layer_norm(x, (1024,)))
    return [(y - norm_by_hand(x.double())).abs().max().item() for y in found]


def check() -> None:
    """The four sums, and where two of them end; the dtypes; norms that are right in fp32 only."""
    for *how, true in FOUR_SUMS:
        found = accumulate(*how)  # type: ignore[arg-type]
        assert round(found, 4) == true, f"{how}: {found:.4f}, not {true}"
    for dtype in (torch.float16, torch.bfloat16):
        end = accumulate(dtype, dtype, False, 4000)
        assert gap(end / 2, dtype) < 2 * 0.01 < gap(end, dtype), f"{dtype} stops at {end}"
    for low in (torch.bfloat16, torch.float16):
        found_dtypes = dtypes_under_autocast(low)
        norm = torch.float32 if DEVICE.type == "cuda" else low
        for name, dtype in found_dtypes.items():
            kept = name in ("input", "loss") or "weight" in name or "bias" in name
            expected = torch.float32 if kept else norm if name.startswith("norm") else low
            assert dtype == expected, f"{name}: {dtype}, not {expected}"
        for spread, shift in ((1, 0), (1, 100.2), (300, 0)):
            _, in_fp32, torchs = norm_errors(low, spread, shift)
            assert in_fp32 < 1e-5, f"the norm of {spread} N + {shift} is wrong by {in_fp32}"
            rounding = torch.finfo(low).eps / 2 * 4  # of a result between 4 and 8
            assert torchs < 1.01 * rounding, f"PyTorch's norm rounds more than once: {torchs}"
    for low, spread, shift in ((torch.float16, 300, 0), (torch.bfloat16, 1, 100.2)):
        error = norm_errors(low, spread, shift)[0]
        assert error > 0.1, f"{low}: {spread} N + {shift} has an error of {error} only"


def show() -> None:
    """The sums, where they stop growing, autocast's choices, and the reason for norms."""

    def short(dtype: torch.dtype) -> str:
        return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[str(dtype)[6:]]

    print("Add 0.01 a thousand times:")
    for dtype, value_dtype, cast_first, _ in FOUR_SUMS:
        how = f"{short(dtype)} += {short(value_dtype)}" + (", cast first" if cast_first else "")
        print(f"  {how:26} {accumulate(dtype, value_dtype, cast_first):.4f}")
    print("fp16 moves in gaps: of 0.0039 between 4 and 8, where 0.01 becomes three (too much), of")
    print(
        "0.0078 between 8 and 16, where it becomes one (too little). In fp32 += fp16 one error is"
    )
    print("left: 0.01 is 0.0100021 in fp16. A cast comes too late for that, and += casts anyway.\n")
    print("Go on adding. A sum stops where 0.01 is less than half a gap:")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sums = "  ".join(f"{accumulate(dtype, dtype, False, n):8.3f}" for n in (400, 1000, 4000))
        print(f"  {short(dtype)} after 400, 1000, 4000: {sums}")
    bf16, fp16 = (dtypes_under_autocast(low) for low in (torch.bfloat16, torch.float16))
    print(f"\nUnder autocast on {DEVICE.type}:{'bf16':>22} {'fp16':>5}")
    for name in bf16:
        print(f"  {name:38} {short(bf16[name]):5} {short(fp16[name])}")
    print("Parameters and their gradients stay fp32: beside a weight of 1, an update of 1e-4 would")
    print(
        "vanish in bf16. Weights are cast for the product, and the gradient is cast back. The loss"
    )
    print("is fp32: log-softmax is an exp and a sum. On CUDA the norm's output is fp32 as well. On")
    print("the CPU, autocast leaves the norm alone: it returns 16 bits, but sums in fp32 inside.")
    print("\nWhy? A norm is a sum of squares of differences. Largest error of a result around 1:")
    print(f"  {'1024 values':24} {'all in low':>11} {'all in fp32':>12} {'layer_norm in low':>18}")
    for low, spread, shift in (
        (torch.float16, 1, 0), (torch.float16, 300, 0), (torch.bfloat16, 1, 0),
        (torch.bfloat16, 1, 100.2),
    ):  # fmt: skip
        values = f"{short(low)}: {spread} · N(0, 1)" + (f" + {shift}" if shift else "")
        in_low, in_fp32, torchs = norm_errors(low, spread, shift)
        print(f"  {values:25} {in_low:10.1e} {in_fp32:12.1e} {torchs:18.1e}")
    print(
        "fp16 overflows: 300² > 65504, the variance is inf, the norm is 0. bf16 reaches as far as"
    )
    print("fp32, but cannot tell the mean 100.2 from 100. PyTorch's kernel computes in fp32 and")
    print(
        "rounds its result once: the last column is that rounding. (fp16 needs loss scaling, too:"
    )
    print("gradients below 3e-8 become 0.)")


def main() -> None:
    """Check, then show."""
    check()
    show()


if __name__ == "__main__":
    main()
