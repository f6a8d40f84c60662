"""Whether a model can be converted, and to which target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from latentfold.convert.attention.sizes import Sizes
from latentfold.convert.errors import InputError
from latentfold.convert.families.family import Family
from latentfold.convert.families.registry import FAMILIES, OUT_OF_REACH
from latentfold.convert.families.support import reasons_against
from latentfold.convert.model.shape import ModelShape
from latentfold.convert.targets.registry import TARGETS, TargetEntry


@dataclass(frozen=True)
class Verdict:
    """Whether a model can be converted: its family, or the reasons why not.

    Attributes:
        family: None where `reasons` stand against it.
        refusals: for each target that cannot hold it, why.
    """

    family: Family | None
    reasons: tuple[str, ...]
    refusals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets that can hold it, preferred first."""
        return tuple(name for name in TARGETS if self.family is not None and name not in self.refusals)


def judge(config: Any, shape: ModelShape, engine: str = "any") -> Verdict:
    """Look for everything in a transformers config that the converted model would get wrong.

    Args:
        engine: what has to load the result; "transformers" takes biases in the stock class too.
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
    if found := reasons_against(family, config, shape):
        return Verdict(None, tuple(found))
    refusals = {
        name: tuple(against)
        for name, entry in TARGETS.items()
        if (against := entry.why_not(family, config, shape, engine))
    }
    return Verdict(family, (), refusals)


def choose_target(target: str, name: str, verdict: Verdict, sizes: Sizes) -> tuple[Family, TargetEntry, list[str]]:
    """A model's family, the target that holds it, and what is to be said about the choice.

    Args:
        target: the one asked for, or "auto".  name: of the model.  sizes: of the result.

    Raises:
        InputError: naming every feature that stands in the way.
    """
    against = {
        entry.name: [*verdict.refusals.get(entry.name, ()), *entry.why_not_sizes(sizes)] for entry in TARGETS.values()
    }
    holding = [entry for entry in TARGETS.values() if not against[entry.name] and target in ("auto", entry.name)]
    if verdict.family is None or not holding:
        asked = against.values() if target == "auto" else [against[target]]
        reasons = [*verdict.reasons, *(dict.fromkeys(reason for found in asked for reason in found))]
        raise InputError(f"{name} cannot be converted: {'; '.join(reasons)}")
    chosen = holding[0]
    if target != "auto" or not chosen.remote_code:
        return verdict.family, chosen, []
    reasons = [reason for entry in TARGETS.values() if not entry.remote_code for reason in against[entry.name]]
    notice = f"no stock class holds this model ({'; '.join(reasons)}): writing latentfold's own, which "
    return verdict.family, chosen, [notice + "transformers loads with trust_remote_code or with latentfold imported"]
