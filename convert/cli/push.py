"""`latentfold push`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from latentfold.convert.cli.options import quiet_libraries, token_option, user_errors


@click.command()
@click.argument("out")
@click.argument("repo_id")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--revision", "--branch", metavar="BRANCH", help="Branch to commit to; made if there is none.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the main branch.")
@click.option("--message", default="Upload an MLA conversion", show_default=True, help="Of the commit.")
@click.option("--tag", metavar="TAG", help="Tag the commit.")
@click.option("--dry-run", is_flag=True, help="Check everything here and print what would be sent; no network.")
@click.option("--allow-unevaluated", is_flag=True, help="Publish without an evaluation; the card says so.")
@click.option("--overwrite", is_flag=True, help="Replace everything in a repository that holds something else.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no notices.")
@token_option
@user_errors
def push(out: str, repo_id: str, dry_run: bool, allow_unevaluated: bool, quiet: bool, **options: Any) -> None:
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
    import torch
    from huggingface_hub.utils import disable_progress_bars, logging

    from latentfold.convert.errors import InputError
    from latentfold.convert.files import size
    from latentfold.convert.publish import push as hub
    from latentfold.convert.publish.card import current_evaluation, read_card, write_card
    from latentfold.convert.publish.files import check_files, files_to_push
    from latentfold.convert.publish.licences import licence_notice
    from latentfold.convert.verify.reloaded import check_probe
    from latentfold.convert.write.recipe import read_recipe
    from latentfold.eval.records import EVALUATION

    if quiet:
        disable_progress_bars()
        logging.set_verbosity_error()
    folder = Path(out)
    hub.check_request(repo_id, **{name: options[name] for name in ("create_pr", "revision", "tag")})
    recipe = read_recipe(folder)
    if not dry_run:
        hub.logged_in(repo_id, options["token"])
    check_files(folder, recipe)
    files_to_push(folder, recipe)  # refuse what does not belong there before anything is written
    evaluated = current_evaluation(folder, recipe) is not None
    if not evaluated and not allow_unevaluated:
        found = f"{EVALUATION} is of other weights" if (folder / EVALUATION).exists() else f"no {EVALUATION}"
        raise InputError(f"{out}: {found}; run latentfold eval, or pass --allow-unevaluated")
    check_probe(folder, recipe, torch.device("cpu"))
    card = read_card(folder) if dry_run else write_card(folder)
    files = files_to_push(folder, recipe)
    if not evaluated:  # what speaks of other weights stays here
        files = {name: path for name, path in files.items() if name not in (EVALUATION, "report.html")}
    if (notice := licence_notice(recipe)) and not quiet:
        click.echo(f"Note: {notice}", err=True)
    if dry_run:
        click.echo("\n".join(f"{size(path.stat().st_size):>10}  {name}" for name, path in files.items()))
        click.echo(f"\nREADME.md, brought up to date:\n\n{card}", nl=False)
        return
    result = hub.push(files, repo_id, **options)
    if not result.changed and not quiet:
        click.echo(f"Nothing to do: {repo_id} holds this already.", err=True)
    click.echo(result.url)
