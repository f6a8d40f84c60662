"""Numbers and names as every report writes them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from typing import Any

MISSING = "\N{EN DASH}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Text from outside without what neither a file nor XML can hold: control characters, lone surrogates become �."""
    return "".join(REPLACEMENT if _unprintable(c) else c for c in text)


def one_line(text: str) -> str:
    """For headings, table cells and legends."""
    return " ".join(printable(text).split())


def shortened(text: str, length: int) -> str:
    """One line of at most `length` characters; the middle goes, since paths differ at their ends."""
    text = one_line(text)
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"


def with_error(value: float, error: float | None, form: str = ".3f") -> str:
    """`value ± error`, both in format `form`, the error's without a sign; without an error the value alone."""
    return f"{value:{form}}" + (f" ± {error:{form.lstrip('+')}}" if error is not None else "")


def perplexity(nll: float) -> float:
    """exp(nll), infinite where that overflows: a broken conversion is still to be reported."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def ppl(nll: float) -> str:
    """Perplexity of a loss in nats."""
    value = perplexity(nll)
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.2f}" if value < 10_000 else f"{value:.2e}"


def score(value: float, error: float | None) -> str:
    """A task's score, of unknown scale: to two digits of its standard error, or to four of its own."""
    if not error or not math.isfinite(error):
        return f"{value:.4g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}"


def speed(value: float | None) -> str:
    """Tokens per second of a model that may have run out of memory."""
    return "out of memory" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float) -> str:
    """0.577 -> 57.7 %."""
    return f"{100 * share:.1f} %"


def ratio(converted: float | None, original: float | None) -> str:
    """How many times the original."""
    return f"{converted / original:.2f}" if converted is not None and original else MISSING


def duration(seconds: float) -> str:
    """`40 seconds`, `1.7 minutes`, `10 minutes`, to two digits."""
    minutes = round(seconds) >= 60
    amount = max(60, seconds) / 60 if minutes else max(1, round(seconds))
    number = f"{amount:,.0f}" if amount >= 9.95 else f"{amount:.2g}"
    return f"{number} {'minute' if minutes else 'second'}{'' if number == '1' else 's'}"


def converted_name(provenance: Mapping[str, Any]) -> str:
    """What tables and legends call the converted model of an evaluation: `healed 10 minutes` where it was trained, so
    that nobody takes its figures for those of a conversion alone."""
    healed = provenance.get("healed")
    return f"healed {duration(60 * healed['minutes'])}" if healed else "converted"


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def _unprintable(character: str) -> bool:
    return character in "\ufffe\uffff" or (character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"))
