"""What the commands share: options, and how errors and files are treated."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from latentfold.convert.errors import InputError

DATA_ERRORS = 2


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """One line on stderr and status 2 for what the user can mend; no traceback.

    That includes what the system refuses: a full disk, a folder that may not be written, a name that is too long.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise  # who reads stdout has enough: click ends quietly
        except (InputError, OSError) as error:
            message = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                message = f"{error.filename}: {error.strerror}"
            click.echo("Error: " + with_flags(" ".join(message.split())), err=True)
            sys.exit(DATA_ERRORS)
        except KeyboardInterrupt:
            click.echo("\nInterrupted. convert and push continue where they stopped when they are repeated.", err=True)
            sys.exit(130)

    return wrapped


def with_flags(message: str) -> str:
    """A message with options spelled as the current command has them: `--kv-rank 0: expected ...`.

    A name with an underscore is an option wherever it stands; one that is also a word (`seed`, `token`) where the
    message begins with it, says to pass it, or has it in backticks.
    """
    context = click.get_current_context(silent=True)
    for option in context.command.params if context else ():
        if isinstance(option, click.Option) and option.name is not None:
            name, flag = option.name, max(option.opts, key=len)
            message = re.sub(rf"`{name}( [^`]*)?`", rf"{flag}\1", message)
            anywhere = rf"(?<![\w/.-]){name}(?![\w/.-])"
            asked = rf"^{name}(?= .*: |: )|(?<=pass ){name}\b|(?<=pass another ){name}\b"
            message = re.sub(anywhere if "_" in name else asked, flag, message)
    return message


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


revision_option = click.option("--revision", metavar="REV", help="Branch, tag or commit, for a Hub id.")
token_option = click.option(
    "--token",
    metavar="TOKEN",
    help="Hub token; default: HF_TOKEN or the one `hf auth login` stored.",
)
