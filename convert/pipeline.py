"""The conversion itself: two passes over the source, one layer in memory at a time.

Pass 1 looks only at rotations and chooses frequencies: one ladder for the whole model, or what the target can hold.
Pass 2 measures each layer, factorizes it and writes it. Both run the *original* layers, so no layer is calibrated on
another's error.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latentfold.convert.calibrate import AttentionProbe, RopeAccumulator
from latentfold.convert.checkpoint import CheckpointWriter, replace_text
from latentfold.convert.config import ConversionConfig
from latentfold.convert.corpus import Windows, default_calibration, make_windows, read_documents, tokenize
from latentfold.convert.errors import InputError
from latentfold.convert.factorize import LatentAttention
from latentfold.convert.layers import StreamedModel
from latentfold.convert.method import LayerCalibration, convert_layer
from latentfold.convert.plan import ConversionPlan, candidate_splits, make_plan
from latentfold.convert.recipe import RECIPE, finished_recipe, starting_recipe
from latentfold.convert.rope import fit_slots
from latentfold.convert.source import Checkpoint, copy_legal_files, download, open_checkpoint, with_headers
from latentfold.convert.stream import stream
from latentfold.convert.survey import SizeEstimate, survey, usual_sizes
from latentfold.convert.sweep import layer_attention, observe
from latentfold.convert.targets.target import Copied, Ladder
from latentfold.convert.verify import RELOAD_TOLERANCE, MemoryTarget, probe_record, reload_difference

LADDER_TOKENS = 8192
"""A few windows are enough to rank ladders."""


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote.

    Attributes:
        path: the checkpoint folder.
        recipe: the contents of its latentfold.json.
    """

    path: Path
    recipe: dict[str, Any]


def convert_checkpoint(source: str, output: str, **options: Any) -> ConversionResult:
    """Convert an MHA/GQA checkpoint to MLA.

    Args:
        source: folder or Hub id.
        output: folder to write.
        **options: any other field of `ConversionConfig`.

    Returns:
        The path and the recipe (also in the folder's latentfold.json).

    Raises:
        InputError: anything about the input that stands in the way; nothing has been written.
        RuntimeError: attention computes something else than its family's description says, or the written checkpoint
            does not give the logits of the tensors it was written from; nothing is left looking finished.

    Example:
        >>> convert_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-mla", kv_rank=96, rope_dim=32)
    """
    config = ConversionConfig(source=source, output=output, **options)
    plan, tokenizer, windows = prepare(config)
    return run(config, plan, tokenizer, windows)


def prepare(config: ConversionConfig) -> tuple[ConversionPlan, Any, Windows]:
    """Check everything and fetch the source; nothing is written to the output yet.

    Raises:
        InputError: see `make_plan`; also calibration text that is missing, empty or too short.
    """
    checkpoint = open_checkpoint(config.source, revision=config.revision, token=config.token)
    plan = make_plan(config, checkpoint)  # refuse by config.json before anything else is read or downloaded
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
    make_plan(config, checkpoint)
    return make_plan(config, with_headers(checkpoint, config.token))


def estimate_sizes(config: ConversionConfig) -> list[SizeEstimate]:
    """What a range of sizes would cost, smallest cache first: a short pass over text, nothing written.

    Raises:
        InputError: see `prepare`.
    """
    plan, _, windows = prepare(config)
    model = StreamedModel(plan.checkpoint, plan.config, torch.float32, config.torch_device)
    return survey(model, plan, windows, config, usual_sizes(plan.shape))


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        InputError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder)
    except Exception as error:  # a damaged tokenizer raises whatever its parser meets
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{checkpoint.name}: expected a tokenizer beside the weights, found none usable ({reason})"
        ) from error


def load_generation_config(checkpoint: Checkpoint) -> Any | None:
    """The checkpoint's generation config, or None.

    Raises:
        InputError: there is one that cannot be read.
    """
    from transformers import GenerationConfig

    path = checkpoint.folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(checkpoint.folder)
    except Exception as error:  # whatever its validation meets
        raise InputError(f"{path}: not a generation config ({' '.join(str(error).split())[:150]})") from error


