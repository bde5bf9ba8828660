"""build/load: what is accepted, and what a refusal says."""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.quant.formats.read import ReadError, build, canonical_json, digest, load, plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    bits: int
    kind: Literal["int", "float"] = "int"

    def __post_init__(self):
        if self.bits < 2:
            raise ValueError(f"bits: at least 2, not {self.bits}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    version: Literal[1]
    alpha: float = 0.5
    enabled: bool = False
    inner: Inner | None = None
    names: tuple[str, ...] = ()
    limits: dict[str, int] = dataclasses.field(default_factory=dict)


class Method:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fancy(Method):
    name: Literal["fancy"]
    strength: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithMethods:
    methods: tuple[Method, ...]


REGISTRIES = {Method: {"fancy": f"{__name__}:Fancy"}}


def test_defaults_are_filled_in_and_whole_numbers_become_floats():
    built = build(Outer, {"version": 1, "alpha": 1, "inner": {"bits": 4}, "names": ["a"], "limits": {"x": 3}})
    assert built == Outer(version=1, alpha=1.0, inner=Inner(bits=4), names=("a",), limits={"x": 3})
    assert isinstance(built.alpha, float)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"version": 1, "alhpa": 1.0},
            r"x\.yaml: alhpa: unknown key \(did you mean 'alpha'\?\); allowed: version, alpha",
        ),
        ({}, r"x\.yaml: version: is missing; Outer needs it"),
        ({"version": 2}, r"version: 2 is not one of 1"),
        ({"version": True}, r"version: True is not one of 1"),
        ({"version": 1, "inner": {"bits": True}}, r"inner\.bits: must be a whole number, not True \(bool\)"),
        ({"version": 1, "inner": {"bits": 4.0}}, r"inner\.bits: must be a whole number, not 4\.0 \(float\)"),
        ({"version": 1, "inner": {"bits": 1}}, r"x\.yaml: inner: bits: at least 2, not 1"),
        ({"version": 1, "inner": {"bits": 4, "kind": "flaot"}}, r"inner\.kind: 'flaot' .*did you mean 'float'"),
        (
            {"version": 1, "alpha": "1e-2"},
            r"alpha: must be a number, not '1e-2' \(str\); YAML reads 1e-2 as text: write 0\.01",
        ),
        ({"version": 1, "alpha": float("nan")}, r"alpha: must be a finite number"),
        ({"version": 1, "enabled": 1}, r"enabled: must be true or false, not 1 \(int\)"),
        ({"version": 1, "names": "abc"}, r"names: must be a list, not 'abc'"),
        ({"version": 1, "names": ["a", 2]}, r"names\[1\]: must be text, not 2"),
        ({"version": 1, "limits": {"x": "y"}}, r"limits\.x: must be a whole number"),
        ({"version": 1, "limits": {1: 2}}, r"limits: the key 1 must be text"),
        ({"version": 1, "enabled": None}, r"enabled: must be true or false, not null"),
        ([], r"x\.yaml: must be a mapping with the keys of Outer, not a list"),
    ],
)
def test_a_refusal_names_the_file_the_key_and_what_would_do(mapping, message):
    with pytest.raises(ReadError, match=message):
        build(Outer, mapping, source="x.yaml")


def test_a_named_entry_is_built_from_the_registry_that_is_handed_in():
    built = build(WithMethods, {"methods": [{"name": "fancy", "strength": 2}]}, registries=REGISTRIES)
    assert built.methods == (Fancy(name="fancy", strength=2.0),)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "fanzy"}, r"methods\[0\]: unknown name 'fanzy' \(did you mean 'fancy'\?\); known: fancy"),
        ({"strength": 2}, r"methods\[0\]: needs a 'name', one of: fancy"),
        ({"name": "fancy", "strenght": 2}, r"methods\[0\]\.strenght: unknown key \(did you mean 'strength'"),
        ("fancy", r"methods\[0\]: needs a 'name'"),
    ],
)
def test_a_wrong_named_entry_lists_the_registry(entry, message):
    with pytest.raises(ReadError, match=message):
        build(WithMethods, {"methods": [entry]}, registries=REGISTRIES)


def test_a_file_that_is_missing_malformed_or_repeats_a_key_is_refused(tmp_path):
    with pytest.raises(ReadError, match="cannot be read: No such file"):
        load(Outer, tmp_path / "absent.yaml")
    path = tmp_path / "x.yaml"
    path.write_text("version: [1")
    with pytest.raises(ReadError, match="is not valid YAML"):
        load(Outer, path)
    path.write_text("version: 1\nalpha: 1\nalpha: 2\n")
    with pytest.raises(ReadError, match="the key 'alpha' stands twice"):
        load(Outer, path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ReadError, match="not UTF-8"):
        load(Outer, path)


def test_the_digest_depends_on_the_value_and_not_on_how_it_was_written(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("inner: {kind: int, bits: 4}\nversion: 1\n")
    assert digest(load(Outer, path)) == digest(build(Outer, {"version": 1, "alpha": 0.5, "inner": {"bits": 4}}))
    assert digest(load(Outer, path)) != digest(build(Outer, {"version": 1, "inner": {"bits": 5}}))


@given(
    st.builds(
        Outer,
        version=st.just(1),
        alpha=st.floats(allow_nan=False, allow_infinity=False),
        enabled=st.booleans(),
        inner=st.none() | st.builds(Inner, bits=st.integers(2, 8), kind=st.sampled_from(["int", "float"])),
        names=st.lists(st.text()).map(tuple),
        limits=st.dictionaries(st.text(), st.integers()),
    )
)
def test_what_is_written_as_json_is_built_again_as_the_same_value(value):
    again = build(Outer, json.loads(canonical_json(value)))
    assert again == value
    assert plain(again) == plain(value)
