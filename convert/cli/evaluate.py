"""`latentfold eval`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from latentfold.convert.cli.card import card
from latentfold.convert.cli.options import (
    FilesCommand,
    Folder,
    ListOf,
    Text,
    check_writable,
    command_line,
    compute_dtype_option,
    device_option,
    next_steps,
    quiet_libraries,
    quiet_option,
    revision_option,
    seq_len_option,
    token_option,
    user_errors,
)
from latentfold.convert.cli.push import push


@click.command(name="eval", cls=FilesCommand)
@click.argument("original", type=Folder())
@click.argument("converted", type=Folder())
@click.option(
    "--text",
    multiple=True,
    type=Text(),
    metavar="FILE...",
    help="Text or jsonl files, or data sets as hf:DATASET[:CONFIG[:SPLIT]]; several give a macro average. "
    "Default: a bundled novel.",
)
@seq_len_option
@click.option(
    "--windows",
    type=click.IntRange(1),
    metavar="N",
    default=4,
    show_default=True,
    help="Windows of each text, at most.",
)
@click.option("--skip", type=click.IntRange(0), metavar="N", help="Tokens to pass over at the start of each text.")
@click.option("--full", is_flag=True, help="Also --continuations and --speed.")
@click.option("--continuations", is_flag=True, help="Let both models continue a few prompts, side by side.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt of your own for --continuations.")
@click.option("--speed", is_flag=True, help="Time prefill and decoding in transformers, and measure their caches.")
@click.option(
    "--contexts", type=ListOf(click.IntRange(1)), default=(), metavar="N,N", help="Context lengths for --speed."
)
@click.option(
    "--batches",
    type=ListOf(click.IntRange(1)),
    default=(1,),
    metavar="N,N",
    help="Batch sizes for --speed; default: 1.",
)
@click.option(
    "--tasks", type=ListOf(click.STRING), default=(), metavar="TASK,TASK", help="lm-evaluation-harness tasks."
)
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="A folder with more tasks.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Samples of each task, at most.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="Requests at a time, for --tasks.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(),
    metavar="FILE",
    help="Write everything measured to FILE ('-': JSON on stdout).",
)
@click.option(
    "--html", "html_file", type=click.Path(), metavar="FILE", help="Write a page with tables and plots to FILE."
)
@click.option("--no-save", is_flag=True, help="Leave no evaluation.json in CONVERTED.")
@click.option(
    "--seed", type=click.IntRange(0), metavar="N", default=0, show_default=True, help="Of --speed and --tasks."
)
@device_option
@compute_dtype_option
@click.option("--stream", is_flag=True, help="Keep no copy of ORIGINAL from the Hub, as in convert.")
@quiet_option
@revision_option
@token_option
@click.pass_context
@user_errors
def evaluate(
    context: click.Context,
    original: str,
    converted: str,
    full: bool,
    json_file: str | None,
    html_file: str | None,
    no_save: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare ORIGINAL and CONVERTED on the same tokens.

    Perplexity by context position, KL and top-1 agreement, the error of every attention layer, and the cache of both.
    Tables go to stdout; a converted folder also keeps the result as evaluation.json, which `card` and `push` read.

    \b
    latentfold eval HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla
    latentfold eval ./llama ./llama-mla --text mine.txt hf:Salesforce/wikitext:wikitext-2-raw-v1 --html report.html
    latentfold eval ./llama ./llama-mla --speed --contexts 1024,8192 --batches 1,8 --tasks arc_easy,hellaswag
    """
    if json_file and json_file != "-":
        check_writable("--json", json_file)
    if html_file:
        check_writable("--html", html_file)
        if json_file and os.path.abspath(json_file) == os.path.abspath(html_file):
            raise click.UsageError(f"--json and --html: expected two files, found {html_file} twice")
    quiet_libraries()
    from latentfold.convert.write.recipe import RECIPE, read_recipe
    from latentfold.eval.comparison import evaluate as compare
    from latentfold.eval.comparison import save_evaluation
    from latentfold.eval.options import EvaluationConfig
    from latentfold.eval.records import EVALUATION
    from latentfold.eval.report.markdown import markdown

    folder = Path(converted)
    recipe = read_recipe(folder) if (folder / RECIPE).is_file() else None
    if recipe and not no_save:
        check_writable("to keep the result (else pass --no-save),", str(folder / EVALUATION))
    options["continuations"] |= full or bool(options["prompts"])
    options["speed"] |= full
    config = EvaluationConfig(**options)
    typed = command_line(context.command, context.params, public=True)
    notify = None if quiet else lambda notice: click.echo(f"Note: {notice}", err=True)
    found = compare(original, converted, config, progress=not quiet, command=typed, notify=notify)
    if not no_save:
        save_evaluation(found, folder)
    data = json.dumps(found.to_dict(), indent=2)
    if json_file and json_file != "-":
        Path(json_file).write_text(data + "\n", encoding="utf-8")
    if html_file:
        from latentfold.eval.report.html import html

        Path(html_file).write_text(html(found, recipe), encoding="utf-8")
    click.echo(data if json_file == "-" else markdown(found))
    if recipe and not no_save:
        next_steps(
            command_line(card, {"out": converted}),
            command_line(push, {"out": converted, "repo_id": "NAMESPACE/NAME"}),
        )
