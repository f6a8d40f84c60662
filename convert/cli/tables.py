"""Plain-text tables for the terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from latentfold.convert.attention.sizes import Sizes, uniform
from latentfold.convert.dtypes import dtype_name
from latentfold.convert.formats import growth, millions, size
from latentfold.convert.model.shape import norm_eps

if TYPE_CHECKING:  # what they import takes seconds
    from latentfold.convert.heal.estimate import HealingEstimate
    from latentfold.convert.pipeline.estimate import SizeEstimate
    from latentfold.convert.pipeline.run import ConversionResult
    from latentfold.convert.plan.inspection import Inspection
    from latentfold.convert.plan.plan import ConversionPlan
    from latentfold.convert.plan.sizes import Proposal
    from latentfold.convert.write.recipe import HealingRecord


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rope(rope: dict) -> str:
    nested = {k: v for k, v in rope.items() if isinstance(v, dict)}
    if nested:
        return "; ".join(f"{kind}: {_rope(parameters)}" for kind, parameters in nested.items())
    if not rope:
        return "none"
    rest = ", ".join(f"{k} {v}" for k, v in rope.items() if k not in ("rope_type", "rope_theta") and v is not None)
    theta = f", theta {rope['rope_theta']}" if "rope_theta" in rope else ""
    return f"{rope.get('rope_type')}{theta}" + (f", {rest}" if rest else "")


def inspection_table(found: Inspection) -> str:
    """The output of `latentfold inspect`."""
    s = found.shape
    if s.is_mla:
        heads = f"{s.num_heads} query heads, latent {s.kv_lora_rank} + rope {s.qk_rope_head_dim}"
    else:
        heads = f"{s.num_heads} query heads over {s.num_kv_heads} KV heads of {s.head_dim}"
    rows = [
        ("model", found.name + (f" @ {found.revision}" if found.revision else "")),
        ("family", f"{found.model_type} ({found.attention})"),
        ("attention", heads),
        (
            "sizes",
            f"{s.num_layers} layers, hidden {s.hidden_size}, MLP {s.intermediate_size}, vocabulary {s.vocab_size}",
        ),
        ("rope", _rope(found.rope)),
        ("unusual", "; ".join(found.unusual) or "nothing"),
        ("KV cache", _cached(found)),
    ]
    rows += [(f"  at {tokens:,} tokens", f"{size(b)} ({found.dtype})") for tokens, b in found.cache_bytes.items()]
    if found.proposal is not None:
        rows += _proposal_rows(found, found.proposal)
    else:
        rows.append(("convert", "no: " + "; ".join(found.reasons)))
    return _rows(rows)


def _cached(found: Inspection) -> str:
    """What a token costs, and how many layers it costs that in."""
    counts = Counter(values for values in found.shape.layer_values if values)
    if not counts:
        return "no layer caches tokens"
    if len(counts) == 1 and counts.total() == found.shape.num_layers:
        values = f"{found.shape.cache_values} values per token and layer"
    else:
        parts = ", ".join(f"{values} in {count}" for values, count in counts.items())
        values = f"values per token: {parts} of {found.shape.num_layers} layers"
    return f"{values}, {size(found.cache_bytes_per_token)} per token"


def _proposal_rows(found: Inspection, proposal: Proposal) -> list[tuple[str, str]]:
    values = proposal.kv_rank + proposal.rope_dim
    after = ", ".join(f"{size(b * proposal.cached_share)} at {tokens:,}" for tokens, b in found.cache_bytes.items())
    return [
        (
            "convert",
            f"--kv-rank {proposal.kv_rank}" + (f" --rope-dim {proposal.rope_dim}" if proposal.rope_dim else ""),
        ),
        ("  cache", f"{values} of {found.shape.cache_values} values ({1 - proposal.cached_share:.0%} less): {after}"),
        ("  kernels", "of transformers alone: " + "; ".join(found.not_portable))
        if found.not_portable
        else ("  kernels", ", ".join(proposal.kernels)),
    ]


def estimates_table(estimates: list[SizeEstimate]) -> str:
    """What `latentfold inspect --calibrate` adds."""
    rows = [("--kv-rank --rope-dim", "cache    expected error of the attention output (0: none, 1: all of it)")]
    for found in estimates:
        note = "   hopeless: expect a broken model" if found.hopeless else ""
        share = f"{found.cached_share:>5.0%}    {found.expected_error:.3f}"
        rows.append((f"{found.kv_rank:>9} {found.rope_dim:>10}", share + note))
    return _rows(rows)


def plan_table(plan: ConversionPlan) -> str:
    """The output of `latentfold convert --dry-run`."""
    files = plan.shards.filename_to_tensors
    target = plan.target
    rows = [
        ("source", f"{plan.checkpoint.name} ({plan.config.model_type}, {plan.shape.num_layers} layers)"),
        ("sizes", _sizes(plan.sizes)),
        ("cache", _per_layer(plan.cache_values, plan.shape.num_layers)),
        ("stored as", f"{dtype_name(target.dtype)}, {size(plan.nbytes)} in {len(files)} file(s)"),
        ("target", target.name),
    ]
    if target.residual != 1.0:
        scale = f"{target.residual:g} (the epsilon of its norms, {norm_eps(plan.config):.2g}, becomes 1e-6)"
        rows.append(("residual scale", scale))
    rows += [("  " + file, f"{len(names)} tensors") for file, names in files.items()]
    rows += [("note", notice) for notice in plan.notices]
    return _rows(rows)


def _sizes(sizes: Sizes) -> str:
    """`--kv-rank 96 --rope-dim 32`, or how many layers have which size."""
    if (one := uniform(sizes)) is not None:
        return f"--kv-rank {one.kv_rank} --rope-dim {one.rope_dim}"
    counts = Counter(sizes)
    left = counts.pop(None, 0)
    parts = [f"{found} in {count} layers" for found, count in counts.items()]
    return ", ".join(parts + ([f"{left} layers as they are"] if left else []))


def _per_layer(cached: tuple[int, int], layers: int) -> str:
    """Values cached before and after, on average where layers differ."""
    before, after = cached
    return f"{after / layers:g} of {before / layers:g} values per token and layer"


def conversion_summary(result: ConversionResult) -> str:
    """What `latentfold convert` says at its end."""
    recipe = result.recipe
    errors = {layer: found.output for layer, found in enumerate(recipe.layers) if found is not None}
    worst = max(errors, key=lambda layer: errors[layer])
    parameters, cache = recipe.parameters, recipe.cache_values
    grown = growth(parameters.source, parameters.converted, recipe.untied_parameters)
    return _rows(
        [
            ("cache", _per_layer((cache.source, cache.converted), len(recipe.sizes))),
            (
                "parameters",
                f"{millions(parameters.source)} -> {millions(parameters.converted)}" + (grown and f"; {grown}"),
            ),
            (
                "rope",
                f"{_rope(recipe.ladder.rope_parameters)} "
                f"(expected rotation error {recipe.ladder.expected_rotation_error:.3f})",
            ),
            (
                "expected error",
                f"{sum(errors.values()) / len(errors):.3f} of the attention output's power on average, "
                f"{errors[worst]:.3f} in layer {worst}",
            ),
            ("reload check", f"logits equal to {recipe.check.reload_logit_difference:.0e}"),
        ]
    )


def healing_plan_table(found: HealingEstimate) -> str:
    """The output of `latentfold heal --dry-run`."""
    rows = [
        ("trained", millions(found.trained) + f" of the student's {millions(found.trained + found.frozen)} parameters"),
        ("steps", f"about {found.steps:,}, each {found.step_seconds:.2g} seconds"),
        ("tokens", f"{found.tokens:,}: {found.tokens / found.text:.2g} times the text"),
        ("memory", f"about {size(found.total)} on each device, and {size(found.loading)} of main memory while loading"),
    ]
    rows += [("", f"{size(part):>10}  {name}") for name, part in found.memory.items()]
    return _rows(rows)


def healing_table(record: HealingRecord) -> str:
    """What `latentfold heal` prints: held-out text from before the first step to the last."""
    rows = [("step", "minutes   KL from original   NLL   (nats per token, held-out text)")]
    for i, point in enumerate(record.curve):
        kept = "   kept" if i == record.best else ""
        figures = f"{point.seconds / 60:>7.1f}   {point.divergence:>16.4f}   {point.nll:.4f}"
        rows.append((f"{point.step:>4}", figures + kept))
    return _rows(rows)
