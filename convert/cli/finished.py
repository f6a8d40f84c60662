"""Whether a conversion has been made already."""

from __future__ import annotations

from dataclasses import replace

from latentfold.convert.errors import InputError
from latentfold.convert.pipeline.prepare import calibration_windows, plan_only
from latentfold.convert.pipeline.record import beginnings
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.source.hub import download
from latentfold.convert.source.tokenizer import load_tokenizer
from latentfold.convert.write.recipe import RECIPE, read_recipe


def finished(config: ConversionConfig) -> bool:
    """Whether the output holds the very conversion that is asked for.

    Compared are the source, the options with every choice made, the sizes and the calibration tokens. Versions are not:
    a conversion that was finished before an upgrade stays what it is. Of a folder only the name is known, so none of
    its weights may be younger than the conversion.

    Raises:
        InputError: see `plan_only`; also calibration text that is missing, empty or too short.
    """
    out = config.output_path
    try:
        recipe = read_recipe(out)
    except InputError:  # nothing finished; whether OUT may be written is found out next
        return False
    plan = plan_only(replace(config, output=None))
    if recipe.size in plan.candidates:
        plan = plan.at(recipe.size)
    checkpoint = download(plan.checkpoint, token=config.token, weights=False)
    windows = calibration_windows(plan, load_tokenizer(checkpoint))
    asked = beginnings(replace(plan, checkpoint=checkpoint), windows)
    same = (asked.source.name, asked.source.revision) == (recipe.source.name, recipe.source.revision) and (
        asked.options,
        asked.sizes,
        asked.calibration,
    ) == (recipe.options, recipe.sizes, recipe.calibration)
    same &= not recipe.healing
    made = (out / RECIPE).stat().st_mtime_ns
    changed = checkpoint.revision is None and any(when > made for _, when in checkpoint.stamps().values())
    return same and not changed
