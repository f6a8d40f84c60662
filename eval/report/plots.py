"""Figures of an evaluation and of a healing, and two ways to draw them: inline SVG for a page, a file on white."""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator
from matplotlib.typing import LineStyleType

from latentfold.convert.formats import size_unit
from latentfold.convert.write.recipe import HealingRecord
from latentfold.eval.records import Evaluation
from latentfold.eval.report.formats import converted_name, shortened

# Series colours with a contrast of at least 3:1 against both white and a dark page; told apart by the colour-blind too
ORIGINAL = "#7d848c"
CONVERTED = "#2f7fd1"
SECOND = "#c4711a"
THIRD = "#17937c"
INK = "#1f2328"
"""Text, axes and grid; inline SVG replaces it by the page's own colour."""
LINE_STYLES: tuple[LineStyleType, ...] = ("-", "--", ":", "-.")
WIDTH, HEIGHT = 5.8, 3.7
"""Inches of one axes; 420 x 270 points, legible unscaled on a phone and beside a table."""
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


@contextmanager
def _drawing(settings: dict[Any, str] | None = None) -> Iterator[None]:
    """Draws under matplotlib's own defaults, whatever the user's matplotlibrc holds, and silent about names in
    scripts that the default font lacks: a browser has them."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings or {})
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@_drawing()
def loss_by_context(evaluation: Evaluation) -> Figure | None:
    """NLL of both models against context length, every text; None without a curve."""
    texts = [text for text in evaluation.texts if text.curve.context]
    if not texts:
        return None
    figure, (axes,) = _figure("Loss of both models by tokens of context")
    for text, style in zip(texts, cycle(LINE_STYLES)):
        _line(axes, text.curve.context, text.curve.original, ORIGINAL, style)
        _line(axes, text.curve.context, text.curve.converted, CONVERTED, style)
    _context_axis(axes)
    axes.set_ylabel("NLL (nats per token)")
    styles = [shortened(text.name, 26) for text in texts] if len(texts) > 1 else []
    _model_legend(figure, styles, converted=converted_name(evaluation.provenance))
    return figure


@_drawing()
def error_by_layer(evaluation: Evaluation) -> Figure | None:
    """Relative error of attention scores, values and output of every layer; None where layers were not compared."""
    layers = evaluation.layers
    if not layers:
        return None
    figure, (axes,) = _figure("Relative error of attention by layer")
    index = [layer.layer for layer in layers]
    predicted = [math.nan if layer.predicted is None else layer.predicted for layer in layers]
    lines = {
        "output": _line(axes, index, [layer.output for layer in layers], CONVERTED),
        "scores": _line(axes, index, [layer.scores for layer in layers], SECOND, width=1.2),
        "values": _line(axes, index, [layer.values for layer in layers], THIRD, width=1.2),
        "output, predicted": _line(axes, index, predicted, CONVERTED, ":", width=1.2),
    }
    if all(layer.predicted is None for layer in layers):
        lines.pop("output, predicted").remove()
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("relative error")
    axes.set_ylim(bottom=0)
    _legend(figure, list(lines.values()), list(lines), len(lines))
    return figure


@_drawing()
def cache_by_context(evaluation: Evaluation) -> Figure | None:
    """Measured bytes of the whole cache of one sequence against context length; None where not measured."""
    points = evaluation.cache_by_context
    if not points:
        return None
    figure, (axes,) = _figure("Cache of one sequence by tokens of context")
    context = [point.context for point in points]
    unit, name = size_unit(max(point.original for point in points))
    _line(axes, context, [point.original / unit for point in points], ORIGINAL)
    _line(axes, context, [point.converted / unit for point in points], CONVERTED)
    axes.set_xlabel("tokens of context")
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    step = 2 ** math.ceil(math.log2(max(context) / 6))
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"cache ({name})")
    _model_legend(figure)
    return figure


@_drawing()
def speed_by_context(evaluation: Evaluation, phases: Sequence[str] = ("prefill", "decode")) -> Figure | None:
    """Tokens per second of each phase against context length, per batch size; None where not measured."""
    points = sorted(evaluation.speed or (), key=lambda point: point.context)
    if not points:
        return None
    figure, panels = _figure(f"Speed of {' and '.join(phases)} by tokens of context", panels=len(phases))
    batches = sorted({point.batch for point in points})
    for axes, phase in zip(panels, phases, strict=True):
        found: list[float] = []
        for batch, style in zip(batches, cycle(LINE_STYLES)):
            rows = [point for point in points if point.batch == batch]
            for name, color in (("original", ORIGINAL), ("converted", CONVERTED)):
                speeds = [getattr(point, f"{phase}_{name}") for point in rows]
                found += [speed for speed in speeds if speed is not None]
                drawn = [math.nan if speed is None else speed for speed in speeds]
                _line(axes, [point.context for point in rows], drawn, color, style)
        _context_axis(axes)
        axes.set_ylabel(f"{phase} (tokens per second)")
        if found and max(found) > 8 * min(found):  # a small batch would lie on the floor beside a large one
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    _model_legend(figure, [f"batch {batch}" for batch in batches])
    return figure


@_drawing()
def healing_curve(healing: Sequence[HealingRecord]) -> Figure | None:
    """KL and NLL on held-out text, of every healing in turn; None where there was none.

    Against minutes, or steps where no healing had a budget of time. Each begins where the one before it was kept; what
    came after that, and was not written, is dotted.
    """
    if not healing:
        return None
    timed = any(record.minutes is not None for record in healing)
    unit = "minutes" if timed else "steps"
    figure, panels = _figure(f"KL from the original and NLL on held-out text by {unit} of healing", panels=2)
    for axes, measure in zip(panels, ("divergence", "nll"), strict=True):
        start = 0.0
        for record in healing:
            x = [start + (point.seconds / 60 if timed else point.step) for point in record.curve]
            y = [getattr(point, measure) for point in record.curve]
            _line(axes, x[record.best :], y[record.best :], CONVERTED, ":", width=1.2).set_alpha(0.5)
            line = _line(axes, x[: record.best + 1], y[: record.best + 1], CONVERTED)
            start = x[record.best]
            (kept,) = axes.plot([start], [y[record.best]], "o", markersize=9, color=CONVERTED, fillstyle="none")
            kept.set_clip_on(False)
        axes.set_xlabel(f"{unit} of healing")
        axes.set_xlim(left=0)
    panels[0].set_ylabel("KL from the original (nats per token)")
    panels[0].set_ylim(bottom=0)
    panels[1].set_ylabel("NLL (nats per token)")
    _legend(figure, [line, kept], ["held-out text", "kept"], 2)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element to stand in a page, in the page's text colour and font, as wide as its place.

    Same figure, same text; ids are its own, so that several stand on one page.
    """
    buffer = io.StringIO()
    with _drawing({"svg.fonttype": "none", "svg.hashsalt": "latentfold"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), str(figure.get_label()))


