"""`latentfold heal`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from latentfold.convert.choices import PRODUCTS, RECOMPUTED, TRAINED
from latentfold.convert.cli.evaluate import evaluate
from latentfold.convert.cli.options import (
    FilesCommand,
    Folder,
    check_writable,
    command_line,
    device_option,
    next_steps,
    quiet_libraries,
    quiet_option,
    token_option,
    user_errors,
)
from latentfold.convert.errors import InputError


@click.command(cls=FilesCommand)
@click.argument("converted", type=Folder())
@click.argument("out", type=Folder())
@click.option("--minutes", type=click.FloatRange(0, min_open=True), metavar="M", help="How long; default: 10.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Or how many steps of the optimizer.")
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Or how many tokens.")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE...",
    help="Text or jsonl files to train on. Default: bundled text. Never use text you will evaluate on.",
)
@click.option("--teacher", metavar="MODEL", help="The original, where CONVERTED's record does not lead to it.")
@click.option("--train", type=click.Choice(TRAINED), default="all", show_default=True, help="Tensors of the layers.")
@click.option("--seq-len", type=click.IntRange(16), default=1024, show_default=True, help="Tokens of a window.")
@click.option("--batch-tokens", type=click.IntRange(16), default=1024, show_default=True, help="Tokens of a step.")
@click.option(
    "--rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="X",
    help="Step relative to each tensor's size; default: by how much there is to heal.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the order of the text.")
@click.option(
    "--recompute",
    type=click.Choice(list(RECOMPUTED)),
    default="half",
    show_default=True,
    help="Layers whose inner results are computed twice instead of being kept: less memory, more time.",
)
@click.option(
    "--cache-teacher",
    is_flag=True,
    help="Run the original once, layer by layer, and keep its likeliest tokens on disk: for originals that do not fit "
    "beside the conversion, and for many epochs.",
)
@device_option
@click.option(
    "--dtype",
    type=click.Choice(["auto", *PRODUCTS]),
    default="auto",
    show_default=True,
    help="Of products; auto: the faster one here. Weights are kept in float32.",
)
@click.option("--dry-run", is_flag=True, help="Print what it would need; write nothing, download no weights.")
@click.option("--overwrite", is_flag=True, help="Replace what OUT holds, once the new checkpoint is complete.")
@click.option("--plot", "plot_file", type=click.Path(), metavar="FILE", help="Draw held-out KL and NLL; .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print the record of the healing as JSON.")
@quiet_option
@click.option("--revision", metavar="REV", help="Of the teacher, for a Hub id.")
@token_option
@user_errors
def heal(
    converted: str,
    out: str,
    dry_run: bool,
    plot_file: str | None,
    as_json: bool,
    quiet: bool,
    text: tuple[str, ...],
    **options: Any,
) -> None:
    """Train the conversion in CONVERTED on its original's predictions, and write it to OUT.

    A few minutes win back most of what a conversion lost. The part of the text that is never trained on has the last
    word: what is written is the best that it saw, never something worse than what was given. OUT is the same class,
    dtype and files as CONVERTED. An interrupted healing continues when the command is repeated.

    \b
    latentfold heal smollm2-mla smollm2-mla-healed
    latentfold heal smollm2-mla smollm2-mla-healed --minutes 60 --text mine.txt
    """
    if plot_file:
        if not plot_file.endswith((".png", ".svg")):
            raise InputError(f"--plot {plot_file}: expected a name that ends in .png or .svg")
        check_writable("--plot", plot_file)
    quiet_libraries()
    from dataclasses import asdict

    from latentfold.convert.cli.tables import healing_plan_table, healing_table
    from latentfold.convert.heal.config import HealingConfig
    from latentfold.convert.heal.estimate import estimate
    from latentfold.convert.heal.processes import launched_first
    from latentfold.convert.heal.run import prepare, run
    from latentfold.convert.progress import shown

    config = HealingConfig(converted, out, text=text, **options)
    if dry_run:
        found = estimate(prepare(config, weights=False))
        click.echo(json.dumps(asdict(found), indent=2) if as_json else healing_plan_table(found))
        return
    job = prepare(config)
    result = run(job, shown(not quiet))
    if not launched_first():
        return
    record = result.recipe.healing[-1]
    if plot_file:
        from latentfold.eval.report import plots

        if curve := plots.healing_curve(result.recipe.healing):
            Path(plot_file).write_bytes(plots.picture(curve, Path(plot_file).suffix[1:]))
    if as_json:
        click.echo(json.dumps(asdict(record), indent=2))
    else:
        click.echo(healing_table(record))
        click.echo(str(result.path))
    next_steps(command_line(evaluate, {"original": job.teacher.name, "converted": out}))
