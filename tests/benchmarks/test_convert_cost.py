"""`make bench` from beginning to end, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import MakeModel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "convert_cost.py"


def test_it_measures(make_model: MakeModel) -> None:
    done = subprocess.run([sys.executable, SCRIPT, make_model()], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["seconds"] > 0 and found["peak_memory_gib"] > 0.1 and found["forward_seconds"] > 0
    assert found["calibration_tokens"] == 28672 // 256 * 256
