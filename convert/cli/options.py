"""What the commands share: options, and how errors and files are treated."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from latentfold.convert.choices import DTYPES, ENGINES
from latentfold.convert.errors import InputError
from latentfold.convert.files import public_name
from latentfold.convert.targets.registry import TARGETS

DATA_ERRORS = 2
DEBUG = "latentfold.debug"


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """One line on stderr and status 2 for what the user can mend; with --debug a traceback before it.

    That includes what the system refuses: a full disk, a folder that may not be written, a name that is too long.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise  # who reads stdout has enough: click ends quietly
        except (InputError, OSError) as error:
            _trace()
            message = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                message = f"{error.filename}: {error.strerror}"
            click.echo("Error: " + with_flags(" ".join(message.split())), err=True)
            sys.exit(DATA_ERRORS)
        except KeyboardInterrupt:
            _trace()
            click.echo("\nInterrupted. convert and push continue where they stopped when they are repeated.", err=True)
            sys.exit(130)

    return _debug_option(wrapped)


def _trace() -> None:
    if click.get_current_context().meta.get(DEBUG):
        traceback.print_exc()


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[DEBUG] = value  # commands that this one runs have it too


_debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    envvar="LATENTFOLD_DEBUG",
    callback=_remember_debug,
    help="Show where an error comes from (also: LATENTFOLD_DEBUG=1).",
)


def with_flags(message: str) -> str:
    """A message with options spelled as the current command has them: `--kv-rank 0: expected ...`.

    A name with an underscore is an option wherever it stands; one that is also a word (`seed`, `token`) where the
    message begins with it, says to pass it, or has it in backticks.
    """
    context = click.get_current_context(silent=True)
    for option in context.command.params if context else ():
        if isinstance(option, click.Option) and option.name is not None:
            name, flag = option.name, _flag(option)
            message = re.sub(rf"`{name}( [^`]*)?`", rf"{flag}\1", message)
            anywhere = rf"(?<![\w/.-]){name}(?![\w/.-])"
            asked = rf"^{name}(?= .*: |: )|(?<=pass ){name}\b|(?<=pass another ){name}\b"
            message = re.sub(anywhere if "_" in name else asked, flag, message)
    return message


def _flag(option: click.Option) -> str:
    return max(option.opts, key=len)


def command_line(command: click.Command, values: Mapping[str, Any], *, public: bool = False) -> str:
    """A command as it can be typed again: options that differ from their default, no token.

    Args:
        values: by parameter.
        public: for a record that may be published; it does not tell where files lie here.
    """
    words = ["latentfold", str(command.name)]
    for param in command.params:
        value = values.get(str(param.name))
        if value is None or value is False or value == () or value == param.default or param.name == "token":
            continue
        each = value if param.multiple else [",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        if public and isinstance(param.type, (Folder, click.Path)):
            each = [public_name(name) for name in each]
        for word in each:
            if isinstance(param, click.Option):
                words.append(_flag(param))
            if value is not True:
                words.append(word)
    return shlex.join(words)


def next_steps(*steps: str) -> None:
    """Say what to do with a result, unless --quiet is given or another command does it anyway."""
    context = click.get_current_context()
    if context.params["quiet"] or (context.parent and not isinstance(context.parent.command, click.Group)):
        return
    for i, step in enumerate(steps):
        click.echo(("Next: " if i == 0 else "      ") + step, err=True)


def loading(name: str, target: str) -> str:
    """The line of Python that loads a result."""
    remote = ", trust_remote_code=True" if TARGETS[target].remote_code else ""
    return f'AutoModelForCausalLM.from_pretrained("{name}"{remote})  # transformers'


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and warnings off the terminal; ours say what matters."""
    import logging

    import transformers

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def check_writable(option: str, name: str) -> None:
    """Find out before the work, not after it, that its result cannot be written; leaves everything as it was.

    Raises:
        InputError: `name` is no file that can be written.
    """
    path = Path(name)
    try:
        if name == "-":
            raise InputError(f"{option} {name}: cannot go to stdout; expected a file")
        if path.is_dir():
            raise InputError(f"{option} {name}: is a folder; expected a file")
        if not path.absolute().parent.is_dir():
            raise InputError(f"{option} {name}: its folder does not exist")
        existed = path.exists()
        with open(path, "a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} {name}: cannot be written ({error.strerror})") from error


class FilesCommand(click.Command):
    """Lets several existing files follow one `--calibration` or `--text`: `--text a.txt b.txt` and `--text *.txt`."""

    files_options = ("--calibration", "--text")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        option: str | None = None
        for i, arg in enumerate(args):
            if arg in self.files_options:
                option = arg
            elif arg.startswith("-"):
                option = None
            elif option and args[i - 1] != option:
                if Path(arg).is_file() or arg.startswith("hf:"):
                    expanded.append(option)
                else:
                    option = None
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


class Folder(click.ParamType):
    """A folder, or a Hub id: which of them, and whether it is there, is found out later."""

    name = "folder"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class Text(click.Path):
    """An existing file, or a data set as `hf:...`."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if str(value).startswith("hf:") else super().convert(value, param, ctx)


class Device(click.ParamType):
    """The form of a torch device's name; whether there is one, torch knows."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not re.fullmatch(r"[a-z]+(:\d+)?", value):
            self.fail(f"{value!r}: expected auto, cpu, cuda, cuda:1 or the like", param, ctx)
        return value


class Even(click.IntRange):
    """Two values a frequency."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number % 2:
            self.fail(f"{number} is not even (two values a frequency).", param, ctx)
        return number


class ListOf(click.ParamType):
    """Comma-separated values of one type: `512,2048`."""

    def __init__(self, kind: click.ParamType) -> None:
        self.kind, self.name = kind, f"{kind.name} list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail(f"{value!r}: expected values with commas between them, such as 512,2048", param, ctx)
        return tuple(self.kind.convert(part, param, ctx) for part in parts)


calibration_option = click.option(
    "--calibration",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE...",
    help="Text or jsonl files to calibrate on. Default: bundled text. "
    "Text from your own domain helps; never use text you will evaluate on.",
)
calibration_tokens_option = click.option(
    "--calibration-tokens",
    type=click.IntRange(16),
    metavar="N",
    default=28672,
    show_default=True,
    help="Tokens to use, at most.",
)
seq_len_option = click.option(
    "--seq-len",
    type=click.IntRange(16),
    metavar="N",
    help="Tokens of a window; default: 4096, or what the model takes.",
)
device_option = click.option(
    "--device", type=Device(), default="auto", show_default=True, help="cpu, cuda, ...; auto: a GPU if any."
)
target_option = click.option(
    "--target",
    type=click.Choice(["auto", *TARGETS]),
    default="auto",
    show_default=True,
    help="deepseek: the stock class that every engine loads; native: latentfold's own, for any family; "
    "auto: deepseek wherever it can hold the model.",
)
engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="any",
    show_default=True,
    help="What has to load the stock class: any engine, or transformers alone, where it holds q/k/v biases too.",
)
stored_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="Stored dtype; auto: the source's. float16: for native alone.",
)
compute_dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Compute dtype."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress, no notices.")
revision_option = click.option("--revision", metavar="REV", help="Branch, tag or commit, for a Hub id.")
token_option = click.option(
    "--token",
    metavar="TOKEN",
    help="Hub token; default: HF_TOKEN or the one `hf auth login` stored.",
)
