"""Pass 1: which frequencies the rotating keys have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from latentfold.convert.calibrate.moments import RopeAccumulator
from latentfold.convert.calibrate.probe import AttentionProbe
from latentfold.convert.config import ConversionConfig
from latentfold.convert.factorize.rope import fit_slots
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import observe
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.targets.target import Ladder
from latentfold.convert.text.windows import Windows

LADDER_TOKENS = 8192
"""A few windows are enough to rank ladders."""


def score_ladders(
    model: StreamedModel, plan: ConversionPlan, windows: Windows, config: ConversionConfig
) -> dict[str, list[tuple[Ladder, float]]]:
    """Expected relative error of the attention output from rotation for each candidate ladder of each kind of layer.

    Of a kind's layers it is the sum, divided by the number of all layers. The best ladder comes first.
    """
    tokens = windows.tokens[: max(1, LADDER_TOKENS // windows.tokens.shape[1])]
    target = plan.target
    found: dict[str, Sequence[Ladder]] = {}
    totals: defaultdict[str, list[float]] = defaultdict(list)
    shape = plan.shape

    class LadderObserver:
        def __init__(self, index: int) -> None:
            self.index, self.kind = index, target.kinds[index]
            weights, self.pairs = layer_attention(model, plan.family, plan.shape, index)
            self.scale = weights.scale
            self.probe = AttentionProbe(weights, self.pairs)
            self.rope = RopeAccumulator(
                shape.num_heads, shape.num_kv_heads, shape.head_dim, tokens.shape[1], model.device
            )
            self.power = 0.0

        def add(self, window: int, x: Tensor, stream: Tensor, output: Tensor) -> None:
            seen = self.probe.sample(x, stream, config.queries, config.seed + window)
            self.probe.check(seen, output)
            self.rope.add(seen)
            self.power += seen.output_power

        def finish(self) -> None:
            stats = self.rope.result()
            unit = 0.5 * self.scale**2 * self.rope.samples / max(self.power, 1e-300) / model.num_layers
            found[self.kind] = target.candidates(self.index, stats, self.pairs)
            slots = [ladder.frequencies.to(model.device) for ladder in found[self.kind]]
            scores = [unit * fit_slots(stats, self.pairs, own).objective for own in slots]
            before = totals[self.kind] or [0.0] * len(scores)
            totals[self.kind] = [sum(pair) for pair in zip(before, scores, strict=True)]

    observe(model, tokens, LadderObserver, description="1/2 rotations", progress=config.progress)
    return {
        kind: sorted(zip(ladders, totals[kind], strict=True), key=lambda scored: scored[1])
        for kind, ladders in found.items()
    }
