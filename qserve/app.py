"""The frame of the command line: the typer app, errors as sentences and exit codes, options that commands share.

Results go to stdout, everything else to stderr. Exit codes are in qserve/errors.py.
"""

import signal
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from qserve.errors import QserveError

STARTED = time.monotonic()


class Commands(TyperGroup):
    """Turns an expected error into its sentence and exit code; nothing else is caught."""

    def invoke(self, ctx: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` blocks end their processes
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show ends nothing
        try:
            return super().invoke(ctx)
        except QserveError as error:
            typer.echo(f"qserve: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            typer.echo("qserve: interrupted; what was finished is kept, the same command goes on from there", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as everything else together
    help="Which quantization of this model should I deploy on this machine for this traffic? Answered by measurement.",
)  # fmt: skip


RecipeArgument = Annotated[
    str | None,
    typer.Argument(help="A recipe file or the name of a shipped one; default ./qserve.yaml, else quickstart."),
]
WorkspaceOption = Annotated[
    Path | None, typer.Option("--workspace", help="Folder of checkpoints and runs [default: ./qserve-workspace]")
]
OnlyOption = Annotated[list[str] | None, typer.Option("--only", help="This variant alone; may be given again.")]
PythonOption = Annotated[
    Path | None, typer.Option("--python", help="Python of an environment of your own, instead of the managed one.")
]


def given_options(context: Any, left_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The options that this call was given, as words that give them again. `left_out`: names of parameters."""
    words: list[str] = []
    for parameter in context.command.params:
        if not isinstance(parameter, TyperOption) or parameter.name in left_out:
            continue
        if context.get_parameter_source(parameter.name).name != "COMMANDLINE":
            continue
        value = context.params[parameter.name]
        if parameter.is_flag:
            words.append(parameter.opts[0])
        else:
            values = value if isinstance(value, list | tuple) else (value,)
            words += [word for each in values for word in (parameter.opts[0], str(each))]
    return tuple(words)


def say(text: str) -> None:
    """One line of progress, with the minutes and seconds since the start."""
    minutes, seconds = divmod(int(time.monotonic() - STARTED), 60)
    typer.echo(f"[{minutes:3d}:{seconds:02d}] {text}", err=True)
