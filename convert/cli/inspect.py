"""`latentfold inspect`."""

from __future__ import annotations

import json

import click

from latentfold.convert.cli.options import quiet_libraries, revision_option, token_option, user_errors


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@revision_option
@token_option
@user_errors
def inspect(model: str, as_json: bool, revision: str | None, token: str | None) -> None:
    """Describe MODEL from its config.json alone: sizes, KV cache, what a conversion would save.

    \b
    latentfold inspect meta-llama/Llama-3.1-8B
    latentfold inspect ./my-model --json | jq .proposal
    """
    quiet_libraries()
    from latentfold.convert.inspection import inspect_model
    from latentfold.convert.tables import inspection_table

    found = inspect_model(model, revision=revision, token=token)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else inspection_table(found))
