"""The model card of a converted checkpoint: its README.md and figures, from its recipe and its evaluation."""

from __future__ import annotations

import re
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from yaml import YAMLError

from latentfold.convert.attention.sizes import Sizes
from latentfold.convert.errors import InputError
from latentfold.convert.files import replace_text
from latentfold.convert.formats import growth
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.targets.kernels import engine_kernels
from latentfold.convert.targets.registry import TARGETS
from latentfold.convert.text.documents import DEFAULT_CALIBRATION
from latentfold.convert.write.recipe import HealingRecord, Recipe, fingerprint, read_recipe
from latentfold.eval.records import EVALUATION, Evaluation, read_evaluation
from latentfold.eval.report import plots
from latentfold.eval.report.formats import (
    converted_name,
    duration,
    one_line,
    percent,
    perplexity,
    ppl,
    printable,
    with_error,
)
from latentfold.eval.report.markdown import cell, code, markdown
from latentfold.eval.report.verdict import verdict

CARD = "README.md"

BEGIN, END = "<!-- latentfold:begin -->", "<!-- latentfold:end -->"
"""What lies between them is replaced when the card is written again; everything else stays."""

TAGS = ["latentfold", "mla", "multi-head-latent-attention", "kv-cache"]

REPEATED = (
    "kv_rank",
    "rope_dim",
    "calibration",
    "calibration_tokens",
    "seq_len",
    "seed",
    "device",
    "target",
    "engine",
    "dtype",
    "max_shard_size",
)
"""Options that a repetition is given as they were resolved; a number of cached values has become two sizes by then."""

FIGURES = {
    f"figures/{draw.__name__}.png": draw
    for draw in (plots.loss_by_context, plots.error_by_layer, plots.cache_by_context, plots.speed_by_context)
}
"""Of the evaluation."""
HEALING = f"figures/{plots.healing_curve.__name__}.png"
"""Of the recipe."""


def write_card(folder: Path) -> str:
    """Write README.md and `figures/` of a converted folder, or bring them up to date; the text written.

    Raises:
        InputError: see `read_card`.
    """
    text = read_card(folder)
    recipe = read_recipe(folder)
    drawn = _figures(recipe, current_evaluation(folder, recipe))
    for name in (*FIGURES, HEALING):
        if name in drawn:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(plots.picture(drawn[name]))
        else:
            (folder / name).unlink(missing_ok=True)
    replace_text(folder / CARD, text)
    return text


def read_card(folder: Path) -> str:
    """The text that `write_card` would write.

    Raises:
        InputError: not a converted folder, an unreadable evaluation, or a README.md that cannot be brought up to date.
    """
    recipe = read_recipe(folder)
    path = folder / CARD
    try:
        existing = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); mend or delete it") from error
    return render_card(recipe, current_evaluation(folder, recipe), existing)


def current_evaluation(folder: Path, recipe: Recipe) -> Evaluation | None:
    """The evaluation beside a checkpoint; None if there is none, or if it speaks of other weights.

    Raises:
        InputError: it is unreadable.
    """
    if not (folder / EVALUATION).is_file():
        return None
    found = read_evaluation(folder / EVALUATION)
    return found if found.provenance.get("fingerprint") == fingerprint(recipe.files) else None


def render_card(recipe: Recipe, evaluation: Evaluation | None, existing: str | None) -> str:
    """The text of README.md.

    Args:
        recipe: contents of latentfold.json.
        evaluation: of these weights; None: the card says that nothing is known.
        existing: the README.md to bring up to date. Its text outside the markers and its metadata are kept, but for
            the keys that follow from the conversion; tags are added.

    Raises:
        InputError: `existing` has metadata that is not YAML, or markers that do not pair.
    """
    text = existing or ""
    if not text.lstrip().startswith("---"):
        text = f"---\n\n---\n{text}"
    try:
        card = ModelCard(text, ignore_metadata_errors=True)
    except (YAMLError, ValueError, TypeError) as error:
        raise InputError(f"{CARD}: its metadata is not a YAML mapping ({error}); mend or delete it") from error
    data = ModelCardData(**_metadata(card.data.to_dict(), recipe, evaluation))
    body = f"{BEGIN}\n{_body(recipe, evaluation)}\n{END}"
    return f"---\n{data.to_yaml()}\n---\n{_with_body(card.text, body)}"


