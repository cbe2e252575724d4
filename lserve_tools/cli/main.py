"""The command `lserve-tools`. Commands import torch and transformers when they run, so that `--help` is quick."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from lserve_tools import __version__, env
from lserve_tools.cli import bench, build_cache, cache, profile_heads, run
from lserve_tools.cli import env as env_command
from lserve_tools.cli.errors import explain
from lserve_tools.cli.output import print_data, print_error

# Plain text: no boxes that break paths, and no rich to import.
app = typer.Typer(
    name="lserve-tools",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print_data(f"lserve-tools {__version__}")
        raise typer.Exit


@app.callback()
def lserve_tools(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Read every document once, keep its KV on disk, and answer any number of questions about it.

    In this order: profile-heads finds the heads that retrieve, build-cache reads the documents, run answers a batch.
    """


app.command("profile-heads")(profile_heads.command)
app.command("build-cache")(build_cache.command)
app.command("run")(run.command)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
app.command("env")(env_command.command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; known errors leave with one line on stderr, bugs with a traceback."""
    try:
        app(args=arguments, prog_name="lserve-tools")
    except Exception as error:
        failure = explain(error)
        if failure is None:
            raise
        if env.debug():
            traceback.print_exc()
        print_error(f"error: {failure.message}")
        sys.exit(failure.exit_code)
