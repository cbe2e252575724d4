"""Peak memory of a stretch of work in this process."""

from __future__ import annotations

from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Begin a new stretch, where the system can."""
    if _RESET.exists():
        _RESET.write_text("5")


def peak_bytes() -> int | None:
    """Largest resident memory since the last reset, or None where the system does not tell."""
    if not _STATUS.exists():
        return None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
