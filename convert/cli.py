"""The command line: thin wrappers around the Python API. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from latentfold.convert.errors import InputError

DATA_ERRORS = 2


def _user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """One line on stderr and status 2 for what the user can mend; no traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except InputError as error:
            click.echo("Error: " + " ".join(str(error).split()), err=True)
            sys.exit(DATA_ERRORS)
        except KeyboardInterrupt:
            click.echo("\nInterrupted. The same command continues where it stopped.", err=True)
            sys.exit(130)

    return wrapped


def _quiet_libraries() -> None:
    """Keep the libraries' own progress bars and warnings off the terminal; ours say what matters."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _check_writable(name: str) -> None:
    """Find out before the work, not after it, that its result cannot be written."""
    path = Path(name)
    try:
        if path.is_dir():
            raise InputError(f"--json {name}: is a folder; expected a file")
        if not path.absolute().parent.is_dir():
            raise InputError(f"--json {name}: its folder does not exist")
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InputError(f"--json {name}: cannot be written ({error.strerror})") from error


class FilesCommand(click.Command):
    """Lets several existing files follow one `--calibration` or `--text`: `--text a.txt b.txt` and `--text *.txt`."""

    files_options = ("--calibration", "--text")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        option: str | None = None
        for i, arg in enumerate(args):
            if arg in self.files_options:
                option = arg
            elif arg.startswith("-"):
                option = None
            elif option and args[i - 1] != option:
                if Path(arg).is_file():
                    expanded.append(option)
                else:
                    option = None
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


revision_option = click.option("--revision", metavar="REV", help="Branch, tag or commit, for a Hub id.")
token_option = click.option(
    "--token",
    metavar="TOKEN",
    help="Hub token; default: HF_TOKEN or the one `hf auth login` stored.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="latentfold")
def main() -> None:
    """Convert MHA/GQA language models to MLA, and measure what it costs.

    \b
    latentfold inspect MODEL            sizes, KV cache, proposed --kv-rank and --rope-dim
    latentfold convert MODEL OUT        write an MLA checkpoint that stock engines load
    latentfold eval MODEL OUT           perplexity, agreement, layer errors, cache of both

    MODEL is a folder or a Hub id. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
    """


@main.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@revision_option
@token_option
@_user_errors
def inspect(model: str, as_json: bool, revision: str | None, token: str | None) -> None:
    """Describe MODEL from its config.json alone: sizes, KV cache, what a conversion would save.

    \b
    latentfold inspect meta-llama/Llama-3.1-8B
    latentfold inspect ./my-model --json | jq .proposal
    """
    _quiet_libraries()
    from latentfold.convert.inspection import inspect_model
    from latentfold.convert.tables import inspection_table

    found = inspect_model(model, revision=revision, token=token)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else inspection_table(found))


@main.command(cls=FilesCommand)
@click.argument("model")
@click.argument("out")
@click.option(
    "--kv-rank", type=int, metavar="R", help="Latent values cached per token and layer; default: see inspect."
)
@click.option("--rope-dim", type=int, metavar="N", help="Rotated values cached per token and layer (even).")
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
@click.option("--dtype", default="auto", show_default=True, help="Stored dtype: bfloat16, float32; auto: the source's.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file.")
@click.option(
    "--dry-run", is_flag=True, help="Print the plan; write nothing. A Hub model's weights are not downloaded."
)
@click.option("--overwrite", is_flag=True, help="Replace what OUT holds, once the new checkpoint is complete.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no notices.")
@revision_option
@token_option
@_user_errors
def convert(model: str, out: str, dry_run: bool, quiet: bool, calibration: tuple[str, ...], **options: Any) -> None:
    """Convert MODEL (folder or Hub id) to an MLA checkpoint in OUT.

    The result is a dense DeepseekV3ForCausalLM: transformers, vLLM, SGLang, llama.cpp and MLX load it as MLA without
    remote code. Defaults need no option. An interrupted conversion continues when the command is repeated.

    \b
    latentfold convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla
    latentfold convert ./llama ./llama-mla --kv-rank 512 --rope-dim 64 --calibration my.txt
    latentfold convert meta-llama/Llama-3.1-8B out --dry-run
    """
    _quiet_libraries()
    from latentfold.convert.config import ConversionConfig
    from latentfold.convert.pipeline import dry_run as plan_only
    from latentfold.convert.pipeline import prepare, run
    from latentfold.convert.tables import conversion_summary, plan_table

    config = ConversionConfig(source=model, output=out, calibration=calibration, progress=not quiet, **options)
    if dry_run:
        click.echo(plan_table(plan_only(config)))
        return
    plan, tokenizer, windows = prepare(config)
    if not quiet:
        for notice in plan.notices:
            click.echo(f"Note: {notice}", err=True)
    result = run(config, plan, tokenizer, windows)
    if not quiet:
        click.echo(conversion_summary(result), err=True)
    click.echo(str(result.path))


@main.command(name="eval", cls=FilesCommand)
@click.argument("original")
@click.argument("converted")
@click.option("--text", multiple=True, metavar="FILE...", help="Text or jsonl files. Default: a bundled novel.")
@click.option("--seq-len", type=int, help="Tokens of a window; default: 4096, or what the models take.")
@click.option("--windows", type=int, default=4, show_default=True, help="Windows to evaluate, at most.")
@click.option("--skip", type=int, help="Tokens to pass over at the start of each text.")
@click.option("--json", "json_file", metavar="FILE", help="Write everything measured to FILE ('-': JSON on stdout).")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...; auto: a GPU if any.")
@click.option("--dtype", default="float32", show_default=True, help="Compute dtype: float32, bfloat16, float16.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@revision_option
@token_option
@_user_errors
def evaluate_command(original: str, converted: str, json_file: str | None, quiet: bool, **options: Any) -> None:
    """Compare ORIGINAL and CONVERTED on the same tokens.

    Perplexity by context position, KL and top-1 agreement, the error of every attention layer, and cache bytes per
    token, counted and measured. A Markdown table goes to stdout.

    \b
    latentfold eval HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla
    latentfold eval ./llama ./llama-mla --text mine.txt --seq-len 8192 --json result.json
    """
    _quiet_libraries()
    from latentfold.eval.comparison import evaluate
    from latentfold.eval.report import markdown

    if json_file and json_file != "-":
        _check_writable(json_file)
    found = evaluate(original, converted, progress=not quiet, **options)
    data = json.dumps(found.to_dict(), indent=2)
    if json_file == "-":
        click.echo(data)
        return
    if json_file:
        Path(json_file).write_text(data + "\n", encoding="utf-8")
    click.echo(markdown(found))


if __name__ == "__main__":
    main()
