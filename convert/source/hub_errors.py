"""What the Hub refuses, in one line each."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from latentfold.convert.errors import InputError


class Unreachable(InputError):
    """The Hub did not answer at all."""


@contextmanager
def hub_errors(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP client or the network raise in the block into one line that says what to do.

    Everything else passes through as it is: a fault of the block's own, a disk that is full.

    Raises:
        InputError: the Hub refused or failed.
        Unreachable: no answer: offline, no network, or the connection broke.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # of httpx or httpx2: what this huggingface_hub uses

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        if not (isinstance(error, HTTPError) or _raised_by_hub(error)):
            raise
        # upload threads, and downloads that then looked into the cache, wrap what really happened
        cause = error.__cause__
        wrapped = isinstance(cause, HfHubHTTPError) or isinstance(error, RuntimeError)
        kind, reason = _hub_failure((wrapped and cause) or error, revision)
        raise kind(f"{repo}: {reason}") from error


def _raised_by_hub(error: Exception) -> bool:
    """Whether an error of no telling type comes out of a call of huggingface_hub, and not from this machine's files."""
    if (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, (ConnectionError, TimeoutError))
    ):
        return False
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(module.partition(".")[0] == "huggingface_hub" for module in modules)


def _hub_failure(error: BaseException, revision: str | None) -> tuple[type[InputError], str]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    said = re.sub(r"(hf_|Bearer )\S+", r"\1...", (str(error).strip().splitlines() or [type(error).__name__])[0])
    if isinstance(error, GatedRepoError):
        return InputError, "gated; accept its terms on the Hub and log in (hf auth login) or pass token"
    if isinstance(error, RepositoryNotFoundError):
        return InputError, "no such repository on the Hub, or it is private; check the name, log in or pass token"
    if isinstance(error, RevisionNotFoundError):
        return InputError, f"no revision {revision!r} on the Hub"
    if isinstance(error, HfHubHTTPError):
        return InputError, _status_failure(error, said)
    if isinstance(error, LocalTokenNotFoundError):
        return InputError, "not logged in; run hf auth login or pass token"
    if isinstance(error, HFValidationError):
        return InputError, "not a Hub id; expected namespace/name"
    if isinstance(error, LocalEntryNotFoundError):
        return Unreachable, "not in the local cache, and the Hub cannot be reached (offline?)"
    if isinstance(error, OfflineModeIsEnabled):
        return Unreachable, "the Hub may not be asked while HF_HUB_OFFLINE is set"
    if isinstance(error, HTTPError):
        return Unreachable, f"the connection to the Hub failed ({said}); repeat the command to continue"
    return InputError, f"the Hub could not be used ({said})"


def _status_failure(error: Any, said: str) -> str:
    """What an HTTP error status means for who reads it."""
    status = error.response.status_code
    said = error.server_message or said
    if status == 401:
        return "the Hub does not accept the token; log in again (hf auth login) or pass another token"
    if status == 403:
        return f"the token has no permission for this ({said}); use one with the right role, of a member"
    if status == 404:
        return f"not found on the Hub ({said}); check the name"
    if status == 412:
        return "has changed on the Hub meanwhile; nothing was overwritten, look at it and repeat the command"
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        return f"too many requests; repeat the command in {f'{wait} seconds' if wait else 'a few minutes'}"
    if status >= 500:
        return f"the Hub has a problem of its own (status {status}); repeat the command later to continue"
    return f"the Hub refused (status {status}: {said})"
