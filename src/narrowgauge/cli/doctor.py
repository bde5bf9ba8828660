"""`narrowgauge doctor`: what this machine has, what the engine would choose, and whether its kernels are right."""

import json as json_module
from typing import Annotated

import typer

_COLOURS = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "red"}


def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for a warning too, not for a failure only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")] = False,
) -> None:
    """Check versions, processor, storage and every kernel that can run here against its eager twin."""
    from narrowgauge.engine.doctor import run_checks
    from narrowgauge.serving.settings import read_settings

    checks = run_checks(read_settings().home)
    bad = {"fail", "warn"} if strict else {"fail"}
    failed = [check for check in checks if check.status in bad]
    if json:
        found = [{"name": check.name, "status": check.status, "detail": check.detail} for check in checks]
        print(json_module.dumps({"ok": not failed, "checks": found}, indent=1))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("check", "status", "finding")
        for check in checks:
            table.add_row(check.name, Text(check.status, style=_COLOURS[check.status]), Text(check.detail))
        Console().print(table)
    if failed:
        raise typer.Exit(1)
