"""`latentfold push`."""

from __future__ import annotations

from typing import Any

import click

from latentfold.convert.cli.options import (
    Folder,
    loading,
    next_steps,
    quiet_libraries,
    quiet_option,
    token_option,
    user_errors,
)


@click.command()
@click.argument("out", type=Folder())
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--revision", "--branch", metavar="BRANCH", help="Branch to commit to; made if there is none.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the main branch.")
@click.option("--message", default="Upload an MLA conversion", show_default=True, help="Of the commit.")
@click.option("--tag", metavar="TAG", help="Tag the commit.")
@click.option("--dry-run", is_flag=True, help="Check everything here and print what would be sent; no network.")
@click.option("--allow-unevaluated", is_flag=True, help="Publish without an evaluation; the card says so.")
@click.option("--overwrite", is_flag=True, help="Replace everything in a repository that holds something else.")
@quiet_option
@token_option
@user_errors
def push(out: str, repo_id: str, dry_run: bool, quiet: bool, **options: Any) -> None:
    """Publish the converted checkpoint in OUT as REPO_ID (namespace/name) on the Hub, in one commit.

    Before anything is sent: every file must be what the conversion wrote, the checkpoint must load and give the logits
    it gave then, its evaluation must be of these weights, and nothing else may lie in OUT. The model card is brought up
    to date. Afterwards the Hub's hashes are compared with the files. Interrupted, repeat the command: large files that
    arrived are not sent again.

    \b
    latentfold push smollm2-mla me/SmolLM2-135M-MLA --dry-run
    latentfold push smollm2-mla me/SmolLM2-135M-MLA --private --tag v1
    """
    quiet_libraries()
    from latentfold.convert.formats import size
    from latentfold.convert.publish.checkpoint import publish_checkpoint
    from latentfold.convert.publish.licences import licence_notice
    from latentfold.convert.write.recipe import read_recipe

    recipe = read_recipe(out)
    if (notice := licence_notice(recipe)) and not quiet:
        click.echo(f"Note: {notice}", err=True)
    found = publish_checkpoint(out, repo_id, dry_run=dry_run, progress=not quiet, **options)
    if found.pushed is None:
        click.echo("\n".join(f"{size(path.stat().st_size):>10}  {name}" for name, path in found.files.items()))
        click.echo(f"\nREADME.md, brought up to date:\n\n{found.card}", nl=False)
        return
    if not found.pushed.changed and not quiet:
        click.echo(f"Nothing to do: {repo_id} holds this already.", err=True)
    click.echo(found.pushed.url)
    next_steps(loading(repo_id, recipe.options.target))
