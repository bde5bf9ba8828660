"""One digest gives one version, whoever registers it at once; nothing is written outside NG_HOME."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from narrowgauge.serving.registry import ModelVersion, RegisterRequest, Registry, RegistryError


def registry_in(home: Path) -> Registry:
    return Registry(f"sqlite:///{home}/mlflow/mlflow.db", home=home)


def request(digest: str = "a" * 64, **changes: object) -> RegisterRequest:
    fields: dict[str, object] = {
        "name": "tiny",
        "digest": digest,
        "uri": f"file:///store/{digest}",
        "verdict": "passed",
        "scheme": "W4A16",
        "recipe_digest": "b" * 64,
        "params": {"method": "gptq"},
        "metrics": {"perplexity": 12.5},
        "texts": {"report.md": "# figures\n"},
        "tables": {"layers.json": {"layer": ["q_proj"], "error": [0.25]}},
    }
    return RegisterRequest(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_a_registered_version_carries_its_tags_figures_and_files(tmp_path: Path) -> None:
    registry = registry_in(tmp_path)
    version = registry.register(request())
    assert (version.version, version.verdict, version.aliases) == (1, "passed", ("candidate",))
    assert version.tags["narrowgauge.recipe_digest"] == "b" * 64
    assert registry.metrics(version) == {"perplexity": 12.5}
    files = {path.name for path in (tmp_path / "mlflow" / "artifacts").rglob("*") if path.is_file()}
    assert {"report.md", "layers.json"} <= files
    assert not any(path.suffix == ".safetensors" for path in tmp_path.rglob("*"))


def test_registering_a_digest_again_gives_the_same_version_and_no_second_run(home: Path) -> None:
    registry = registry_in(home)
    first = registry.register(request(name="again"))
    assert registry.register(request(name="again")) == first
    assert [version.version for version in registry.versions("again")] == [1]


def test_a_rejected_version_never_becomes_candidate(home: Path) -> None:
    registry = registry_in(home)
    good = registry.register(request("1" * 64, name="judged"))
    bad = registry.register(request("2" * 64, name="judged", verdict="rejected"))
    assert bad.verdict == "rejected"
    assert bad.aliases == ()
    candidate = registry.by_alias("judged", "candidate")
    assert candidate is not None
    assert candidate.digest == good.digest


def test_a_second_judgement_changes_the_verdict_of_the_version_and_takes_candidate_away(home: Path) -> None:
    registry = registry_in(home)
    registry.register(request(name="twice"))
    again = registry.register(request(name="twice", verdict="rejected", metrics={"perplexity": 99.0}))
    assert (again.version, again.verdict, again.aliases) == (1, "rejected", ())
    assert registry.metrics(again) == {"perplexity": 99.0}
    assert registry.by_alias("twice", "candidate") is None


def test_an_unjudged_version_has_no_verdict_tag_and_is_no_candidate(home: Path) -> None:
    version = registry_in(home).register(request(name="unjudged", verdict="unjudged"))
    assert version.verdict == "unjudged"
    assert "narrowgauge.verdict" not in version.tags
    assert version.aliases == ()


def test_aliases_and_tags_move_and_what_is_absent_is_none(home: Path) -> None:
    registry = registry_in(home)
    one = registry.register(request("1" * 64, name="moves"))
    two = registry.register(request("2" * 64, name="moves"))
    registry.set_alias("moves", "champion", one.version)
    registry.set_alias("moves", "champion", two.version)
    registry.set_tag("moves", two.version, key="narrowgauge.rollout", value="promoted")
    champion = registry.by_alias("moves", "champion")
    assert champion is not None
    assert (champion.version, champion.tags["narrowgauge.rollout"]) == (2, "promoted")
    assert registry.by_digest("moves", "1" * 64) == registry.by_version("moves", 1)
    assert registry.by_alias("moves", "previous") is None
    assert registry.by_version("moves", 9) is None
    assert registry.by_digest("nobody", "1" * 64) is None
    assert registry.by_alias("nobody", "champion") is None


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("models:/nobody@champion", "no model 'nobody'"),
        ("models:/resolved@champion", "no alias 'champion'"),
        ("models:/resolved/7", "no version 7"),
        ("models:/resolved", "write models:/NAME@ALIAS"),
    ],
)
def test_an_unresolvable_uri_is_named(home: Path, uri: str, says: str) -> None:
    registry = registry_in(home)
    registry.register(request(name="resolved"))
    with pytest.raises(RegistryError, match=says):
        registry.resolve(uri)


def test_a_name_that_would_change_the_query_is_refused() -> None:
    with pytest.raises(RegistryError, match="model name"):
        request(name="x' or name != 'y")


def test_eight_threads_that_register_one_digest_get_one_version(tmp_path: Path) -> None:
    def register(_: int) -> ModelVersion:
        return registry_in(tmp_path).register(request())

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(register, range(8)))
    assert len({version.version for version in versions}) == 1
    assert len(registry_in(tmp_path).versions("tiny")) == 1


def test_four_processes_that_register_one_digest_get_one_version_and_write_only_in_ng_home(tmp_path: Path) -> None:
    home, elsewhere, user_home = tmp_path / "ng", tmp_path / "cwd", tmp_path / "home"
    elsewhere.mkdir()
    user_home.mkdir()
    program = textwrap.dedent(f"""
        from pathlib import Path
        from narrowgauge.serving.registry import Registry, RegisterRequest
        home = Path({str(home)!r})
        registry = Registry(f"sqlite:///{{home}}/mlflow/mlflow.db", home=home)
        request = RegisterRequest(name="tiny", digest="d" * 64, uri="file:///x", verdict="passed", metrics={{"p": 1.0}})
        print(registry.register(request).version)
    """)
    kept = ("NG_", "MLFLOW_", "XDG_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(kept)} | {
        "HOME": str(user_home)
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    answers = [child.communicate(timeout=120)[0].strip() for child in children]
    assert answers == ["1"] * 4
    assert len(registry_in(home).versions("tiny")) == 1
    assert list(elsewhere.iterdir()) == []
    assert list(user_home.iterdir()) == []
