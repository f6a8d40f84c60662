"""Convert MHA/GQA checkpoints to MLA; docs/python.md shows every stage."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

from latentfold.convert.errors import InputError

if TYPE_CHECKING:
    from latentfold.convert.api import (
        calibrate_layer,
        convert_checkpoint,
        estimate_sizes,
        heal_checkpoint,
        plan_conversion,
    )
    from latentfold.convert.attention.sizes import LayerSize
    from latentfold.convert.factorize.layer import convert_layer
    from latentfold.convert.pipeline.run import ConversionResult
    from latentfold.convert.plan.inspection import Inspection, inspect_model
    from latentfold.convert.plan.plan import ConversionPlan
    from latentfold.convert.publish.checkpoint import Publication, publish_checkpoint
    from latentfold.convert.targets.deepseek.absorb import enable_absorbed_decode
    from latentfold.convert.targets.native.modeling_latentfold import LatentfoldForCausalLM
    from latentfold.convert.write.recipe import Recipe, read_recipe

__all__ = [
    "ConversionPlan",
    "ConversionResult",
    "InputError",
    "Inspection",
    "LatentfoldForCausalLM",
    "LayerSize",
    "Publication",
    "Recipe",
    "calibrate_layer",
    "convert_checkpoint",
    "convert_layer",
    "enable_absorbed_decode",
    "estimate_sizes",
    "heal_checkpoint",
    "inspect_model",
    "plan_conversion",
    "publish_checkpoint",
    "read_recipe",
]

_HOMES = {
    "api": ("calibrate_layer", "convert_checkpoint", "estimate_sizes", "heal_checkpoint", "plan_conversion"),
    "attention.sizes": ("LayerSize",),
    "factorize.layer": ("convert_layer",),
    "pipeline.run": ("ConversionResult",),
    "plan.inspection": ("Inspection", "inspect_model"),
    "plan.plan": ("ConversionPlan",),
    "publish.checkpoint": ("Publication", "publish_checkpoint"),
    "targets.deepseek.absorb": ("enable_absorbed_decode",),
    "targets.native.modeling_latentfold": ("LatentfoldForCausalLM",),
    "write.recipe": ("Recipe", "read_recipe"),
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something is used."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@when_imported("transformers.models.auto.modeling_auto")
def _register(_: Any) -> None:
    """Let transformers know our class, once somebody uses transformers: importing it here would cost seconds."""
    import_module("latentfold.convert.targets.native.registration").register()
