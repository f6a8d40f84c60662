"""A transformers model run one decoder layer at a time, from lazily read tensors.

Only one layer's weights are in memory, whatever the depth. The model class, its masks, rotary embeddings and caches are
transformers' own: a dry forward pass with the layers replaced by recorders shows what each layer is called with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from latentfold.convert.errors import InputError
from latentfold.convert.model.heads import ATTENTION
from latentfold.convert.model.wrapped import check_names, unwrapped


class Header(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def file(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorReader(Protocol):
    """Anything that gives tensors by name, as `source.Checkpoint` does; `headers` has the names that are known."""

    @property
    def headers(self) -> Mapping[str, Any]: ...

    def tensor(self, name: str) -> Tensor: ...


class _Recorder(nn.Module):
    """Stands in for a layer: notes what it is called with; hands the hidden states on unchanged, or `output`."""

    def __init__(self, layer: nn.Module, output: Tensor | None = None) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.kwargs: dict[str, Any] = {}
        self.output = output
        self.names = list(inspect.signature(layer.forward).parameters)[1:]
        # models choose a mask by attributes of the layer (attention_type, layer_idx)
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, (str, int)):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.hidden, self.kwargs = hidden_states, dict(zip(self.names, args, strict=False)) | kwargs
        return hidden_states if self.output is None else self.output


class StreamedModel:
    """A causal language model whose layers are loaded when needed and dropped afterwards.

    Args:
        checkpoint: where tensors are read from.
        config: the model's transformers config.
        dtype: compute dtype.
        device: compute device.

    Raises:
        InputError: the checkpoint's names are not the model's own.

    Attributes:
        decoder: the module that holds the layers.
        layers_name: the layers' name within the model, such as `model.layers`.
        tied: tensors that are another one, and that one's name.
        stored: each tensor's name, or the names of its parts (a mixture's experts), in a checkpoint.
        shapes: name and shape of every tensor that a checkpoint of this model holds. Of tied tensors it needs one,
            under whichever name it has it.
        copies: names under which it may hold one of them again, and that one's name.
    """

    def __init__(
        self, checkpoint: TensorReader, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype
            ).eval()
        self.tied: dict[str, str] = dict(self.model.all_tied_weights_keys)
        self.layers_name, self._layers = find_layers(self.model)
        holder, _, self._attribute = self.layers_name.rpartition(".")
        self.decoder: Any = self.model.get_submodule(holder)
        conversions = get_model_conversion_mapping(self.model, add_legacy=False)
        reverted = [c for c in conversions if not isinstance(c, PrefixChange)]
        # as from_pretrained leaves it: without it every call of revert_weight_conversion looks through the whole model
        self.model._weight_conversions = reverted or None
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._prefix = self._missing_prefix()
        self.stored: dict[str, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.copies: dict[str, str] = {}
        for name, tensor in self.model.state_dict().items():
            if name in self.tied:
                continue
            names = [name, *(twin for twin, own in self.tied.items() if own == name)]
            forms = [self._in_checkpoint(each, tensor) for each in names]
            found = next((form for form in forms if form.keys() <= self.checkpoint.headers.keys()), forms[0])
            self.stored[name] = list(found)
            self.shapes |= found
            for form in forms:
                if form is not found:
                    self.copies |= zip(form, found, strict=True)
        check_names(self.checkpoint.headers.keys(), self.shapes.keys())
        self._fill_buffers()

    def _in_checkpoint(self, name: str, tensor: Tensor) -> dict[str, tuple[int, ...]]:
        """Name and shape of a tensor, or of its parts, as a checkpoint holds them."""
        found = {name: tensor}
        if self.model._weight_conversions:
            found = revert_weight_conversion(self.model, found)
        return {part.removeprefix(self._prefix): tuple(t.shape) for part, t in found.items()}

    def _missing_prefix(self) -> str:
        """What the checkpoint's names lack where it was written from the decoder alone, without a head (GPT-2)."""
        prefix = self.model.base_model_prefix + "."
        names = [unwrapped(name) for name in self.checkpoint.headers]
        return prefix if names and not any(f".{prefix}" in f".{name}" for name in names) else ""

    def _fill_buffers(self) -> None:
        """What no checkpoint holds (rotary frequencies, embedding scales) is computed, as from_pretrained does."""
        for module in self.model.modules():
            names = module._non_persistent_buffers_set
            for name in names:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=self.device)
            if names:
                self.model._init_weights(module)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def embedding(self) -> str:
        """Name of the token embedding's weight."""
        module = self.model.get_input_embeddings()
        return next(name for name, found in self.model.named_modules() if found is module) + ".weight"

    def rotation(self, index: int) -> tuple[Tensor, float]:
        """A layer's inverse frequencies (n,) in float64, any scaling included, and its factor on cos and sin.

        None (n = 0) in a model that does not rotate, and for a layer of a type that does not, where types differ.

        Raises:
            InputError: frequencies go by the layer's type, and the config does not say which layer is of which.
        """
        rotary, kind = getattr(self.decoder, "rotary_emb", None), ""
        if rotary is not None and not hasattr(rotary, "inv_freq"):
            types = getattr(self.config.get_text_config(), "layer_types", None) or ()
            if len(types) != self.num_layers:
                raise InputError(
                    f"model type {self.config.model_type!r}: rotates layers by their type; expected layer_types of "
                    f"{self.num_layers} layers in config.json, found {len(types)}"
                )
            kind = f"{types[index]}_"
        frequencies = getattr(rotary, f"{kind}inv_freq", None)
        if frequencies is None:
            return torch.zeros(0, dtype=torch.float64), 1.0
        return frequencies.to("cpu", torch.float64), float(getattr(rotary, f"{kind}attention_scaling"))

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model from the checkpoint's, as from_pretrained puts it together."""
        converter = None
        for part in self.stored[name]:
            target, pattern = rename_source_key(self._prefix + part, self._renamings, self._converters)
            if pattern is None:
                return self.checkpoint.tensor(part)
            if converter is None:
                converter = copy.deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
            tensor: Any = self.checkpoint.tensor(part)
            converter.add_tensor(target, part, pattern, tensor)
        assert converter is not None
        found = converter.convert(name, model=self.model, config=self.config)[name]
        return found[0] if isinstance(found, list) else found

    def check_headers(self, headers: Mapping[str, Header]) -> None:
        """Compare the tensors that will be read with the files' headers, before the first is.

        Raises:
            InputError: naming one that is missing or has another shape, and its file.
        """
        for name, size in self.shapes.items():
            if name not in headers:
                found_in = f"{len(headers)} tensors in {len({header.file for header in headers.values()})} files"
                raise InputError(f"tensor {name}: expected shape {list(size)}, found nothing ({found_in})")
            found = headers[name].shape
            if found != size:
                raise InputError(
                    f"tensor {name} in {headers[name].file}: expected shape {list(size)}, as config.json says, "
                    f"found {list(found)}{self._other_vocabulary(name, headers)}"
                )

    def _other_vocabulary(self, name: str, headers: Mapping[str, Header]) -> str:
        """How to mend a shape, where all that differs is how many tokens there are."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        modules = [prefix + "." for prefix, module in self.model.named_modules() if module in ends]
        names = [self.stored[prefix + "weight"][0] for prefix in modules if prefix + "weight" in self.stored]
        found = {headers[each].shape for each in names if each in headers}
        if name not in names or {shape[1:] for shape in found} != {self.shapes[name][1:]}:
            return ""
        rows = sorted(shape[0] for shape in found)
        if len(rows) > 1:
            return f"; the embedding and the output head have {rows[0]} and {rows[1]} rows, expected as many"
        return f"; if that is its vocabulary, set vocab_size to {rows[0]} in config.json"

    def check_copies(self) -> None:
        """Compare tied tensors that the checkpoint holds twice: transformers would load two that differ as two.

        Raises:
            InputError: they differ.
        """
        headers = self.checkpoint.headers
        for copy_, own in self.copies.items():
            if copy_ in headers and own in headers:
                one, other = self.checkpoint.tensor(copy_), self.checkpoint.tensor(own)
                if one.shape != other.shape or bool((one != other).any()):
                    raise InputError(
                        f"tensors {own} and {copy_}: one and the same, as config.json says, but two that differ in the "
                        "files; set tie_word_embeddings to false in config.json"
                    )

    def _load(self, module: nn.Module, prefix: str) -> None:
        names = {name: self.tied.get(prefix + name, prefix + name) for name in module.state_dict()}
        state = {name: self.tensor(own).to(self.device, self.dtype) for name, own in names.items()}
        for name, meta in module.state_dict().items():
            if state[name].shape != meta.shape:
                raise InputError(
                    f"tensor {self.stored[names[name]][0]}: expected shape {list(meta.shape)}, as config.json says, "
                    f"found {list(state[name].shape)}"
                )
        module.load_state_dict(state, strict=True, assign=True)

    @contextmanager
    def loaded(self, module: nn.Module, prefix: str) -> Iterator[nn.Module]:
        """`module` with its weights, for the length of the block."""
        self._load(module, prefix)
        try:
            yield module
        finally:
            empty = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
            module.load_state_dict(empty, strict=True, assign=True)

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Decoder layer `index` with its weights, for the length of the block."""
        with self.loaded(self._layers[index], f"{self.layers_name}.{index}.") as module:
            yield module

    @contextmanager
    def _outside(self, recorders: list[_Recorder], root: nn.Module, unused: nn.Module | None = None) -> Iterator[None]:
        """`recorders` in place of the layers, and weights in everything else within `root` but in `unused`."""
        setattr(self.decoder, self._attribute, nn.ModuleList(recorders))
        within = set(root.modules()) - {unused}
        try:
            with ExitStack() as stack:
                for name, module in self.model.named_modules():
                    if module in within and module._parameters:
                        stack.enter_context(self.loaded(module, name + "."))
                yield
        finally:
            setattr(self.decoder, self._attribute, self._layers)

    @torch.no_grad()
    def begin(self, windows: Iterable[Tensor], cache: Any = None) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
        """Embed windows of tokens, each (T,): inputs of the first layer (1, T, D), and each layer's keyword arguments.

        The arguments depend on T only: windows of one length share them.
        """
        recorders = [_Recorder(layer) for layer in self._layers]
        streams: list[Tensor] = []
        kwargs: list[list[dict[str, Any]]] = []
        by_length: dict[int, list[dict[str, Any]]] = {}
        with self._outside(recorders, self.decoder):
            for row in windows:
                self.decoder(input_ids=row[None].to(self.device), cache=cache, use_cache=cache is not None)
                assert recorders[0].hidden is not None
                streams.append(recorders[0].hidden)
                kwargs.append(by_length.setdefault(len(row), [recorder.kwargs for recorder in recorders]))
        return streams, kwargs

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """A function from last hidden states (.., D) to logits (.., V), for the length of the block.

        It is the model's own forward pass with layers that all hand on the same, so that whatever a family does to
        its logits is done.
        """
        recorders = [_Recorder(layer) for layer in self._layers]

        def logits(hidden: Tensor) -> Tensor:
            rows = hidden.reshape(1, -1, hidden.shape[-1])
            recorders[-1].output = rows
            nothing = rows.new_zeros(1, 1, self.model.get_input_embeddings().embedding_dim)
            found = self.model(inputs_embeds=nothing, use_cache=False).logits
            return found.reshape(*hidden.shape[:-1], -1)

        with self._outside(recorders, self.model, unused=self.model.get_input_embeddings()):
            yield logits


def find_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder layers of a transformers model, and their name within it.

    Raises:
        InputError: it has no list of as many layers as its config says.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise InputError(f"model type {model.config.model_type!r}: expected a decoder with {count} layers in a list")
