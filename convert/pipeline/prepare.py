"""Everything before the first layer: source, plan, text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.plan.plan import ConversionPlan, make_plan
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.hub import download, with_headers
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.source.streamed import stream
from latentfold.convert.source.tokenizer import load_generation_config, load_tokenizer
from latentfold.convert.text.documents import Document, default_calibration, read_documents
from latentfold.convert.text.windows import Windows, make_windows
from latentfold.convert.write.output import check_output, check_space


@dataclass(frozen=True)
class Job:
    """A conversion that can begin.

    Attributes:
        plan: what will be written.
        tokenizer: the source's.
        windows: calibration tokens.
    """

    plan: ConversionPlan
    tokenizer: Any
    windows: Windows

    @cached_property
    def model(self) -> StreamedModel:
        """The source, to be run layer by layer."""
        plan = self.plan
        return StreamedModel(plan.checkpoint, plan.config, torch.float32, plan.request.torch_device)


def plan_only(config: ConversionConfig) -> ConversionPlan:
    """The plan of a conversion; of a Hub model only config.json and file headers are fetched.

    Raises:
        InputError: for anything that would fail or give a wrong model later.
    """
    if config.calibration:
        read_documents(config.calibration)
    return _plan(config)


def _plan(config: ConversionConfig) -> ConversionPlan:
    checkpoint = open_checkpoint(config.source, revision=config.revision, token=config.token)
    if config.output is not None:
        check_output(config.output, checkpoint.folder, overwrite=config.overwrite, needed=config.calibration_files)
    if checkpoint.revision is not None:
        make_plan(config, checkpoint)  # refuse by config.json before file headers are asked for
    plan = make_plan(config, with_headers(checkpoint, config.token))
    if config.output is not None:
        check_space(config.output_path, plan.nbytes)
    return plan


def prepare(config: ConversionConfig) -> Job:
    """Check everything and fetch the source; nothing is written to the output yet.

    Raises:
        InputError: see `plan_only`; also calibration text that is missing, empty or too short.
    """
    documents = _documents(config)
    plan = _plan(config)
    checkpoint = download(plan.checkpoint, token=config.token, weights=False)
    load_generation_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    windows = calibration_windows(plan, tokenizer, documents)
    plan = _with_weights(plan, checkpoint)
    for copied in plan.target.outer().values():
        plan.checkpoint.tensor(copied.source)  # whatever is damaged: the layers' tensors are all read by pass 1
    plan.target.model.check_copies()
    return Job(plan, tokenizer, windows)


def calibration_windows(plan: ConversionPlan, tokenizer: Any, documents: Sequence[Document] = ()) -> Windows:
    """What a conversion calibrates on; `documents` are its texts where they have been read.

    Raises:
        InputError: the text is missing, empty or too short.
    """
    return make_windows(
        documents or _documents(plan.request),
        tokenizer,
        length=plan.seq_len,
        count=plan.request.calibration_tokens // plan.seq_len,
        purpose="calibration",
        vocab_size=plan.shape.vocab_size,
    )


def _documents(config: ConversionConfig) -> list[Document]:
    return read_documents(config.calibration) if config.calibration else default_calibration()


def _with_weights(plan: ConversionPlan, checkpoint: Checkpoint) -> ConversionPlan:
    """The plan once the source's weights are here, or come when they are wanted."""
    config = plan.request
    if config.stream:
        checkpoint = stream(checkpoint, config.token)
    elif checkpoint.revision is None:
        return plan
    else:
        checkpoint = download(checkpoint, token=config.token)
        checkpoint.read_headers()
    if checkpoint.headers != plan.checkpoint.headers:  # offline there were none, on the Hub's word others
        return make_plan(config, checkpoint)
    return replace(plan, checkpoint=checkpoint, target=replace(plan.target, checkpoint=checkpoint))
