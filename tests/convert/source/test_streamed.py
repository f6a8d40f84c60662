"""Shards that come and go: each is fetched once in a pass over the model, however layers lie in them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from latentfold.convert import convert_checkpoint
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.model.walk import Walk
from latentfold.convert.source.config import read_config
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.source.streamed import StreamedCheckpoint, layer_of, stream
from tests.conftest import MakeModel, random_tokens
from tests.hub_server import HubServer

pytestmark = pytest.mark.hub
REPO = "org/tiny"


def reshard(source: Path, per_layer: int, *, split: bool) -> int:
    """Lay a checkpoint's layers into shards of their own, `split` with a shard shared by neighbours; how many."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    layers = [name for name in sorted(tensors) if layer_of(name) is not None]
    in_layer: Counter[int | None] = Counter()
    numbers: dict[str, int] = {"model.embed_tokens.weight": 0}
    for name in layers:
        layer = layer_of(name)
        assert layer is not None
        numbers[name] = layer * (per_layer - split) + in_layer[layer] % per_layer
        in_layer[layer] += 1
    numbers |= {name: max(numbers.values()) for name in ("lm_head.weight", "model.norm.weight")}
    files = {name: f"model-{number:05d}.safetensors" for name, number in numbers.items()}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, source / file, {"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return len(set(files.values()))


def publish(server: HubServer, source: Path) -> None:
    server.create_repo(REPO, files={path.name: path.read_bytes() for path in source.iterdir()})


def fetched(server: HubServer, start: int = 0) -> Counter[str]:
    """How often each shard was asked for whole, not its header alone."""
    return Counter(
        request.path.rpartition("/")[2]
        for request in server.requests[start:]
        if request.method == "GET" and request.path.endswith(".safetensors") and "range" not in request.headers
    )


def on_disk(checkpoint: StreamedCheckpoint) -> int:
    assert checkpoint._folder is not None
    return len(list(Path(checkpoint._folder.name).rglob("*.safetensors")))


@pytest.mark.parametrize(("per_layer", "split"), [(1, False), (2, True), (3, False), (3, True), (5, True)])
def test_a_pass_fetches_each_shard_once(per_layer: int, split: bool, make_model: MakeModel, server: HubServer) -> None:
    source = make_model(num_hidden_layers=6)
    shards = reshard(source, per_layer, split=split)
    publish(server, source)
    checkpoint = stream(open_checkpoint(REPO))
    model = StreamedModel(checkpoint, read_config(checkpoint), torch.float32, torch.device("cpu"))
    held = []
    for count in (1, 2):
        before = len(server.requests)
        walk = Walk(model, random_tokens())
        for visit in walk:
            visit.advance()
            held.append(on_disk(checkpoint))
        with model.head() as logits:
            logits(walk.streams[0][0])
        found = fetched(server, before)
        assert set(found.values()) == {1}
        assert len(found) == shards if count == 1 else len(found) <= shards
    assert max(held) <= per_layer + 2 < shards  # a layer's, and those of embedding and head


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.k_proj.weight", 12),
        ("h.3.attn.c_attn.weight", 3),
        ("model.layers.4.mlp.experts.7.up_proj.weight", 4),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
        ("model.norm2.weight", None),
    ],
)
def test_layers_by_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_a_conversion_is_two_passes(
    make_model: MakeModel, server: HubServer, tmp_path: Path, options: dict[str, Any]
) -> None:
    source = make_model(num_hidden_layers=5)
    shards = reshard(source, 3, split=True)
    publish(server, source)
    convert_checkpoint(REPO, str(tmp_path / "out"), kv_rank=8, rope_dim=4, stream=True, **options)
    found = fetched(server)
    assert len(found) == shards and max(found.values()) <= 2
    convert_checkpoint(str(source), str(tmp_path / "whole"), kv_rank=8, rope_dim=4, **options)
    whole, streamed = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == streamed.read_bytes()