def _with_body(text: str, body: str) -> str:
    """`text` with what lies between the markers replaced, or `body` after it where there are none."""
    if text.count(BEGIN) == text.count(END) == 0:
        own = text.rstrip("\n")
        return f"{own}\n\n{body}\n" if own else f"\n{body}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or END in before:
        raise InputError(f"{CARD}: expected one {BEGIN} and one {END} after it; mend them, or delete both")
    return before + body + after


def _metadata(existing: dict[str, Any], recipe: Recipe, evaluation: Evaluation | None) -> dict[str, Any]:
    source = recipe.source
    # no base_model_relation: its values are finetune, adapter, merge and quantized, and this is none of them
    known = {
        "base_model": source.name if source.revision else None,
        **{key: getattr(source, key) for key in ("license", "license_name", "license_link", "language")},
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
    }
    tags = existing.get("tags") or []
    kept = {key: value for key, value in existing.items() if key not in ("model-index", "model_name", "eval_results")}
    return (
        kept
        | {key: value for key, value in known.items() if value is not None}
        | {"tags": [*(tags if isinstance(tags, list) else [tags]), *(tag for tag in TAGS if tag not in tags)]}
        | ({"model_name": _model_name(recipe), "eval_results": _results(evaluation)} if evaluation else {})
    )


def _model_name(recipe: Recipe) -> str:
    """What the Hub lists results under."""
    tokens, seconds = recipe.trained
    return f"{_source_name(recipe)}-MLA" + (f", healed {duration(seconds)}" if tokens else "")


def _results(evaluation: Evaluation) -> list[EvalResult]:
    """The converted model's results as the Hub lists them."""
    results = []
    for text in evaluation.texts:
        place: dict[str, Any] = {
            "task_type": "text-generation",
            "dataset_type": re.sub(r"[^\w.]+", "-", text.name.lower()).strip("-") or "text",
            "dataset_name": one_line(text.name),
            "dataset_args": {"sha256": text.sha256, "windows": text.windows, "window_length": text.window_length},
        }
        metrics = {
            "perplexity": ("Perplexity", perplexity(text.overall.converted)),
            "nll-gap": ("NLL minus the original's (nats per token)", text.overall.gap),
        }
        results += [
            EvalResult(**place, metric_type=kind, metric_name=name, metric_value=round(value, 4))
            for kind, (name, value) in metrics.items()
        ]
    for task in evaluation.tasks or ():
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=task.task,
                dataset_name=task.task,
                metric_type=task.metric,
                metric_name=f"{task.metric} (original: {task.original:.4f})",
                metric_value=round(task.converted, 4),
            )
        )
    return results