def picture(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file on white, "png" or "svg"; drawn twice, the same bytes."""
    buffer = io.BytesIO()
    with _drawing({"svg.hashsalt": "latentfold"}):
        metadata = {"png": {"Software": None}, "svg": {"Date": None}}[kind]
        figure.savefig(buffer, format=kind, dpi=200, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def _inline(document: str, label: str) -> str:
    """matplotlib's SVG document as an element of a page."""
    root = ElementTree.fromstring(document)
    for name in ("width", "height"):
        del root.attrib[name]
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    for parent in list(root.iter()):
        for name in ("metadata", "style"):  # a style sheet would hold for the whole page
            for element in parent.findall(f"{{{SVG}}}{name}"):
                parent.remove(element)
    prefix = "plot-" + hashlib.sha256(document.encode()).hexdigest()[:8] + "-"
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", document))
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                if value in used:
                    element.set("id", prefix + value)
                else:
                    del element.attrib["id"]
            elif name == f"{{{XLINK}}}href":
                del element.attrib[name]
                element.set("href", value.replace("#", "#" + prefix))
            else:
                value = value.replace("url(#", f"url(#{prefix}").replace(INK, "currentColor")
                value = re.sub(r"font: (?:\d+ )?([\d.]+px) [^;]+", r"font-size: \1", value)
                element.set(name, re.sub(r"font-family: [^;]+(; )?", "", value))
    root.set("role", "img")
    root.set("aria-label", label)
    title = ElementTree.Element(f"{{{SVG}}}title")
    title.text = label
    root.insert(0, title)
    ElementTree.register_namespace("", SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _figure(label: str, *, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes one above the other; its label says to screen readers what it shows."""
    figure = Figure(figsize=(WIDTH, HEIGHT * panels), layout="constrained")
    figure.set_label(label)
    panel_axes = [figure.add_subplot(panels, 1, i + 1) for i in range(panels)]
    for axes in panel_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=INK, alpha=0.4)
        axes.set_facecolor("none")
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", color=INK, labelcolor=INK, labelsize=10, length=3)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set(color=INK, fontsize=10)
    return figure, panel_axes


def _line(
    axes: Axes, x: Sequence[float], y: Sequence[float], color: str, style: LineStyleType = "-", *, width: float = 1.8
) -> Line2D:
    # markers show where something was measured, and single points at all
    (line,) = axes.plot(x, y, color=color, linestyle=style, linewidth=width, marker="o", markersize=1.8 * width)
    line.set_clip_on(False)
    return line


def _legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str], columns: int) -> None:
    legend = figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=10, labelcolor=INK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a `$` in a file's name is no formula


def _model_legend(figure: Figure, styles: Sequence[str] = (), *, converted: str = "converted") -> None:
    """Colours are models; line styles, where there are several, are what `styles` names."""
    models = [Line2D([], [], color=color, linewidth=1.8) for color in (ORIGINAL, CONVERTED)]
    lines = [Line2D([], [], color=INK, linewidth=1.2, linestyle=style) for _, style in zip(styles, cycle(LINE_STYLES))]
    _legend(figure, models + lines, ["original", converted, *styles], 2)


def _context_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of context")


def _tokens(value: float, _position: int) -> str:
    """512, 1k, 128k: contexts are powers of two."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"
