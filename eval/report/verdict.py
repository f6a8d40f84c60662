"""An evaluation in plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from latentfold.eval.records import CacheSize, Evaluation, TaskScore
from latentfold.eval.report.formats import duration, listed, percent, perplexity, ppl, ratio, with_error


@dataclass(frozen=True)
class Grade:
    """A judgement of the loss.

    Attributes:
        limit: the largest gap it covers, in nats a token.
        name: a few words.  meaning: a clause; `{it}` stands for the text or the texts.
    """

    limit: float
    name: str
    meaning: str


GRADES = (
    Grade(0.0, "No loss", "the converted model predicts {it} no worse than the original"),
    Grade(0.02, "Practically lossless", "the converted model predicts {it} almost as well as the original"),
    Grade(0.1, "Small loss", "the converted model predicts {it} slightly worse than the original"),
    Grade(
        0.3,
        "Noticeable loss",
        "the converted model predicts {it} clearly worse than the original; try it on your own task before use",
    ),
    Grade(
        1.0,
        "Large loss",
        "the converted model predicts {it} much worse than the original; train it before you rely on it",
    ),
    Grade(math.inf, "Not usable without training", "the converted model predicts {it} far worse than the original"),
)
BROKEN = Grade(math.nan, "Broken", "the loss on {it} is not a finite number")


def grade(evaluation: Evaluation) -> Grade:
    """The judgement, by the gap alone."""
    gap = evaluation.overall.gap
    return next(g for g in GRADES if gap <= g.limit) if math.isfinite(gap) else BROKEN


def meaning(evaluation: Evaluation) -> str:
    """What the grade says about these texts, as a clause."""
    return grade(evaluation).meaning.format(it="these texts" if len(evaluation.texts) > 1 else "this text")


def verdict(evaluation: Evaluation) -> str:
    """A paragraph for who knows language models but not this tool: judgement, saving, cost, and what is not known."""
    return f"{grade(evaluation).name}: {meaning(evaluation)}. {findings(evaluation)} {unmeasured(evaluation)}"


def findings(evaluation: Evaluation) -> str:
    """What the judgement rests on, in sentences."""
    e = evaluation
    sentences = [*_healed(e), _cache(e)]
    if math.isfinite(e.overall.gap):
        sentences += [_cost(e), *_by_context(e), _agreement(e)]
    sentences += [*_speed(e), *_tasks(e)]
    return " ".join(sentences)


def unmeasured(evaluation: Evaluation) -> str:
    """What the evaluation says nothing about, as a sentence."""
    e = evaluation
    longest = max(text.window_length for text in e.texts)
    gaps = {
        f"contexts beyond {longest:,} tokens": True,
        "the uncertainty of the loss (too little text)": e.overall.gap_standard_error is None,
        "the cache in use": compared_cache(e)[2] == "counted",
        "the error of each layer": not e.layers,
        "continuations": not e.continuations,
        "speed": not e.speed,
        "tasks": not e.tasks,
    }
    return f"Not measured: {listed([name for name, missing in gaps.items() if missing])}."


def compared_cache(evaluation: Evaluation) -> tuple[float, float, str]:
    """Cache bytes a token of original and converted, and how they are known: measured, or else counted."""

    def known(size: CacheSize) -> float:
        return size.counted if size.measured is None or not measured else size.measured

    measured = None not in (evaluation.cache_original.measured, evaluation.cache_converted.measured)
    found = known(evaluation.cache_original), known(evaluation.cache_converted)
    return *found, "measured" if measured else "counted"


def _healed(e: Evaluation) -> list[str]:
    healed = e.provenance.get("healed")
    if not healed:
        return []
    return [
        f"After its conversion it was healed for {duration(60 * healed['minutes'])}: trained on the original's "
        f"predictions for {healed['tokens']:,} tokens."
    ]


def _cache(e: Evaluation) -> str:
    original, converted, how = compared_cache(e)
    if converted >= original:
        return f"The KV cache is no smaller: {converted:,.0f} bytes per token against {original:,.0f} ({how})."
    saved = percent(1 - converted / original)
    return f"The KV cache takes {converted:,.0f} bytes per token instead of {original:,.0f} ({how}), {saved} less."


def _cost(e: Evaluation) -> str:
    row = e.overall
    if row.gap == 0:
        return (
            f"The loss is the same for both models, {row.original:.3f} nats per token (perplexity {ppl(row.original)})."
        )
    gap = with_error(abs(row.gap), row.gap_standard_error)
    side = "higher" if row.gap > 0 else "lower"
    sentence = (
        f"The converted model's loss is {gap} nats per token {side}: its perplexity is {ppl(row.converted)} "
        f"instead of {ppl(row.original)}, {perplexity(row.gap):.2f} times as much."
    )
    if row.gap_standard_error is not None and abs(row.gap) < 2 * row.gap_standard_error:
        sentence += " On this much text that cannot be told from no difference."
    return sentence


def _by_context(e: Evaluation) -> list[str]:
    """How the gap moves from the first to the last run of positions, averaged over the texts that have several."""
    ends = [(text.by_position[0], text.by_position[-1]) for text in e.texts if len(text.by_position) > 1]
    if not ends:
        return []
    first = sum(a.gap for a, _ in ends) / len(ends)
    last = sum(b.gap for _, b in ends) / len(ends)
    # a change within two standard errors is no trend
    noise = math.sqrt(sum((row.gap_standard_error or 0) ** 2 for pair in ends for row in pair)) / len(ends)
    if abs(last - first) <= max(2 * noise, 0.005):
        return [f"The gap changes little with context ({first:+.3f} nats at the start, {last:+.3f} at the end)."]
    verb = "grows" if last > first else "shrinks"
    if len({(a.end, b.start) for a, b in ends}) == 1:
        a, b = ends[0]
        where = f"from {first:+.3f} nats within the first {a.end:,} tokens to {last:+.3f} beyond {b.start:,}"
    else:
        where = f"from {first:+.3f} nats at the start of a window to {last:+.3f} at its end"
    return [f"The gap {verb} with context, {where}."]


def _agreement(e: Evaluation) -> str:
    kl = with_error(e.agreement.kl, e.agreement.kl_standard_error)
    return (
        f"Both models rank the same token first at {percent(e.agreement.top1)} of positions; "
        f"the KL divergence from the original is {kl} nats."
    )


def _speed(e: Evaluation) -> list[str]:
    """The hardest case that both models decoded."""
    both = [p for p in e.speed or () if p.decode_original and p.decode_converted]
    if not both:
        return []
    point = max(both, key=lambda p: (p.batch * p.context, p.batch))
    times = ratio(point.decode_converted, point.decode_original)
    return [
        f"The converted model decodes at {times} times the original's speed with {point.context:,} tokens of context "
        f"(batch {point.batch}, {e.provenance.get('device', 'this machine')})."
    ]


def _tasks(e: Evaluation) -> list[str]:
    judged = [worse for task in e.tasks or () if (worse := clearly_worse(task)) is not None]
    if not judged:
        return []
    return [f"Task metrics that are worse by more than two standard errors: {sum(judged)} of {len(judged)}."]


def clearly_worse(task: TaskScore) -> bool | None:
    """By more than two standard errors of the difference, taken as independent; None where that cannot be judged."""
    errors = (task.original_standard_error, task.converted_standard_error)
    if task.higher_is_better is None or errors[0] is None or errors[1] is None:
        return None
    loss = task.original - task.converted if task.higher_is_better else task.converted - task.original
    return loss > 2 * math.hypot(errors[0], errors[1])
