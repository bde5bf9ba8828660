"""Results files: rows, and what is needed to measure them again (machine, versions, commit, command)."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narrowgauge import __version__


def make_result(
    topic: str,
    rows: list[dict[str, Any]],
    command: str,
    *,
    packages: Iterable[str],
    peer_versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of a results file. `packages` are named with their installed versions, missing ones left out."""
    from narrowgauge.kernels.hardware import cpu_class, cpu_flags, cpu_name

    versions = {name: importlib.metadata.version(name) for name in packages if _installed(name)}
    return {
        "topic": topic,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "class": cpu_class(),
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "flags": sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma"))),
        },
        "versions": versions | {f"peer {name}": version for name, version in (peer_versions or {}).items()},
        "command": command,
        "rows": rows,
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a results file, whole or not at all."""
    from narrowgauge.quant.formats.manifest import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())


def commit() -> str:
    """The commit of the source tree this runs from, or the version of the installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return f"v{__version__}"
    answer = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or f"v{__version__}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
