"""Publishing a folder: everything that is checked before a file is sent, then the push."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from latentfold.convert.errors import InputError
from latentfold.convert.publish.card import current_evaluation, read_card, write_card
from latentfold.convert.publish.files import check_files, files_to_push
from latentfold.convert.publish.licences import licence_notice
from latentfold.convert.publish.push import MESSAGE, PushResult, check_request, logged_in, push
from latentfold.convert.verify.reloaded import check_probe
from latentfold.convert.write.recipe import read_recipe
from latentfold.eval.records import EVALUATION


@dataclass(frozen=True)
class Publication:
    """A checkpoint that was published, or may be.

    Attributes:
        files: name in the repository -> file.
        card: text of the README.md among them.
        notice: what to mind about the original's licence, if anything.
        pushed: where it is; None after a dry run.
    """

    files: Mapping[str, Path]
    card: str
    notice: str | None
    pushed: PushResult | None


def publish_checkpoint(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = MESSAGE,
    tag: str | None = None,
    overwrite: bool = False,
    token: str | None = None,
    allow_unevaluated: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> Publication:
    """Publish a converted checkpoint on the Hub, in one commit.

    Before anything is sent: every file must be what the conversion wrote, the checkpoint must load and give the logits
    it gave then, its evaluation must be of these weights, and nothing else may lie in the folder. The model card is
    brought up to date. Afterwards the Hub's hashes are compared with the files. Interrupted, a push leaves the
    repository as it was; repeated, it sends no large file again that arrived.

    Args:
        folder: of the conversion.
        repo_id: namespace/name; made if there is none.
        private: for a repository that is made.
        revision: branch to commit to, made from the main one if there is none; None: the main one.
        create_pr: propose the commit as a pull request instead.
        message: of the commit.
        tag: name to give the commit.
        overwrite: replace everything in a repository that holds something else than a conversion.
        token: Hub token; None: HF_TOKEN or the stored one.
        allow_unevaluated: publish without an evaluation; the card says so.
        dry_run: check everything here and send nothing; nothing is written and the network is not used.
        progress: show the Hub's own progress bars.

    Raises:
        InputError: the folder is not a whole, unchanged, evaluated conversion and nothing else; the Hub refuses or
            fails, the repository holds something else, or it changed meanwhile.

    Example:
        >>> publish_checkpoint("smollm2-mla", "me/SmolLM2-135M-MLA", private=True).pushed.url
    """
    folder = Path(folder)
    check_request(repo_id, create_pr=create_pr, revision=revision, tag=tag)
    recipe = read_recipe(folder)
    if not dry_run:
        logged_in(repo_id, token)
    check_files(folder, recipe)
    files_to_push(folder, recipe)  # refuse what does not belong there before anything is written
    evaluated = current_evaluation(folder, recipe) is not None
    if not evaluated and not allow_unevaluated:
        found = f"{EVALUATION} is of other weights" if (folder / EVALUATION).exists() else f"no {EVALUATION}"
        raise InputError(
            f"{folder}: {found}; run latentfold eval (from Python: save_evaluation), or pass allow_unevaluated"
        )
    check_probe(folder, recipe.check.probe, torch.device("cpu"))
    card = read_card(folder) if dry_run else write_card(folder)
    files = files_to_push(folder, recipe)
    if not evaluated:  # what speaks of other weights stays here
        files = {name: path for name, path in files.items() if name not in (EVALUATION, "report.html")}
    pushed = None
    if not dry_run:
        with _hub_bars(progress):
            pushed = push(
                files,
                repo_id,
                private=private,
                revision=revision,
                create_pr=create_pr,
                message=message,
                tag=tag,
                overwrite=overwrite,
                token=token,
            )
    return Publication(files, card, licence_notice(recipe), pushed)


@contextmanager
def _hub_bars(shown: bool) -> Iterator[None]:
    """Keep huggingface_hub's bars and warnings away for a while, unless they are to be shown."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    if shown:
        yield
        return
    silent, level = are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not silent:
            enable_progress_bars()
