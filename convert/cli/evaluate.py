"""`latentfold eval`."""

from __future__ import annotations

import json
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


@click.command(name="eval", cls=FilesCommand)
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
@user_errors
def evaluate(original: str, converted: str, json_file: str | None, quiet: bool, **options: Any) -> None:
    """Compare ORIGINAL and CONVERTED on the same tokens.

    Perplexity by context position, KL and top-1 agreement, the error of every attention layer, and cache bytes per
    token, counted and measured. A Markdown table goes to stdout.

    \b
    latentfold eval HuggingFaceTB/SmolLM2-135M-Instruct smollm2-mla
    latentfold eval ./llama ./llama-mla --text mine.txt --seq-len 8192 --json result.json
    """
    quiet_libraries()
    from latentfold.eval.comparison import evaluate
    from latentfold.eval.report.markdown import markdown

    if json_file and json_file != "-":
        check_writable("--json", json_file)
    found = evaluate(original, converted, progress=not quiet, **options)
    data = json.dumps(found.to_dict(), indent=2)
    if json_file == "-":
        click.echo(data)
        return
    if json_file:
        Path(json_file).write_text(data + "\n", encoding="utf-8")
    click.echo(markdown(found))
