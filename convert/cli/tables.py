"""Plain-text tables for the terminal."""

from __future__ import annotations

from latentfold.convert.files import size
from latentfold.convert.pipeline.estimate import SizeEstimate
from latentfold.convert.pipeline.run import ConversionResult
from latentfold.convert.plan.inspection import Inspection
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.plan.sizes import Proposal


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
        ("KV cache", f"{s.cache_values} values per token and layer, {size(found.cache_bytes_per_token)} per token"),
    ]
    rows += [(f"  at {tokens:,} tokens", f"{size(b)} ({found.dtype})") for tokens, b in found.cache_bytes.items()]
    if found.proposal is not None:
        rows += _proposal_rows(found, found.proposal)
    else:
        rows.append(("convert", "no: " + "; ".join(found.reasons)))
    return _rows(rows)


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
    rows = [
        ("source", f"{plan.checkpoint.name} ({plan.config.model_type}, {plan.shape.num_layers} layers)"),
        ("sizes", f"--kv-rank {plan.kv_rank} --rope-dim {plan.rope_dim}"),
        ("cache", f"{plan.cache_values} of {plan.shape.cache_values} values per token and layer"),
        ("stored as", f"{str(plan.dtype).removeprefix('torch.')}, {size(plan.nbytes)} in {len(files)} file(s)"),
        ("target", plan.target.name),
    ]
    if plan.target.residual != 1.0:
        scale = f"{plan.target.residual:g} (rms_norm_eps {plan.config.rms_norm_eps:.2g} becomes 1e-6)"
        rows.append(("residual scale", scale))
    rows += [("  " + file, f"{len(names)} tensors") for file, names in files.items()]
    rows += [("note", notice) for notice in plan.notices]
    return _rows(rows)


def conversion_summary(source: str, result: ConversionResult) -> str:
    """What `latentfold convert` says at the end of converting `source`."""
    r = result.recipe
    layers = r["layers"]
    total = [layer["output"] for layer in layers]
    worst = max(range(len(total)), key=lambda i: total[i])
    ladder = r["ladder"]["rope_parameters"]
    cache, parameters = r["cache_values"], r["parameters"]
    return _rows(
        [
            ("cache", f"{cache['source']} -> {cache['converted']} values per token and layer"),
            ("parameters", f"{parameters['source'] / 1e6:.1f} M -> {parameters['converted'] / 1e6:.1f} M"),
            ("rope", _rope(ladder) + f" (expected rotation error {r['ladder']['expected_rotation_error']:.3f})"),
            (
                "expected error",
                f"{sum(total) / len(total):.3f} of the attention output's power on average, "
                f"{total[worst]:.3f} in layer {worst}",
            ),
            ("reload check", f"logits equal to {r['check']['reload_logit_difference']:.0e}"),
            ("next", f"latentfold eval {source} {result.path}"),
        ]
    )
