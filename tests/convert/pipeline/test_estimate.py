"""Sizes from a number of cached values, and what sizes would cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from latentfold.convert import InputError, convert_checkpoint, estimate_sizes
from latentfold.convert.cli import main
from latentfold.convert.model.shape import model_shape
from latentfold.convert.pipeline import run as pipeline
from latentfold.convert.plan.sizes import divisible, splits
from latentfold.convert.source.config import read_config
from latentfold.convert.source.opening import open_checkpoint
from tests.conftest import MakeModel, load


def test_splits_add_up_and_fit(make_model: MakeModel) -> None:
    shape = model_shape(read_config(open_checkpoint(make_model())))  # 2 KV heads of 8
    found = splits(shape, 16)
    assert found == [(14, 2), (12, 4), (10, 6), (8, 8)]
    assert splits(shape, 2) == []


def test_a_number_of_values_is_divided_by_a_survey(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    source = str(make_model())
    result = convert_checkpoint(source, str(tmp_path / "out"), cache_ratio=0.5, **options)
    chosen, tried = result.recipe.options, result.recipe.split
    assert chosen.kv_rank + chosen.rope_dim == 16 and len(tried) == 4
    best = min(tried, key=lambda size: size.expected_error)
    assert (best.kv_rank, best.rope_dim) == (chosen.kv_rank, chosen.rope_dim)
    config = load(tmp_path / "out").config
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (chosen.kv_rank, chosen.rope_dim)
    again = convert_checkpoint(source, str(tmp_path / "again"), cache_values=16, **options)
    assert again.recipe.split == tried


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_values": 16, "kv_rank": 8}, "expected one of"),
        ({"cache_values": 16, "cache_ratio": 0.5}, "expected one of"),
        ({"cache_ratio": 1.5}, "expected a share between 0 and 1"),
        ({"cache_values": 2}, "expected at least 3"),
        ({"cache_ratio": 0.05}, "2 cached values: expected between 3 and 31"),
        ({"cache_values": 32}, "the source caches 32 per token and layer"),
    ],
)
def test_impossible_numbers_are_refused(
    given: dict[str, Any], message: str, make_model: MakeModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=message):
        convert_checkpoint(str(make_model()), str(tmp_path / "out"), **given, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_bounds_told_are_those_that_divide(kv_heads: int, make_model: MakeModel) -> None:
    shape = model_shape(read_config(open_checkpoint(make_model(num_key_value_heads=kv_heads))))
    dividing = [values for values in range(shape.cache_values) if splits(shape, values)]
    assert divisible(shape) == (dividing[0], dividing[-1]) and dividing == list(range(dividing[0], dividing[-1] + 1))


def test_dry_run_says_that_the_sizes_are_open(make_model: MakeModel, tmp_path: Path) -> None:
    command = ["convert", str(make_model()), str(tmp_path / "out"), "--cache-values", "16", "--dry-run"]
    assert "chooses kv_rank + rope_dim from 14 + 2, 12 + 4, 10 + 6, 8 + 8" in CliRunner().invoke(main, command).stdout


def test_an_interrupted_conversion_is_not_surveyed_again(
    make_model: MakeModel, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = str(make_model()), str(tmp_path / "out")
    whole = convert_checkpoint(source, str(tmp_path / "whole"), cache_values=16, **options)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "score_ladders", interrupt)
        convert_checkpoint(source, out, cache_values=16, **options)
    monkeypatch.setattr(pipeline, "survey", lambda *_: pytest.fail("surveyed"))
    for other in ({"seed": 4, "cache_values": 16}, {"cache_values": 6}):
        with pytest.raises(InputError, match="interrupted conversion with other options"):
            convert_checkpoint(source, out, **other, **options)
    assert convert_checkpoint(source, out, cache_values=16, **options).recipe == whole.recipe


def test_larger_sizes_cost_less(make_model: MakeModel, options: dict[str, Any]) -> None:
    found = estimate_sizes(str(make_model()), **options)
    errors = [size.expected_error for size in found]
    assert len(found) >= 3 and errors[0] > errors[-1] > 0
    assert [size.cached_share for size in found] == sorted(size.cached_share for size in found)
    assert found[0].hopeless


def test_inspect_prints_estimates(make_model: MakeModel, text_file: Path) -> None:
    source = str(make_model())
    command = ["inspect", source, "--calibrate", "--calibration", str(text_file)]
    refused = CliRunner().invoke(main, ["inspect", source, "--calibration", str(text_file)])
    assert refused.exit_code == 2 and "--calibrate" in refused.stderr
    long = text_file.read_text() * 64  # the default is 28672 tokens in windows of 256
    text_file.write_text(long)
    printed = CliRunner().invoke(main, command)
    assert printed.exit_code == 0, printed.stderr
    assert "expected error of the attention output" in printed.stdout and "hopeless" in printed.stdout
    data = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert {"kv_rank", "rope_dim", "cached_share", "expected_error", "hopeless"} == set(data["estimates"][0])
