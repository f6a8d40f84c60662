"""Publishing a converted checkpoint: what may go to the Hub, and one commit that brings all of it there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from latentfold.convert.errors import InputError
from latentfold.convert.files import read_json
from latentfold.convert.publish.files import GENERATED, _matches
from latentfold.convert.source.hub import same_content
from latentfold.convert.source.hub_errors import hub_errors
from latentfold.convert.write.recipe import RECIPE

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo, RepoFile


MESSAGE = "Upload an MLA conversion"


@dataclass(frozen=True)
class PushResult:
    """What became of a push.

    Attributes:
        url: of the commit, the pull request, or the repository where nothing was to be done.
        commit: its hash.
        changed: whether there was anything to do.
    """

    url: str
    commit: str
    changed: bool


def push(
    files: Mapping[str, Path],
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = MESSAGE,
    tag: str | None = None,
    overwrite: bool = False,
    token: str | None = None,
) -> PushResult:
    """Bring files to a model repository in one commit, and check that they arrived.

    A repository that does not exist is created. Files of an earlier conversion that are not in `files` go in the same
    commit. Interrupted, a push leaves the repository as it was; repeated, it sends no large file again that arrived.

    Args:
        files: name in the repository -> file.
        repo: namespace/name.
        private: for a repository that is created.
        revision: branch to commit to, made from the main one if there is none; default: the main one.
        create_pr: propose the commit as a pull request instead.
        message: of the commit.
        tag: name to give the commit.
        overwrite: replace everything in a repository that holds something else than a conversion.
        token: Hub token; None: HF_TOKEN or the stored one.

    Raises:
        InputError: the Hub refuses or fails, the repository holds something else, or it changed meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    check_request(repo, create_pr=create_pr, revision=revision, tag=tag)
    with hub_errors(repo, revision):
        api = logged_in(repo, token)
        parent = _parent(api, repo, private=private, revision=revision)
        there = _remote_files(api, repo, parent)
        old = _replaceable(api, repo, parent, there, overwrite=overwrite)
        additions = [name for name, path in files.items() if name not in there or not same_content(path, there[name])]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationDelete(name, is_folder=False) for name in sorted(old - set(files))),
            *(CommitOperationAdd(name, files[name]) for name in additions),
        ]
        _check_tag(api, repo, tag, None if operations else parent)
        commit, url = parent, f"{api.endpoint}/{repo}"
        if operations:
            done = api.create_commit(
                repo,
                operations,
                commit_message=message,
                revision=revision,
                create_pr=create_pr,
                parent_commit=parent,
            )
            commit, url = done.oid, done.pr_url or done.commit_url
        check_arrival(api, repo, commit, files)
        if tag:
            api.create_tag(repo, tag=tag, revision=commit, exist_ok=True)
    return PushResult(url, commit, bool(operations))


def check_request(repo: str, *, create_pr: bool = False, revision: str | None = None, tag: str | None = None) -> None:
    """What can be refused without asking the Hub, and before anything is hashed.

    Raises:
        InputError: not a repository id, or options of a push that contradict each other.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise InputError(f"{repo}: expected a repository as namespace/name")
    if create_pr and (revision or tag):
        raise InputError("create_pr: goes to the main branch and has no commit to tag yet; drop `revision` and `tag`")


def check_target(repo: str, *, private: bool = False, token: str | None = None) -> None:
    """Find out before a long conversion that its result cannot be pushed.

    Raises:
        InputError: not a repository id, nobody is logged in, or the repository is public though a private one is
            wanted, or holds something else.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    check_request(repo)
    with hub_errors(repo):
        api = logged_in(repo, token)
        api.whoami()
        try:
            there = api.model_info(repo)
        except RepositoryNotFoundError:
            return
        _check_private(repo, private, there)
        commit = str(there.sha)
        _replaceable(api, repo, commit, _remote_files(api, repo, commit), overwrite=False)


def logged_in(repo: str, token: str | None) -> HfApi:
    """The Hub with a token, given or stored; nothing is asked yet.

    Raises:
        InputError: there is no token.
    """
    from huggingface_hub import HfApi, get_token

    if token is None and get_token() is None:
        raise InputError(f"{repo}: not logged in; run hf auth login, set HF_TOKEN or pass token")
    return HfApi(token=token)


def _parent(api: HfApi, repo: str, *, private: bool, revision: str | None) -> str:
    """The commit to build on; the repository and the branch are made if they do not exist."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        main = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private or None)  # None: as the namespace has it
        main = api.model_info(repo)
    _check_private(repo, private, main)
    if revision is None:
        return str(main.sha)
    try:
        return str(api.model_info(repo, revision=revision).sha)
    except RevisionNotFoundError:
        api.create_branch(repo, branch=revision)
        return str(main.sha)


def _check_private(repo: str, private: bool, there: ModelInfo) -> None:
    if private and not there.private:
        raise InputError(f"{repo}: is public, and `private` is for new repositories; make it private on the Hub first")


def _remote_files(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    from huggingface_hub import RepoFile

    tree = api.list_repo_tree(repo, recursive=True, revision=commit)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _check_tag(api: HfApi, repo: str, tag: str | None, commit: str | None) -> None:
    """Refuse a tag that stands for anything else than `commit` (None: one that is still to be made)."""
    for ref in api.list_repo_refs(repo).tags if tag else ():
        if ref.name == tag and ref.target_commit != commit:
            raise InputError(f"{repo}: has a tag {tag} on another commit; choose another name")


def _replaceable(api: HfApi, repo: str, commit: str, there: Iterable[str], *, overwrite: bool) -> set[str]:
    """Names in the repository that a push may delete: an earlier conversion's, or with `overwrite` all."""
    names = set(there) - {".gitattributes"}
    if overwrite:
        return names
    if names and RECIPE not in names:
        raise InputError(
            f"{repo}: holds {sorted(names)[0]} and no {RECIPE}, so it is no conversion; "
            "choose another repository, or pass overwrite to replace everything in it"
        )
    if not names:
        return names
    with TemporaryDirectory() as folder:
        earlier = read_json(Path(api.hf_hub_download(repo, RECIPE, revision=commit, local_dir=folder))).get("files", {})
    return {name for name in names if name in earlier or _matches(name, [RECIPE, *GENERATED])}


def check_arrival(api: HfApi, repo: str, commit: str, files: Mapping[str, Path]) -> None:
    """Compare sizes and hashes of what the Hub holds with the files that were sent.

    Raises:
        InputError: a file is not there, or another.
    """
    there = _remote_files(api, repo, commit)
    wrong = [name for name, path in files.items() if name not in there or not same_content(path, there[name])]
    if wrong:
        raise InputError(f"{repo}: {', '.join(wrong)} arrived damaged in commit {commit}; push again")
