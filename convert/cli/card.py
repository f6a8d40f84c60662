"""`latentfold card`."""

from __future__ import annotations

from pathlib import Path

import click

from latentfold.convert.cli.options import Folder, quiet_libraries, user_errors


@click.command()
@click.argument("out", type=Folder())
@click.option("--stdout", is_flag=True, help="Print the card; write nothing.")
@user_errors
def card(out: str, stdout: bool) -> None:
    """Write OUT's model card: README.md and figures/, from its recipe and its evaluation.

    The part between its two markers and the metadata that follow from the conversion are replaced; everything else
    you wrote stays. Without an evaluation of these weights in OUT the card says so.

    \b
    latentfold card smollm2-mla
    latentfold card smollm2-mla --stdout | less
    """
    quiet_libraries()
    from latentfold.convert.publish.card import CARD, read_card, write_card

    folder = Path(out)
    if stdout:
        click.echo(read_card(folder), nl=False)
        return
    write_card(folder)
    click.echo(str(folder / CARD))
