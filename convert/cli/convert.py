"""`latentfold convert`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from latentfold.convert.cli.evaluate import evaluate
from latentfold.convert.cli.options import FilesCommand, quiet_libraries, revision_option, token_option, user_errors
from latentfold.convert.cli.push import push


@click.command(cls=FilesCommand)
@click.argument("model")
@click.argument("out")
@click.option(
    "--kv-rank", type=int, metavar="R", help="Latent values cached per token and layer; default: see inspect."
)
@click.option("--rope-dim", type=int, metavar="N", help="Rotated values cached per token and layer (even).")
@click.option(
    "--cache-values",
    type=int,
    metavar="N",
    help="Cached values per token and layer; a short survey divides them into latent and rotated ones.",
)
@click.option("--cache-ratio", type=float, metavar="X", help="The same as a share of the source's: 0.33.")
@click.option(
    "--calibration",
    multiple=True,
    metavar="FILE...",
    help="Text or jsonl files to calibrate on. Default: bundled text. "
    "Text from your own domain helps; never use text you will evaluate on.",
)
@click.option("--calibration-tokens", type=int, default=28672, show_default=True, help="Tokens to use, at most.")
@click.option("--seq-len", type=int, help="Tokens of a calibration window; default: 4096, or what the model takes.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampled query positions.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...; auto: a GPU if any.")
@click.option(
    "--target",
    default="auto",
    show_default=True,
    help="deepseek: the stock class that every engine loads; native: latentfold's own, for any family; "
    "auto: deepseek wherever it can hold the model.",
)
@click.option(
    "--engine",
    default="any",
    show_default=True,
    help="What has to load the stock class: any engine, or transformers alone, where it holds q/k/v biases too.",
)
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="Stored dtype: bfloat16, float32, for native also float16; auto: the source's.",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file.")
@click.option(
    "--dry-run", is_flag=True, help="Print the plan; write nothing. A Hub model's weights are not downloaded."
)
@click.option("--stream", is_flag=True, help="Keep no copy of a Hub model: fetch shards when needed, then delete them.")
@click.option("--push", "repo_id", metavar="REPO_ID", help="Afterwards evaluate on the bundled novel, and publish.")
@click.option("--private", is_flag=True, help="Make a new repository private, with --push.")
@click.option("--overwrite", is_flag=True, help="Replace what OUT holds, once the new checkpoint is complete.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no notices.")
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
    whose code is in OUT. Defaults need no option. An interrupted conversion continues when the command is repeated.

    \b
    latentfold convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla
    latentfold convert ./llama ./llama-mla --kv-rank 512 --rope-dim 64 --calibration my.txt
    latentfold convert ./llama ./llama-mla --cache-ratio 0.25
    latentfold convert meta-llama/Llama-3.1-8B out --dry-run
    latentfold convert meta-llama/Llama-3.1-8B out --stream --push me/Llama-3.1-8B-MLA
    """
    quiet_libraries()
    from latentfold.convert.cli.tables import conversion_summary, plan_table
    from latentfold.convert.pipeline.prepare import plan_only, prepare
    from latentfold.convert.pipeline.run import run
    from latentfold.convert.plan.config import ConversionConfig
    from latentfold.convert.progress import shown
    from latentfold.convert.publish.push import check_target

    if private and not repo_id:
        raise click.UsageError("--private is for --push")
    config = ConversionConfig(source=model, output=out, calibration=calibration, **options)
    if repo_id:
        check_target(repo_id, private=private, token=config.token)
    if dry_run:
        click.echo(plan_table(plan_only(config)))
        return
    job = prepare(config)
    if not quiet:
        for notice in job.plan.notices:
            click.echo(f"Note: {notice}", err=True)
    result = run(job, shown(not quiet))
    if not quiet:
        click.echo(conversion_summary(model, result), err=True)
    click.echo(str(result.path))
    if repo_id:
        shared = {name: options[name] for name in ("token", "stream", "device", "revision")}
        try:
            context.invoke(evaluate, original=model, converted=out, quiet=quiet, **shared)
            context.invoke(push, out=out, repo_id=repo_id, private=private, quiet=quiet, token=config.token)
        except SystemExit:
            revision, stream = options["revision"], options["stream"]
            measuring = [model, out, *(["--revision", revision] if revision else []), *(["--stream"] if stream else [])]
            publishing = [out, repo_id, *(["--private"] if private else [])]
            left = f"latentfold eval {shlex.join(measuring)} && latentfold push {shlex.join(publishing)}"
            click.echo(f"The conversion is complete; what is left: {left}", err=True)
            raise
