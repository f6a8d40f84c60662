"""Tokenizer, config.json, generation config, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from latentfold.convert.files import replace_text
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.source.tokenizer import load_generation_config
from latentfold.convert.targets.target import Ladder
from latentfold.convert.text.windows import tokenize


def write_small_files(plan: ConversionPlan, chosen: Mapping[str, Ladder], tokenizer: Any, folder: Path) -> None:
    """Tokenizer, generation config, config.json and the model's code, where it is ours.

    Raises:
        RuntimeError: the written tokenizer does not give the source's tokens.
    """
    from transformers import AutoTokenizer, GenerationConfig

    replace_text(folder / "config.json", json.dumps(plan.target.config(chosen), indent=2) + "\n")
    for path in plan.target.code:
        shutil.copyfile(path, folder / path.name)
    tokenizer.save_pretrained(folder)
    sample = "Zwölf Boxkämpfer jagen Viktor:\n\tdef f(x): return x  # 12345"
    again = AutoTokenizer.from_pretrained(folder)
    if not torch.equal(tokenize(tokenizer, sample), tokenize(again, sample)):
        raise RuntimeError(f"{plan.checkpoint.name}: its tokenizer does not survive saving; please report this")
    generation = load_generation_config(plan.checkpoint) or GenerationConfig(
        bos_token_id=plan.config.bos_token_id,
        eos_token_id=plan.config.eos_token_id,
        pad_token_id=plan.config.pad_token_id,
    )
    generation.save_pretrained(folder)
