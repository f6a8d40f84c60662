"""The real model: LATENTFOLD_SMOLLM2 names its folder (`make test-slow` fetches it)."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SOURCE = os.environ.get("LATENTFOLD_SMOLLM2", "")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M at 128 of 384 values, default calibration, within its time and memory."""
    if not SOURCE:
        pytest.skip("LATENTFOLD_SMOLLM2 is not set")
    out = tmp_path_factory.mktemp("smollm2") / "mla"
    command = [sys.executable, "-m", "latentfold.convert.cli", "convert", SOURCE, str(out)]
    start = time.monotonic()
    subprocess.run([*command, "--kv-rank", "96", "--rope-dim", "32", "--quiet"], check=True)
    assert time.monotonic() - start < 300
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6 < 1.6  # GB
    return out


def test_gap_on_a_novel(converted: Path) -> None:
    from latentfold.eval import evaluate

    found = evaluate(SOURCE, str(converted), progress=False)
    assert found.provenance["windows"] == [4, 4096]
    assert found.overall.gap < 0.8
    assert found.cache_converted.measured == 30 * 128 * 2
