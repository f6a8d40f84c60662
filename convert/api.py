"""The stages of a conversion as functions, with everything they can be told written out."""

from __future__ import annotations

from collections.abc import Sequence

from latentfold.convert.attention.sizes import LayerSize, Sizes
from latentfold.convert.calibrate.layer import CalibratedLayer, calibrate
from latentfold.convert.errors import InputError
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.heal.config import HealingConfig
from latentfold.convert.heal.run import HealingResult
from latentfold.convert.heal.run import prepare as prepare_healing
from latentfold.convert.heal.run import run as run_healing
from latentfold.convert.model.walk import Walk
from latentfold.convert.pipeline.estimate import SizeEstimate, survey, usual_sizes
from latentfold.convert.pipeline.prepare import plan_only, prepare
from latentfold.convert.pipeline.run import ConversionResult, run
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.plan.plan import ConversionPlan
from latentfold.convert.progress import Progress, shown


def plan_conversion(
    source: str,
    output: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    cache_values: int | None = None,
    cache_ratio: float | None = None,
    sizes: Sizes | None = None,
    target: str = "auto",
    engine: str = "any",
    dtype: str = "auto",
    max_shard_size: str = "5GB",
) -> ConversionPlan:
    """What a conversion would write, decided before a weight is read; of a Hub model only config.json and file headers
    are fetched.

    Args:
        source: folder or Hub id.
        output: folder that it would be written to, if that is to be checked too.
        revision, token: for a Hub id; token None: the stored one.
        kv_rank, rope_dim: values cached per token and layer, latent and rotated; None: as `inspect_model` proposes.
        cache_values, cache_ratio: instead of both, how many values or which share of the source's; a survey of a few
            layers divides them when the conversion begins.
        sizes: instead of all these, the size of each layer, None for one that is left as it is.
        target: "deepseek" (the stock class that every engine loads), "native" (our own class, for what that one cannot
            hold), or "auto": the first wherever it fits.
        engine: what has to load the stock class: "any" engine, or "transformers" alone, whose class has biases too.
        dtype: "bfloat16", "float32", "auto" (the source's, where the target can hold it); for "native" also "float16".
        max_shard_size: of a file, such as "5GB".

    Raises:
        InputError: anything about the model or the options that stands in the way.

    Example:
        >>> plan = plan_conversion("HuggingFaceTB/SmolLM2-135M-Instruct", kv_rank=96, rope_dim=32)
        >>> plan.target.name, plan.nbytes, plan.notices
    """
    return plan_only(
        ConversionConfig(
            source=source,
            output=output,
            revision=revision,
            token=token,
            kv_rank=kv_rank,
            rope_dim=rope_dim,
            cache_values=cache_values,
            cache_ratio=cache_ratio,
            sizes=None if sizes is None else tuple(sizes),
            target=target,
            engine=engine,
            dtype=dtype,
            max_shard_size=max_shard_size,
        )
    )


def estimate_sizes(
    source: str,
    sizes: Sequence[tuple[int, int]] | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    target: str = "auto",
    engine: str = "any",
    calibration: Sequence[str] = (),
    calibration_tokens: int = 28672,
    seq_len: int | None = None,
    queries: int = 128,
    seed: int = 0,
    device: str = "auto",
    progress: bool | Progress = True,
) -> list[SizeEstimate]:
    """What sizes would cost: a few layers converted at each, on a little text; nothing is written.

    Args:
        source, revision, token, target, engine: see `plan_conversion`.
        sizes: (kv_rank, rope_dim) to try; None: a range of them, smallest cache first.
        calibration, calibration_tokens, seq_len, queries, seed, device, progress: see `convert_checkpoint`.

    Raises:
        InputError: see `convert_checkpoint`.
    """
    config = ConversionConfig(
        source=source,
        output=None,
        revision=revision,
        token=token,
        target=target,
        engine=engine,
        calibration=tuple(calibration),
        calibration_tokens=calibration_tokens,
        seq_len=seq_len,
        queries=queries,
        seed=seed,
        device=device,
    )
    job = prepare(config)
    tried = usual_sizes(job.plan.shape) if sizes is None else [LayerSize(*size) for size in sizes]
    return survey(job, tried, shown(progress))


def calibrate_layer(
    source: str,
    layer: int,
    *,
    revision: str | None = None,
    token: str | None = None,
    calibration: Sequence[str] = (),
    calibration_tokens: int = 28672,
    seq_len: int | None = None,
    queries: int = 128,
    seed: int = 0,
    device: str = "auto",
    progress: bool | Progress = True,
) -> CalibratedLayer:
    """What a conversion learns of one layer: its weights head by head, and statistics of its attention on text.

    `latentfold.convert.convert_layer` makes latent attention of it, of any size, in a second or so.

    Args:
        layer: which, counted from 0; the layers before it are run too.
        others: see `convert_checkpoint`.

    Raises:
        InputError: see `convert_checkpoint`; no such layer.
    """
    config = ConversionConfig(
        source=source,
        output=None,
        revision=revision,
        token=token,
        calibration=tuple(calibration),
        calibration_tokens=calibration_tokens,
        seq_len=seq_len,
        queries=queries,
        seed=seed,
        device=device,
    )
    job = prepare(config)
    plan, model, tokens = job.plan, job.model, job.windows.tokens
    if not 0 <= layer < model.num_layers:
        raise InputError(f"layer {layer}: expected 0 to {model.num_layers - 1}")
    for visit in Walk(model, tokens, progress=shown(progress), stage=f"to layer {layer}"):
        if visit.index == layer:
            weights, pairs = layer_attention(model, plan.family, plan.shape, layer)
            return calibrate(visit.observe(plan.family.attention), weights, pairs, tokens.shape, config.sampling)
    raise AssertionError("the walk visits every layer")