def _figures(recipe: Recipe, evaluation: Evaluation | None) -> dict[str, Figure]:
    drawn = {name: draw(evaluation) for name, draw in FIGURES.items()} if evaluation else {}
    drawn[HEALING] = plots.healing_curve(recipe.healing)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _body(recipe: Recipe, evaluation: Evaluation | None) -> str:
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader("latentfold.convert.publish"), PackageLoader("latentfold.convert.targets", "")]
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown; names go through `code` and `cell`
    )
    environment.filters |= {
        "code": code,
        "cell": cell,
        "percent": percent,
        "ppl": ppl,
        "duration": duration,
        "basename": _basename,
    }
    environment.globals |= {
        "with_error": with_error,
        "per_layer": lambda values: f"{values / len(recipe.sizes):g}",
        "heal_command": heal_command,
    }
    parameters, (tokens, seconds) = recipe.parameters, recipe.trained
    labels = {name: figure.get_label() for name, figure in _figures(recipe, evaluation).items()}
    body = (
        environment.get_template("card.md.j2")
        .render(
            recipe=recipe,
            options=recipe.options,
            source=_source_name(recipe),
            hub_id=recipe.source.name if recipe.source.revision else None,
            licence=recipe.source.license_name or recipe.source.license,
            target=TARGETS[recipe.options.target],
            grown=growth(parameters.source, parameters.converted, recipe.untied_parameters),
            command=convert_command(recipe),
            kernels=engine_kernels(*recipe.size) if recipe.size else (),
            evaluation=evaluation,
            verdict=verdict(evaluation) if evaluation else None,
            everything=markdown(evaluation) if evaluation else None,
            converted=converted_name(evaluation.provenance) if evaluation else None,
            trained=duration(seconds) if tokens else None,
            figures={name: label for name, label in labels.items() if name in FIGURES},
            curve={name: label for name, label in labels.items() if name == HEALING},
        )
        .strip()
    )
    for marker in (BEGIN, END):  # a prompt or a continuation may hold one
        body = body.replace(marker, marker.replace("<!--", "<!-"))
    return printable(body)


def convert_command(recipe: Recipe) -> str:
    """What makes this checkpoint again: the command, or Python where the command has no option for what was asked.

    A local source goes by its folder's name, and texts by their files', which is all a reader can use.
    """
    source, options = recipe.source, recipe.options
    name = source.name if source.revision else _source_name(recipe)
    given = {"revision": source.revision} | {option: getattr(options, option) for option in REPEATED}
    given["device"] = None if options.device == "auto" else options.device
    given["calibration"] = tuple(map(_basename, options.calibration))
    given = {option: value for option, value in given.items() if value not in (None, ())}
    if recipe.size is None or options.queries != ConversionConfig.queries:
        return _python(name, given | ({} if recipe.size else {"sizes": recipe.sizes}) | {"queries": options.queries})
    words = ["latentfold", "convert", name, "OUT"]
    for option, value in given.items():
        for each in value if isinstance(value, tuple) else (value,):
            words += [f"--{option.replace('_', '-')}", str(each)]
    return shlex.join(words)


def heal_command(record: HealingRecord) -> str:
    """The command that heals a conversion in CONVERTED so again; texts by their files' names."""
    bundled = all(text.startswith(DEFAULT_CALIBRATION) for text in record.texts)
    budget = ["--minutes", f"{record.minutes:g}"] if record.minutes else ["--steps", str(record.curve[-1].step)]
    words = ["latentfold", "heal", "CONVERTED", "OUT", *budget]
    words += ["--train", record.train, "--seq-len", str(record.seq_len), "--batch-tokens", str(record.batch_tokens)]
    words += ["--rate", f"{record.rate:.3g}", "--seed", str(record.seed), "--dtype", record.dtype]
    return shlex.join([*words, *([] if bundled else ["--text", *map(_basename, record.texts)])])


def _python(source: str, options: dict[str, Any]) -> str:
    lines = [
        f"    {name}={_run_lengths(value) if name == 'sizes' else repr(value)}," for name, value in options.items()
    ]
    call = ["convert_checkpoint(", f"    {source!r},", "    'OUT',", *lines, ")"]
    imported = "LayerSize, convert_checkpoint" if "sizes" in options else "convert_checkpoint"
    return "\n".join([f"from latentfold.convert import {imported}", "", *call])


def _run_lengths(sizes: Sizes) -> str:
    """`[LayerSize(kv_rank=96, rope_dim=32)] * 28 + [None] * 2`."""
    return " + ".join(f"[{size!r}] * {len(list(run))}" for size, run in groupby(sizes))


def _source_name(recipe: Recipe) -> str:
    """`SmolLM2-135M` for org/SmolLM2-135M and for a folder of that name."""
    return _basename(recipe.source.name)


def _basename(name: str) -> str:
    """A path's last part: where the files lay on another machine tells a reader nothing."""
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] or "model"
