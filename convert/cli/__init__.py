"""The command line: thin wrappers around the Python API. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import click

from latentfold.convert.cli.card import card
from latentfold.convert.cli.convert import convert
from latentfold.convert.cli.evaluate import evaluate
from latentfold.convert.cli.heal import heal
from latentfold.convert.cli.inspect import inspect
from latentfold.convert.cli.push import push


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="latentfold")
def main() -> None:
    """Convert MHA/GQA language models to MLA, and measure what it costs.

    \b
    latentfold inspect MODEL            sizes, KV cache, proposed --kv-rank and --rope-dim
    latentfold convert MODEL OUT        write an MLA checkpoint that stock engines load
    latentfold heal OUT HEALED          train it on the original's predictions for some minutes
    latentfold eval MODEL OUT           perplexity, agreement, layer errors, cache of both
    latentfold card OUT                 write its model card
    latentfold push OUT REPO_ID         publish it on the Hub

    MODEL is a folder or a Hub id. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
    """


for command in (inspect, convert, heal, evaluate, card, push):
    main.add_command(command)
