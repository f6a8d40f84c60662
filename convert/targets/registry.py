"""The targets, one line each. Nothing is imported before a target is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from latentfold.convert.targets.target import Conversion


@dataclass(frozen=True)
class TargetEntry:
    """A format that conversions are written in.

    Attributes:
        name: as the option has it, and of the folder beside this file, whose `target.py` holds `cls`.
        cls: the class of its conversions.
        architecture: the class that loads it.
        dtypes: names of the dtypes it can be stored in.
        remote_code: whether a checkpoint is loaded with its own code; otherwise by a class of transformers.
        other_dtype: why other dtypes are not possible.
    """

    name: str
    cls: str
    architecture: str
    dtypes: tuple[str, ...]
    remote_code: bool
    other_dtype: str = ""

    @property
    def conversion(self) -> type[Conversion]:
        """`cls`, imported."""
        found: type[Conversion] = getattr(import_module(f"{__package__}.{self.name}.target"), self.cls)
        return found


TARGETS: Mapping[str, TargetEntry] = {
    entry.name: entry
    for entry in (
        TargetEntry(
            "deepseek",
            "PortableTarget",
            "DeepseekV3ForCausalLM",
            ("bfloat16", "float32"),
            remote_code=False,
            other_dtype="the latent norm is made neutral with values it cannot hold",
        ),
        TargetEntry(
            "native", "NativeTarget", "LatentfoldForCausalLM", ("bfloat16", "float32", "float16"), remote_code=True
        ),
    )
}
"""By name; where the choice is left open, the first that can hold a model is taken."""
