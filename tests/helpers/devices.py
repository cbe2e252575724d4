"""Where kernels are held to their twins: in the interpreter, and on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
# The interpreter's bfloat16 is wrong in places, so that is for a GPU alone.
KINDS = [
    *(
        pytest.param(
            "cpu",
            dtype,
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here"),
            id=f"interpreter-{dtype}".replace("torch.", ""),
        )
        for dtype in (torch.float32, torch.float16)
    ),
    *(
        pytest.param("cuda", dtype, marks=_GPU, id=f"gpu-{dtype}".replace("torch.", ""))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ),
]
