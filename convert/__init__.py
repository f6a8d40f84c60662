"""Convert MHA/GQA checkpoints to MLA: `convert_checkpoint(source, output)`, `inspect_model(name)`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

from latentfold.convert.errors import InputError

if TYPE_CHECKING:
    from latentfold.convert.pipeline.run import ConversionResult, convert_checkpoint
    from latentfold.convert.plan.inspection import Inspection, inspect_model
    from latentfold.convert.targets.deepseek.absorb import enable_absorbed_decode
    from latentfold.convert.targets.native import LatentfoldForCausalLM

__all__ = [
    "ConversionResult",
    "InputError",
    "Inspection",
    "LatentfoldForCausalLM",
    "convert_checkpoint",
    "enable_absorbed_decode",
    "inspect_model",
]

_HOMES = {
    "ConversionResult": "pipeline.run",
    "convert_checkpoint": "pipeline.run",
    "Inspection": "plan.inspection",
    "inspect_model": "plan.inspection",
    "enable_absorbed_decode": "targets.deepseek.absorb",
    "LatentfoldForCausalLM": "targets.native",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


@when_imported("transformers.models.auto.modeling_auto")
def _register(_: Any) -> None:
    """Let transformers know our class, once somebody uses transformers: importing it here would cost seconds."""
    import_module("latentfold.convert.targets.native")
