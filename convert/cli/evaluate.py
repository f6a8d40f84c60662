"""`latentfold eval`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from latentfold.convert.cli.options import (
    FilesCommand,
    check_writable,
    quiet_libraries,
    revision_option,
    token_option,
    user_errors,
)


class ListOf(click.ParamType):
    """Comma-separated values of one type: `512,2048`."""

    def __init__(self, kind: type) -> None:
        self.kind, self.name = kind, f"{kind.__name__} list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            values = tuple(self.kind(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values:
            self.fail(f"{value!r}: expected values with commas between them, such as 512,2048", param, ctx)
        return values


@click.command(name="eval", cls=FilesCommand)
@click.argument("original")
@click.argument("converted")
@click.option(
    "--text",
    multiple=True,
    metavar="FILE...",
    help="Text or jsonl files, or data sets as hf:DATASET[:CONFIG[:SPLIT]]; several give a macro average. "
    "Default: a bundled novel.",
)
@click.option("--seq-len", type=int, help="Tokens of a window; default: 4096, or what the models take.")
@click.option("--windows", type=int, default=4, show_default=True, help="Windows of each text, at most.")
@click.option("--skip", type=int, help="Tokens to pass over at the start of each text.")
@click.option("--full", is_flag=True, help="Also --continuations and --speed.")
@click.option("--continuations", is_flag=True, help="Let both models continue a few prompts, side by side.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt of your own for --continuations.")
@click.option("--speed", is_flag=True, help="Time prefill and decoding in transformers, and measure their caches.")
@click.option("--contexts", type=ListOf(int), default=(), metavar="N,N", help="Context lengths for --speed.")
@click.option("--batches", type=ListOf(int), default=(1,), metavar="N,N", help="Batch sizes for --speed; default: 1.")
@click.option("--tasks", type=ListOf(str), default=(), metavar="TASK,TASK", help="lm-evaluation-harness tasks.")
@click.option("--include-path", metavar="DIR", help="A folder with more tasks.")
@click.option("--limit", type=int, metavar="N", help="Samples of each task, at most.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Requests at a time, for --tasks.")
@click.option("--json", "json_file", metavar="FILE", help="Write everything measured to FILE ('-': JSON on stdout).")
@click.option("--html", "html_file", metavar="FILE", help="Write a page with tables and plots to FILE.")
@click.option("--no-save", is_flag=True, help="Leave no evaluation.json in CONVERTED.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --speed and --tasks.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...; auto: a GPU if any.")
@click.option("--dtype", default="float32", show_default=True, help="Compute dtype: float32, bfloat16, float16.")
@click.option("--stream", is_flag=True, help="Keep no copy of ORIGINAL from the Hub, as in convert.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@revision_option
@token_option
@user_errors
def evaluate(
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
    quiet_libraries()
    from latentfold.convert.write.recipe import RECIPE, read_recipe
    from latentfold.eval.comparison import evaluate as compare
    from latentfold.eval.comparison import save_evaluation
    from latentfold.eval.options import EvaluationConfig
    from latentfold.eval.records import EVALUATION
    from latentfold.eval.report.markdown import markdown

    folder = Path(converted)
    if json_file and json_file != "-":
        check_writable("--json", json_file)
    if html_file:
        check_writable("--html", html_file)
        if json_file and os.path.abspath(json_file) == os.path.abspath(html_file):
            raise click.UsageError(f"--json and --html: expected two files, found {html_file} twice")
    recipe = read_recipe(folder) if (folder / RECIPE).is_file() else None
    if recipe and not no_save:
        check_writable("to keep the result (else pass --no-save),", str(folder / EVALUATION))
    options["continuations"] |= full or bool(options["prompts"])
    options["speed"] |= full
    config = EvaluationConfig(**options)
    found = compare(original, converted, config, progress=not quiet, command=_command())
    if not no_save:
        save_evaluation(found, folder)
    data = json.dumps(found.to_dict(), indent=2)
    if json_file and json_file != "-":
        Path(json_file).write_text(data + "\n", encoding="utf-8")
    if html_file:
        from latentfold.eval.report.html import html

        Path(html_file).write_text(html(found, recipe), encoding="utf-8")
    click.echo(data if json_file == "-" else markdown(found))


def _command() -> str:
    """The command line as it can be typed again, without a token and without telling where files lie here."""
    from latentfold.convert.files import public_name

    words = sys.argv[1:]
    kept = ["latentfold"]
    for i, word in enumerate(words):
        if not word.startswith("--token") and (i == 0 or words[i - 1] != "--token"):
            option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            kept.append(option + equals + public_name(value))
    return shlex.join(kept)
