"""flash_attn.bert_padding's functions, against loops over rows and tokens."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import ring_flash_attn
from ring_flash_attn.bert_padding import (
    get_unpad_data,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    rearrange,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "in the middle": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "an empty row": [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]],
    "nothing": [[0, 0, 0, 0, 0]] * 3,
}


def hidden(*trailing: int) -> Tensor:
    """(3, 5, …) in fp64."""
    torch.manual_seed(0)
    return torch.randn(3, 5, *trailing, dtype=torch.float64, requires_grad=True)


def packed(x: Tensor, mask: list[list[int]]) -> list[Tensor]:
    return [x[row, token] for row in range(3) for token in range(5) if mask[row][token]]


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_unpad_and_pad(name: str, kind: torch.dtype) -> None:
    x, mask = hidden(2, 4), MASKS[name]
    found, indices, cu_seqlens, longest, used = unpad_input(x, torch.tensor(mask).to(kind))
    rows = [sum(row) for row in mask]
    assert longest == max(rows)
    assert used.tolist() == rows
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [sum(rows[:n]) for n in range(4)]
    assert found.shape == (sum(rows), 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, packed(x, mask), strict=True))
    assert get_unpad_data(torch.tensor(mask))[0].tolist() == indices.tolist()
    again = pad_input(found, indices, batch=3, seqlen=5)
    assert torch.equal(again, x * torch.tensor(mask)[..., None, None])


def test_gradients_are_those_of_the_tokens() -> None:
    x, mask = hidden(4), torch.tensor(MASKS["left"])

    def there_and_back(x: Tensor) -> Tensor:
        found, indices, *_ = unpad_input(x, mask)
        return pad_input(found.sin(), indices, 3, 5)

    assert torch.autograd.gradcheck(there_and_back, x)
    (grad,) = torch.autograd.grad((there_and_back(x) * 2).sum(), x)
    torch.testing.assert_close(grad, 2 * x.cos() * mask[..., None])


def test_unused_places_are_packed_and_not_counted() -> None:
    x, mask = hidden(4), torch.tensor(MASKS["right"])
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [0, 1, 1, 0, 0]])
    for kind in (torch.int64, torch.bool):
        found, indices, cu_seqlens, longest, used = unpad_input(x, mask.to(kind), unused.to(kind))
        assert torch.equal(found, torch.stack(packed(x, (mask + unused).tolist())))
        assert (cu_seqlens.tolist(), longest) == ([0, 4, 9, 12], 5)
        assert used.tolist() == [3, 5, 1]
        assert len(indices) == 12


def test_rows_of_several_documents() -> None:
    x = hidden(4)
    lengths = [[2, 1, 0, 0, 0], [5, 0, 0, 0, 0], [1, 1, 2, 0, 0]]
    found, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(
        x, torch.tensor(lengths)
    )
    mask = [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 1, 1, 0]]
    assert torch.equal(found, torch.stack(packed(x, mask)))
    assert (cu_seqlens.tolist(), longest) == ([0, 2, 3, 8, 9, 10, 12], 5)
    assert torch.equal(pad_input(found, indices, 3, 5), x * torch.tensor(mask)[..., None])


def test_attention_over_what_was_unpadded() -> None:
    """Documents that start anywhere in their rows; a padded batch never sees its padding."""
    x, mask = hidden(2, 4), torch.tensor(MASKS["left"])
    q, indices, cu, longest, _ = unpad_input(x, mask)
    found = ring_flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, causal=True)
    out = pad_input(found, indices, 3, 5)
    for row in range(3):
        tokens = x[row, mask[row].bool()][None]
        alone = ring_flash_attn.flash_attn_func(tokens, tokens, tokens, causal=True)
        torch.testing.assert_close(out[row, mask[row].bool()], alone[0])


def test_rows_by_number() -> None:
    x = hidden(4)[0].detach().requires_grad_()
    indices = torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)
    assert torch.equal(index_first_axis(x, indices.int()), x[indices])
    assert torch.autograd.gradcheck(lambda v: index_put_first_axis(v, indices, 6), x[:3])
    assert torch.equal(index_put_first_axis(x[:3], indices, 6)[indices], x[:3])
    rows, residual = index_first_axis_residual(x, indices)
    (grad,) = torch.autograd.grad(rows.sum() + 10 * residual.sum(), x)
    assert grad.sum(1).tolist() == [44, 40, 44, 40, 44]
    ids = torch.arange(5)[:, None]  # of tokens: no gradient
    assert index_first_axis(ids, indices).T.tolist() == [[4, 0, 2]]


ONES = torch.ones(3, 5, dtype=torch.int64)
WRONG: dict[str, tuple[Any, str]] = {
    "numbers of documents": (lambda x: unpad_input(x, ONES * 2), "0 and 1 alone: 15 .* sum is 30"),
    "a mask of heads": (lambda x: unpad_input(x, ONES[:, None]), r"\(batch, seqlen\).*\(3, 1, 5\)"),
    "another batch": (lambda x: unpad_input(x, ONES[:2]), r"hidden_states \(3, 5, 4\), not \(2, 5"),
    "marked twice": (lambda x: unpad_input(x, ONES, ONES), "must not mark the same place"),
    "too long": (lambda x: unpad_input_for_concatenated_sequences(x, ONES * 2), r"10.* over 5"),
    "two dimensions": (lambda x: index_first_axis(x, ONES), r"indices.*\(3, 5\)"),
    "flags": (lambda x: index_first_axis(x, ONES[0].bool()), "indices.*bool"),
    "a negative batch": (lambda x: pad_input(x[0], torch.arange(5), -1, 5), "batch.*-1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(ValueError, match=words):
        call(hidden(4))


def test_rearrange_is_that_of_einops(monkeypatch: pytest.MonkeyPatch) -> None:
    x = hidden(4)
    monkeypatch.setitem(sys.modules, "einops", None)  # importing it raises
    with pytest.raises(ImportError, match="pip install einops"):
        rearrange(x, "b s ... -> (b s) ...")
    einops = types.ModuleType("einops")
    einops.rearrange = lambda *args, **lengths: (args, lengths)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "einops", einops)
    pattern = "(b s) ... -> b s ..."
    assert rearrange(x, pattern, b=3) == ((x, pattern), {"b": 3})
