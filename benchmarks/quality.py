"""What a conversion costs, ingredient by ingredient, and against other training-free methods, on your model and text.

    python -m benchmarks.quality MODEL                      this project's method at two sizes, on two texts
    python -m benchmarks.quality MODEL --ablate             and without each of its ingredients in turn
    python -m benchmarks.quality MODEL --baselines          and the baselines
    python -m benchmarks.quality MODEL --text mine.txt --sizes 64+448 --calibration other.txt

One sweep serves all rows: the calibration windows pass the original's layers once, every row converts each layer from
the same statistics, and the evaluation windows pass every row's layers. Attention is computed from the factorization in
float32 (the tests hold the stock class to the same numbers); rows that do not fit the stock container are marked
`simulated`. The default texts are a novel and Python's reference manual; the bundled calibration text holds
neither. JSON goes to --json, a Markdown table to stdout.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import resource
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.variants import BASELINES, VARIANTS, Variant
from latentfold.convert.attention.latent import LatentAttention, head_outputs
from latentfold.convert.calibrate.layer import calibrate
from latentfold.convert.cli.options import FilesCommand, check_writable, quiet_libraries, user_errors
from latentfold.convert.errors import InputError
from latentfold.convert.families.reading import layer_attention
from latentfold.convert.files import public_name
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import Walk
from latentfold.convert.pipeline.ladders import score_ladders
from latentfold.convert.pipeline.prepare import Job, prepare
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.progress import Bars
from latentfold.convert.source.config import max_positions
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.targets.deepseek.target import KIND, PortableTarget
from latentfold.convert.text.datasets import open_texts
from latentfold.convert.text.documents import Document
from latentfold.convert.text.windows import Windows, make_windows
from latentfold.eval.inputs import NOVEL_FRONT_MATTER, bundled_novel
from latentfold.eval.provenance import provenance
from latentfold.eval.quality.predictions import agreement, nll, position_buckets, score_tokens

BLOCK = 512
"""Tokens of a block of the manual: even ones may calibrate (--manual), odd ones are evaluated on then."""


@dataclass
class Row:
    """One variant at one size, on its way through the layers."""

    variant: Variant
    size: str
    kv_rank: int
    slots: Tensor
    streams: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    predicted: list[float | None] = field(default_factory=list)


class FactorizedAttention(nn.Module):
    """Stands in for a layer's attention module; computes it from a factorization."""

    def __init__(self, layer: LatentAttention, frequencies: Tensor) -> None:
        super().__init__()
        self.layer, self.frequencies = layer, frequencies
        self.o = layer.o.transpose(0, 1).flatten(1).to(torch.float32)  # (D, H d)

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        heads = head_outputs(self.layer, self.frequencies, hidden_states[0]).flatten(1)
        return (heads @ self.o.T)[None], None


def manual() -> Document:
    """Python's reference manual, as the interpreter ships it."""
    topics = pydoc_data.topics.topics
    return Document("Python manual", "\n\n".join(topics[key] for key in sorted(topics)))


def manual_blocks(tokenizer: object, vocab_size: int, calibrating: int) -> tuple[Windows, Windows]:
    """The manual in blocks of 512 tokens: of the even ones as many to calibrate on, of the odd ones as many to test on,
    evenly spread over it."""
    blocks = make_windows([manual()], tokenizer, length=BLOCK, count=1 << 30, purpose="manual", vocab_size=vocab_size)
    parts = []
    for name, rows in (("even", blocks.tokens[::2]), ("odd", blocks.tokens[1::2])):
        chosen = torch.linspace(0, len(rows) - 1, min(calibrating, len(rows))).round().long()
        parts.append(Windows(rows[chosen], (f"Python manual, {name} blocks",), blocks.sha256))
    return parts[0], parts[1]


