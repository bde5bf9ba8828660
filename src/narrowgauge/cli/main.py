"""The command line: one module a group of commands; each imports its rooms inside the command, so that --help is quick."""

import importlib
import logging
import sys
from typing import Annotated

import typer

from narrowgauge.cli.environment import explained

EXIT_FAILED, EXIT_USAGE, EXIT_GATE = 1, 2, 3

COMMANDS = {
    "quantize": "quantize:quantize",
    "evaluate": "evaluate:evaluate",
    "convert": "convert:convert",
    "inspect": "inspect:inspect",
    "register": "registry:register",
    "list": "registry:list_models",
    "show": "registry:show",
    "serve": "serve:serve",
    "gateway": "gateway:gateway",
    "controller": "controller:controller",
    "stop": "stop:stop",
    "release": "release:release",
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
}
GROUPS = {"rollout": "rollout:app", "bench": "bench:app"}


def make_app() -> typer.Typer:
    """Assembles the command line from the tables above."""
    app = typer.Typer(
        name="narrowgauge",
        help="Quantize a language model, judge it, register it, and roll it out under health gates.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_common)
    for name, target in COMMANDS.items():
        app.command(name)(_load(target))
    for name, target in GROUPS.items():
        app.add_typer(_load(target), name=name)
    return app


def run() -> None:
    """Entry point. Our named errors and the machine's become one line; anything else is a bug and shows its trace."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    try:
        make_app()()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if (text := str(error) if _is_ours(error) else explained(error)) is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", EXIT_FAILED))


def _show_version(wanted: bool) -> None:
    if wanted:
        from narrowgauge import __version__

        print(f"narrowgauge {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
]


def _common(version: Version = False) -> None:
    """What stands before the command."""


def _load(target: str):  # type: ignore[no-untyped-def]
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(f"narrowgauge.cli.{module}"), attribute)


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "narrowgauge"
