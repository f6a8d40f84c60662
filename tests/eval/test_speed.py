"""Speed: what is run, counted and reported; never how fast this machine is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from latentfold.convert import convert_checkpoint
from latentfold.convert.errors import InputError
from latentfold.convert.model.whole import loaded
from latentfold.convert.progress import Bars
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.source.opening import open_checkpoint
from latentfold.eval import speed
from latentfold.eval.cache import held_bytes
from latentfold.eval.speed import measure_speed
from tests.conftest import TEXT, MakeModel, load, random_tokens, save_tiny

COMPUTE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A tiny model and its conversion: 2 layers, 32 and 12 cached values each."""
    folder = tmp_path_factory.mktemp("pair")
    text, source, out = folder / "text.txt", save_tiny(folder / "source"), folder / "out"
    text.write_text(TEXT * 8, encoding="utf-8")
    options = {"calibration": (str(text),), "calibration_tokens": 256, "seq_len": 64, "progress": False}
    convert_checkpoint(str(source), str(out), kv_rank=8, rope_dim=4, **options)
    return open_checkpoint(source), open_checkpoint(out)


def test_every_point_is_measured_for_both_models(
    pair: tuple[Checkpoint, Checkpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure_speed(*pair, contexts=(16, 256), batches=(1, 3), decode_tokens=2, **COMPUTE, progress=Bars())
    assert [(point.context, point.batch) for point in found] == [(16, 1), (16, 3), (256, 1), (256, 3)]
    for point in found:
        size = point.context * point.batch * 2 * 4
        assert (point.cache_original, point.cache_converted) == (32 * size, 12 * size)
        for rate in (point.prefill_original, point.prefill_converted, point.decode_original, point.decode_converted):
            assert rate is not None and rate > 0
    assert "24/24" in capsys.readouterr().err


def test_speed_is_tokens_by_the_median_second(
    pair: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock of our own: prefills of 4, 1 and 2 seconds, decodes of 5, 8 and 50, each after a warm-up of 100."""
    seconds = [[100.0, 100.0, 4.0, 5.0], [100.0, 100.0, 1.0, 8.0], [100.0, 100.0, 2.0, 50.0]]
    ticks, now = [], 0.0
    for each in (each for repeat in seconds for each in repeat * 2):
        ticks += [now, now + each]
        now += each
    clock = iter(ticks)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    (point,) = measure_speed(*pair, contexts=(10,), batches=(3,), decode_tokens=4, repeats=3, **COMPUTE)
    assert point.prefill_original == point.prefill_converted == 3 * 10 / 2
    assert point.decode_original == point.decode_converted == 3 * 4 / 8
    assert next(clock, None) is None


def test_decoding_reads_the_cached_context(pair: tuple[Checkpoint, Checkpoint]) -> None:
    """One run gives the model just what a forward pass over the whole text would."""
    tokens = random_tokens(rows=2, length=12)
    for checkpoint in pair:
        model = load(checkpoint.folder)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        model.register_forward_hook(lambda _module, args, output, seen=seen: seen.append((args[0], output.logits)))
        _, _, held = speed._run(model, tokens, 9)
        assert [part.shape[1] for part, _ in seen] == [9, 1, 1, 1]
        assert torch.equal(torch.cat([part for part, _ in seen], dim=1), tokens)
        assert all(logits.shape[1] == 1 for _, logits in seen)
        with torch.no_grad():
            expected = load(checkpoint.folder)(tokens).logits[:, 8:]
        torch.testing.assert_close(torch.cat([logits for _, logits in seen], dim=1), expected, atol=1e-4, rtol=1e-4)
        assert held == 2 * 9 * 2 * 4 * (32 if checkpoint is pair[0] else 12)


def test_models_take_turns(pair: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(model: Any, tokens: torch.Tensor, context: int) -> speed._Run:
        seen.append(f"{model.config.model_type} {context}")
        return speed._Run(1.0, 1.0, 1)

    monkeypatch.setattr(speed, "_run", noted)
    measure_speed(*pair, contexts=(8, 16), batches=(1,), repeats=2, **COMPUTE)
    turns = [f"{kind} {context}" for kind in ("llama", "deepseek_v3") for context in (8, 8, 16, 16)]
    assert seen == turns * 2


def test_one_model_is_in_memory_at_a_time(pair: tuple[Checkpoint, Checkpoint]) -> None:
    with loaded(pair[0], torch.bfloat16, torch.device("cpu")) as model:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.config._attn_implementation == "sdpa" and not model.training
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_held_bytes_counts_what_a_cache_holds() -> None:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5, 6), layer)
    assert held_bytes(cache) == 3 * 2 * 4 * 5 * (8 + 6) * 4
    half = DynamicCache()
    half.update(torch.zeros(1, 1, 7, 16, dtype=torch.bfloat16), torch.zeros(1, 1, 7, 4, dtype=torch.bfloat16), 0)
    assert held_bytes(half) == 7 * 20 * 2


def out_of_cuda_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def out_of_cpu_memory() -> None:
    torch.empty(1 << 50)


@pytest.mark.parametrize("fail", [out_of_cuda_memory, out_of_cpu_memory])
def test_a_point_that_does_not_fit_is_none_and_the_rest_goes_on(
    pair: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    run = speed._run

    def limited(model: Any, tokens: torch.Tensor, context: int) -> speed._Run:
        if model.config.model_type == "llama" and context == 32:
            fail()
        return run(model, tokens, context)

    monkeypatch.setattr(speed, "_run", limited)
    found = measure_speed(*pair, contexts=(32, 16), batches=(1,), decode_tokens=1, **COMPUTE)
    assert [point.prefill_original is None for point in found] == [True, False]
    assert found[0].decode_original is None and found[0].cache_original is None
    assert all(point.prefill_converted and point.decode_converted and point.cache_converted for point in found)


def test_a_batch_whose_tokens_alone_do_not_fit(pair: tuple[Checkpoint, Checkpoint]) -> None:
    small, huge = measure_speed(*pair, contexts=(16,), batches=(1, 1 << 44), decode_tokens=1, **COMPUTE)
    assert small.prefill_original and huge.prefill_original is None and huge.cache_converted is None


def test_other_errors_are_not_taken_for_memory(
    pair: tuple[Checkpoint, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(speed, "_run", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        measure_speed(*pair, contexts=(16,), batches=(1,), **COMPUTE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": (16, 512)}, "context 512.*at most 256 positions"),
        ({"contexts": (0,)}, "at least 1"),
        ({"batches": (1, -1)}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"decode_tokens": 0}, "at least 1"),
    ],
)
def test_refusals_come_before_anything_loads(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    checkpoint = open_checkpoint(make_model())
    monkeypatch.setattr(speed, "loaded", lambda *_: pytest.fail("loaded"))
    with pytest.raises(InputError, match=message):
        measure_speed(checkpoint, checkpoint, **{"contexts": (16,), "batches": (1,)} | COMPUTE | changes)
