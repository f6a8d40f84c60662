"""The record every family is written as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from latentfold.convert.shapes import ModelShape


@dataclass(frozen=True)
class TensorRole:
    """One tensor: name, shape in symbols (see the package's legend), whether it writes to the residual stream."""

    name: str
    shape: str
    to_residual: bool = False


@dataclass(frozen=True)
class Family:
    """A model family with separate q/k/v/o projections and a residual stream read through RMSNorm.

    Attributes:
        model_type: as in config.json.
        embedding, norm, head: tensors outside the layers. The head may be tied to the embedding.
        layer_prefix: what stands before the names below, with `{layer}`.
        q, k, v, o: the attention projections.
        input_norm: the norm before attention.
        copied: the layer's other tensors by their name in the target.
        ignored: endings of names that old checkpoints carry and nothing reads.
    """

    model_type: str
    embedding: TensorRole
    norm: TensorRole
    head: TensorRole
    layer_prefix: str
    q: TensorRole
    k: TensorRole
    v: TensorRole
    o: TensorRole
    input_norm: TensorRole
    copied: Mapping[str, TensorRole]
    ignored: tuple[str, ...] = ()

    def expected_tensors(self, shape: ModelShape, *, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor the source must hold."""
        outer = [self.embedding, self.norm] + ([] if tied else [self.head])
        for role in outer:
            yield role.name, shape.resolve(role.shape)
        for layer in range(shape.num_layers):
            prefix = self.layer_prefix.format(layer=layer)
            for role in (self.q, self.k, self.v, self.o, *self.copied.values()):
                yield prefix + role.name, shape.resolve(role.shape)
