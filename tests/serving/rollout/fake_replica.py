"""A replica without a model: a real HTTP server in a real process that scores from a table and misbehaves on demand.

Takes the arguments of `narrowgauge serve`; its "checkpoint" is a JSON file with the knobs below. Standard library only,
so that it starts in tenths of a second.
"""

import argparse
import ctypes
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VOCABULARY = 64
KNOBS = {
    "load_s": 0.0,
    "crash_at_load": False,
    "never_ready": False,
    "delay_s": 0.0,
    "broken": False,  # every request answers 500
    "error_every": 0,  # of users' requests; 2 = every second one answers 500
    "gibberish": False,
    "claims_digest": None,
}


def logprobs_after(token, *, gibberish):
    """Top-20 log-probabilities after a token: one clear winner, which a gibberish model gets wrong."""
    winner = (7 * token + (29 if gibberish else 3)) % VOCABULARY
    others = [(winner + offset) % VOCABULARY for offset in range(1, 20)]
    return {winner: math.log(0.62)} | {other: math.log(0.02) for other in others}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        if self.path == "/ready":
            self.answer(200 if server.ready.is_set() and not server.stopping.is_set() else 503, {})
        elif self.path == "/version":
            digest = server.knobs["claims_digest"] or server.arguments.digest
            self.answer(200, {"revision": server.arguments.revision, "digest": digest, "pid": os.getpid()})
        else:
            self.answer(200 if self.path == "/live" else 404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            text = body.get("prompt") or "".join(message["content"] for message in body["messages"])
            self.answer(200, {"tokens": [ord(character) % VOCABULARY for character in text][:16]})
        else:
            self.answer(*self.complete(body))

    def complete(self, body):
        server = self.server
        knobs, scoring = server.knobs, body.get("echo")
        gibberish = knobs["gibberish"]
        user = not scoring and not body.get("return_tokens_as_token_ids")
        if user:
            time.sleep(knobs["delay_s"])
            with server.lock:
                server.count += 1
                bad = server.warm and knobs["error_every"] and server.count % knobs["error_every"] == 0
                server.warm = server.warm or server.count >= 3
            if bad or knobs["broken"]:
                return 500, {"error": {"message": "injected", "type": "server_error"}}
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [1]
        ids = list(prompt)
        for _ in range(body["max_tokens"]):
            table = logprobs_after(ids[-1], gibberish=gibberish)
            ids.append(max(table, key=table.get))
        shown = ids if scoring else ids[len(prompt) :]
        first = 0 if scoring else len(prompt)
        tops = [
            {f"token_id:{token}": value for token, value in logprobs_after(ids[i - 1], gibberish=gibberish).items()}
            if i
            else None
            for i in range(first, len(ids))
        ]
        logprobs = {"tokens": [f"token_id:{token}" for token in shown], "top_logprobs": tops}
        choice = {"index": 0, "text": "gibberish" if gibberish else "good", "finish_reason": "length"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids) - len(prompt)}
        answer = {"id": "1", "object": "text_completion", "model": body["model"], "usage": usage}
        answer["system_fingerprint"] = server.arguments.revision
        return 200, {**answer, "choices": [{**choice, "logprobs": logprobs if body.get("logprobs") else None}]}

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("x-narrowgauge-revision", self.server.arguments.revision)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def end_with(owner):
    """Ends this process soon after the tests' process, however that ended: no run leaves replicas behind."""
    while Path(f"/proc/{owner}").exists():
        time.sleep(0.5)
    os._exit(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    for flag in ("--fd", "--served-model-name", "--revision", "--digest", "--admin-socket", "--threads", "--die-with"):
        parser.add_argument(flag)
    arguments = parser.parse_args()
    if arguments.die_with:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if owner := os.environ.get("FAKE_REPLICA_OWNER"):
        threading.Thread(target=end_with, args=(owner,), daemon=True).start()
    knobs = KNOBS | json.loads(Path(arguments.uri).read_text())
    time.sleep(knobs["load_s"])
    if knobs["crash_at_load"]:
        sys.exit(7)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(arguments.fd))
    server.socket.listen(128)
    server.server_name, server.server_port = server.socket.getsockname()
    server.daemon_threads = False
    server.arguments, server.knobs, server.count, server.warm = arguments, knobs, 0, False
    server.lock, server.ready, server.stopping = threading.Lock(), threading.Event(), threading.Event()
    if not knobs["never_ready"]:
        server.ready.set()

    def stop(*_):
        server.stopping.set()
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    Handler.timeout = 0.5  # an idle kept-alive connection must not keep the process
    server.serve_forever(poll_interval=0.05)
    server.server_close()


if __name__ == "__main__":
    main()
