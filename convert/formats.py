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


def millions(count: int) -> str:
    """Parameters: 134.5 M."""
    return f"{count / 1e6:,.1f} M"


def growth(source: int, converted: int, untied: int) -> str:
    """Why a result has more parameters than its source; empty where it has not.

    Args:
        untied: parameters of an output head that the source ties to its embedding and the result cannot.
    """
    parts = []
    if untied:
        parts.append(f"{millions(untied)} more for the output head, which the original shares with its embedding")
    if (rest := converted - source - untied) > 0:
        parts.append(f"{millions(rest)} more for attention, whose projections have other sizes")
    return ", ".join(parts) if converted > source else ""
