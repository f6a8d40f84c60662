"""Tokenizer, generation config, legal files, config.json, code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from latentfold.convert.files import read_json
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.source.licence import legal_files
from latentfold.convert.source.tokenizer import GENERATION_CONFIG, tokenizer_files
from latentfold.convert.targets.target import Ladder
from latentfold.convert.write.writer import CheckpointWriter

SETTINGS = "tokenizer_config.json"

SAMPLE = "Zwölf Boxkämpfer jagen Viktor:\n\tdef f(x): return x  # 12345"


def write_source_files(plan: ConversionPlan, tokenizer: Any, writer: CheckpointWriter) -> None:
    """What goes over from the source and depends on nothing that is computed, file by file as it is.

    Raises:
        RuntimeError: the written tokenizer does not give the source's tokens.
    """
    folder = plan.checkpoint.folder
    writer.copy(legal_files(folder))
    writer.copy(tokenizer_files(folder, tokenizer))
    _check_tokenizer(plan, tokenizer, writer)
    if (folder / GENERATION_CONFIG).is_file():  # one that loads, as `prepare` has seen
        writer.copy({GENERATION_CONFIG: folder / GENERATION_CONFIG})
    else:
        ids = {key: getattr(plan.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        known = {key: value for key, value in ids.items() if value is not None}
        writer.write_text(GENERATION_CONFIG, json.dumps(known, indent=2) + "\n")


def write_config(plan: ConversionPlan, chosen: Mapping[str, Ladder], writer: CheckpointWriter) -> None:
    """config.json, and the model's code where it is ours."""
    writer.write_text("config.json", json.dumps(plan.target.config(chosen), indent=2) + "\n")
    writer.copy({path.name: path for path in plan.target.code})


def _check_tokenizer(plan: ConversionPlan, tokenizer: Any, writer: CheckpointWriter) -> None:
    """Load the tokenizer as it will be beside the new config.json, and compare.

    Its class may follow from the source's model type, or from code that stays behind: then its settings name it.
    """
    expected = _answers(tokenizer)
    settings = read_json(path) if (path := writer.folder / SETTINGS).is_file() else {}
    if "auto_map" not in settings:
        with suppress(Exception):  # whatever a class meets whose files these are not
            if _answers(_load(plan, writer)) == expected:
                return
    settings.pop("auto_map", None)
    writer.write_text(SETTINGS, json.dumps(settings | {"tokenizer_class": type(tokenizer).__name__}, indent=2) + "\n")
    if _answers(_load(plan, writer)) != expected:
        raise RuntimeError(f"{plan.checkpoint.name}: its tokenizer does not survive copying; please report this")


def _load(plan: ConversionPlan, writer: CheckpointWriter) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.for_model(plan.target.model_type)  # config.json is not there yet
    return AutoTokenizer.from_pretrained(writer.folder, config=config, trust_remote_code=False)


def _answers(tokenizer: Any) -> Any:
    """What has to be the same of a tokenizer and its copy."""
    return tokenizer(SAMPLE)["input_ids"], tokenizer.eos_token_id, len(tokenizer), tokenizer.chat_template
