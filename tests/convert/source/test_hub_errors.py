"""What becomes of an error inside a block that uses the Hub."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HTTPError

from latentfold.convert.errors import InputError
from latentfold.convert.source.hub_errors import Unreachable, hub_errors

NOBODY = "http://127.0.0.1:1"
"""An endpoint that nothing listens at."""


def raising(error: Exception) -> Callable[..., Any]:
    """A function that raises, whatever it is called with."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    return function


OWN = [
    InputError("kv_rank 0: expected a positive number"),
    ValueError("too many values to unpack"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "card.md"),
    ConnectionResetError(errno.ECONNRESET, "a worker of our own"),
    KeyError("weight_map"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_errors_of_ours_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, hub_errors("org/model"):
        raising(error)()
    assert raised.value is error and error.__cause__ is None


def test_what_the_disk_refuses_a_download_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("huggingface_hub.file_download._hf_hub_download_to_cache_dir", raising(full))
    with pytest.raises(OSError) as raised, hub_errors("org/model"):
        hf_hub_download("org/model", "config.json", cache_dir=tmp_path)
    assert raised.value is full


@pytest.mark.parametrize(
    "error",
    [
        ValueError("an answer that cannot be parsed"),
        RuntimeError("an upload thread died"),
        OSError("Consistency check failed: file should be of size 2 but has size 1"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError(errno.ETIMEDOUT, "timed out"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_out_of_huggingface_hub_are_told_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download._hf_hub_download_to_cache_dir", raising(error))
    told = pytest.raises(InputError, match=r"^org/model: the Hub could not be used \(.+\)$")
    with told as raised, hub_errors("org/model"):
        hf_hub_download("org/model", "config.json", cache_dir=tmp_path)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: HfApi(endpoint=NOBODY).model_info("org/model"), Unreachable, "the connection to the Hub failed"),
        (lambda: HfApi(endpoint=NOBODY).model_info("a--b/c"), InputError, "not a Hub id; expected namespace/name"),
        (raising(HTTPError("broken off")), Unreachable, r"the connection to the Hub failed \(broken off\)"),
    ],
)
def test_the_network_and_names(call: Callable[[], Any], kind: type[InputError], message: str) -> None:
    with pytest.raises(kind, match=message), hub_errors("org/model"):
        call()