def run(config: ConversionConfig, plan: ConversionPlan, tokenizer: Any, windows: Windows) -> ConversionResult:
    """Do the work of a prepared conversion; continues an interrupted run of the same recipe."""
    model = StreamedModel(plan.checkpoint, plan.config, torch.float32, config.torch_device)
    estimates: list[SizeEstimate] = []
    if candidates := candidate_splits(config, plan.shape):
        sizes = _interrupted_sizes(config)
        if sizes is None:
            estimates = survey(model, plan, windows, config, candidates)
            cheapest = min(estimates, key=lambda size: size.expected_error)
            sizes = cheapest.kv_rank, cheapest.rope_dim
        if sizes in candidates:  # else the writer refuses an interrupted run of other options
            divided = replace(config, kv_rank=sizes[0], rope_dim=sizes[1], cache_values=None, cache_ratio=None)
            plan = make_plan(divided, plan.checkpoint)
    recipe = starting_recipe(config, plan, windows)
    key = recipe | {"source_files": plan.checkpoint.stamps()}
    writer = CheckpointWriter(config.output_path, plan.tensors, plan.shards, key, overwrite=config.overwrite)
    if writer.moving:
        writer.finish()
        return ConversionResult(config.output_path, json.loads((config.output_path / RECIPE).read_text("utf-8")))
    if estimates:
        writer.write("split", {}, [asdict(size) for size in estimates])
    if not writer.done("ladder"):
        found = score_ladders(model, plan, windows, config)
        record = {
            kind: [(ladder.data, str(ladder), score) for ladder, score in scored] for kind, scored in found.items()
        }
        writer.write("ladder", {}, record)
    chosen = {kind: plan.target.ladder(kind, scored[0][0]) for kind, scored in writer.records["ladder"].items()}
    if not writer.done("outer"):
        writer.write("outer", _copies(plan, plan.target.outer()))
    target = MemoryTarget(config, plan, chosen, writer)
    write_layers(model, plan, chosen, windows, config, writer, target)
    logits = target.logits()
    recipe = finished_recipe(recipe, plan, chosen, writer)
    write_small_files(plan, chosen, tokenizer, writer.folder)
    copy_legal_files(plan.checkpoint.folder, writer.folder)
    writer.write_index()
    difference = reload_difference(writer.folder, target.tokens, logits, config.torch_device)
    if not difference <= RELOAD_TOLERANCE:
        raise RuntimeError(
            f"{config.output}: reloaded logits differ from those of the written tensors by {difference:.1e} "
            f"(allowed {RELOAD_TOLERANCE:.0e}); the checkpoint was not finished"
        )
    recipe["check"] |= {"reload_logit_difference": difference, "probe": probe_record(target.tokens, logits)}
    recipe["files"] = writer.hashes()
    replace_text(writer.folder / RECIPE, json.dumps(recipe, indent=2) + "\n")
    writer.finish()
    return ConversionResult(config.output_path, recipe)


def _interrupted_sizes(config: ConversionConfig) -> tuple[int, int] | None:
    """(kv_rank, rope_dim) of an interrupted run that is to be continued: no second survey, nor one before a refusal."""
    key = CheckpointWriter.interrupted_key(config.output_path)
    if key is None or config.overwrite:
        return None
    return key["options"]["kv_rank"], key["options"]["rope_dim"]


