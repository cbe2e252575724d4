"""Bounds, scores and choice of pages, against the keys themselves; kernels against their twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lserve_kernels import PageBounds, PageLayout, choose_pages, score_pages, update_bounds
from tests.helpers.devices import KINDS

NEVER = float("-inf")


def ragged(
    seed: int, heads: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, PageBounds, Tensor]:
    """Pages of 64 tokens, filled to `counts`, with bounds of 16; what stands behind is poison."""
    torch.manual_seed(seed)
    counts = torch.tensor([64, 1, 16, 17, 63, 64, 48])
    keys = torch.randn(heads, len(counts), 64, width).to(dtype)
    keys[:, torch.arange(64) >= counts[:, None]] = float("inf")
    keys = keys.to(device)
    layout = PageLayout(64, width, dtype, logical_size=16)
    bounds = PageBounds.allocate(layout, heads, len(counts), keys.device)
    bounds.low.fill_(float("nan"))
    bounds.high.fill_(float("nan"))
    held = [(page * 4 + i, min(16, count - 16 * i)) for page, count in enumerate(counts.tolist()) for i in range(4)]
    logical, tokens = torch.tensor([pair for pair in held if pair[1] > 0]).T
    update_bounds(bounds, keys, logical.contiguous().to(device), tokens.contiguous().to(device))
    return keys, bounds, counts.to(device)


def best_products(query: Tensor, keys: Tensor, counts: Tensor) -> Tensor:
    """The largest product of any query head of a group with any key of a page, `[H, R, P]`."""
    products = torch.einsum("hgrd,hpsd->hrpgs", query.double(), keys.double().nan_to_num(posinf=0))
    empty = torch.arange(keys.shape[2]) >= counts[:, None]
    return products.masked_fill(empty[:, None], NEVER).amax((-1, -2))


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=40, deadline=None)
def test_no_key_of_a_page_exceeds_its_score(seed: int, scale: float) -> None:
    keys, bounds, counts = ragged(seed, heads=2, width=8)
    query = torch.randn(2, 3, 5, 8) * scale
    scores = score_pages(query, bounds, torch.arange(len(counts))[None], counts[None])
    exact = best_products(query, keys, counts)
    assert (scores.double() >= exact - 1e-5 * scale * (1 + exact.abs())).all()


def test_pages_of_one_token_score_its_product() -> None:
    keys, bounds, counts = ragged(0, heads=2, width=8)
    query = torch.randn(2, 1, 3, 8)
    scores = score_pages(query, bounds, torch.tensor([[1]]), torch.tensor([[1]]))
    torch.testing.assert_close(scores[..., 0], best_products(query, keys, counts)[..., 1].float())


def test_rows_with_pages_of_their_own_score_as_alone() -> None:
    _, bounds, counts = ragged(1, heads=2, width=8)
    query = torch.randn(2, 3, 2, 8)
    pages = torch.tensor([[0, 3, 2], [6, 5, 0]])
    held = counts[pages]
    held[1, 2] = 0
    together = score_pages(query, bounds, pages, held)
    assert (together[:, 1, 2] == NEVER).all()
    for row in range(2):
        alone = score_pages(query[:, :, row : row + 1], bounds, pages[row : row + 1], held[row : row + 1])
        torch.testing.assert_close(together[:, row], alone[:, 0])


def test_the_choice_holds_first_and_newest_page_and_ties_go_to_the_earlier() -> None:
    scores = torch.tensor([[[-5.0, 1, 3, 3, 3, -9, NEVER], [0.0, 0, 0, 0, 0, 0, 0]]])
    chosen = choose_pages(scores, torch.tensor([6, 7]), 4)
    assert chosen.tolist() == [[[0, 2, 3, 5], [0, 1, 2, 6]]]


def test_a_budget_without_room_for_both_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold the first and the newest"):
        choose_pages(torch.zeros(1, 1, 3), torch.tensor([3]), 1)


def test_pages_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 24 tokens"):
        PageLayout(24, 8, torch.float32, logical_size=16)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
@pytest.mark.parametrize("width", [8, 96])
def test_kernels_equal_their_twins(
    device: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("LSERVE_KERNELS", backend)
        _, bounds, counts = ragged(2, heads=3, width=width, dtype=dtype, device=device)
        query = torch.randn(4, 3, 3, width, generator=torch.Generator().manual_seed(3)).to(device, dtype)
        query = query.transpose(0, 1)[:, :3]
        everyone = score_pages(query, bounds, torch.arange(len(counts), device=device)[None], counts[None])
        pages = torch.tensor([[0, 1, 5], [6, 4, 2], [3, 3, 0]], device=device)
        held = counts[pages]
        held[2, 1:] = 0
        results.append((bounds, everyone, score_pages(query, bounds, pages, held)))
    (twin, *scores), (kernel, *found) = results
    assert torch.equal(twin.low.nan_to_num(), kernel.low.nan_to_num())
    assert torch.equal(twin.high.nan_to_num(), kernel.high.nan_to_num())
    assert not twin.low[:, 0].isnan().any()
    for a, b in zip(scores, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSERVE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="not one of auto, triton, torch"):
        ragged(0, heads=1, width=8)


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSERVE_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        ragged(0, heads=1, width=8)
