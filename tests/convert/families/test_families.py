"""The contract every family keeps in our own target, through the written checkpoint."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from latentfold.convert import InputError, convert_checkpoint, enable_absorbed_decode, inspect_model
from latentfold.convert.families.registry import FAMILIES
from latentfold.convert.model.shape import model_shape
from latentfold.convert.source.config import read_config
from latentfold.convert.source.opening import open_checkpoint
from latentfold.convert.targets.native.modeling_latentfold import LatentfoldForCausalLM
from latentfold.eval import EvaluationConfig, evaluate
from tests.conftest import DEFAULT_ROPE, load, random_tokens
from tests.families import MODELS, save_family

TOKENS = 20


@pytest.fixture
def options(options: dict[str, Any]) -> dict[str, Any]:
    """Exactness needs no data, and what reduced sizes are tested for is not their quality."""
    return options | {"calibration_tokens": 128}


def full_size(source: Path) -> dict[str, int]:
    """The smallest size at which nothing is lost."""
    shape = model_shape(read_config(open_checkpoint(source)))
    width = shape.num_kv_heads * shape.head_dim
    return {"kv_rank": shape.max_kv_rank, "rope_dim": width}


@torch.no_grad()
def step_by_step(model: Any, tokens: torch.Tensor, prefill: int) -> tuple[torch.Tensor, Any]:
    """Logits of a prefill and then single tokens, and the cache."""
    out = model(tokens[:, :prefill], use_cache=True)
    logits = [out.logits]
    for i in range(prefill, tokens.shape[1]):
        out = model(tokens[:, i : i + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, dim=1), out.cache


@pytest.mark.parametrize("name", MODELS)
def test_full_size_is_the_identity(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_family(tmp_path / "source", name)
    convert_checkpoint(str(source), str(tmp_path / "out"), target="native", **full_size(source), **options)
    tokens = random_tokens(2, TOKENS)
    with torch.no_grad():
        expected = load(source, attn_implementation="eager")(tokens).logits
    kernels = ("sdpa", "eager") if MODELS[name].get("attn_logit_softcapping") is None else ("eager",)
    for attention in kernels:
        converted = load(tmp_path / "out", attn_implementation=attention)
        assert isinstance(converted, LatentfoldForCausalLM)
        with torch.no_grad():
            found = converted(tokens).logits
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        decoded, _ = step_by_step(converted, tokens, 4)
        assert (decoded - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_beyond_the_first_context(tmp_path: Path, options: dict[str, Any]) -> None:
    """longrope turns all keys by another list there; a model that stays in its first context is not enough."""
    source = save_family(tmp_path / "source", "phi3, longrope")
    convert_checkpoint(str(source), str(tmp_path / "out"), **full_size(source), **options)
    tokens, config = random_tokens(1, 80), load(source).config
    assert tokens.shape[1] > config.original_max_position_embeddings
    converted = load(tmp_path / "out")
    with torch.no_grad():
        expected, found = load(source)(tokens).logits, converted(tokens).logits
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        converted.config.first_context = 256
        assert (converted(tokens).logits - expected).abs().max() > 1e-2 * expected.abs().max()
    with pytest.raises(InputError, match="seq_len 128: the model takes at most 64"):
        convert_checkpoint(str(source), str(tmp_path / "x"), **options | {"seq_len": 128})


@pytest.mark.parametrize("name", MODELS)
def test_reduced_size(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", name), tmp_path / "out"
    recipe = convert_checkpoint(str(source), str(out), target="native", kv_rank=10, rope_dim=4, **options).recipe
    model = load(out)
    tokens = random_tokens(1, TOKENS)
    with torch.no_grad():
        whole = model(tokens).logits
    # prefill equals decode, one token at a time and a few at once
    decoded, cache = step_by_step(model, tokens, 6)
    assert torch.allclose(decoded, whole, atol=3e-5 * whole.abs().max().item())
    with torch.no_grad():
        first = model(tokens[:, :12], use_cache=True)
        rest = model(tokens[:, 12:], cache=first.cache, use_cache=True).logits
    assert torch.allclose(rest, whole[:, 12:], atol=3e-5 * whole.abs().max().item())
    # the cache is as small as promised, and forgets what left the window
    config = model.config
    widths = [config.kv_lora_rank + rope_dim for rope_dim in config.rope_dims]
    assert recipe.cache_values.converted == sum(widths) and max(widths) <= 14
    for index, layer in enumerate(cache.layers):
        window = model_shape(config).windows[index]
        held = TOKENS if window is None else min(TOKENS, window - 1)
        assert layer.keys.numel() + layer.values.numel() == held * widths[index]
    # a batch with padding on the left
    padded = torch.cat([torch.full((1, 5), 2), tokens], dim=1)
    both = torch.cat([padded, random_tokens(1, TOKENS + 5, seed=9)])
    mask = torch.ones_like(both)
    mask[0, :5] = 0
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        batched = model(both, attention_mask=mask, position_ids=positions).logits[0, 5:]
    assert torch.allclose(batched, whole[0], atol=3e-5 * whole.abs().max().item())
    generated = model.generate(both, attention_mask=mask, min_new_tokens=4, max_new_tokens=4, do_sample=False)
    alone = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=4, max_new_tokens=4, do_sample=False
    )
    assert generated.shape == (2, TOKENS + 9) and torch.equal(generated[0, 5:], alone[0])
    static = model.generate(
        tokens, min_new_tokens=4, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(static, alone)
    # eager computes the same; so does what save_pretrained writes
    with torch.no_grad():
        eager = load(out, attn_implementation="eager")(tokens).logits
        model.save_pretrained(tmp_path / "again")
        again = load(tmp_path / "again")(tokens).logits
    assert torch.allclose(eager, whole, atol=3e-5 * whole.abs().max().item())
    assert torch.equal(again, whole)
    # what is not attention went over untouched
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    others = [key for key in before if f".{config.attention}." not in key]
    copied = [key for key in others if key in after]
    assert len(copied) >= len(others) - 1  # GPT-NeoX's head has another name there
    assert all(torch.equal(after[key], before[key]) for key in copied)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_wrong_shapes_are_refused(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_family(tmp_path / "source", name)
    tensors = load_file(source / "model.safetensors")
    key = next(key for key in tensors if "layers.1." in key or "h.1." in key)
    tensors[key] = tensors[key][..., :-1].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"tensor \S+ in model\.safetensors: expected shape .* found"):
        convert_checkpoint(str(source), str(tmp_path / "out"), target="native", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", "qwen3"), tmp_path / "out"
    name = str(dtype).removeprefix("torch.")
    convert_checkpoint(str(source), str(out), target="native", dtype=name, **full_size(source), **options)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {dtype}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
    tokens = random_tokens(1, TOKENS)
    with torch.no_grad():
        expected = load(source)(tokens).logits
        found, _ = step_by_step(model, tokens, 6)
    assert (found.float() - expected).norm() <= (0.01 if dtype == torch.float16 else 0.1) * expected.norm()


def test_copies_and_pickles(tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", "qwen3"), tmp_path / "out"
    convert_checkpoint(str(source), str(out), target="native", kv_rank=10, rope_dim=4, **options)
    model, tokens = load(out), random_tokens(1)
    torch.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        expected = model(tokens).logits
        for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            assert type(again) is type(model) and torch.equal(again(tokens).logits, expected)
            again.model.embed_tokens.weight.zero_()
        assert torch.equal(model(tokens).logits, expected)


def test_adapters_on_the_readers_count(tmp_path: Path, options: dict[str, Any]) -> None:
    """Wrapped as an adapter does it, `kv_b_proj` is more than its weight."""

    class Adapted(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.weight = base.weight
            self.extra = torch.nn.Parameter(torch.randn_like(base.weight))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.extra.T

    for name, target in (("qwen3", "native"), ("llama", "deepseek")):
        source, out = save_family(tmp_path / name, name), tmp_path / f"{name}-out"
        convert_checkpoint(str(source), str(out), target=target, kv_rank=10, rope_dim=4, **options)
        model, tokens = load(out), random_tokens(1)
        if target == "deepseek":
            enable_absorbed_decode(model)
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
        whole = model(tokens).logits
        whole.sum().backward()
        assert all(layer.self_attn.kv_b_proj.extra.grad.abs().max() > 0 for layer in model.model.layers)
        decoded, _ = step_by_step(model, tokens, 6)
        assert torch.allclose(decoded, whole, atol=3e-5 * whole.abs().max().item())


def test_settings_of_the_source_reach_it(tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", "qwen3"), tmp_path / "out"
    convert_checkpoint(str(source), str(out), target="native", kv_rank=10, rope_dim=4, **options)
    model = load(out)
    assert model(random_tokens(1)).cache is not None
    model.config.use_cache = False
    assert model(random_tokens(1)).cache is None


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_misdescribed_family_is_noticed(
    name: str, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than converted into another model."""
    source = save_family(tmp_path / "source", name)
    family = FAMILIES[MODELS[name]["model_type"]]
    other = replace(family, scale=lambda config, shape: 1.01 * family.scale(config, shape))
    monkeypatch.setattr("latentfold.convert.plan.support.FAMILIES", {family.model_type: other})
    with pytest.raises(RuntimeError, match=r"differs from the model's own .* not understood"):
        convert_checkpoint(str(source), str(tmp_path / "out"), kv_rank=10, rope_dim=4, **options)
    assert not (tmp_path / "out" / "config.json").exists()


