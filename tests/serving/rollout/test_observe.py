"""Evidence from the gateway: what cannot be read is left out, and hides nothing that comes after it."""

from narrowgauge.serving.rollout.observe import RecordReader

RECORD = {
    "seq": 1,
    "t_end": 100.0,
    "model": "m",
    "revision": "new",
    "role": "canary",
    "shadow": False,
    "status": 200,
    "fault": None,
    "finish_reason": "stop",
    "ttft_s": 0.1,
    "itl_p50_s": 0.01,
    "e2e_s": 0.5,
    "prompt_tokens": 3,
    "output_tokens": 4,
}


class Gateway:
    """The records' half of the gateway's admin API."""

    def __init__(self, *records):
        self.records = list(records)
        self.asked = []

    async def json(self, path):
        after = int(path.partition("after=")[2].partition("&")[0])
        self.asked.append(after)
        return {"records": self.records[after:], "next": len(self.records)}


async def test_a_record_that_cannot_be_read_hides_none_after_it():
    without_a_key = {key: value for key, value in RECORD.items() if key != "revision"}
    gateway = Gateway(RECORD, without_a_key, None, 7, {**RECORD, "t_end": 101.0})
    reader = RecordReader(gateway)
    await reader.refresh()
    gateway.records.append({**RECORD, "t_end": 102.0})
    await reader.refresh()
    assert [record.t_end for record in reader.of("new", since=0.0)] == [100.0, 101.0, 102.0]
    assert gateway.asked == [0, 5], "no page is fetched twice"
