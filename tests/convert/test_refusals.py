"""Bad input: one clear line on stderr, exit code 2, no traceback, and not a byte written anywhere."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from latentfold.convert.cli import main
from latentfold.convert.write.recipe import RECIPE
from latentfold.convert.write.writer import PARTIAL
from tests.conftest import DEFAULT_ROPE, MakeModel

K_PROJ = "model.layers.0.self_attn.k_proj.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Refused = Callable[..., None]


@pytest.fixture
def small(text_file: Path) -> list[str]:
    """Options under which a tiny model converts in a moment, should a refusal be missing."""
    return ["--calibration", str(text_file), "--calibration-tokens", "256", "--seq-len", "64"]


def invoke(args: Sequence[Any]) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(main, [str(a) for a in args])


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: file contents, and what else there is."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else "folder"
        for p in folder.rglob("*")
    }


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    """A function that runs a command and asserts that it is refused with a message, leaving all files alone.

    All of `tmp_path` is compared, not OUT alone: the source must not be written to either.
    """

    def check(args: Sequence[Any], message: str) -> None:
        before = tree(tmp_path)
        result = invoke(args)
        crash = result.exception if not isinstance(result.exception, SystemExit) else None
        assert crash is None, f"traceback instead of a message: {crash!r}"
        assert result.exit_code == 2, f"not refused: {result.stderr[-200:]}"
        lines = result.stderr.splitlines()
        if lines[0].startswith("Usage: "):  # click's own answer
            lines = lines[3:]
        assert len(lines) == 1 and lines[0].startswith("Error: "), f"not one line: {result.stderr}"
        assert re.search(message, lines[0]), lines[0]
        assert result.stdout == ""
        after = tree(tmp_path)
        assert sorted(after) == sorted(before), f"refused after writing: {lines[0]}"
        assert after == before

    return check


def edit_config(folder: Path, changes: dict[str, Any], remove: Sequence[str] = ()) -> None:
    """Change a checkpoint's config.json behind transformers' back."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if k not in remove}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change a checkpoint's only shard."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2": ({"model_type": "qwen2"}, r"attention bias, .*--engine transformers"),
    "qwen3": ({"model_type": "qwen3"}, r"'qwen3': q/k-norm"),
    "gemma2": ({"model_type": "gemma2"}, r"'gemma2': attention soft-cap"),
    "asked for before": (
        {"model_type": "cohere2"},
        r"'cohere2': layers without.*not supported yet; supported: .*llama",
    ),
    "known to transformers only": ({"model_type": "persimmon"}, r"'persimmon': unknown.*; supported: .*llama, mistral"),
    "unknown to transformers": ({"model_type": "frobnicate"}, r"model type 'frobnicate': unknown to this transformers"),
    "already MLA": ({"model_type": "deepseek_v3"}, r"already MLA \(kv_lora_rank \d+\)"),
    "sliding window": ({"model_type": "mistral", "sliding_window": 64}, r"sliding window attention \(64 tokens\)"),
    "attention bias": ({"attention_bias": True}, r"attention bias, .*--engine transformers"),
    "MLP bias": ({"mlp_bias": True}, r"mlp_bias: true.*stock class has none"),
    "activation": ({"hidden_act": "gelu"}, r"activation 'gelu'.*SiLU"),
    "quantized": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantiz.*full-precision checkpoint"),
    "dynamic rope": (
        {"rope_parameters": {**DEFAULT_ROPE, "rope_type": "dynamic", "factor": 2.0}},
        r"rope type 'dynamic'; supported: default, llama3, linear, yarn",
    ),
    "longrope": ({"rope_parameters": LONGROPE}, r"rope type 'longrope'; supported: default, llama3, linear"),
    "yarn": (
        {"rope_parameters": {**DEFAULT_ROPE, "rope_type": "yarn", "factor": 2.0}},
        r"rope type 'yarn'; supported: default, llama3, linear",
    ),
    "partial rotary": (
        {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
        r"partial rotary embedding \(factor 0.5\)",
    ),
    "partial rotary, old spelling": ({"partial_rotary_factor": 0.5}, r"partial rotary embedding \(factor 0.5\)"),
    "more than one reason": (
        {"attention_bias": True, "mlp_bias": True},
        r"attention bias.*--engine transformers.*; MLP bias",
    ),
    "not causal": ({"is_causal": False}, r"bidirectional attention \(is_causal: false\)"),
    "no layers": ({"num_hidden_layers": 0}, r"model type 'llama': expected a decoder"),
    "sizes that are text": ({"hidden_size": "wide"}, r"hidden_size"),
    "no epsilon": ({"rms_norm_eps": 0.0}, r"rms_norm_eps"),
    "no rotation base": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, r"rope_theta"),
    "rotation base as text": ({"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, r"rope_theta"),
    "rope factor of zero": ({"rope_parameters": {**DEFAULT_ROPE, "rope_type": "linear", "factor": 0.0}}, r"factor"),
    "more layers than tensors": ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\..*expected.*found nothing"),
    "fewer layers than tensors": ({"num_hidden_layers": 1}, r"tensor model\.layers\.1\.\S+ in model\.safetensors"),
    "vocabulary unlike the tensors'": ({"vocab_size": 100}, r"expected.*100.*found.*259"),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["convert", "dry run"])
@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_cannot_be_converted(
    case: str, dry: list[str], make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    source = make_model()
    changes, message = CONFIGS[case]
    edit_config(source, changes)
    refused(["convert", source, tmp_path / "out", "--target", "deepseek", *dry, *small], message)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_real_configs_of_other_families(
    family: str, make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    """As transformers writes them, not a Llama config under another name: their own defaults must be seen."""
    from transformers import AutoConfig

    source = make_model()
    AutoConfig.for_model(family).save_pretrained(source)
    reason = {"qwen2": "attention bias", "mistral": "sliding window attention"}[family]
    refused(["convert", source, tmp_path / "out", "--target", "deepseek", *small], f"cannot be converted: .*{reason}")


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "odd rope": (["--rope-dim", "3"], r"'--rope-dim': 3 is not even \(two values a frequency\)"),
    "zero rope": (["--rope-dim", "0"], r"--rope-dim 0: expected a positive even number"),
    "negative rope": (["--rope-dim", "-2"], r"'--rope-dim': -2 is not in the range x>=0"),
    "large rope": (["--rope-dim", "18"], r"--rope-dim 18.* 16 .*try --rope-dim \d+"),
    "zero rank": (["--kv-rank", "0"], r"'--kv-rank': 0 is not in the range x>=1"),
    "negative rank": (["--kv-rank", "-8"], r"'--kv-rank': -8 is not in the range x>=1"),
    "zero windows": (["--seq-len", "0"], r"'--seq-len': 0 is not in the range x>=16"),
    "negative windows": (["--seq-len", "-64"], r"'--seq-len': -64 is not in the range x>=16"),
    "zero tokens": (["--calibration-tokens", "0"], r"'--calibration-tokens': 0 is not in the range x>=16"),
    "less than a window": (["--calibration-tokens", "63"], r"--calibration-tokens 63: expected .* --seq-len 64"),
    "windows beyond the model": (["--seq-len", "300", "--calibration-tokens", "300"], r"--seq-len 300.* 256 "),
    "target": (["--target", "bogus"], r"'--target': 'bogus' is not one of 'auto', 'deepseek', 'native'"),
    "engine": (["--engine", "vllm"], r"'--engine': 'vllm' is not one of 'any', 'transformers'"),
    "float16": (["--dtype", "float16"], r"--dtype float16: .*use bfloat16 or float32"),
    "dtype": (["--dtype", "bogus"], r"'--dtype': 'bogus' is not one of 'auto', 'bfloat16', 'float32', 'float16'"),
    "device": (["--device", "bogus"], r"--device bogus: not available here"),
    "device of another build": (["--device", "vulkan"], r"--device vulkan: not available here.{0,300}$"),
    "device that needs a plug-in": (["--device", "hpu"], r"--device hpu: not available here"),
    "device without memory": (["--device", "meta"], r"--device meta: not available here"),
    "device that no one has": (["--device", "cuda0"], r"'--device': 'cuda0': expected auto, cpu, cuda, cuda:1"),
    "cached share": (["--cache-ratio", "1"], r"'--cache-ratio': 1\.0 is not in the range 0<x<1"),
    "cached values": (["--cache-values", "2"], r"'--cache-values': 2 is not in the range x>=3"),
    "device number": (["--device", "cuda:99"], r"--device cuda:99: not available here"),
    "shard size": (["--max-shard-size", "bogus"], r"--max-shard-size bogus: expected a size such as 5GB"),
    "no shard size": (["--max-shard-size", "0GB"], r"--max-shard-size 0GB: expected"),
    "negative shard size": (["--max-shard-size", "-1GB"], r"--max-shard-size -1GB: expected"),
    "seed": (["--seed", str(2**70)], r"--seed \d+: expected"),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["convert", "dry run"])
@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option(
    case: str, dry: list[str], make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    extra, message = BAD_OPTIONS[case]
    refused(["convert", make_model(), tmp_path / "out", *small, *extra, *dry], message)


@pytest.mark.parametrize(("kv_heads", "largest"), [(1, 16), (2, 32), (4, 32)])  # 2 x heads x 8, but no more than hidden
def test_rank_above_what_keys_and_values_hold(
    kv_heads: int, largest: int, make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    args = ["convert", make_model(num_key_value_heads=kv_heads), tmp_path / "out", *small, "--dry-run", "--kv-rank"]
    refused([*args, largest + 1], rf"--kv-rank {largest + 1}: .*at most {largest} .*try --kv-rank \d+ --rope-dim \d+")
    assert invoke([*args, largest]).exit_code == 0


Damage = Callable[[Path], Any]


def truncate(source: Path) -> None:
    """Cut a checkpoint's last bytes off, as an interrupted download does."""
    os.truncate(source / SINGLE, (source / SINGLE).stat().st_size - 100)


def only_pickle(source: Path) -> None:
    """Replace safetensors by the pickle of old repositories."""
    torch.save(load_file(source / SINGLE), source / "pytorch_model.bin")
    (source / SINGLE).unlink()


def no_tokenizer(source: Path) -> None:
    """Leave weights and config alone."""
    for path in [*source.glob("tokenizer*"), *source.glob("special_tokens*")]:
        path.unlink()


def uneven_heads(source: Path) -> None:
    """Three KV heads for four query heads, in config and tensors alike."""
    edit_config(source, {"num_key_value_heads": 3})
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "kv"]
    edit_tensors(source, lambda tensors: tensors.update({name: torch.randn(24, 32) for name in names}))


SOURCES: dict[str, tuple[Damage, str]] = {
    "pickles": (only_pickle, r"only pickled weights \(pytorch_model\.bin\).*expected safetensors"),
    "no weights": (lambda s: (s / SINGLE).unlink(), rf"no {SINGLE} and no {INDEX}; expected a safetensors checkpoint"),
    "empty weights": (lambda s: edit_tensors(s, lambda t: t.clear()), r"expected shape .*found nothing|no tensors"),
    "missing tensor": (
        lambda s: edit_tensors(s, lambda t: t.pop(K_PROJ)),
        rf"tensor {K_PROJ}: expected shape \[16, 32\], found nothing",
    ),
    "wrong shape": (
        lambda s: edit_tensors(s, lambda t: t.update({K_PROJ: torch.zeros(8, 32)})),
        rf"tensor {K_PROJ} in {SINGLE}: expected shape \[16, 32\].*found \[8, 32\]",
    ),
    "extra tensor": (
        lambda s: edit_tensors(s, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
        rf"tensor model\.layers\.0\.self_attn\.q_proj\.bias in {SINGLE}: .*no such tensor",
    ),
    "integer tensor": (
        lambda s: edit_tensors(s, lambda t: t.update({K_PROJ: torch.zeros(16, 32, dtype=torch.int8)})),
        rf"tensor {K_PROJ} in {SINGLE}: expected F16, BF16 or F32, found I8",
    ),
    "undefined weights": (
        lambda s: edit_tensors(s, lambda t: t[K_PROJ].fill_(torch.nan)),
        rf"{K_PROJ}.*(undefined|NaN|finite)",
    ),
    "infinite weights": (
        lambda s: edit_tensors(s, lambda t: t["lm_head.weight"][7].fill_(torch.inf)),
        r"lm_head\.weight.*(undefined|infinite|finite)",
    ),
    "truncated": (truncate, rf"{SINGLE}: not a complete safetensors file.*download it again"),
    "zero bytes": (lambda s: os.truncate(s / SINGLE, 0), rf"{SINGLE}: not a complete safetensors file"),
    "index: missing shard": (
        lambda s: (s / INDEX).write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'),
        rf"model-00002-of-00002\.safetensors: listed in {INDEX} but not in .*download",
    ),
    "index: empty map": (lambda s: (s / INDEX).write_text('{"weight_map": {}}'), "hold no tensors"),
    "index: broken": (lambda s: (s / INDEX).write_text('{"weight_map": {'), rf"{INDEX}: not readable as JSON"),
    "index: a list": (lambda s: (s / INDEX).write_text("[]"), rf"{INDEX}: expected a JSON object, found list"),
    "index: no map": (lambda s: (s / INDEX).write_text("{}"), rf"{INDEX}.*weight_map"),
    "index: not a map": (lambda s: (s / INDEX).write_text('{"weight_map": []}'), rf"{INDEX}.*weight_map"),
    "index: not a file": (lambda s: (s / INDEX).write_text('{"weight_map": {"a": 1}}'), rf"{INDEX}.*weight_map"),
    "no config": (lambda s: (s / "config.json").unlink(), r"no config\.json; expected the folder of a transformers"),
    "config: broken": (lambda s: (s / "config.json").write_text("{,}"), r"config\.json: not readable as JSON"),
    "config: binary": (lambda s: (s / "config.json").write_bytes(b"\xff\xfe"), r"config\.json: not readable as JSON"),
    "config: a list": (lambda s: (s / "config.json").write_text("[]"), r"config\.json: expected a JSON object"),
    "config: no type": (
        lambda s: edit_config(s, {}, remove=["model_type"]),
        r"config\.json has no model_type; expected a transformers checkpoint",
    ),
    "config: odd type": (lambda s: edit_config(s, {"model_type": ["llama"]}), r"config\.json is not valid"),
    "heads that do not divide": (uneven_heads, r"num_attention_heads|num_key_value_heads|KV heads"),
    "generation config: broken": (
        lambda s: (s / "generation_config.json").write_text("{"),
        r"generation_config\.json: not a generation config",
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_damaged_source(case: str, make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused) -> None:
    source = make_model()
    damage, message = SOURCES[case]
    damage(source)
    refused(["convert", source, tmp_path / "out", *small], message)


def test_no_tokenizer(make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused) -> None:
    source = make_model()
    no_tokenizer(source)
    refused(
        ["convert", source, tmp_path / "out", *small], r"expected a tokenizer beside the weights, found none usable"
    )


def test_broken_tokenizer(make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused) -> None:
    source = make_model()
    (source / "tokenizer.json").write_text("{}")
    refused(["convert", source, tmp_path / "out", *small], r"expected a tokenizer beside the weights")


def test_tokenizer_with_more_tokens_than_the_embedding(
    make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    """Config and tensors agree, but the text has tokens the model has no row for."""
    refused(["convert", make_model(vocab_size=80), tmp_path / "out", *small], r"tokenizer.*80")


NAMES = ["nowhere/at/all", "./nowhere", "/nowhere", "a/b/c/d", "two words", "two\nlines", "..", "a--b/c..d", "x" * 300]


@pytest.mark.parametrize("command", [["inspect"], ["convert", "OUT"], ["convert", "OUT", "--dry-run"]])
@pytest.mark.parametrize("name", NAMES, ids=[repr(name[:20]) for name in NAMES])
def test_no_such_model(
    name: str, command: list[str], tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that cannot be Hub ids are not asked for there."""
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    args = [str(tmp_path / "out") if a == "OUT" else a for a in command[1:]]
    refused([command[0], name, *args], r"no such folder, and not a|not a Hub id|no config\.json; expected the folder")


def test_model_is_a_file(text_file: Path, tmp_path: Path, refused: Refused) -> None:
    refused(["convert", text_file, tmp_path / "out"], r"text\.txt: no such folder")


def test_offline_unknown_id(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is read when huggingface_hub is imported, so it is set where it was read to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(["convert", "nobody/nothing", tmp_path / "out"], r"nobody/nothing: not in the local cache.*offline")


CALIBRATION: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("gone.txt", None, r"'--calibration': File '.*gone\.txt' does not exist"),
    "empty": ("a.txt", b"", r"a\.txt: holds no text"),
    "blank": ("a.txt", b" \n\n\t", r"a\.txt: holds no text"),
    "binary": ("a.txt", b"text \xff\xfe", r"a\.txt: not UTF-8 text \(byte 5\)"),
    "jsonl: malformed": ("a.jsonl", b'{"text": "fine"}\n{"text":', r"a\.jsonl, line 2: not JSON"),
    "jsonl: no text": ("a.jsonl", b'{"label": 1}\n', r"a\.jsonl, line 1: expected an object with `text`"),
    "jsonl: a number": ("a.jsonl", b"12\n", r"a\.jsonl, line 1: expected an object with `text`"),
    "jsonl: empty": ("a.jsonl", b"\n", r"a\.jsonl: holds no text"),
    "jsonl: empty text": ("a.jsonl", b'{"text": ""}\n', r"a\.jsonl: holds no text"),
    "jsonl: empty messages": ("a.jsonl", b'{"messages": []}\n', r"a\.jsonl: holds no text"),
    "jsonl: messages of nothing": ("a.jsonl", b'{"messages": [{"content": null}]}\n', r"a\.jsonl.*(no text|content)"),
    "jsonl: messages in parts": (
        "a.jsonl",
        b'{"messages": [{"content": [{"type": "image", "url": "x"}]}]}\n',
        r"a\.jsonl.*(no text|content)",
    ),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["convert", "dry run"])
@pytest.mark.parametrize("case", CALIBRATION)
def test_calibration_text(case: str, dry: list[str], make_model: MakeModel, tmp_path: Path, refused: Refused) -> None:
    name, data, message = CALIBRATION[case]
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    refused(["convert", make_model(), tmp_path / "out", "--seq-len", 64, "--calibration", path, *dry], message)


def test_calibration_text_too_short(make_model: MakeModel, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "short.txt"
    path.write_text("only a few")
    refused(
        ["convert", make_model(), tmp_path / "out", "--seq-len", 64, "--calibration", path],
        r"calibration text is too short: expected at least 64 tokens.*found 10; give more text or a smaller --seq-len",
    )


def test_calibration_folder(make_model: MakeModel, tmp_path: Path, refused: Refused) -> None:
    refused(
        ["convert", make_model(), tmp_path / "out", "--calibration", tmp_path],
        r"'--calibration': File '.*' is a directory",
    )


def holding(out: Path) -> None:
    """A folder with something in it."""
    out.mkdir()
    (out / "precious.txt").write_text("data")


OUTPUTS: dict[str, tuple[Callable[[Path], Any], str, list[str], str]] = {
    "not empty": (holding, "out", [], r"out: not empty \(holds precious\.txt\); .*--overwrite"),
    "a file": (lambda out: out.write_text("data"), "out", [], r"out: is a file; expected a folder"),
    "a file, overwrite": (lambda out: out.write_text("data"), "out", ["--overwrite"], r"out: is a file"),
    "below a file": (lambda out: None, "text.txt/out", [], r"cannot be written \(.*text\.txt is not a writable folder"),
    "inside the source": (lambda out: None, "source1/out", [], r"lies inside the source"),
    "inside the source, overwrite": (lambda out: None, "source1/out", ["--overwrite"], r"lies inside the source"),
    "the source": (lambda out: None, "source1", [], r"lies inside the source|is the source"),
    "the source, overwrite": (lambda out: None, "source1", ["--overwrite"], r"lies inside the source|is the source"),
    "the source by a link": (lambda out: out.symlink_to("source1"), "out", ["--overwrite"], r"the source"),
    "the source by dots": (lambda out: None, "source1/../source1", ["--overwrite"], r"the source"),
    "holds the source": (
        lambda out: None,
        ".",
        ["--overwrite"],
        r"holds .*source1, which is needed; --overwrite would delete it",
    ),
    "a link to nowhere": (lambda out: out.symlink_to("gone"), "out", [], r"out: .*(link|written)"),
    "a link to itself": (lambda out: out.symlink_to("out"), "out", [], r"out: .*(link|written)"),
    "a name too long": (lambda out: None, "x" * 300, [], r"x{300}: .*(written|too long)"),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["convert", "dry run"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_output(
    case: str, dry: list[str], make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    source = make_model()
    prepare, name, extra, message = OUTPUTS[case]
    prepare(tmp_path / "out")
    refused(["convert", source, tmp_path / name, *small, *extra, *dry], message)


def test_output_holds_the_calibration_text(
    make_model: MakeModel, tmp_path: Path, refused: Refused, small: list[str]
) -> None:
    """--overwrite deletes what OUT holds; the user's own text must not go with it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("the only copy " * 100)
    refused(
        ["convert", make_model(), out, *small, "--calibration", out / "mine.txt", "--overwrite"],
        r"holds .*mine\.txt, which is needed; --overwrite would delete it",
    )


def test_output_holds_the_weights_that_the_source_links_to(
    make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    """A source may be a folder of links, as in the Hub's cache; --overwrite would delete what they point to."""
    source, out = make_model(), tmp_path / "out"
    out.mkdir()
    (source / SINGLE).rename(out / SINGLE)
    (source / SINGLE).symlink_to(out / SINGLE)
    refused(["convert", source, out, *small, "--overwrite"], r"out: holds .*--overwrite would delete")


def test_remains_of_a_run_do_not_open_a_full_folder(
    make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    """Whoever interrupts an `--overwrite` must say it again before the old checkpoint is replaced."""
    out = tmp_path / "out"
    (out / PARTIAL).mkdir(parents=True)
    (out / "config.json").write_text("old")
    refused(["convert", make_model(), out, *small], r"out: not empty \(holds config\.json\).*--overwrite")


def test_empty_output_name(
    make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--overwrite "$UNSET"` must not mean the current folder, which it would empty."""
    source = make_model()
    holding(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    refused(["convert", source, "", *small, "--overwrite"], r"OUT|empty")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("exists", [True, False])
def test_output_not_writable(
    exists: bool, make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    out = locked if exists else locked / "out"
    refused(["convert", make_model(), out, *small], r"cannot be written \(.*locked is not a writable folder\)")


@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["loud", "quiet"])
def test_quiet_leaves_errors_alone(
    quiet: list[str], make_model: MakeModel, tmp_path: Path, small: list[str], refused: Refused
) -> None:
    refused(["convert", make_model(), tmp_path / "out", *small, *quiet, "--kv-rank", 99], r"--kv-rank 99.*at most 32")


@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["loud", "quiet"])
def test_dry_run_writes_nothing(quiet: list[str], make_model: MakeModel, tmp_path: Path, small: list[str]) -> None:
    """The plan is what was asked for, so --quiet does not silence it."""
    source = make_model()
    before = tree(tmp_path)
    result = invoke(["convert", source, tmp_path / "out", *small, "--kv-rank", 8, "--rope-dim", 4, "--dry-run", *quiet])
    assert result.exit_code == 0 and result.stderr == ""
    assert "--kv-rank 8 --rope-dim 4" in result.stdout and "12 of 32 values" in result.stdout
    assert tree(tmp_path) == before


SAVES_NOTHING = ["--kv-rank", "32", "--rope-dim", "8"]


@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["loud", "quiet"])
def test_sizes_that_save_nothing_earn_a_note(
    quiet: list[str], make_model: MakeModel, tmp_path: Path, small: list[str]
) -> None:
    """They are allowed: a full-size conversion is how exactness is checked."""
    result = invoke(["convert", make_model(), tmp_path / "out", *small, *SAVES_NOTHING, *quiet])
    assert result.exit_code == 0, result.output
    note = re.search(r"^Note: the result caches 40 of the 32 values", result.stderr, re.MULTILINE)
    assert bool(note) is not bool(quiet)
    assert quiet == [] or result.stderr == ""
    assert result.stdout == f"{tmp_path / 'out'}\n"


def test_dry_run_shows_the_note(make_model: MakeModel, tmp_path: Path, small: list[str]) -> None:
    result = invoke(["convert", make_model(), tmp_path / "out", *small, *SAVES_NOTHING, "--dry-run"])
    assert result.exit_code == 0
    assert "caches 40 of the 32 values" in result.output


def test_several_files_after_one_option(make_model: MakeModel, tmp_path: Path, text_file: Path) -> None:
    """As shells expand `*.txt`; whatever follows the files is still an option or an argument."""
    second, third = tmp_path / "b.txt", tmp_path / "c.jsonl"
    second.write_text(text_file.read_text())
    third.write_text(json.dumps({"messages": [{"role": "user", "content": text_file.read_text()}]}) + "\n")
    files = [text_file, second, third]
    args = ["convert", "--seq-len", 64, "--calibration-tokens", 256, "-q", "--calibration", *files]
    result = invoke([*args, "--kv-rank", 8, make_model(), tmp_path / "out"])
    assert result.exit_code == 0, result.output
    recipe = json.loads((tmp_path / "out" / RECIPE).read_text())
    assert recipe["calibration"]["texts"] == [f.name for f in files]
    assert recipe["calibration"]["windows"] == [4, 64]


def other_tokenizer(folder: Path) -> None:
    """Swap two letters."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    path.write_text(json.dumps(data))
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == [vocab["a"]]


EVAL: dict[str, tuple[Damage, list[str], str]] = {
    "no converted model": (lambda b: b.rename(b.with_name("gone")), [], r"source2: no such folder"),
    "converted without config": (lambda b: (b / "config.json").unlink(), [], r"source2: no config\.json"),
    "converted without weights": (lambda b: (b / SINGLE).unlink(), [], r"source2: no model\.safetensors"),
    "truncated": (truncate, [], r"not a complete safetensors file"),
    "missing tensor": (lambda b: edit_tensors(b, lambda t: t.pop(K_PROJ)), [], rf"tensor {K_PROJ}"),
    "wrong shape": (
        lambda b: edit_tensors(b, lambda t: t.update({K_PROJ: torch.zeros(8, 32)})),
        [],
        rf"tensor {K_PROJ}.*\[16, 32\].*\[8, 32\]",
    ),
    "no tokenizer": (no_tokenizer, [], r"source2: expected a tokenizer"),
    "other tokenizer": (other_tokenizer, [], r"tokenize the text differently; expected models with one tokenizer"),
    "other vocabulary": (lambda b: edit_vocabulary(b, 300), [], r"vocabular|259.*300"),
    "broken recipe": (lambda b: (b / RECIPE).write_text("{"), [], rf"{RECIPE}: not readable as JSON"),
    "foreign recipe": (lambda b: (b / RECIPE).write_text('{"a": 1}'), [], rf"{RECIPE}"),
    "no such architecture": (
        lambda b: edit_config(b, {"model_type": "gpt2"}),
        [],
        r"tensor \S+: expected shape .*found nothing",
    ),
    "short text": (
        lambda b: None,
        ["--seq-len", "128", "--skip", "5000"],
        r"evaluation text is too short: .*16 tokens",
    ),
    "long windows": (lambda b: None, ["--seq-len", "257"], r"--seq-len 257: .* takes at most 256 positions"),
    "tiny windows": (lambda b: None, ["--seq-len", "4"], r"'--seq-len': 4 is not in the range x>=16"),
    "no windows": (lambda b: None, ["--windows", "0"], r"'--windows': 0 is not in the range x>=1"),
    "negative skip": (lambda b: None, ["--skip", "-1"], r"'--skip': -1 is not in the range x>=0"),
    "dtype": (
        lambda b: None,
        ["--dtype", "bogus"],
        r"'--dtype': 'bogus' is not one of 'bfloat16', 'float32', 'float16'",
    ),
    "device": (lambda b: None, ["--device", "bogus"], r"--device bogus: not available here"),
    "device without memory": (lambda b: None, ["--device", "meta"], r"--device meta: not available here"),
    "json folder": (lambda b: None, ["--json", "/nowhere/a.json"], r"--json /nowhere/a\.json: its folder does not"),
    "json is a folder": (lambda b: None, ["--json", "/tmp"], r"--json /tmp: is a folder"),
    "text": (lambda b: None, ["--text", "/nowhere/a.txt"], r"'--text': File '/nowhere/a\.txt' does not exist"),
}


def edit_vocabulary(folder: Path, size: int) -> None:
    """Add rows to embedding and head, as padding to a round number does."""
    edit_config(folder, {"vocab_size": size})
    rows = {"model.embed_tokens.weight": torch.zeros(size, 32), "lm_head.weight": torch.zeros(size, 32)}
    edit_tensors(folder, lambda tensors: tensors.update(rows))


@pytest.mark.parametrize("case", EVAL)
def test_eval(case: str, make_model: MakeModel, text_file: Path, refused: Refused) -> None:
    original, converted = make_model(), make_model()
    damage, extra, message = EVAL[case]
    damage(converted)
    refused(["eval", original, converted, "--text", text_file, "--seq-len", 64, "--windows", 1, "-q", *extra], message)


def test_eval_without_the_original(make_model: MakeModel, tmp_path: Path, text_file: Path, refused: Refused) -> None:
    refused(["eval", tmp_path / "gone", make_model(), "--text", text_file], r"gone: no such folder")


def test_eval_tokenizer_with_more_tokens_than_the_embedding(
    make_model: MakeModel, text_file: Path, refused: Refused
) -> None:
    model = make_model(vocab_size=80)
    refused(["eval", model, model, "--text", text_file, "--seq-len", 64, "-q"], r"tokenizer.*80|vocab.*80")
