"""Memory does not grow with depth: one layer of weights and statistics at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import MakeModel

CODE = """
import re, sys
from latentfold.convert import convert_checkpoint
convert_checkpoint(sys.argv[1], sys.argv[2], kv_rank=32, rope_dim=16, calibration=(sys.argv[3],),
                   calibration_tokens=512, seq_len=64, progress=False)
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


def peak_mib(source: Path, out: Path, text: Path) -> int:
    command = [sys.executable, "-c", CODE, str(source), str(out), str(text)]
    # large blocks go back to the system when freed: what is measured is what is held, not the allocator's leftovers
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def test_peak_does_not_grow_with_depth(make_model: MakeModel, tmp_path: Path, text_file: Path) -> None:
    wide = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    wide |= {"intermediate_size": 4096}
    layer_mib = (3 * 256 * 4096 + 2 * 256 * 256 + 2 * 256 * 128) * 4 / 2**20  # 13 MiB of weights in float32
    shallow = peak_mib(make_model(num_hidden_layers=2, **wide), tmp_path / "shallow", text_file)
    deep = peak_mib(make_model(num_hidden_layers=14, **wide), tmp_path / "deep", text_file)
    # twelve more layers are 156 MiB of weights read and as many written; the page cache may show as a few of them
    assert deep - shallow < 3 * layer_mib, (shallow, deep)
