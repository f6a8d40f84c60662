"""Measure what a conversion cost: `evaluate(original, converted)`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latentfold.eval.comparison import evaluate, save_evaluation
    from latentfold.eval.options import EvaluationConfig
    from latentfold.eval.records import Evaluation

__all__ = ["Evaluation", "EvaluationConfig", "evaluate", "save_evaluation"]


_HOMES = {
    "evaluate": "comparison",
    "save_evaluation": "comparison",
    "Evaluation": "records",
    "EvaluationConfig": "options",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
