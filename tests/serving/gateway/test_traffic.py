"""Traffic states: the split by buckets, what is refused, epochs, and what a restarted gateway finds."""

import json
import math

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.serving.gateway.traffic import StaleEpoch, TrafficError, TrafficTable, bucket, read_state

PLAIN = {"epoch": 3, "stable": "a", "replicas": {"a": ["http://127.0.0.1:8000"]}}
SPLIT = {
    "epoch": 4,
    "stable": "a",
    "canary": "b",
    "canary_bp": 1000,
    "shadow_bp": 0,
    "replicas": {"a": ["http://127.0.0.1:8000"], "b": ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]},
}


@given(st.text())
def test_a_bucket_is_xxh32_with_seed_7_modulo_10000(key):
    data = key.encode("utf-8", "surrogatepass")
    assert bucket(key) == bucket(data) == xxhash.xxh32(data, seed=7).intdigest() % 10_000


@pytest.mark.parametrize("share", [1, 100, 1_000, 5_000, 9_999])
def test_the_share_of_100000_sessions_is_the_share_asked_for(share):
    keys = 100_000
    hits = sum(bucket(f"session-{number}") < share for number in range(keys))
    p = share / 10_000
    assert abs(hits - keys * p) <= 4 * math.sqrt(keys * p * (1 - p))


def test_raising_the_share_moves_no_session_back():
    numbers = [bucket(f"user-{number}") for number in range(5_000)]
    before = set()
    for share in (0, 50, 1_000, 2_500, 5_000, 10_000):
        now = {index for index, number in enumerate(numbers) if number < share}
        assert before <= now
        before = now
    assert len(before) == 5_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": True}, "epoch: must be a whole number, not True"),
        ({"epoch": -1}, "epoch: must be 0 or more, not -1"),
        ({"stable": ""}, "stable: must name a revision"),
        ({"canary_bp": 10_001}, r"canary_bp: must be from 0 to 10000 \(units of 0.01 %\), not 10001"),
        ({"canary_bp": 0.5}, "canary_bp: must be a whole number"),
        ({"canary": None}, "canary_bp: is 1000 but there is no canary"),
        ({"canary": None, "canary_bp": 0, "shadow_bp": 5}, "shadow_bp: is 5 but there is no canary"),
        ({"canary": "a"}, "canary: must name a revision other than stable, not 'a'"),
        ({"canary": "c"}, "replicas: revision c is named but has no replica"),
        ({"replicas": {"a": ["http://h:1"], "b": []}}, "replicas: revision b is named but has no replica"),
        ({"replicas": {"a": ["http://h:1"], "b": ["http://h:1"]}}, "http://h:1 is listed twice"),
        ({"replicas": {"a": ["http://h:1/v1"], "b": ["http://h:2"]}}, "'http://h:1/v1' is not http://HOST:PORT"),
        ({"replicas": {"a": ["127.0.0.1:80"], "b": ["http://h:2"]}}, "is not http://HOST:PORT"),
        ({"replicas": {"a": ["http://h:99999"], "b": ["http://h:2"]}}, "is not http://HOST:PORT"),
        ({"replicas": "a"}, "replicas: must be a mapping"),
        ({"canry": "b"}, r"canry: unknown key \(did you mean 'canary'\?\)"),
    ],
)
def test_a_state_that_cannot_be_served_is_refused_in_one_line(changes, message):
    with pytest.raises(TrafficError, match=message) as refusal:
        read_state({**SPLIT, **changes})
    assert "\n" not in str(refusal.value)


def test_a_revision_without_a_role_may_keep_its_replicas():
    state = read_state({**PLAIN, "replicas": {**PLAIN["replicas"], "old": ["http://127.0.0.1:9000"]}})
    assert state.replicas["old"] == ("http://127.0.0.1:9000",)


async def test_an_older_epoch_is_refused_with_the_state_in_force(tmp_path):
    table = TrafficTable(tmp_path)
    current = await table.put("m", read_state(SPLIT))
    with pytest.raises(StaleEpoch, match=r"epoch 3 is older than the one in force \(4\)") as refusal:
        await table.put("m", read_state(PLAIN))
    assert refusal.value.current == current == table.get("m")


async def test_an_equal_epoch_is_taken_only_with_an_equal_state(tmp_path):
    table = TrafficTable(tmp_path)
    await table.put("m", read_state(SPLIT))
    assert await table.put("m", read_state(SPLIT)) == read_state(SPLIT)
    with pytest.raises(StaleEpoch, match="epoch 4 is equal to the one in force"):
        await table.put("m", read_state({**SPLIT, "canary_bp": 2000}))
    assert table.get("m").canary_bp == 1000


@pytest.mark.parametrize("model", ["m", "org/model", "..", ".", "a b%2F", "ü" * 20])
async def test_a_kept_state_is_found_again_under_any_name(tmp_path, model):
    await (table := TrafficTable(tmp_path)).put(model, read_state(PLAIN))
    await table.put(model, read_state(SPLIT))
    again = TrafficTable(tmp_path)
    again.load()
    assert dict(again.states()) == {model: read_state(SPLIT)}
    assert len(list(tmp_path.iterdir())) == 1, "nothing but the state lies there, and nothing outside"


@pytest.mark.parametrize("model", ["", "x" * 201])
async def test_a_name_that_no_file_can_carry_is_refused(tmp_path, model):
    with pytest.raises(TrafficError, match="model: a name has 1 to 200 characters"):
        await TrafficTable(tmp_path).put(model, read_state(PLAIN))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", json.dumps({**PLAIN, "epoch": "x"}).encode(), b"\xff"])
async def test_a_damaged_file_is_passed_over_with_a_warning(tmp_path, caplog, content):
    await TrafficTable(tmp_path).put("good", read_state(PLAIN))
    (tmp_path / "bad.json").write_bytes(content)
    table = TrafficTable(tmp_path)
    table.load()
    assert set(table.states()) == {"good"}
    assert "bad.json" in caplog.text


async def test_a_state_that_cannot_be_kept_is_not_put_in_force(tmp_path):
    folder = tmp_path / "traffic"
    table = TrafficTable(folder)
    table.load()
    await table.put("m", read_state(PLAIN))
    (folder / "m.json").unlink()
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        await table.put("m", read_state(SPLIT))
    assert table.get("m") == read_state(PLAIN)
