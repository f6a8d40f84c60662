"""Everything before the first layer: source, plan, text."""

from __future__ import annotations

from typing import Any

from latentfold.convert.config import ConversionConfig
from latentfold.convert.plan.plan import ConversionPlan, make_plan
from latentfold.convert.source.hub import download, with_headers
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.source.streamed import stream
from latentfold.convert.source.tokenizer import load_generation_config, load_tokenizer
from latentfold.convert.text.documents import default_calibration, read_documents
from latentfold.convert.text.windows import Windows, make_windows
from latentfold.convert.write.output import check_output, check_space


def prepare(config: ConversionConfig) -> tuple[ConversionPlan, Any, Windows]:
    """Check everything and fetch the source; nothing is written to the output yet.

    Raises:
        InputError: see `make_plan`; also calibration text that is missing, empty or too short.
    """
    checkpoint = open_checkpoint(config.source, revision=config.revision, token=config.token)
    check_output(config, checkpoint)
    plan = make_plan(config, checkpoint)  # refuse by config.json before anything else is read or downloaded
    check_space(config, plan.nbytes)
    make_plan(config, with_headers(checkpoint, config.token))  # and by file headers, before the weights are
    documents = read_documents(config.calibration) if config.calibration else default_calibration()
    checkpoint = download(checkpoint, token=config.token, weights=False)
    load_generation_config(checkpoint)
    windows = make_windows(
        documents,
        tokenizer := load_tokenizer(checkpoint),
        length=plan.seq_len,
        count=config.calibration_tokens // plan.seq_len,
        purpose="calibration",
        vocab_size=plan.shape.vocab_size,
    )
    if config.stream:
        checkpoint = stream(checkpoint, config.token)
    else:
        checkpoint = download(checkpoint, token=config.token)
        checkpoint.read_headers()
    plan = make_plan(config, checkpoint)
    checkpoint.check_values(plan.target.expected)
    return plan, tokenizer, windows


def dry_run(config: ConversionConfig) -> ConversionPlan:
    """The plan of a conversion; of a Hub model only config.json and file headers are fetched.

    Raises:
        InputError: see `make_plan`.
    """
    if config.calibration:
        read_documents(config.calibration)
    checkpoint = open_checkpoint(config.source, revision=config.revision, token=config.token)
    check_output(config, checkpoint)
    check_space(config, make_plan(config, checkpoint).nbytes)
    return make_plan(config, with_headers(checkpoint, config.token))
