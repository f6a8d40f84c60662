"""`latentfold inspect`."""

from __future__ import annotations

import json

import click

from latentfold.convert.cli.options import FilesCommand, quiet_libraries, revision_option, token_option, user_errors


@click.command(cls=FilesCommand)
@click.argument("model")
@click.option("--calibrate", is_flag=True, help="Also what several sizes would cost: reads the weights, a few minutes.")
@click.option("--calibration", multiple=True, metavar="FILE...", help="Text for --calibrate. Default: bundled text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@revision_option
@token_option
@user_errors
def inspect(
    model: str,
    calibrate: bool,
    calibration: tuple[str, ...],
    as_json: bool,
    revision: str | None,
    token: str | None,
) -> None:
    """Describe MODEL from its config.json alone: sizes, KV cache, what a conversion would save.

    With --calibrate a few layers are converted at several sizes, and the error of their attention on text left out is
    printed: what to expect of a size before converting at it.

    \b
    latentfold inspect meta-llama/Llama-3.1-8B
    latentfold inspect ./my-model --json | jq .proposal
    latentfold inspect ./my-model --calibrate --calibration my.txt
    """
    quiet_libraries()
    from dataclasses import asdict

    from latentfold.convert.api import estimate_sizes
    from latentfold.convert.cli.tables import estimates_table, inspection_table
    from latentfold.convert.errors import InputError
    from latentfold.convert.plan.inspection import inspect_model

    if calibration and not calibrate:
        raise InputError("--calibration: is for --calibrate")
    found = inspect_model(model, revision=revision, token=token)
    estimates = []
    if calibrate:
        estimates = estimate_sizes(model, revision=revision, token=token, calibration=calibration)
    if as_json:
        data = found.to_dict() | {"estimates": [asdict(size) for size in estimates] if calibrate else None}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(inspection_table(found))
    if calibrate:
        click.echo("\n" + estimates_table(estimates))
