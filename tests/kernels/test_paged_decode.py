"""Attention to pages, against attention to the same keys laid out in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lserve_kernels import NOTHING, OwnRuns, PageLayout, Partial, PlainPages, SharedRun, hidden, paged_attention, slots

HEADS, GROUP, WIDTH, SIZE, PAGES = 2, 3, 16, 8, 40


def pages() -> PlainPages:
    made = PlainPages.allocate(PageLayout(SIZE, WIDTH, torch.float32), HEADS, PAGES, torch.device("cpu"))
    assert not made.keys.any()
    assert not made.values.any()
    made.keys.normal_()
    made.values.normal_()
    return made


def nothing(rows: int) -> Partial:
    return Partial(torch.zeros(HEADS, GROUP, rows, WIDTH), torch.full((HEADS, GROUP, rows), NOTHING))


def bias(valid: list[int]) -> Tensor:
    seen = torch.arange(SIZE) < torch.tensor(valid)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, hidden(torch.float32)).flatten()


def expected(query: Tensor, kv: PlainPages, places: list[int]) -> Tensor:
    keys, values = (slots(x)[:, places] for x in (kv.keys, kv.values))
    scores = query @ keys[:, None].transpose(-1, -2) * 0.25
    return scores.softmax(-1) @ values[:, None]


def places(page_ids: list[int], valid: list[int]) -> list[int]:
    return [p * SIZE + i for p, n in zip(page_ids, valid, strict=True) for i in range(n)]


@pytest.mark.parametrize("page_ids", [[4, 5, 6], [9, 2, 31]], ids=["neighbours", "scattered"])
def test_rows_see_their_runs_and_no_more(page_ids: list[int]) -> None:
    kv, query = pages(), torch.randn(HEADS, GROUP, 5, WIDTH)
    first_page = page_ids[0] if page_ids[1] == page_ids[0] + 1 else None
    everyone = SharedRun(0, 5, torch.tensor([0, 1]), 0, None)
    some = SharedRun(1, 4, torch.tensor(page_ids), first_page, bias([8, 3, 8])[None, None, None])
    own = OwnRuns(
        torch.tensor([4, 2]),
        torch.tensor([[20, 21], [33, 0]]),
        torch.stack([bias([8, 2]), bias([5, 0])])[:, None, None],
    )
    total = nothing(5)
    paged_attention(query, kv, [everyone, some], [own], total, scale=0.25)
    common, middle = places([0, 1], [8, 8]), places(page_ids, [8, 3, 8])
    seen = [
        common,
        common + middle,
        common + middle + places([33], [5]),
        common + middle,
        common + places([20, 21], [8, 2]),
    ]
    for row, row_places in enumerate(seen):
        torch.testing.assert_close(total.out[:, :, row], expected(query[:, :, row : row + 1], kv, row_places)[:, :, 0])


def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    kv, query = pages(), torch.randn(HEADS, GROUP, 4, WIDTH)
    run = SharedRun(0, 4, torch.tensor([3, 4]), 3, None)
    together, alone = nothing(4), nothing(1)
    paged_attention(query, kv, [run], [], together, scale=0.25)
    paged_attention(query[:, :, 2:3], kv, [SharedRun(0, 1, run.pages, 3, None)], [], alone, scale=0.25)
    torch.testing.assert_close(together.out[:, :, 2], alone.out[:, :, 0])
    torch.testing.assert_close(together.lse[:, :, 2], alone.lse[:, :, 0])
