"""What a healing will need: the arithmetic of its memory and of its time, before any weight is read.

Shape legend
    T  tokens of a step in one process    D  hidden size    V  vocabulary    H, d  heads and their size
    P, P'  numbers in the matrices of the layers that a token is multiplied with, in student and original
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latentfold.convert.choices import RECOMPUTED
from latentfold.convert.families.registry import attention_name
from latentfold.convert.heal.distill import CHUNK
from latentfold.convert.heal.models import is_trained, product_rate
from latentfold.convert.heal.run import HealingJob
from latentfold.convert.model.shape import model_shape
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.config import read_config

OVERHEAD = 2.0
"""A step's time relative to that of its products of matrices: norms, softmax and casts come on top. 1.7 on a processor
whose bfloat16 is 3 times as fast as float32, 2.6 on one where it is 8 times."""


@dataclass(frozen=True)
class HealingEstimate:
    """What it takes on each device.

    Attributes:
        trained, frozen, original: numbers in the tensors that are trained, in the student's others, in the original.
        memory: bytes on the device, by what they are for.
        loading: bytes of main memory while the student is loaded.
        step_seconds: of a step, about.
        steps: that the budget is enough for.
        tokens: trained on.
        text: tokens that there are to train on; beyond them epochs begin again.
    """

    trained: int
    frozen: int
    original: int
    memory: dict[str, int]
    loading: int
    step_seconds: float
    steps: int
    tokens: int
    text: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.memory.values())


def estimate(job: HealingJob, processes: int = 1) -> HealingEstimate:
    """From names and shapes, and the rate of products measured here.

    Args:
        processes: that share the batch; memory is each one's.
    """
    config, dtype = job.config, job.arithmetic.dtype
    student, original = (
        StreamedModel(checkpoint, read_config(checkpoint), dtype, torch.device("cpu"))
        for checkpoint in (job.converted, job.teacher)
    )
    attention = attention_name(student.config)
    parameters = dict(student.model.named_parameters())
    chosen = {name for name in parameters if is_trained(name, student.layers_name, attention, config.train)}
    trained = sum(parameters[name].numel() for name in chosen)
    frozen = sum(map(Tensor.numel, parameters.values())) - trained
    whole = sum(map(Tensor.numel, original.model.parameters()))
    tokens = config.batch * config.seq_len // processes
    memory = {
        "trained weights in float32": 4 * trained,
        "two moments each, float32": 8 * trained,
        "the largest gradient": 4 * max(parameters[name].numel() for name in chosen),
        "the student's other weights": frozen * (4 if dtype == torch.float32 else job.converted.dtype.itemsize),
        "the original": 0 if config.cache_teacher else whole * dtype.itemsize,
        "inner results of a step": tokens * _kept(student, RECOMPUTED[config.recompute]),
        "a chunk of logits": 4 * CHUNK * dtype.itemsize,
    }
    if dtype != torch.float32:
        memory["trained weights in the products' dtype"] = dtype.itemsize * trained
    operations = tokens * _operations(student, original, chosen, config.seq_len, RECOMPUTED[config.recompute])
    seconds = OVERHEAD * operations / product_rate(job.arithmetic.device, dtype)
    steps = config.max_steps if config.max_steps is not None else max(1, int((config.seconds or 0) / seconds))
    done = steps * config.batch * config.seq_len
    return HealingEstimate(
        trained, frozen, whole, memory, 4 * (trained + frozen), seconds, steps, done, sum(map(len, job.text.streams))
    )


def _matrices(model: StreamedModel) -> dict[str, tuple[Tensor, float]]:
    """The layers' matrices by name, and how often a token is multiplied with each (out, in) or (experts, out, in)."""
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    return {
        name: (tensor, 1.0 if tensor.dim() == 2 else chosen / len(tensor))
        for name, tensor in model.model.named_parameters()
        if name.startswith(model.layers_name + ".") and tensor.dim() > 1
    }


def _kept(student: StreamedModel, recompute: float) -> int:
    """Bytes for each token that wait for the way back, and those of a layer that is computed again.

    A matrix keeps what goes in and what comes out, in 2 bytes; a norm its float32 input, its float32 result and the
    cast one. A layer that is recomputed keeps its float32 input.
    """
    config = student.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    sides = sum(share * len(t) ** (t.dim() - 2) * sum(t.shape[-2:]) for t, share in _matrices(student).values())
    layer = 2 * sides / layers + 2 * 10 * hidden
    again = int(layers * recompute)
    return int((layers - again) * layer + (layer + again * 4 * hidden if again else 0))


def _operations(
    student: StreamedModel, original: StreamedModel, chosen: set[str], length: int, recompute: float
) -> float:
    """Floating point operations of a step for each token.

    2 P forward, 2 P backward and 2 P for the gradients of what is trained; 2 P again for what is recomputed; 2 P' and
    the head of the original; the student's head forward and backward; scores with half of the window's tokens, 1 + 2.5
    times in the student.
    """
    shape = model_shape(original.config)
    mine = {name: share * tensor.numel() for name, (tensor, share) in _matrices(student).items()}
    theirs = sum(share * tensor.numel() for tensor, share in _matrices(original).values())
    passes = (2 + recompute) * sum(mine.values()) + sum(mine[name] for name in chosen & mine.keys())
    heads = 3 * shape.vocab_size * shape.hidden_size
    scores = (4.5 + recompute) * shape.num_layers * shape.num_heads * 2 * shape.head_dim * length / 2
    return 2 * (passes + theirs + heads + scores)
