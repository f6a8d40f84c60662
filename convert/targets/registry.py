"""The targets, one line each. Nothing is imported before a target is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latentfold.convert.attention.sizes import Sizes
    from latentfold.convert.families.family import Family
    from latentfold.convert.model.shape import ModelShape
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
        limited: whether `support.py` in its folder says what it cannot hold; otherwise it holds all that families
            describe, layer by layer.
    """

    name: str
    cls: str
    architecture: str
    dtypes: tuple[str, ...]
    remote_code: bool
    other_dtype: str = ""
    limited: bool = False

    def why_not(self, family: Family, config: Any, shape: ModelShape, engine: str) -> list[str]:
        """Why the target cannot hold a model; empty where it can.

        Args:
            engine: what has to load the result: "any", or "transformers" alone.
        """
        found: list[str] = self._support.why_not(family, config, shape, engine) if self.limited else []
        return found

    def why_not_sizes(self, sizes: Sizes) -> list[str]:
        """Why the target cannot hold such sizes; empty where it can."""
        found: list[str] = self._support.why_not_sizes(sizes) if self.limited else []
        return found

    @property
    def training(self) -> Any:
        """`open_for_training` and `closed`, from the target's folder."""
        return import_module(f"{__package__}.{self.name}.training")

    @property
    def _support(self) -> Any:
        return import_module(f"{__package__}.{self.name}.support")

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
            limited=True,
        ),
        TargetEntry(
            "native", "NativeTarget", "LatentfoldForCausalLM", ("bfloat16", "float32", "float16"), remote_code=True
        ),
    )
}
"""By name; where the choice is left open, the first that can hold a model is taken."""
