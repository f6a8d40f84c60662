"""Tensor names of a model that was saved inside a training program's wrapper."""

from __future__ import annotations

import re
from collections.abc import Collection

from latentfold.convert.errors import InputError

WRITERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DataParallel, DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_forward_module.": "Lightning Fabric",
    "base_model.model.": "PEFT",
    "base_layer.": "PEFT",
}
"""What wrappers put into names, at the start or further in, and whose they are."""

_PART = re.compile(r"(?:^|(?<=\.))(?:" + "|".join(map(re.escape, WRITERS)) + ")")


def unwrapped(name: str) -> str:
    """A tensor's name without what known wrappers put into it."""
    return _PART.sub("", name)


def check_names(found: Collection[str], expected: Collection[str]) -> None:
    """Refuse names that a wrapper has changed.

    Args:
        found: names in the files.  expected: the model's own.

    Raises:
        InputError: naming the part that is too much, whose it is, and how to be rid of it.
    """
    for name in found:
        own = unwrapped(name)
        if own != name and own in expected and own not in found:
            parts = dict.fromkeys(part for each in found for part in _PART.findall(each))
            said = " and ".join(f"{part} ({WRITERS[part]})" for part in parts)
            if any(".lora_" in each for each in found):
                raise InputError(
                    f"tensor {name}: an adapter's layers that were not merged, saved with {said} in the names; load it "
                    "with PEFT and save it again: model.merge_and_unload().save_pretrained(FOLDER)"
                )
            raise InputError(_advice(name, said, "".join(f".replace({part!r}, '')" for part in parts)))
    if any(name in expected for name in found):
        return
    for name in found:
        ends = [name[dot.end() :] for dot in re.finditer(r"\.", name)]
        if own := next((end for end in ends if end in expected), ""):
            prefix = name.removesuffix(own)
            said = f"{prefix} at the start (of a training program that holds the model under that name)"
            raise InputError(_advice(name, said, f".removeprefix({prefix!r})"))


def _advice(name: str, said: str, mended: str) -> str:
    return (
        f"tensor {name}: saved inside a wrapper, which left {said} in the names; save the model inside, or rename in "
        f"each file F and in the index: save_file({{n{mended}: t for n, t in load_file(F).items()}}, F, "
        "{'format': 'pt'}) of safetensors.torch"
    )