def test_masks_of_old_checkpoints_are_not_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_family(tmp_path / "source", "gpt_neox")
    convert_checkpoint(str(source), str(tmp_path / "a"), kv_rank=10, rope_dim=4, **options)
    tensors = load_file(source / "model.safetensors")
    prefix = "gpt_neox.layers.0.attention."
    old = {
        prefix + "bias": torch.ones(1, 1, 512, 512, dtype=torch.uint8),
        prefix + "masked_bias": torch.tensor(-torch.inf),
    }
    save_file(tensors | old, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(str(source), str(tmp_path / "b"), kv_rank=10, rope_dim=4, **options)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_loads_without_latentfold(tmp_path: Path, options: dict[str, Any]) -> None:
    """The folder holds its own code."""
    source, out = save_family(tmp_path / "source", "qwen3"), tmp_path / "out"
    convert_checkpoint(str(source), str(out), target="native", kv_rank=10, rope_dim=4, **options)
    with torch.no_grad():
        expected = load(out)(random_tokens(1)).logits[0, -1, :5].tolist()
    script = f"""
import json, sys, torch
sys.modules["latentfold"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True, dtype=torch.float32).eval()
print(json.dumps(model(torch.tensor({random_tokens(1).tolist()})).logits[0, -1, :5].tolist()))
model.save_pretrained({str(tmp_path / "again")!r})
"""
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "again" / "modeling_latentfold.py").is_file()


