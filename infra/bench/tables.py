"""Renders result files as Markdown tables between markers, so that no figure in a README is typed by hand.

A README marks the place with `<!-- results: engine-cpu-avx512 -->` and `<!-- end -->`; a pattern behind the file's name
(`<!-- results: quant-cpu-avx512 *_ppl -->`) picks rows. Run `python infra/bench/tables.py` to rewrite what stands between
them, or with `--check` to fail where it would change.
"""

import argparse
import fnmatch
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
_MARKED = re.compile(r"(<!-- results: ([\w.-]+)(?: (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def render(result: dict[str, Any], pattern: str = "*") -> str:
    """One Markdown table of the rows whose names match, and a line that says when, where and by which command they came.

    Raises ValueError where no row matches.
    """
    rows = [row for row in result["rows"] if fnmatch.fnmatchcase(row["name"], pattern)]
    if not rows:
        raise ValueError(f"no row of {result['command']} matches {pattern!r}")
    lines = ["| | ours | peer | ratio |", "|---|---|---|---|"]
    for row in rows:
        peer = "–" if row["peer"] is None else f"{_number(row['peer'])} {row['peer_name']}"
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(f"| {row['name']} ({row['unit']}) | {_number(row['ours'])} | {peer} | {ratio} |")
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    lines += [
        "",
        f"`{result['command']}` on {result['date'][:10]}, {machine.get('name', 'unknown machine')}; {versions}.",
    ]
    return "\n".join(lines) + "\n"


def rewrite(text: str, results: Path = RESULTS) -> str:
    """`text` with every marked table rendered anew. Raises FileNotFoundError for a results file that is not there."""

    def replace(match: re.Match[str]) -> str:
        result = json.loads((results / f"{match[2]}.json").read_text(encoding="utf-8"))
        return match[1] + render(result, match[3] or "*") + match[5]

    return _MARKED.sub(replace, text)


def main() -> int:
    """Rewrites, or with --check compares, every README of the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a table is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        text = path.read_text(encoding="utf-8")
        new = rewrite(text)
        if new != text:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    return int(check and bool(stale))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
