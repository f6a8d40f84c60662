"""An evaluation as a Markdown table."""

from __future__ import annotations

import math

from latentfold.eval.records import Evaluation, Nll


def _with_error(value: float, error: float | None) -> str:
    return f"{value:+.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _nll_row(label: str, row: Nll) -> str:
    return (
        f"| {label} | {row.original:.3f} | {row.converted:.3f} | {_with_error(row.gap, row.gap_standard_error)} | "
        f"{math.exp(row.original):.2f} | {math.exp(row.converted):.2f} |"
    )


def markdown(evaluation: Evaluation) -> str:
    """Tables of everything measured; arrows say which way is better."""
    e = evaluation
    windows, length = e.provenance["windows"]
    lines = [
        f"`{e.converted}` against `{e.original}`",
        "",
        f"Text: {', '.join(e.provenance['text'])}; {windows} windows of {length} tokens, {e.provenance['dtype']}.",
        "",
        "| context | NLL original ↓ | NLL converted ↓ | gap (nats) ↓ | PPL original ↓ | PPL converted ↓ |",
        "|---|---|---|---|---|---|",
        _nll_row("**all**", e.overall),
        *(_nll_row(f"{row.start}-{row.end}", row) for row in e.by_position),
        "",
        "| | original | converted |",
        "|---|---|---|",
        f"| cache bytes per token, counted ↓ | {e.cache_original.counted:,.0f} | {e.cache_converted.counted:,.0f} |",
    ]
    if e.cache_original.measured is not None and e.cache_converted.measured is not None:
        lines.append(
            f"| cache bytes per token, measured ↓ | {e.cache_original.measured:,.0f} "
            f"| {e.cache_converted.measured:,.0f} |"
        )
    kl = f"{e.agreement.kl:.3f}"
    if e.agreement.kl_standard_error is not None:
        kl += f" ± {e.agreement.kl_standard_error:.3f}"
    lines += [
        f"| KL from original (nats) ↓ | 0 | {kl} |",
        f"| top-1 agreement ↑ | 100 % | {e.agreement.top1:.1%} |",
    ]
    if e.layers is not None:
        lines += ["", "| layer | attention output error ↓ | predicted |", "|---|---|---|"]
        lines += [
            f"| {layer.layer} | {layer.relative_error:.3f} | "
            + (f"{layer.predicted:.3f} |" if layer.predicted is not None else "- |")
            for layer in e.layers
        ]
    return "\n".join(lines)
