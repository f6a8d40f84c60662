"""Options of the command line: answered at once where they are wrong, completed, recorded."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from latentfold.convert import choices
from latentfold.convert.cli import main
from latentfold.convert.cli.options import command_line
from latentfold.convert.dtypes import DTYPES
from latentfold.convert.pipeline.prepare import Job, prepare
from latentfold.convert.plan.config import ConversionConfig
from latentfold.convert.write.recipe import read_recipe
from latentfold.eval.records import EVALUATION
from tests.conftest import TINY_SIZES, MakeModel
from tests.families import save_family


def invoke(*args: Any, **env: str) -> Result:
    return CliRunner(env=env).invoke(main, [str(arg) for arg in args], prog_name="latentfold")


# ---------------------------------------------------------------------------------------- wrong ones

WRONG: list[tuple[list[str], str]] = [
    (["convert", "a", "b", "--target", "deepsek"], "'--target': 'deepsek' is not one of 'auto', 'deepseek', 'native'"),
    (["convert", "a", "b", "--engine", "vllm"], "'--engine': 'vllm' is not one of 'any', 'transformers'"),
    (["convert", "a", "b", "--dtype", "bf16"], "'bf16' is not one of 'auto', 'bfloat16', 'float32', 'float16'"),
    (["convert", "a", "b", "--device", "cuda0"], "'--device': 'cuda0': expected auto, cpu, cuda, cuda:1"),
    (["convert", "a", "b", "--device", "CPU"], "'--device': 'CPU': expected auto, cpu"),
    (["convert", "a", "b", "--seq-len", "8"], "'--seq-len': 8 is not in the range x>=16"),
    (["convert", "a", "b", "--seq-len", "4k"], "'--seq-len': '4k' is not a valid integer range"),
    (["convert", "a", "b", "--kv-rank", "0"], "'--kv-rank': 0 is not in the range x>=1"),
    (["convert", "a", "b", "--rope-dim", "3"], "'--rope-dim': 3 is not even"),
    (["convert", "a", "b", "--cache-ratio", "33"], "'--cache-ratio': 33.0 is not in the range 0<x<1"),
    (["convert", "a", "b", "--cache-values", "2"], "'--cache-values': 2 is not in the range x>=3"),
    (["convert", "a", "b", "--calibration-tokens", "0"], "'--calibration-tokens': 0 is not in the range x>=16"),
    (["convert", "a", "b", "--seed", "-1"], "'--seed': -1 is not in the range x>=0"),
    (["convert", "a", "b", "--calibration", "gone.txt"], "'--calibration': File 'gone.txt' does not exist"),
    (["convert", "a", "b", "--private"], "--private is for --push"),
    (["eval", "a", "b", "--dtype", "auto"], "'auto' is not one of 'bfloat16', 'float32', 'float16'"),
    (["eval", "a", "b", "--device", "gpu 1"], "'--device': 'gpu 1': expected auto, cpu"),
    (["eval", "a", "b", "--windows", "0"], "'--windows': 0 is not in the range x>=1"),
    (["eval", "a", "b", "--skip", "-1"], "'--skip': -1 is not in the range x>=0"),
    (["eval", "a", "b", "--speed", "--contexts", "64,0"], "'--contexts': 0 is not in the range x>=1"),
    (["eval", "a", "b", "--speed", "--batches", "1,x"], "'--batches': 'x' is not a valid integer range"),
    (["eval", "a", "b", "--limit", "0"], "'--limit': 0 is not in the range x>=1"),
    (["eval", "a", "b", "--batch-size", "0"], "'--batch-size': 0 is not in the range x>=1"),
    (["eval", "a", "b", "--include-path", "gone"], "'--include-path': Directory 'gone' does not exist"),
    (["eval", "a", "b", "--text", "gone.txt"], "'--text': File 'gone.txt' does not exist"),
    (["eval", "a", "b", "--json", "gone/a.json"], "--json gone/a.json: its folder does not exist"),
    (["eval", "a", "b", "--html", "a.html", "--json", "a.html"], "--json and --html: expected two files"),
    (["inspect", "a", "--device", "cpu"], "--device is for --calibrate"),
    (["inspect", "a", "--calibration-tokens", "99"], "--calibration-tokens is for --calibrate"),
    (["inspect", "a", "-q"], "--quiet is for --calibrate"),
    (["inspect", "a", "--calibrate", "--target", "mla"], "'--target': 'mla' is not one of"),
]
ALL_OF_THEM = """
import json, sys
from click.testing import CliRunner
from latentfold.convert.cli import main
results = [CliRunner().invoke(main, command) for command in json.loads(sys.argv[1])]
loaded = [name for name in ("torch", "transformers", "huggingface_hub", "matplotlib") if name in sys.modules]
print(json.dumps([loaded, [[result.exit_code, result.stderr] for result in results]]))
"""


def test_wrong_options_are_answered_before_torch_loads(tmp_path: Path) -> None:
    commands = json.dumps([command for command, _ in WRONG])
    done = subprocess.run([sys.executable, "-c", ALL_OF_THEM, commands], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded, results = json.loads(done.stdout)
    assert loaded == [], "a typo waited for them"
    for (command, message), (status, stderr) in zip(WRONG, results, strict=True):
        assert status == 2 and message in stderr, f"{command}: {stderr}"
    assert list(tmp_path.iterdir()) == []


def test_choices_are_written_once() -> None:
    """What an option offers is what the code behind it takes."""
    assert tuple(DTYPES) == choices.DTYPES
    for command in main.commands.values():
        for param in command.params:
            if param.name == "dtype":
                assert isinstance(param.type, click.Choice)
                offered = choices.PRODUCTS if command.name == "heal" else DTYPES
                assert set(param.type.choices) - {"auto"} == set(offered)


def test_float16_where_the_model_becomes_native(tmp_path: Path, text_file: Path) -> None:
    """Whether a dtype is possible depends on the target, which `auto` leaves to the model."""
    source = save_family(tmp_path / "source", "qwen3")
    done = invoke("convert", source, tmp_path / "out", *TINY_SIZES, "--calibration", text_file, "--dtype", "float16")
    assert done.exit_code == 0, done.output
    assert read_recipe(tmp_path / "out").options.dtype == "float16"


# --------------------------------------------------------------------------------------------- debug


@pytest.mark.parametrize("command", [["inspect"], ["convert", "out"], ["eval", "b"], ["card"], ["push", "me/b"]])
def test_debug_shows_where_an_error_comes_from(command: list[str], tmp_path: Path) -> None:
    name, *rest = command
    args = [name, tmp_path / "gone", *rest]
    plain = invoke(*args)
    assert plain.exit_code == 2 and len(plain.stderr.splitlines()) == 1
    for traced in (invoke(*args, "--debug"), invoke(*args, LATENTFOLD_DEBUG="1")):
        assert traced.exit_code == 2 and traced.stdout == ""
        assert traced.stderr.startswith("Traceback (most recent call last):") and "InputError" in traced.stderr
        assert traced.stderr.splitlines()[-1] == plain.stderr.strip()
    assert invoke(*args, LATENTFOLD_DEBUG="0").stderr == plain.stderr


def test_debug_reaches_what_convert_runs(
    make_model: MakeModel, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentfold.convert.publish.push.check_target", lambda *_, **__: None)
    monkeypatch.setattr("latentfold.eval.comparison.evaluate", lambda *_, **__: (tmp_path / "gone").read_text())
    command = ["convert", make_model(), tmp_path / "out", *TINY_SIZES, "--calibration", text_file, "--push", "me/b"]
    failed = invoke(*command, "--debug")
    assert failed.exit_code == 2 and "Traceback" in failed.stderr and "FileNotFoundError" in failed.stderr


# ------------------------------------------------------------------------------------------- inspect


def test_inspect_calibrates_as_it_is_told(
    make_model: MakeModel, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ConversionConfig] = []

    def noted(config: ConversionConfig) -> Job:
        asked.append(config)
        return prepare(config)

    monkeypatch.setattr("latentfold.convert.api.prepare", noted)
    options = ["--calibration", text_file, "--calibration-tokens", 192, "--seq-len", 48, "--device", "cpu"]
    targets = ["--target", "native", "--engine", "transformers"]
    done = invoke("inspect", make_model(), "--calibrate", *options, *targets, "--quiet")
    assert done.exit_code == 0 and done.stderr == "", done.output
    (config,) = asked
    assert (config.calibration, config.calibration_tokens, config.seq_len) == ((str(text_file),), 192, 48)
    assert (config.device, config.target, config.engine) == ("cpu", "native", "transformers")
    assert "expected error" in done.stdout
    loud = invoke("inspect", make_model(), "--calibrate", *options, "--json")
    assert json.loads(loud.stdout)["estimates"] and "sizes" in loud.stderr


# ---------------------------------------------------------------------------------------- completion


def completed(words: str) -> list[str]:
    """What bash is offered for the last word."""
    env = {
        "_LATENTFOLD_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return [line.partition(",")[2] for line in invoke(**env).stdout.splitlines()]


def test_completion() -> None:
    assert completed("latentfold conv") == ["convert"]
    assert completed("latentfold convert a b --target ") == ["auto", "deepseek", "native"]
    assert completed("latentfold eval a b --dtype fl") == ["float32", "float16"]
    assert "--calibration-tokens" in completed("latentfold inspect a --cal")
    script = invoke(_LATENTFOLD_COMPLETE="bash_source").stdout
    assert "complete -o nosort -F _latentfold_completion latentfold" in script


# ------------------------------------------------------------------------------- what is typed again


def parsed(line: str) -> tuple[click.Command, dict[str, Any]]:
    name, *rest = shlex.split(line.removeprefix("latentfold "))
    command = main.commands[name]
    return command, command.make_context(name, rest).params


@pytest.mark.parametrize(
    "line",
    [
        "eval a b",
        "eval a b --skip 0 --prompt ' x' --prompt /a/b --continuations",
        "eval a b --text hf:x/y --text hf:z --seq-len 64 --windows 2",
        "eval a b --speed --contexts 512,1024 --batches 1,8 --device cuda:1 --dtype bfloat16",
        "eval a b --tasks arc_easy,hellaswag --limit 3 --batch-size 2 --no-save --json - --revision main --stream",
        "push out me/b --private --revision x --tag v1 --message 'My own' --allow-unevaluated",
        "convert a b --cache-ratio 0.25 --rope-dim 0 --seed 3 --dtype float16 --dry-run",
    ],
)
def test_a_command_typed_again_is_the_same(line: str) -> None:
    command, values = parsed(line)
    again = command_line(command, values | {"token": "hf_secret"})
    assert parsed(again) == (command, values) and "hf_secret" not in again
    assert len(again.split()) == len(line.split()) + 1, "defaults are left out"


def test_a_command_that_is_published_names_no_folders(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    command, values = parsed(f"eval {tmp_path}/a {tmp_path}/b --text {tmp_path}/mine.txt --prompt /etc/x --full")
    assert command_line(command, values, public=True) == "latentfold eval a b --text mine.txt --full --prompt /etc/x"


# ---------------------------------------------------------------------------------------- what is next


@pytest.mark.parametrize(("family", "remote"), [("llama", ""), ("qwen3", ", trust_remote_code=True")])
def test_what_is_next(family: str, remote: str, tmp_path: Path, text_file: Path) -> None:
    source, out = save_family(tmp_path / "my source", family), tmp_path / "out"
    sizes = [option for option in TINY_SIZES if option != "--quiet"]
    converted = invoke("convert", source, out, *sizes, "--calibration", text_file)
    assert converted.exit_code == 0 and converted.stdout == f"{out}\n"
    assert converted.stderr.splitlines()[-3:] == [
        f"Next: latentfold eval '{source}' {out}",
        f"      latentfold push {out} NAMESPACE/NAME",
        f'      AutoModelForCausalLM.from_pretrained("{out}"{remote})  # transformers',
    ]
    options = ["--text", text_file, "--seq-len", 64, "--windows", 1]
    evaluated = invoke("eval", source, out, *options)
    assert evaluated.stderr.splitlines()[-2:] == [
        f"Next: latentfold card {out}",
        f"      latentfold push {out} NAMESPACE/NAME",
    ]
    assert json.loads((out / EVALUATION).read_text())["provenance"]["command"] == (
        "latentfold eval 'my source' out --text text.txt --seq-len 64 --windows 1"
    )
    assert "Next" not in invoke("eval", source, out, *options, "--no-save").stderr
    assert invoke("eval", source, out, *options, "--quiet").stderr == ""
