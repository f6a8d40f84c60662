"""The conversion itself: two passes over the source, one layer in memory at a time.

Pass 1 looks only at rotations and chooses one frequency ladder for the whole model. Pass 2 measures each layer,
factorizes it and writes it. Both run the *original* layers, so no layer is calibrated on another's error.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from latentfold.convert.calibrate import AttentionProbe, LatentAccumulator, RopeAccumulator, query_positions
from latentfold.convert.checkpoint import CheckpointWriter, replace_text
from latentfold.convert.config import ConversionConfig
from latentfold.convert.corpus import Windows, default_calibration, make_windows, read_documents, tokenize
from latentfold.convert.errors import InputError
from latentfold.convert.factorize import AttentionWeights, LatentAttention, factorize
from latentfold.convert.layers import StreamedModel, attention_inputs
from latentfold.convert.plan import ConversionPlan, make_plan, read_config
from latentfold.convert.rope import fit_slots
from latentfold.convert.source import Checkpoint, download, open_checkpoint, with_headers
from latentfold.convert.targets import deepseek
from torch import Tensor
from tqdm import tqdm

RECIPE = "latentfold.json"
PROBE_TOKENS = 48
LADDER_WINDOWS = 2
LADDER_SWEEPS = 3
"""Alternations of `fit_slots` when ranking ladders; the chosen one is solved more closely."""
LAYOUT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of a written layer's attention output from its own factorization, by stored dtype."""
RELOAD_TOLERANCE = 1e-5
"""Largest relative difference of logits between the written tensors and the reloaded checkpoint (both in float32)."""


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote.

    Attributes:
        path: the checkpoint folder.
        recipe: the contents of its latentfold.json.
    """

    path: Path
    recipe: dict[str, Any]


class Observer(Protocol):
    """Looks at one layer: fed every window's attention input and residual stream, then told to finish."""

    def add(self, window: int, x: Tensor, stream: Tensor) -> None: ...

    def finish(self) -> None: ...


def convert_checkpoint(source: str, output: str, **options: Any) -> ConversionResult:
    """Convert an MHA/GQA checkpoint to MLA.

    Args:
        source: folder or Hub id of a Llama-type checkpoint.
        output: folder to write.
        **options: any other field of `ConversionConfig`.

    Returns:
        The path and the recipe (also in the folder's latentfold.json).

    Raises:
        InputError: anything about the input that stands in the way; nothing has been written.
        RuntimeError: the written checkpoint does not give the logits of the tensors it was written from.

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
    checkpoint = download(checkpoint, token=config.token)
    checkpoint.read_headers()
    plan = make_plan(config, checkpoint)
    checkpoint.check_values()
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
    recipe = starting_recipe(config, plan, windows)
    key = recipe | {"source_files": plan.checkpoint.stamps()}
    writer = CheckpointWriter(config.output_path, plan.tensors, plan.shards, key, overwrite=config.overwrite)
    if writer.moving:
        writer.finish()
        return ConversionResult(config.output_path, json.loads((config.output_path / RECIPE).read_text("utf-8")))
    model = StreamedModel(plan.checkpoint, plan.config, torch.float32, config.torch_device)
    if not writer.done("ladder"):
        scores = score_ladders(model, plan, windows, config)
        best = min(range(len(scores)), key=lambda i: scores[i])
        writer.write("ladder", {}, {"chosen": best, "scores": scores})
    choice = writer.records["ladder"]
    ladder = plan.ladders[choice["chosen"]]
    target = MemoryTarget(config, plan, ladder, writer)
    convert_layers(model, plan, ladder, windows, config, writer, target)
    write_outer(plan, writer)
    logits = target.logits(plan)
    recipe = finished_recipe(recipe, plan, ladder, writer)
    write_small_files(plan, ladder, tokenizer, writer.folder)
    writer.write_index()
    difference = reload_difference(writer.folder, target.tokens, logits, config.torch_device)
    if not difference <= RELOAD_TOLERANCE:
        raise RuntimeError(
            f"{config.output}: reloaded logits differ from those of the written tensors by {difference:.1e} "
            f"(allowed {RELOAD_TOLERANCE:.0e}); the checkpoint was not finished"
        )
    recipe["check"]["reload_logit_difference"] = difference
    recipe["files"] = writer.hashes()
    replace_text(writer.folder / RECIPE, json.dumps(recipe, indent=2) + "\n")
    writer.finish()
    return ConversionResult(config.output_path, recipe)


def observe(
    model: StreamedModel,
    tokens: Tensor,
    visit: Callable[[int], Observer | None],
    *,
    description: str,
    progress: bool,
) -> None:
    """Run windows through the source's layers; `visit(index)` gives each layer's observer, or None."""
    streams: list[Tensor] = []
    kwargs: list[dict[str, Any]] = []
    for row in tokens:
        hidden, kwargs = model.begin(row[None])
        streams.append(hidden)
    total = model.num_layers * tokens.numel()
    with tqdm(total=total, desc=description, unit="tok", unit_scale=True, disable=not progress) as bar:
        for index in range(model.num_layers):
            bar.set_postfix_str(f"layer {index + 1}/{model.num_layers}")
            with model.layer(index) as layer:
                observer: Observer | None = visit(index)
                for k, hidden in enumerate(streams):
                    streams[k], x, _ = attention_inputs(layer, hidden, kwargs[index])
                    if observer is not None:
                        observer.add(k, x[0], hidden[0])
                    bar.update(tokens.shape[1])
                if observer is not None:
                    observer.finish()


def attention_weights(model: StreamedModel, plan: ConversionPlan, index: int, dtype: torch.dtype) -> AttentionWeights:
    """One layer's projections, head by head."""
    shape, family = plan.shape, plan.family
    prefix = family.layer_prefix.format(layer=index)

    def read(name: str) -> Tensor:
        return plan.checkpoint.tensor(prefix + name).to(model.device, dtype)

    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return AttentionWeights(
        q=read(family.q.name).view(heads, size, -1),
        k=read(family.k.name).view(kv_heads, size, -1),
        v=read(family.v.name).view(kv_heads, size, -1),
        o=read(family.o.name).view(-1, heads, size).transpose(0, 1).contiguous(),
        scale=size**-0.5,
    )


