"""An evaluation as one self-contained page: no network, no scripts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from latentfold.convert.formats import size
from latentfold.convert.write.recipe import Change, HealingRecord, Recipe
from latentfold.eval.records import Continuation, Evaluation
from latentfold.eval.report import formats, plots, verdict


def html(evaluation: Evaluation, recipe: Recipe | None = None) -> str:
    """The report; `recipe`, what latentfold.json holds, adds how the model was converted and healed.

    Same evaluation, same page.
    """
    environment = Environment(
        loader=PackageLoader("latentfold.eval.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: formats.printable(value) if type(value) is str else value,
    )
    names = ("one_line", "percent", "perplexity", "ppl", "ratio", "score", "shortened", "speed", "with_error")
    environment.globals |= {name: getattr(formats, name) for name in names} | {"MISSING": formats.MISSING, "size": size}
    original, converted, known = verdict.compared_cache(evaluation)
    healing = recipe.healing if recipe else ()
    return environment.get_template("report.html.j2").render(
        e=evaluation,
        grade=verdict.grade(evaluation).name,
        side=formats.converted_name(evaluation.provenance),
        meaning=verdict.meaning(evaluation),
        findings=_unbroken(verdict.findings(evaluation)),
        unmeasured=verdict.unmeasured(evaluation),
        cache={"original": original, "converted": converted, "known": known},
        loss_plot=_drawn(plots.loss_by_context(evaluation)),
        layer_plot=_drawn(plots.error_by_layer(evaluation)),
        cache_plot=_drawn(plots.cache_by_context(evaluation)),
        prefill_plot=_drawn(plots.speed_by_context(evaluation, ["prefill"])),
        decode_plot=_drawn(plots.speed_by_context(evaluation, ["decode"])),
        healing=[(record, healing_facts(record)) for record in healing],
        healing_plot=_drawn(plots.healing_curve(healing)),
        parted=parted,
        measurement=measurement_facts(evaluation),
        conversion=conversion_facts(recipe) if recipe else [],
    )


def parted(continuation: Continuation) -> tuple[str, str, str]:
    """What both models wrote alike, and how each went on."""
    original, converted = continuation.original, continuation.converted
    pairs = enumerate(zip(original, converted, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(original), len(converted)))
    return original[:shared], original[shared:], converted[shared:]


def measurement_facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    """What it takes to repeat the measurement, as far as it was recorded."""
    p = evaluation.provenance
    revisions = p.get("revisions") or {}
    speed = p.get("speed") or {}
    facts = [
        ("Measured", p.get("created")),
        ("Computed in", _joined([p.get("dtype"), p.get("device")])),
        ("Machine", p.get("machine")),
        ("Seed", p.get("seed")),
        ("Versions", _joined([f"{name} {version}" for name, version in (p.get("versions") or {}).items()])),
        ("Python", p.get("python")),
        ("latentfold commit", p.get("commit")),
        ("Revision of the original", revisions.get("original")),
        ("Revision of the converted", revisions.get("converted")),
        ("Fingerprint of the converted", p.get("fingerprint")),
        ("Speed measured with", _joined([f"{name} {value}" for name, value in speed.items()])),
    ]
    texts = [
        (
            f"Text {formats.one_line(text.name)}",
            f"{text.windows} x {text.window_length:,} tokens, {text.skipped_tokens:,} skipped, SHA-256 {text.sha256}",
        )
        for text in evaluation.texts
    ]
    return _known(facts) + texts


def conversion_facts(recipe: Recipe) -> list[tuple[str, str]]:
    """How the converted model came about, as far as latentfold.json says."""
    source, options, calibration = recipe.source, recipe.options, recipe.calibration
    layers = len(recipe.sizes)
    kept = Counter("as it was" if found is None else str(found) for found in recipe.sizes)
    windows, length = calibration.windows

    def change(of: Change, unit: int = 1) -> str:
        return f"{of.source / unit:,g} → {of.converted / unit:,g}" if unit > 1 else f"{of.source:,} → {of.converted:,}"

    return _known(
        [
            ("Source", source.name),
            ("Source revision", source.revision),
            ("Architecture", source.model_type),
            ("Latent values (--kv-rank)", options.kv_rank),
            ("Rotated values (--rope-dim)", options.rope_dim),
            (
                "Latent + rotated values",
                None if recipe.size else ", ".join(f"{found} in {count} layers" for found, count in kept.items()),
            ),
            ("Cached values per token and layer", change(recipe.cache_values, layers)),
            ("Parameters", change(recipe.parameters)),
            ("Calibration texts", _joined([*calibration.texts])),
            ("Calibration windows", f"{windows:,} x {length:,} tokens"),
            ("Calibration SHA-256", calibration.sha256),
            ("Seed", options.seed),
            ("Stored as", options.dtype),
            ("Residual scale", recipe.residual_scale),
            ("Rope", _joined([f"{name} {value}" for name, value in recipe.ladder.rope_parameters.items()])),
            ("latentfold", recipe.latentfold),
        ]
    )


def healing_facts(record: HealingRecord) -> list[tuple[str, str]]:
    """The options of a healing."""
    windows = record.batch_tokens // record.seq_len
    return _known(
        [
            ("Budget", None if record.minutes is None else formats.duration(60 * record.minutes)),
            ("Original", _joined([record.teacher, record.revision])),
            ("Trained (--train)", record.train),
            ("Rate", f"{record.rate:.3g} of each tensor's root mean square"),
            ("A step", f"{windows:,} x {record.seq_len:,} tokens"),
            ("Texts", _joined([*record.texts])),
            ("Text SHA-256", record.sha256),
            ("Seed", record.seed),
            ("Products in", record.dtype),
            (
                "Versions",
                _joined([f"{n} {v}" for n, v in {"latentfold": record.latentfold, **record.versions}.items()]),
            ),
        ]
    )


def _drawn(figure: plots.Figure | None) -> Markup | None:
    return None if figure is None else Markup(plots.svg(figure))


def _unbroken(sentences: str) -> str:
    """No line ends inside `0.530 ± 0.013` or `66.7 %`."""
    return sentences.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}").replace(" %", "\N{NO-BREAK SPACE}%")


def _joined(parts: list[Any]) -> str | None:
    return ", ".join(str(part) for part in parts if part) or None


def _known(facts: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in facts if value is not None]