@torch.no_grad()
def sweep(job: Job, evaluation: Tensor, rows: list[Row]) -> list[Tensor]:
    """Take every row's evaluation streams through its own layers; the original's last hidden states."""
    plan, calibration = job.plan, job.windows.tokens
    count = len(calibration)
    walk = Walk(job.model, [*calibration, *evaluation], progress=Bars(), stage="layers")
    for row in rows:
        row.streams = walk.streams[count:]
    for visit in walk:
        weights, pairs = layer_attention(walk.model, plan.family, plan.shape, visit.index)
        calls = islice(visit.observe(plan.family.attention), count)
        calibrated = calibrate(calls, weights, pairs, calibration.shape, plan.request.sampling)
        visit.advance()
        layer: Any = visit.layer
        original = layer.self_attn
        for row in rows:
            start = time.perf_counter()
            converted, frequencies = row.variant.convert(calibrated, row.slots, row.kv_rank)
            row.seconds += time.perf_counter() - start
            row.predicted.append(converted.predicted_error.get("output"))
            layer.self_attn = FactorizedAttention(converted, frequencies)
            row.streams = [layer(hidden, **visit.kwargs(count)) for hidden in row.streams]
        layer.self_attn = original
    return walk.streams[count:]


def result(row: Row, counts: dict[str, int], tokens: Tensor, last: list[Tensor], model: StreamedModel) -> dict:
    """A row as data: each text's NLL gap by position, KL and top-1 agreement."""
    with model.head() as head:
        scores = score_tokens(tokens, last, row.streams, head, head)
    parts = scores.split(list(counts.values()))
    length = tokens.shape[1] - 1
    return {
        "method": row.variant.name,
        "size": row.size,
        "container": "stock" if row.variant.portable else "simulated",
        "factorization_seconds": round(row.seconds, 1),
        "texts": {
            name: {
                "overall": asdict(nll(part, 0, length)),
                "by_position": [asdict(nll(part, *bucket)) for bucket in position_buckets(length)],
                "agreement": asdict(agreement(part)),
            }
            for name, part in zip(counts, parts, strict=True)
        },
        "predicted_output_error": row.predicted,
    }


def table(results: list[dict]) -> str:
    """Markdown: one line a row."""
    texts = list(results[0]["texts"])
    lines = [
        "| method | size (rope+rank) | container | "
        + " | ".join(f"{name}: gap (nats) ↓ | longest contexts ↓ | KL ↓ | top-1 ↑" for name in texts)
        + " | seconds |",
        "|---" * (4 + 4 * len(texts)) + "|",
    ]
    for r in results:
        cells = []
        for found in r["texts"].values():
            whole, tail = found["overall"], found["by_position"][-1]
            error = whole["gap_standard_error"]
            cells += [
                f"{whole['gap']:+.3f}" + (f" ± {error:.3f}" if error is not None else ""),
                f"{tail['gap']:+.3f}",
                f"{found['agreement']['kl']:.3f}",
                f"{found['agreement']['top1']:.1%}",
            ]
        lines.append(
            f"| {r['method']} | {r['size']} | {r['container']} | "
            + " | ".join(cells)
            + f" | {r['factorization_seconds']:.0f} |"
        )
    return "\n".join(lines)