def score_ladders(
    model: StreamedModel, plan: ConversionPlan, windows: Windows, config: ConversionConfig
) -> list[float]:
    """Expected relative error of the attention output from rotation, mean over layers, for each candidate ladder.

    A few windows are enough to rank ladders.
    """
    tokens = windows.tokens[: max(LADDER_WINDOWS, len(windows.tokens) // 4)]
    frequencies = [ladder.frequencies.to(model.device) for ladder in plan.ladders]
    totals = [0.0] * len(frequencies)
    shape = plan.shape

    class LadderObserver:
        def __init__(self, index: int) -> None:
            weights = attention_weights(model, plan, index, torch.float32)
            self.scale = weights.scale
            self.probe = AttentionProbe(weights, model.inverse_frequencies.to(model.device))
            self.rope = RopeAccumulator(
                shape.num_heads, shape.num_kv_heads, shape.head_dim, tokens.shape[1], model.device
            )
            self.power = 0.0

        def add(self, window: int, x: Tensor, stream: Tensor) -> None:
            positions = query_positions(len(x), config.queries, config.seed + window).to(x.device)
            seen = self.probe(x, stream, positions, config.seed + window)
            self.rope.add(seen)
            self.power += float((seen.weight * seen.outputs.square().sum(-1)).sum())

        def finish(self) -> None:
            stats = self.rope.result()
            unit = 0.5 * self.scale**2 * self.rope.samples / max(self.power, 1e-300) / model.num_layers
            pairs = model.inverse_frequencies.to(model.device)
            for i, slots in enumerate(frequencies):
                totals[i] += unit * fit_slots(stats, pairs, slots, sweeps=LADDER_SWEEPS).objective

    observe(model, tokens, LadderObserver, description="1/2 rotations", progress=config.progress)
    return totals


def convert_layers(
    model: StreamedModel,
    plan: ConversionPlan,
    ladder: deepseek.Ladder,
    windows: Windows,
    config: ConversionConfig,
    writer: CheckpointWriter,
    target: MemoryTarget,
) -> None:
    """Pass 2: measure, factorize, check and write every layer that is not written yet."""
    slots = ladder.frequencies.to(model.device)
    pairs = model.inverse_frequencies.to(model.device)

    class LayerObserver:
        def __init__(self, index: int) -> None:
            self.index = index
            self.weights = attention_weights(model, plan, index, torch.float32)
            self.probe = AttentionProbe(self.weights, pairs)
            self.moments = LatentAccumulator(self.weights, windows.tokens.shape[1])

        def add(self, window: int, x: Tensor, stream: Tensor) -> None:
            positions = query_positions(len(x), config.queries, config.seed + window).to(x.device)
            self.moments.add(x, self.probe(x, stream, positions, config.seed + window))

        def finish(self) -> None:
            rope, latent = self.moments.result()
            fit = fit_slots(rope, pairs, slots)
            weights = attention_weights(model, plan, self.index, torch.float64)
            converted = factorize(latent, weights, fit, plan.kv_rank)
            tensors = layer_tensors(plan, ladder, self.index, converted)
            layout_error = target.take(self.index, tensors, converted)
            record = {"predicted_error": converted.predicted_error, "layout_error": layout_error}
            writer.write(f"layer {self.index}", tensors, record)

    def visit(index: int) -> LayerObserver | None:
        if writer.done(f"layer {index}"):
            target.skip(index)
            return None
        return LayerObserver(index)

    observe(model, windows.tokens, visit, description="2/2 converting", progress=config.progress)


def layer_tensors(
    plan: ConversionPlan, ladder: deepseek.Ladder, index: int, converted: LatentAttention
) -> dict[str, Tensor]:
    """Everything the target stores of one layer, in its stored dtype."""
    prefix = plan.family.layer_prefix.format(layer=index)
    gain = plan.checkpoint.tensor(prefix + plan.family.input_norm.name).to(converted.latent)
    attention = deepseek.attention_tensors(converted, ladder, gain, plan.residual, plan.dtype)
    tensors = {f"model.layers.{index}.self_attn.{name}": t.to("cpu", plan.dtype) for name, t in attention.items()}
    for name, role in plan.family.copied.items():
        tensor = plan.checkpoint.tensor(prefix + role.name)
        tensors[f"model.layers.{index}.{name}"] = _stored(tensor, plan, role.to_residual)
    return tensors


def _stored(tensor: Tensor, plan: ConversionPlan, to_residual: bool) -> Tensor:
    return (tensor.to(torch.float32) * plan.residual if to_residual else tensor).to(plan.dtype)


def write_outer(plan: ConversionPlan, writer: CheckpointWriter) -> None:
    """Embedding, last norm, and a head of its own even where the source ties it."""
    family = plan.family
    embedding = plan.checkpoint.tensor(family.embedding.name)
    head = embedding if plan.config.tie_word_embeddings else plan.checkpoint.tensor(family.head.name)
    if not writer.done("outer"):
        tensors = {
            "model.embed_tokens.weight": _stored(embedding, plan, True),
            "model.norm.weight": _stored(plan.checkpoint.tensor(family.norm.name), plan, False),
            "lm_head.weight": _stored(head, plan, False),
        }
        writer.write("outer", tensors)


class _Tensors:
    """A few tensors in memory, read as a checkpoint is."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        return self.held[name]


class MemoryTarget:
    """The converted model as it is being written: a few tokens follow the conversion, layer by layer.

    Each new layer's stock attention, from the rounded tensors, is compared with its own factorization (a wrong layout
    shows here, at once), and the tokens' logits are what the reloaded checkpoint has to give in the end.
    """

    def __init__(
        self, config: ConversionConfig, plan: ConversionPlan, ladder: deepseek.Ladder, writer: CheckpointWriter
    ) -> None:
        from transformers import AutoConfig

        data = deepseek.target_config(plan.config, ladder, plan.shape.head_dim, plan.kv_rank, plan.dtype)
        self.dtype, self.ladder, self.residual = plan.dtype, ladder, plan.residual
        self.tensors, self.writer = _Tensors(), writer
        self.model = StreamedModel(self.tensors, AutoConfig.for_model(**data), torch.float32, config.torch_device)
        generator = torch.Generator().manual_seed(config.seed)
        self.tokens = torch.randint(plan.shape.vocab_size, (1, PROBE_TOKENS), generator=generator)
        self.tensors.held = self._outer(plan)
        self.hidden, self.kwargs = self.model.begin(self.tokens)

    def _outer(self, plan: ConversionPlan) -> dict[str, Tensor]:
        embedding = plan.checkpoint.tensor(plan.family.embedding.name)
        return {"model.embed_tokens.weight": _stored(embedding, plan, True)}

    def take(self, index: int, tensors: dict[str, Tensor], converted: LatentAttention) -> float:
        """Run the tokens through a freshly converted layer; the relative error of its layout.

        Raises:
            RuntimeError: the stock class does not compute what was factorized.
        """
        self.tensors.held = tensors
        with self.model.layer(index) as layer:
            self.hidden, x, output = attention_inputs(layer, self.hidden, self.kwargs[index])
        expected = self.residual * latent_attention(converted, self.ladder.frequencies, x[0])
        error = float((output[0].to(expected) - expected).norm() / expected.norm().clamp_min(1e-30))
        if not error <= LAYOUT_TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"layer {index}: the written attention differs from its factorization by {error:.1e} "
                f"(allowed {LAYOUT_TOLERANCE[self.dtype]:.0e} in {self.dtype}); please report this"
            )
        return error

    def skip(self, index: int) -> None:
        """Run the tokens through a layer that an interrupted run has already written."""
        self.tensors.held = self.writer.read(f"model.layers.{index}.")
        with self.model.layer(index) as layer:
            self.hidden, _, _ = attention_inputs(layer, self.hidden, self.kwargs[index])

    def logits(self, plan: ConversionPlan) -> Tensor:
        """(1, PROBE_TOKENS, V) of the tensors as written."""
        self.tensors.held = self.writer.read("model.norm.") | self.writer.read("lm_head.")
        with torch.no_grad(), self.model.head() as head:
            return head(self.hidden)


@torch.no_grad()
def latent_attention(layer: LatentAttention, frequencies: Tensor, x: Tensor) -> Tensor:
    """The layer's attention output computed from its factorization alone, in float64: x (T, D) -> (T, D)."""
    x = x.to(torch.float64)
    latent = x @ layer.latent.T  # (T, r)
    length = torch.arange(x.shape[0], device=x.device)
    phase = torch.polar(
        torch.ones(len(length), len(frequencies), dtype=torch.float64, device=x.device),
        length[:, None] * frequencies.to(x.device),
    )
    z = (x.to(torch.complex128) @ layer.rope_key.T) * phase  # (T, S)
    q_rope = torch.einsum("hsd,td->hts", layer.q_rope, x.to(torch.complex128)) * phase
    q_nope = torch.einsum("hed,td->hte", layer.q_nope, x)
    keys = torch.einsum("her,tr->hte", layer.k_up, latent)
    scores = layer.scale * (q_nope @ keys.mT + (q_rope @ z.conj().T).real)
    scores = scores.masked_fill(length[None, :] > length[:, None], -torch.inf)
    values = torch.einsum("her,tr->hte", layer.v_up, latent)
    return torch.einsum("hde,hte->td", layer.o, scores.softmax(-1) @ values)


def reload_difference(folder: Path, tokens: Tensor, logits: Tensor, device: torch.device) -> float:
    """Load a written checkpoint afresh, layer by layer; largest logit difference relative to the largest logit."""
    checkpoint = open_checkpoint(folder)
    checkpoint.read_headers()
    model = StreamedModel(checkpoint, read_config(checkpoint), torch.float32, device)
    with torch.no_grad():
        found = model.logits(tokens)
    return float((found - logits).abs().max() / logits.abs().max().clamp_min(1e-30))


def write_small_files(plan: ConversionPlan, ladder: deepseek.Ladder, tokenizer: Any, folder: Path) -> None:
    """Tokenizer, generation config and config.json.

    Raises:
        RuntimeError: the written tokenizer does not give the source's tokens.
    """
    from transformers import AutoTokenizer, GenerationConfig

    data = deepseek.target_config(plan.config, ladder, plan.shape.head_dim, plan.kv_rank, plan.dtype)
    replace_text(folder / "config.json", json.dumps(data, indent=2) + "\n")
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


def starting_recipe(config: ConversionConfig, plan: ConversionPlan, windows: Windows) -> dict[str, Any]:
    """Everything the written tensors depend on."""
    hidden = {"token", "progress", "overwrite", "output", "source", "revision"}
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in hidden}
    headers = plan.checkpoint.headers
    return {
        "latentfold": version("latentfold"),
        "source": {
            "name": plan.checkpoint.name,
            "revision": plan.checkpoint.revision,
            "model_type": plan.config.model_type,
            "tensors": len(headers),
        },
        "options": options
        | {
            "calibration": list(options["calibration"]),
            "kv_rank": plan.kv_rank,
            "rope_dim": plan.rope_dim,
            "seq_len": plan.seq_len,
            "dtype": str(plan.dtype).removeprefix("torch."),
        },
        "calibration": {
            "texts": list(windows.sources),
            "windows": list(windows.tokens.shape),
            "sha256": windows.sha256,
        },
        "residual_scale": plan.residual,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")}
        | {"python": platform.python_version()},
    }


def finished_recipe(
    recipe: dict[str, Any], plan: ConversionPlan, ladder: deepseek.Ladder, writer: CheckpointWriter
) -> dict[str, Any]:
    """The recipe with what the conversion found."""
    layers = [writer.records[f"layer {i}"] for i in range(plan.shape.num_layers)]
    scores = writer.records["ladder"]["scores"]
    source = sum(
        torch.Size(shape).numel()
        for _, shape in plan.family.expected_tensors(plan.shape, tied=plan.config.tie_word_embeddings)
    )
    converted = sum(torch.Size(t.shape).numel() for t in plan.tensors.values())
    return recipe | {
        "cache_values": {"source": plan.shape.cache_values, "converted": plan.cache_values},
        "parameters": {"source": source, "converted": converted},
        "ladder": {
            "rope_parameters": ladder.parameters,
            "expected_rotation_error": min(scores),
            "candidates": [
                {"rope": str(candidate), "expected_rotation_error": score}
                for candidate, score in zip(plan.ladders, scores, strict=True)
            ],
        },
        "layers": [record["predicted_error"] for record in layers],
        "check": {"largest_layout_error": max(record["layout_error"] for record in layers)},
    }