def score_ladders(
    model: StreamedModel, plan: ConversionPlan, windows: Windows, config: ConversionConfig
) -> dict[str, list[tuple[Ladder, float]]]:
    """Expected relative error of the attention output from rotation for each candidate ladder of each kind of layer.

    Of a kind's layers it is the sum, divided by the number of all layers. The best ladder comes first.
    """
    tokens = windows.tokens[: max(1, LADDER_TOKENS // windows.tokens.shape[1])]
    target = plan.target
    found: dict[str, Sequence[Ladder]] = {}
    totals: defaultdict[str, list[float]] = defaultdict(list)
    shape = plan.shape

    class LadderObserver:
        def __init__(self, index: int) -> None:
            self.index, self.kind = index, target.kinds[index]
            weights, self.pairs = layer_attention(model, plan, index)
            self.scale = weights.scale
            self.probe = AttentionProbe(weights, self.pairs)
            self.rope = RopeAccumulator(
                shape.num_heads, shape.num_kv_heads, shape.head_dim, tokens.shape[1], model.device
            )
            self.power = 0.0

        def add(self, window: int, x: Tensor, stream: Tensor, output: Tensor) -> None:
            seen = self.probe.sample(x, stream, config.queries, config.seed + window)
            self.probe.check(seen, output)
            self.rope.add(seen)
            self.power += seen.output_power

        def finish(self) -> None:
            stats = self.rope.result()
            unit = 0.5 * self.scale**2 * self.rope.samples / max(self.power, 1e-300) / model.num_layers
            found[self.kind] = target.candidates(self.index, stats, self.pairs)
            slots = [ladder.frequencies.to(model.device) for ladder in found[self.kind]]
            scores = [unit * fit_slots(stats, self.pairs, own).objective for own in slots]
            before = totals[self.kind] or [0.0] * len(scores)
            totals[self.kind] = [sum(pair) for pair in zip(before, scores, strict=True)]

    observe(model, tokens, LadderObserver, description="1/2 rotations", progress=config.progress)
    return {
        kind: sorted(zip(ladders, totals[kind], strict=True), key=lambda scored: scored[1])
        for kind, ladders in found.items()
    }


def write_layers(
    model: StreamedModel,
    plan: ConversionPlan,
    chosen: dict[str, Ladder],
    windows: Windows,
    config: ConversionConfig,
    writer: CheckpointWriter,
    target: MemoryTarget,
) -> None:
    """Pass 2: measure, factorize, check and write every layer that is not written yet."""

    class LayerObserver(LayerCalibration):
        def __init__(self, index: int) -> None:
            self.index = index
            self.ladder = chosen[plan.target.kinds[index]]
            super().__init__(
                *layer_attention(model, plan, index),
                windows.tokens.shape,
                queries=config.queries,
                seed=config.seed,
            )

        def finish(self) -> None:
            slots = self.ladder.frequencies.to(model.device)
            converted = convert_layer(self.result(), slots, plan.kv_rank)
            tensors = layer_tensors(plan, self.ladder, self.index, converted)
            layout_error = target.take(self.index, tensors, converted, slots)
            record = {"predicted_error": converted.predicted_error, "layout_error": layout_error}
            writer.write(f"layer {self.index}", tensors, record)

    def visit(index: int) -> LayerObserver | None:
        if writer.done(f"layer {index}"):
            target.skip(index)
            return None
        return LayerObserver(index)

    observe(model, windows.tokens, visit, description="2/2 converting", progress=config.progress)


def layer_tensors(plan: ConversionPlan, ladder: Ladder, index: int, converted: LatentAttention) -> dict[str, Tensor]:
    """Everything the target stores of one layer, in its stored dtype."""
    attention = plan.target.attention(index, converted, ladder, plan.checkpoint)
    tensors = {name: tensor.to("cpu", plan.dtype) for name, tensor in attention.items()}
    return tensors | _copies(plan, plan.target.copied(index))


def _copies(plan: ConversionPlan, copied: dict[str, Copied]) -> dict[str, Tensor]:
    """Tensors that go over as they are, but for the residual's factor, rounded once."""
    tensors = {}
    for name, copy in copied.items():
        part, parts = copy.part
        tensor = plan.checkpoint.tensor(copy.source).chunk(parts)[part]
        if copy.to_residual:
            tensor = tensor.to(torch.float32) * plan.target.residual
        tensors[name] = tensor.to(plan.dtype)
    return tensors


def write_small_files(plan: ConversionPlan, chosen: dict[str, Ladder], tokenizer: Any, folder: Path) -> None:
    """Tokenizer, generation config, config.json and the model's code, where it is ours.

    Raises:
        RuntimeError: the written tokenizer does not give the source's tokens.
    """
    from transformers import AutoTokenizer, GenerationConfig

    replace_text(folder / "config.json", json.dumps(plan.target.config(chosen), indent=2) + "\n")
    for path in plan.target.code:
        shutil.copyfile(path, folder / path.name)
    tokenizer.save_pretrained(folder)
    sample = "Zwölf Boxkämpfer jagen Viktor:\n\tdef f(x): return x  # 12345"
    again = AutoTokenizer.from_pretrained(folder)
    if not torch.equal(tokenize(tokenizer, sample), tokenize(again, sample)):
        raise RuntimeError(f"{plan.checkpoint.name}: its tokenizer does not survive saving; please report this")
    generation = load_generation_config(plan.checkpoint) or GenerationConfig(
        bos_token_id=plan.config.bos_token_id,
        eos_token_id=plan.config.eos_token_id,
        pad_token_id=plan.config.pad_token_id,
    )
    generation.save_pretrained(folder)
