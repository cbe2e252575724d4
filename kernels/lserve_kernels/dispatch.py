"""Whether a tensor is worked on by Triton kernels or by their torch twins: decided here and nowhere else."""

from __future__ import annotations

import os
from importlib.util import find_spec

from torch import Tensor

CHOICES = ("auto", "triton", "torch")


def use_triton(tensor: Tensor) -> bool:
    """Whether kernels run on `tensor`.

    `LSERVE_KERNELS` decides: `auto` (the default) runs kernels on a GPU, `torch` never, `triton` always, which on a CPU
    needs Triton's interpreter (`TRITON_INTERPRET=1`).

    Raises:
        ValueError: if `LSERVE_KERNELS` is something else.
        RuntimeError: if kernels are wanted and cannot run.
    """
    choice = os.environ.get("LSERVE_KERNELS") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"LSERVE_KERNELS is {choice!r}, not one of {', '.join(CHOICES)}")
    if choice == "auto":
        return tensor.is_cuda and find_spec("triton") is not None
    if choice == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("LSERVE_KERNELS=triton on a CPU needs TRITON_INTERPRET=1")
    return choice == "triton"
