"""Golden scores over HTTP: an odd answer is a reason to try again, never an error of the controller."""

import http.server
import json
import threading

import pytest

from narrowgauge.serving.rollout.gates.base import CollectError, Probe
from narrowgauge.serving.rollout.gates.golden import GoldenPrompt
from narrowgauge.serving.rollout.scoring import score_prompts

TOKENS = {"tokens": [1, 2]}
ODD = [7, None, [1], "text", {"choices": 3}, {"choices": [1]}, {"choices": [{"logprobs": {"tokens": [None]}}]}]


@pytest.fixture
def replica():
    """A replica that gives the answers of a table, by path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(server.answers[self.path]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.answers = {}
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def score(replica, **answers):
    replica.answers = {"/tokenize": answers["tokenize"], "/v1/completions": answers.get("completions")}
    probe = Probe(model="m", canary_url=replica.url, stable_url=replica.url)
    return await score_prompts([GoldenPrompt(prompt="hello")], probe)


@pytest.mark.parametrize("answer", [7, None, [1], {"tokens": [None]}, {"tokens": 3}, {"tokens": ["x"]}])
async def test_a_tokenizer_that_answers_oddly_is_tried_again(replica, answer):
    with pytest.raises(CollectError, match="http://127"):
        await score(replica, tokenize=answer)


@pytest.mark.parametrize("answer", ODD)
async def test_a_completion_of_another_shape_is_tried_again(replica, answer):
    with pytest.raises(CollectError):
        await score(replica, tokenize=TOKENS, completions=answer)