def measure(
    model: str,
    sizes: list[tuple[int, int]],
    variants: list[Variant],
    *,
    documents: list[Document],
    skip: int,
    calibration: tuple[str, ...],
    calibration_tokens: int,
    on_manual: bool,
    seq_len: int,
    windows: int,
) -> dict:
    """All rows of one model."""
    started = time.perf_counter()
    jobs = []
    for rope_dim, kv_rank in sizes:
        config = ConversionConfig(
            model,
            None,
            rope_dim=rope_dim,
            kv_rank=kv_rank,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            seq_len=seq_len,
            target="deepseek",
        )
        jobs.append(prepare(config))
    tokenizer, plan, calibrating = jobs[0].tokenizer, jobs[0].plan, jobs[0].windows
    if on_manual:
        blocks = calibration_tokens // BLOCK
        calibrating, testing = manual_blocks(tokenizer, plan.shape.vocab_size, blocks)
        parts = {"manual, odd blocks": testing.tokens}
    else:
        parts = {
            public_name(document.name): make_windows(
                [document],
                tokenizer,
                length=seq_len,
                count=windows,
                purpose=f"{document.name}: evaluation",
                vocab_size=plan.shape.vocab_size,
                skip=skip,
            ).tokens
            for document in documents
        }
    rows: list[Row] = []
    jobs = [replace(job, windows=calibrating) for job in jobs]
    for (rope_dim, kv_rank), job in zip(sizes, jobs, strict=True):
        target = job.plan.target
        assert isinstance(target, PortableTarget)
        found, _ = score_ladders(job, Bars())[KIND][0]
        literal = target.ladders[0]
        for variant in variants:
            if variant is VARIANTS["no ladder search"] and found == literal:
                continue  # the search found nothing better: the same row again
            ladder = found if variant.searches_ladder else literal
            slots = ladder.frequencies.to(config.torch_device)
            rows.append(Row(variant, f"{rope_dim}+{kv_rank}", kv_rank, slots))
    tokens = torch.cat(list(parts.values()))
    last = sweep(jobs[0], tokens, rows)
    source = jobs[0].model
    counts = {name: len(part) for name, part in parts.items()}
    return {
        "model": public_name(model),
        "calibration": {"texts": [*map(public_name, calibrating.sources)], "windows": [*calibrating.tokens.shape]},
        "rows": [result(row, counts, tokens, last, source) for row in rows],
        "seconds": round(time.perf_counter() - started, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "provenance": provenance(command=None, dtype="float32", device=config.torch_device, seed=config.seed),
    }


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """`32+96,32+160` -> [(32, 96), (32, 160)], rope-dim and kv-rank."""
    try:
        return [(int(rope), int(rank)) for rope, rank in (size.split("+") for size in text.split(","))]
    except ValueError as error:
        raise InputError(f"--sizes {text}: expected rope-dim + kv-rank, such as 32+96,32+160") from error


@click.command(cls=FilesCommand)
@click.argument("models", nargs=-1, required=True)
@click.option("--sizes", default="32+96,32+160", show_default=True, help="rope-dim + kv-rank, with commas between.")
@click.option("--text", multiple=True, metavar="FILE...", help="To evaluate on; default: a novel, the manual.")
@click.option("--calibration", multiple=True, metavar="FILE...", help="Texts to calibrate on; default: bundled.")
@click.option("--manual", "on_manual", is_flag=True, help="Calibrate on the manual's even blocks, test on odd ones.")
@click.option("--seq-len", type=int, default=4096, show_default=True, help="Tokens of a window.")
@click.option(
    "--windows", type=click.IntRange(1), default=2, show_default=True, help="Evaluation windows of each text."
)
@click.option("--ablate", is_flag=True, help="Rows without each ingredient.")
@click.option("--baselines", is_flag=True, help="Rows for other methods.")
@click.option("--only", multiple=True, metavar="NAME", help="Of these rows only some; may be repeated.")
@click.option("--calibration-tokens", type=int, default=28672, show_default=True, help="Tokens to use, at most.")
@click.option("--json", "json_file", metavar="FILE", help="Write everything to FILE.")
@user_errors
def main(
    models: tuple[str, ...],
    sizes: str,
    text: tuple[str, ...],
    on_manual: bool,
    ablate: bool,
    baselines: bool,
    only: tuple[str, ...],
    json_file: str | None,
    **options: Any,
) -> None:
    """Run the benchmark on MODELS, folders or Hub ids."""
    quiet_libraries()
    if json_file:
        check_writable("--json", json_file)
    chosen = parse_sizes(sizes)
    if on_manual and (text or options["calibration"]):
        raise click.UsageError("--manual: calibrates and tests on the manual; drop --text and --calibration")
    documents = open_texts(text) if text else [bundled_novel(), manual()]
    if len({public_name(document.name) for document in documents}) < len(documents):
        raise InputError("--text: two of one name; expected names that tell the texts apart")
    for model in models:  # before hours are spent on the first
        limit = max_positions(open_checkpoint(model)) or BLOCK
        if on_manual and limit < BLOCK:
            raise InputError(f"--manual: blocks of {BLOCK} tokens; {model} takes at most {limit} positions")
    variants = list(VARIANTS.values()) if ablate else [VARIANTS["latentfold"]]
    variants += BASELINES.values() if baselines else ()
    names = [variant.name for variant in variants]
    if unknown := [name for name in only if name not in names]:
        raise InputError(f"--only {unknown[0]}: expected one of {', '.join(names)}")
    variants = [variant for variant in variants if not only or variant.name in only]
    skip = 0 if text else NOVEL_FRONT_MATTER
    found = []
    for model in models:
        found.append(measure(model, chosen, variants, documents=documents, skip=skip, on_manual=on_manual, **options))
        if json_file:
            Path(json_file).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        click.echo(f"{found[-1]['model']}\n\n{table(found[-1]['rows'])}\n")


if __name__ == "__main__":
    main()
