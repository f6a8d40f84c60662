"""Time and peak memory of a conversion at default settings, against the cost of running the model over the same text.

usage: python benchmarks/convert_cost.py MODEL

The ceiling: pass 2 cannot be faster than one forward pass of the decoder layers over the calibration tokens. Prints a
line for people on stderr and JSON on stdout.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM

from latentfold.convert import read_recipe

SAMPLE = 2


def forward_seconds(folder: str, tokens: int, length: int) -> float:
    """Seconds of a plain forward pass of the decoder over `tokens` tokens, from a sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().model
    batch = torch.randint(model.config.vocab_size, (1, length))
    with torch.no_grad():
        model(batch)
        start = time.perf_counter()
        for _ in range(SAMPLE):
            model(batch)
    return (time.perf_counter() - start) / SAMPLE * tokens / length


def main() -> None:
    """Measure one conversion in a process of its own."""
    source = sys.argv[1]
    # first, while this process is small: a child's peak is at least its parent's at the fork
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "latentfold.convert.cli", "convert", source, out, "--quiet"]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        windows, length = read_recipe(out).calibration.windows
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    forward = forward_seconds(source, windows * length, length)
    print(f"{seconds:.0f} s, {peak:.2f} GiB; one forward pass over the text: {forward:.0f} s", file=sys.stderr)
    result = {
        "seconds": round(seconds, 1),
        "peak_memory_gib": round(peak, 3),
        "forward_seconds": round(forward, 1),
        "forward_passes": round(seconds / forward, 2),
        "calibration_tokens": windows * length,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
