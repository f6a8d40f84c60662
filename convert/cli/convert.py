"""`latentfold convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from latentfold.convert.cli.evaluate import evaluate
from latentfold.convert.cli.options import (
    Even,
    FilesCommand,
    Folder,
    calibration_option,
    calibration_tokens_option,
    command_line,
    device_option,
    engine_option,
    loading,
    next_steps,
    quiet_libraries,
    quiet_option,
    revision_option,
    seq_len_option,
    stored_dtype_option,
    target_option,
    token_option,
    user_errors,
)
from latentfold.convert.cli.push import push


@click.command(cls=FilesCommand)
@click.argument("model", type=Folder())
@click.argument("out", type=Folder())
@click.option(
    "--kv-rank",
    type=click.IntRange(1),
    metavar="R",
    help="Latent values cached per token and layer; default: see inspect.",
)
@click.option(
    "--rope-dim", type=Even(0), metavar="N", help="Rotated values cached per token and layer, an even number."
)
@click.option(
    "--cache-values",
    type=click.IntRange(3),
    metavar="N",
    help="Cached values per token and layer; a short survey divides them into latent and rotated ones.",
)
@click.option(
    "--cache-ratio",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="X",
    help="The same as a share of the source's: 0.33.",
)
@calibration_option
@calibration_tokens_option
@seq_len_option
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", default=0, show_default=True, help="Of the sampled query positions."
)
@device_option
@target_option
@engine_option
@stored_dtype_option
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file.")
@click.option(
    "--dry-run", is_flag=True, help="Print the plan; write nothing. A Hub model's weights are not downloaded."
)
@click.option("--stream", is_flag=True, help="Keep no copy of a Hub model: fetch shards when needed, then delete them.")
@click.option("--push", "repo_id", metavar="REPO_ID", help="Afterwards evaluate on the bundled novel, and publish.")
@click.option("--private", is_flag=True, help="Make a new repository private, with --push.")
@click.option("--overwrite", is_flag=True, help="Replace what OUT holds, once the new checkpoint is complete.")
@quiet_option
@revision_option
@token_option
@click.pass_context
@user_errors
def convert(
    context: click.Context,
    model: str,
    out: str,
    dry_run: bool,
    quiet: bool,
    calibration: tuple[str, ...],
    repo_id: str | None,
    private: bool,
    **options: Any,
) -> None:
    """Convert MODEL (folder or Hub id) to an MLA checkpoint in OUT.

    The result is a dense DeepseekV3ForCausalLM: transformers, vLLM, SGLang, llama.cpp and MLX load it as MLA without
    remote code. Where that class lacks what MODEL needs (biases, q/k-norm, windows, ...), it is latentfold's own,
    whose code is in OUT. Defaults need no option. An interrupted conversion continues when the command is repeated, and
    so does one with --push that could not be evaluated or published.

    \b
    latentfold convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla
    latentfold convert ./llama ./llama-mla --kv-rank 512 --rope-dim 64 --calibration my.txt
    latentfold convert ./llama ./llama-mla --cache-ratio 0.25
    latentfold convert meta-llama/Llama-3.1-8B out --dry-run
    latentfold convert meta-llama/Llama-3.1-8B out --stream --push me/Llama-3.1-8B-MLA
    """
    if private and not repo_id:
        raise click.UsageError("--private is for --push")
    quiet_libraries()
    from latentfold.convert.cli.finished import finished
    from latentfold.convert.cli.tables import conversion_summary, plan_table
    from latentfold.convert.pipeline.prepare import plan_only, prepare
    from latentfold.convert.pipeline.run import run
    from latentfold.convert.plan.config import ConversionConfig
    from latentfold.convert.progress import shown
    from latentfold.convert.publish.push import check_target

    config = ConversionConfig(source=model, output=out, calibration=calibration, **options)
    if repo_id:
        check_target(repo_id, private=private, token=config.token)
    if dry_run:
        click.echo(plan_table(plan_only(config)))
        return
    if repo_id and finished(config):
        if not quiet:
            click.echo(f"Note: {out} holds this conversion already; what is left is done", err=True)
    else:
        job = prepare(config)
        if not quiet:
            for notice in job.plan.notices:
                click.echo(f"Note: {notice}", err=True)
        result = run(job, shown(not quiet))
        if not quiet:
            click.echo(conversion_summary(result), err=True)
        if not repo_id:
            next_steps(
                command_line(evaluate, {"original": model, "converted": out, "revision": config.revision}),
                command_line(push, {"out": out, "repo_id": "NAMESPACE/NAME"}),
                loading(out, result.recipe.options.target),
            )
    click.echo(str(config.output_path))
    if repo_id:
        measuring = {"original": model, "converted": out, "quiet": quiet} | {
            name: options[name] for name in ("token", "stream", "device", "revision")
        }
        publishing = {"out": out, "repo_id": repo_id, "private": private, "quiet": quiet, "token": config.token}
        _publish(context, measuring, publishing)


def _publish(context: click.Context, measuring: dict[str, Any], publishing: dict[str, Any]) -> None:
    """Evaluate a finished conversion, unless that was done, and push it; where that fails, say what is left."""
    from latentfold.convert.publish.card import current_evaluation
    from latentfold.convert.write.recipe import read_recipe

    left: list[tuple[click.Command, dict[str, Any]]] = [(push, publishing)]
    out = Path(publishing["out"])
    if current_evaluation(out, read_recipe(out)) is None:
        left.insert(0, (evaluate, measuring))
    while left:
        command, values = left[0]
        try:
            context.invoke(command, **values)
        except SystemExit:
            typed = " && ".join(command_line(step, values | {"quiet": False}) for step, values in left)
            click.echo(f"The conversion is complete; repeat this command to go on. What is left: {typed}", err=True)
            raise
        left.pop(0)