def convert_checkpoint(
    source: str,
    output: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    cache_values: int | None = None,
    cache_ratio: float | None = None,
    sizes: Sizes | None = None,
    calibration: Sequence[str] = (),
    calibration_tokens: int = 28672,
    seq_len: int | None = None,
    queries: int = 128,
    seed: int = 0,
    device: str = "auto",
    target: str = "auto",
    engine: str = "any",
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    stream: bool = False,
    overwrite: bool = False,
    progress: bool | Progress = True,
) -> ConversionResult:
    """Convert an MHA/GQA checkpoint to MLA.

    Args:
        source, revision, token, kv_rank, rope_dim, cache_values, cache_ratio, sizes, target, engine, dtype,
            max_shard_size: see `plan_conversion`.
        output: folder to write; must not exist, be empty, or `overwrite` be set.
        calibration: text or jsonl files; empty: the bundled text. Text like what the model will read helps; never use
            text that it will be evaluated on.
        calibration_tokens: tokens to calibrate on, at most.
        seq_len: tokens of a calibration window; None: 4096, or what the model takes.
        queries: query positions looked at in each window.
        seed: of those positions.
        device: torch device, or "auto".
        stream: keep no copy of a Hub source: fetch its shards when they are needed and delete them (slower).
        overwrite: replace what `output` holds, once the new checkpoint is complete.
        progress: show bars, or tell a function of your own.

    Returns:
        The path and the recipe (also in the folder's latentfold.json).

    Raises:
        InputError: anything about the input that stands in the way; nothing has been written.
        RuntimeError: attention computes something else than its family's description says, or the written checkpoint
            does not give the logits of the tensors it was written from; nothing is left looking finished.

    Example:
        >>> convert_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-mla", kv_rank=96, rope_dim=32)
    """
    config = ConversionConfig(
        source=source,
        output=output,
        revision=revision,
        token=token,
        kv_rank=kv_rank,
        rope_dim=rope_dim,
        cache_values=cache_values,
        cache_ratio=cache_ratio,
        sizes=None if sizes is None else tuple(sizes),
        calibration=tuple(calibration),
        calibration_tokens=calibration_tokens,
        seq_len=seq_len,
        queries=queries,
        seed=seed,
        device=device,
        target=target,
        engine=engine,
        dtype=dtype,
        max_shard_size=max_shard_size,
        stream=stream,
        overwrite=overwrite,
    )
    return run(prepare(config), shown(progress))


def heal_checkpoint(
    converted: str,
    output: str,
    *,
    teacher: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    text: Sequence[str] = (),
    seq_len: int = 1024,
    batch_tokens: int = 1024,
    train: str = "all",
    rate: float | None = None,
    seed: int = 0,
    recompute: str = "half",
    cache_teacher: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool | Progress = True,
) -> HealingResult:
    """Train a conversion on its original's predictions, and keep it as it was at its best on text held out.

    Args:
        converted: folder of a conversion, healed before or not.
        output: folder to write: the same class, dtype and files.
        teacher, revision, token: the original, where the record's own name does not lead to it.
        minutes, steps, tokens: how long to train, in one of these; by default ten minutes.
        text: text or jsonl files; empty: the bundled calibration text. Never text that it will be evaluated on.
        seq_len, batch_tokens: tokens of a window and of a step.
        train: "attention" alone, attention and "norms", or "all" tensors of the layers.
        rate: step of the optimizer relative to each tensor's size; None: chosen by how much there is to heal.
        seed: of the order of the text.
        recompute: of which layers the inner results are computed again on the way back instead of being kept: "none",
            "half", "all"; the more, the slower and the less memory.
        cache_teacher: compute the original's predictions once, layer by layer, and keep the likeliest tokens' on disk,
            so that the original needs no memory and every epoch but the first no time; all epochs are then alike.
        device: torch device, or "auto".
        dtype: of products: "float32", "bfloat16", or "auto", the faster one here; what is trained is kept in float32.
        overwrite: replace what `output` holds, once the new checkpoint is complete.
        progress: show a bar, or tell a function of your own.

    Returns:
        The path and the recipe; `recipe.healing[-1]` has the curve.

    Raises:
        InputError: anything about the input that stands in the way; also losses that are not finite.

    Example:
        >>> heal_checkpoint("smollm2-mla", "smollm2-mla-healed", minutes=10).recipe.healing[-1].curve
    """
    config = HealingConfig(
        converted=converted,
        output=output,
        teacher=teacher,
        revision=revision,
        token=token,
        minutes=minutes,
        steps=steps,
        tokens=tokens,
        text=tuple(text),
        seq_len=seq_len,
        batch_tokens=batch_tokens,
        train=train,
        rate=rate,
        seed=seed,
        recompute=recompute,
        cache_teacher=cache_teacher,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
    )
    return run_healing(prepare_healing(config), shown(progress))
