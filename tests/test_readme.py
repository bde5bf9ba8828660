"""The README promises only what is there: figures come from results files, commands exist, links lead somewhere."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.cli.main import COMMANDS, GROUPS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")]


def test_every_figure_in_a_table_is_rendered_from_a_results_file():
    script = ROOT / "infra" / "bench" / "tables.py"
    result = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_table_shows_both_sides_and_where_it_was_measured():
    render = runpy.run_path(str(ROOT / "infra" / "bench" / "tables.py"))["render"]
    row = {"name": "bf16/b1", "unit": "tok/s", "ours": 91.24, "peer": 40.5, "peer_name": "transformers", "ratio": 2.253}
    text = render(
        {
            "rows": [row, {**row, "name": "alone", "peer": None, "ratio": None}],
            "machine": {"name": "cpu-avx512"},
            "date": "2026-11-30T10:00:00",
            "versions": {"torch": "2.13.0"},
            "command": "narrowgauge bench engine",
        }
    )
    assert "| bf16/b1 (tok/s) | 91.2 | 40.5 transformers | 2.25 |" in text
    assert "| alone (tok/s) | 91.2 | – | – |" in text
    assert "`narrowgauge bench engine` on 2026-11-30, cpu-avx512; torch 2.13.0." in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_command_in_the_readme_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"^(?:\$ )?narrowgauge ([a-z]+)", text, flags=re.MULTILINE))
    assert used
    assert used <= {*COMMANDS, *GROUPS}


def test_every_make_target_in_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    used = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert used
    assert used <= targets
