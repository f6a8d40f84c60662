"""`latentfold inspect`."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from latentfold.convert.cli.options import (
    FilesCommand,
    Folder,
    calibration_option,
    calibration_tokens_option,
    device_option,
    engine_option,
    quiet_libraries,
    quiet_option,
    revision_option,
    seq_len_option,
    target_option,
    token_option,
    user_errors,
)


@click.command(cls=FilesCommand)
@click.argument("model", type=Folder())
@click.option("--calibrate", is_flag=True, help="Also what several sizes would cost: reads the weights, a few minutes.")
@calibration_option
@calibration_tokens_option
@seq_len_option
@device_option
@target_option
@engine_option
@quiet_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@revision_option
@token_option
@click.pass_context
@user_errors
def inspect(
    context: click.Context,
    model: str,
    calibrate: bool,
    as_json: bool,
    quiet: bool,
    revision: str | None,
    token: str | None,
    **options: Any,
) -> None:
    """Describe MODEL from its config.json alone: sizes, KV cache, what a conversion would save.

    With --calibrate a few layers are converted at several sizes, and the error of their attention on text left out is
    printed: what to expect of a size before converting at it. All options from --calibration to --quiet are for that.

    \b
    latentfold inspect meta-llama/Llama-3.1-8B
    latentfold inspect ./my-model --json | jq .proposal
    latentfold inspect ./my-model --calibrate --calibration my.txt --device cuda
    """
    for name in (*options, "quiet"):
        if not calibrate and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is for --calibrate")
    quiet_libraries()
    from dataclasses import asdict

    from latentfold.convert.cli.tables import estimates_table, inspection_table
    from latentfold.convert.plan.inspection import inspect_model

    found = inspect_model(model, revision=revision, token=token)
    estimates = []
    if calibrate:
        from latentfold.convert.api import estimate_sizes

        estimates = estimate_sizes(model, revision=revision, token=token, progress=not quiet, **options)
    if as_json:
        data = found.to_dict() | {"estimates": [asdict(size) for size in estimates] if calibrate else None}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(inspection_table(found))
    if calibrate:
        click.echo("\n" + estimates_table(estimates))
