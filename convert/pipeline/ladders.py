"""Pass 1: which frequencies the rotating keys have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from latentfold.convert.calibrate.layer import calibrate_rotation
from latentfold.convert.factorize.rope import fit_slots
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.walk import Walk
from latentfold.convert.pipeline.prepare import Job
from latentfold.convert.progress import Progress
from latentfold.convert.targets.target import Ladder

LADDER_TOKENS = 8192
"""A few windows are enough to rank ladders."""


Scored = dict[str, list[tuple[Ladder, float]]]
"""Ladders of each kind of layer with their expected error, the best first."""


def score_ladders(job: Job, progress: Progress) -> Scored:
    """Expected relative error of the attention output from rotation for each candidate ladder of each kind of layer.

    Of a kind's layers it is the sum, divided by the number of all layers that are converted. The best comes first.
    """
    plan, model = job.plan, job.model
    target, sampling = plan.target, plan.request.sampling
    length = plan.seq_len
    tokens = job.windows.tokens[: max(1, LADDER_TOKENS // length)]
    found: dict[str, Sequence[Ladder]] = {}
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for visit in Walk(model, tokens, progress=progress, stage="1/2 rotations"):
        if visit.index not in target.converted:
            continue
        weights, pairs = layer_attention(model, plan.family, plan.shape, visit.index)
        stats, unit = calibrate_rotation(visit.observe(plan.family.attention), weights, pairs, length, sampling)
        unit /= len(target.converted)
        kind = target.kind(visit.index)
        found[kind] = target.candidates(visit.index, stats, pairs)
        slots = [ladder.frequencies.to(model.device) for ladder in found[kind]]
        scores = [unit * fit_slots(stats, pairs, own).objective for own in slots]
        before = totals[kind] or [0.0] * len(scores)
        totals[kind] = [sum(pair) for pair in zip(before, scores, strict=True)]
    return {
        kind: sorted(zip(ladders, totals[kind], strict=True), key=lambda scored: scored[1])
        for kind, ladders in found.items()
    }
