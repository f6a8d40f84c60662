"""Whether a model can be converted, and to which target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from latentfold.convert.config import ConversionConfig
from latentfold.convert.errors import InputError
from latentfold.convert.families.family import Family
from latentfold.convert.families.registry import FAMILIES, OUT_OF_REACH
from latentfold.convert.families.support import reasons_against
from latentfold.convert.model.shape import ModelShape
from latentfold.convert.targets.deepseek.support import why_not
from latentfold.convert.targets.deepseek.target import PortableTarget


def choose_target(config: ConversionConfig, name: str, verdict: Verdict) -> tuple[Family, str, list[str]]:
    """A model's family, the target that holds it, and what is to be said about the choice.

    Raises:
        InputError: naming every feature that stands in the way.
    """
    reasons = verdict.reasons + (verdict.not_portable if config.target == PortableTarget.name else ())
    if verdict.family is None or reasons:
        raise InputError(f"{name} cannot be converted: {'; '.join(reasons)}")
    if config.target != "auto":
        return verdict.family, config.target, []
    if not verdict.not_portable:
        return verdict.family, PortableTarget.name, []
    notice = f"no stock class holds this model ({'; '.join(verdict.not_portable)}): writing latentfold's own, which "
    return verdict.family, "native", [notice + "transformers loads with trust_remote_code or with latentfold imported"]


@dataclass(frozen=True)
class Verdict:
    """Whether a model can be converted: its family, or the reasons why not.

    Attributes:
        family: None where `reasons` stand against it.
        not_portable: why the portable target cannot hold it; empty where it can.
    """

    family: Family | None
    reasons: tuple[str, ...]
    not_portable: tuple[str, ...] = ()


def judge(config: Any, shape: ModelShape, engine: str = "any") -> Verdict:
    """Look for everything in a transformers config that the converted model would get wrong.

    Args:
        engine: what has to load a portable result; "transformers" takes biases too.
    """
    if shape.is_mla:
        return Verdict(None, (f"already MLA (kv_lora_rank {shape.kv_lora_rank})",))
    model_type = config.model_type
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        reason = OUT_OF_REACH.get(model_type)
        detail = f"{reason} not supported yet" if reason else "unknown to this version"
        return Verdict(None, (f"family {model_type!r}: {detail}; supported: {known}",))
    family = FAMILIES[model_type]
    found = tuple(reasons_against(family, config, shape))
    return Verdict(None if found else family, found, () if found else tuple(why_not(family, config, shape, engine)))
