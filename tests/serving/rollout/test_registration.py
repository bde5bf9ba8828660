"""What a rollout reads and writes in a real MLflow registry (SQLite)."""

import pytest

from narrowgauge.serving.registry import RegisterRequest, Registry
from narrowgauge.serving.rollout.registration import RegistryRegistrar, VersionRejected
from narrowgauge.serving.rollout.spec import Revision, read_spec
from narrowgauge.serving.rollout.state import Rollout
from narrowgauge.serving.settings import read_settings


def revision(digest, model="m"):
    return Revision(model=model, uri="file:///x", digest=digest)


def rollout(digest):
    spec = read_spec({"version": 1, "model": "m", "steps": [], "gates": []})
    return Rollout(id="r", revision=revision(digest), spec=spec, stable=None, override=None, created_at=0.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A registry with two good versions (a, b) and a rejected one (c)."""
    settings = read_settings({"NG_HOME": str(tmp_path_factory.mktemp("home"))})
    registry = Registry(settings.mlflow_tracking_uri, home=settings.home)
    for digest, verdict in (("a", "passed"), ("b", "passed"), ("c", "rejected")):
        registry.register(RegisterRequest(name="m", digest=digest, uri="file:///x", verdict=verdict))
    return RegistryRegistrar(settings), registry


def test_promotion_moves_champion_and_keeps_the_previous_one(world):
    registrar, registry = world
    assert "champion" in registrar.record(rollout("a"), "promoted")
    assert "previous: version 1" in registrar.record(rollout("b"), "promoted")
    registrar.record(rollout("b"), "promoted")  # a controller that was killed in between does it again
    assert registry.by_alias("m", "champion").version == 2
    assert registry.by_alias("m", "previous").version == 1
    assert registry.by_digest("m", "b").tags["narrowgauge.rollout"] == "promoted"


def test_an_abort_leaves_aliases_alone_and_tags_the_gate(world):
    registrar, registry = world
    before = registry.by_alias("m", "champion")
    registrar.record(rollout("c"), "aborted:golden")
    assert registry.by_digest("m", "c").tags["narrowgauge.rollout"] == "aborted:golden"
    assert registry.by_alias("m", "champion") == before


def test_a_rejected_version_needs_an_override_whose_reason_is_kept(world):
    registrar, registry = world
    with pytest.raises(VersionRejected, match=r"version 3 of m was rejected .*--override"):
        registrar.admit(revision("c"), None)
    registrar.admit(revision("c"), "to show it")
    assert registry.by_digest("m", "c").tags["narrowgauge.override"] == "to show it"
    registrar.admit(revision("a"), None)


def test_what_was_never_registered_rolls_out_without_aliases(world):
    registrar, _ = world
    registrar.admit(revision("z"), None)
    registrar.admit(revision("z", model="org/name"), None)
    assert "aliases skipped" in registrar.record(rollout("z"), "promoted")


def test_without_a_registry_none_is_made(tmp_path):
    settings = read_settings({"NG_HOME": str(tmp_path / "home")})
    registrar = RegistryRegistrar(settings)
    registrar.admit(revision("z"), None)
    assert registrar.models() == ()
    assert registrar.versions("m") == ()
    assert not (tmp_path / "home").exists()
