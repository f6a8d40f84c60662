"""Numbers for people."""

from __future__ import annotations


def size(value: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    unit, name = size_unit(value)
    return f"{value / unit:,.1f} {name}" if unit > 1 else f"{value:,.0f} {name}"


def size_unit(value: float) -> tuple[int, str]:
    """The binary unit to write `value` bytes in, with its name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return 1024**power, name
    return 1, "bytes"
