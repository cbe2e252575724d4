"""`lserve-tools env`: what a bug report should hold."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lserve_tools import __version__, env
from lserve_tools.cli.options import Json, Quiet, Verbose
from lserve_tools.cli.output import Output
from lserve_tools.errors import LServeError
from lserve_tools.text.numbers import show_bytes

if TYPE_CHECKING:
    from lserve_tools.schema import EnvReport, Gpu

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "huggingface_hub",
    "zstandard",
    "numpy",
    "pydantic",
    "psutil",
    "typer",
)
_TRIED = ("torch", "triton", "safetensors", "zstandard", "numpy")  # broken builds of these show only when imported
_HUB = ("HF_HOME", "HF_HUB_OFFLINE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SECRET = "HF_TOKEN"
_CACHE = Path(".lserve/cache")


def command(as_json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Show versions, hardware and settings, for a bug report. No secret is shown."""
    out = Output.start(as_json=as_json, quiet=quiet, verbose=verbose)
    from lserve_tools.schema import EnvReport

    packages = {name: _version(name) for name in _PACKAGES}
    torch, psutil = _import("torch"), _import("psutil")
    memory = psutil.virtual_memory() if psutil else None
    report = EnvReport(
        version=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        cpu=_cpu(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads() if torch else None,
        memory=memory.total if memory else None,
        free_memory=memory.available if memory else None,
        packages=packages,
        cuda=torch.version.cuda if torch else None,
        gpus=_gpus(torch),
        kernels=_kernels(torch),
        variables=_variables(),
        cache=_cache(),
    )
    out.result(report, _rows(report))


def _version(name: str) -> str:
    """A package's version, or what is wrong with it."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
    if name in _TRIED:
        try:
            import_module(name)
        except Exception as error:  # whatever a broken package raises
            return f"{version}, broken ({_line(error)})"
    return version


def _import(name: str) -> Any:
    """A module, or None if it is missing or broken."""
    try:
        return import_module(name)
    except Exception:
        return None


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus(torch: Any) -> list[Gpu]:
    from lserve_tools.schema import Gpu

    if torch is None or not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Gpu(name=g.name, memory=g.total_memory, capability=f"{g.major}.{g.minor}") for g in found]


def _kernels(torch: Any) -> str:
    """Whether Triton kernels run."""
    if torch is None:
        return "no: torch cannot be imported"
    from lserve_kernels.dispatch import use_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        used = use_triton(torch.empty(0, device=device))
    except (ValueError, RuntimeError) as error:
        return f"no: {_line(error)}"
    return "triton" if used else f"torch on {device}"


def _variables() -> dict[str, str | None]:
    values = {name: os.environ.get(name) or None for name in _HUB}
    values |= {variable.name: variable.get() for variable in env.VARIABLES}
    return {**values, _SECRET: "set" if os.environ.get(_SECRET) else None}


def _cache() -> str | None:
    """The cache in its usual folder, in a line."""
    if not _CACHE.exists():
        return None
    try:
        from lserve_tools.cache.inventory import report

        found = report(_CACHE)
    except (LServeError, ImportError) as error:
        return f"{_CACHE} cannot be read: {_line(error)}"
    return f"{_CACHE}: {found.documents:,} documents, {show_bytes(found.bytes)}, {found.codec}, of {found.model}"


def _rows(report: EnvReport) -> Iterable[tuple[str, str]]:
    yield "lserve-tools", report.version
    yield "python", report.python
    yield from report.packages.items()
    yield "system", report.system
    threads = "" if report.threads is None else f", {report.threads} threads in torch"
    yield "cpu", f"{report.cpu}, {report.cpus} usable{threads}"
    known = report.memory is not None and report.free_memory is not None
    yield "memory", f"{show_bytes(report.memory or 0)}, {show_bytes(report.free_memory or 0)} free" if known else "?"
    for number, gpu in enumerate(report.gpus):
        yield f"gpu {number}", f"{gpu.name}, {show_bytes(gpu.memory)}, capability {gpu.capability}"
    if not report.gpus:
        yield "gpu", "none"
    yield "cuda", report.cuda or "none"
    yield "kernels", report.kernels
    for name, value in report.variables.items():
        yield name, value if value is not None else "unset"
    yield "cache", report.cache or f"none in {_CACHE}"