@pytest.mark.parametrize(
    "imports",
    [
        "import latentfold.convert; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import latentfold.convert",
        "import transformers, latentfold.convert; AutoModelForCausalLM = transformers.AutoModelForCausalLM",
    ],
)
def test_loads_with_latentfold_without_trust(imports: str, tmp_path: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", "qwen3"), tmp_path / "out"
    convert_checkpoint(str(source), str(out), target="native", kv_rank=10, rope_dim=4, **options)
    script = f"{imports}; print(type(AutoModelForCausalLM.from_pretrained({str(out)!r})).__module__)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["latentfold.convert.targets.native.modeling_latentfold"]


def test_auto_takes_the_stock_class_wherever_it_fits(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes = {"kv_rank": 10, "rope_dim": 4}
    for name, expected in (("llama", "deepseek_v3"), ("qwen2", "latentfold")):
        source, out = save_family(tmp_path / name, name), tmp_path / f"{name}-out"
        recipe = convert_checkpoint(str(source), str(out), **sizes, **options).recipe
        assert json.loads((out / "config.json").read_text())["model_type"] == expected
        assert recipe.options.target == ("deepseek" if name == "llama" else "native")
    with pytest.raises(InputError, match=r"attention bias, .*engine transformers"):
        convert_checkpoint(str(tmp_path / "qwen2"), str(tmp_path / "x"), target="deepseek", **sizes, **options)


def test_without_rope_all_of_the_cache_is_latent(tmp_path: Path, options: dict[str, Any]) -> None:
    source = save_family(tmp_path / "source", "gpt2")
    for size in ({"cache_values": 20}, {"kv_rank": 20}, {"cache_ratio": 20 / 64}):
        recipe = convert_checkpoint(str(source), str(tmp_path / "out"), **size, overwrite=True, **options).recipe
        assert (recipe.cache_values.source, recipe.cache_values.converted) == (2 * 64, 2 * 20)
    proposal = inspect_model(str(source)).proposal
    assert proposal is not None and proposal.rope_dim == 0 and 0.3 < proposal.cached_share < 0.4


def test_names_without_the_decoders_prefix(tmp_path: Path, options: dict[str, Any]) -> None:
    """GPT-2's own checkpoint was written from the model without its head."""
    source = save_family(tmp_path / "source", "gpt2", tie_word_embeddings=True)
    convert_checkpoint(str(source), str(tmp_path / "a"), target="native", kv_rank=10, **options)
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(str(source), str(tmp_path / "b"), target="native", kv_rank=10, **options)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", ["gemma2", "smollm3", "qwen3_moe", "gpt2", "gpt_neox", "phi3, longrope"])
def test_evaluates(name: str, tmp_path: Path, text_file: Path, options: dict[str, Any]) -> None:
    source, out = save_family(tmp_path / "source", name), tmp_path / "out"
    convert_checkpoint(str(source), str(out), target="native", **full_size(source), **options)
    found = evaluate(
        str(source), str(out), EvaluationConfig(text=(str(text_file),), seq_len=32, windows=1), progress=False
    )
    assert abs(found.overall.gap) < 1e-4
    assert found.layers is not None and all(layer.output < 1e-3 for layer in found.layers)
    assert found.cache_converted.measured <= found.cache_converted.counted
    assert name == "gemma2" or found.cache_converted.measured == found.cache_converted.counted  # the rest: no windows


def test_the_same_model_in_another_house(tmp_path: Path, options: dict[str, Any]) -> None:
    """A Llama stored as Phi-3 (fused projections) or with repeated KV heads (MHA) converts to the same quality."""
    llama = save_family(tmp_path / "llama", "llama")
    tensors = load_file(llama / "model.safetensors")
    phi3 = save_family(tmp_path / "phi3", "phi4 mini", rope_parameters=DEFAULT_ROPE, rms_norm_eps=1e-6)
    mha = save_family(tmp_path / "mha", "llama", num_key_value_heads=4)
    fused, repeated = {}, dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif name.endswith("gate_proj.weight"):
            parts = [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            fused[name] = tensor
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            repeated[name] = tensor.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1).contiguous()
    save_file(fused, phi3 / "model.safetensors", metadata={"format": "pt"})
    save_file(repeated, mha / "model.safetensors", metadata={"format": "pt"})
    found = {}
    for source in (llama, phi3, mha):
        out = tmp_path / f"{source.name}-out"
        size = {"kv_rank": 12, "rope_dim": 8}
        recipe = convert_checkpoint(str(source), str(out), target="native", **size, **options).recipe
        with torch.no_grad():
            found[source.name] = load(out)(random_tokens(2)).logits, [layer.output for layer in recipe.layers]
    assert torch.allclose(found["phi3"][0], found["llama"][0], atol=1e-3)
    assert found["mha"][1] == pytest.approx(found["llama"][1], rel=0.05)
