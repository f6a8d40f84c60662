"""An evaluation as Markdown tables, for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable

from latentfold.convert.formats import size
from latentfold.eval.records import (
    Continuation,
    Evaluation,
    LayerError,
    Nll,
    SpeedPoint,
    TaskScore,
    TextResult,
)
from latentfold.eval.report.formats import (
    MISSING,
    converted_name,
    one_line,
    percent,
    ppl,
    printable,
    ratio,
    score,
    speed,
    with_error,
)


def markdown(evaluation: Evaluation) -> str:
    """Tables of everything measured; arrows say which way is better. A healed model is called healed."""
    e = evaluation
    converted = converted_name(e.provenance)
    healed = "" if converted == "converted" else f", {converted},"
    several = len(e.texts) > 1
    blocks = [f"{code(e.converted)}{healed} against {code(e.original)}"]
    if several:
        blocks.append(_texts(e, converted))
    for text in e.texts:
        blocks += [_description(text, e), _positions(text, converted)]
    blocks.append(_summary(e, converted))
    if len(e.cache_by_context) > 1:
        blocks.append(_cache_by_context(e))
    if e.layers:
        blocks.append(_layers(e.layers))
    if e.continuations:
        blocks += [_continuation(continuation, converted) for continuation in e.continuations]
    if e.speed:
        blocks.append(_speed(e.speed))
    if e.tasks:
        blocks.append(_tasks(e.tasks, converted))
    blocks.append(_provenance(e))
    return "\n\n".join(blocks)


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(
        [f"| {' | '.join(header)} |".replace("|  |", "| |"), "|" + "---|" * len(header)]
        + [f"| {' | '.join(row)} |" for row in rows]
    )


def cell(text: str) -> str:
    """A name in a table: one line, no cell borders of its own."""
    return one_line(text).replace("|", "\\|")


def code(text: str) -> str:
    """A name as inline code."""
    return f"`{one_line(text).replace('`', chr(39))}`"


def _nll_header(converted: str) -> list[str]:
    return ["NLL original ↓", f"NLL {converted} ↓", "gap (nats) ↓", "PPL original ↓", f"PPL {converted} ↓"]


def _nll(row: Nll) -> list[str]:
    gap = with_error(row.gap, row.gap_standard_error, "+.3f")
    return [f"{row.original:.3f}", f"{row.converted:.3f}", gap, ppl(row.original), ppl(row.converted)]


def _texts(e: Evaluation, converted: str) -> str:
    header = ["text", *_nll_header(converted), "KL (nats) ↓", "top-1 ↑"]
    records = [*((cell(t.name), t.overall, t.agreement) for t in e.texts), ("**mean**", e.overall, e.agreement)]
    return table(
        header,
        (
            [name, *_nll(row), with_error(agreement.kl, agreement.kl_standard_error), percent(agreement.top1)]
            for name, row, agreement in records
        ),
    )


def _description(text: TextResult, e: Evaluation) -> str:
    windows = "1 window" if text.windows == 1 else f"{text.windows} windows"
    dtype = f", {e.provenance['dtype']}" if "dtype" in e.provenance else ""
    return f"Text: {one_line(text.name)}; {windows} of {text.window_length} tokens{dtype}."


def _positions(text: TextResult, converted: str) -> str:
    rows = [("**all**", text.overall), *((f"{row.start}-{row.end}", row) for row in text.by_position)]
    return table(["context", *_nll_header(converted)], ([name, *_nll(row)] for name, row in rows))


def _summary(e: Evaluation, converted: str) -> str:
    def cache(name: str, part: str) -> list[list[str]]:
        values = [getattr(e.cache_original, part), getattr(e.cache_converted, part)]
        if values == [None, None]:
            return []
        return [[f"cache bytes per token, {name} ↓", *(MISSING if v is None else f"{v:,.0f}" for v in values)]]

    a = e.agreement
    return table(
        ["", "original", converted],
        [
            *cache("counted", "counted"),
            *cache("measured", "measured"),
            ["KL from original (nats) ↓", "0", with_error(a.kl, a.kl_standard_error)],
            *([f"KL, quantile {q} (nats) ↓", "0", f"{kl:.3f}"] for q, kl in a.kl_quantiles.items()),
            ["top-1 agreement ↑", "100 %", percent(a.top1)],
        ],
    )


def _cache_by_context(e: Evaluation) -> str:
    return table(
        ["context", "cache original ↓", "cache converted ↓", "ratio ↓"],
        (
            [f"{p.context:,}", size(p.original), size(p.converted), ratio(p.converted, p.original)]
            for p in e.cache_by_context
        ),
    )


def _layers(layers: Iterable[LayerError]) -> str:
    return table(
        ["layer", "scores error ↓", "values error ↓", "output error ↓", "output, predicted"],
        (
            [
                str(layer.layer),
                f"{layer.scores:.3f}",
                f"{layer.values:.3f}",
                f"{layer.output:.3f}",
                MISSING if layer.predicted is None else f"{layer.predicted:.3f}",
            ]
            for layer in layers
        ),
    )


def _continuation(c: Continuation, converted: str) -> str:
    # indented, nothing in them is markup
    width = max(len("original"), len(converted)) + 2
    return "\n".join(
        [
            f"Greedy continuation, {c.shared_tokens} of {c.tokens} tokens alike before they part:",
            "",
            *(
                f"    {name:<{width}}{_quoted(text)}"
                for name, text in (("prompt", c.prompt), ("original", c.original), (converted, c.converted))
            ),
        ]
    )


def _quoted(text: str) -> str:
    """As a JSON string: one line, with its line breaks visible."""
    return json.dumps(printable(text), ensure_ascii=False)


def _speed(points: Iterable[SpeedPoint]) -> str:
    def memory(value: float | None) -> str:
        return MISSING if value is None else size(value)

    sides = ["original", "converted"]
    return table(
        [
            "context",
            "batch",
            *(f"prefill {side} (tokens/s) ↑" for side in sides),
            "ratio ↑",
            *(f"decode {side} (tokens/s) ↑" for side in sides),
            "ratio ↑",
            *(f"cache {side} ↓" for side in sides),
        ],
        (
            [
                f"{p.context:,}",
                str(p.batch),
                speed(p.prefill_original),
                speed(p.prefill_converted),
                ratio(p.prefill_converted, p.prefill_original),
                speed(p.decode_original),
                speed(p.decode_converted),
                ratio(p.decode_converted, p.decode_original),
                memory(p.cache_original),
                memory(p.cache_converted),
            ]
            for p in points
        ),
    )


def _tasks(tasks: Iterable[TaskScore], converted: str) -> str:
    arrows = {True: " ↑", False: " ↓", None: ""}
    return table(
        ["task", "metric", "samples", "original", converted],
        (
            [
                cell(t.task),
                cell(t.metric) + arrows[t.higher_is_better],
                MISSING if t.samples is None else f"{t.samples:,}",
                score(t.original, t.original_standard_error),
                score(t.converted, t.converted_standard_error),
            ]
            for t in tasks
        ),
    )


def _provenance(e: Evaluation) -> str:
    p = e.provenance
    versions = [f"{name} {number}" for name, number in p.get("versions", {}).items()]
    parts = [
        f"measured {p['created']}" if p.get("created") else "",
        f"with {', '.join(versions)}" if versions else "",
        f"on {p['device']} ({p.get('machine', '')})" if p.get("device") else "",
        f"seed {p['seed']}" if p.get("seed") is not None else "",
        f"by {code(p['command'])}" if p.get("command") else "",
    ]
    return f"Provenance: {one_line('; '.join(filter(None, parts))) or 'not recorded'}."
