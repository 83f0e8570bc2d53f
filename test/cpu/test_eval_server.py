"""Runs against a server over real HTTP, which answers right, wrong, late, or not as it should, in a set pattern."""

import collections
import contextlib
import email.utils
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headfit import cli
from headfit.evals.client import Endpoint, Reply, RequestError
from headfit.evals.store import append, read_run

COUNT = 44
# What question i is answered, attempt after attempt: pattern i % 11. The last step is the one that is scored.
PATTERN = [
    ["right"],
    ["wrong"],
    ["slow", "right"],
    ["429", "right"],
    ["500", "500", "wrong"],
    ["truncated", "right"],
    ["dropped", "reset", "right"],
    ["cut"],
    ["not json", "no choices", "right"],
    ["aborted", "chunks cut", "unmarked"],
    ["503", "right"],
]
FAILING = {
    "slow",
    "429",
    "500",
    "truncated",
    "dropped",
    "reset",
    "not json",
    "no choices",
    "aborted",
    "chunks cut",
    "503",
}
STATUS = {"429": 429, "500": 500, "503": 503, "401": 401}
SLOW_HEADS = {
    "slow headers": b"X-Wait: 1\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n",
    "slow line": b"H",
}
DEEP = b'{"choices":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
KEY = "sk-0123456789"
SLOW = 3.0
TIMEOUT = 1.5
COPIES = COUNT // len(PATTERN)
RIGHT_BY_MARK = COPIES * sum(steps[-1] == "right" for steps in PATTERN)
RIGHT_BY_LAST = COPIES * sum(steps[-1] in ("right", "unmarked") for steps in PATTERN)
FAILURES = COPIES * sum(step in FAILING for steps in PATTERN for step in steps)


class Server:
    """Answers `What is twice <i>?` (gold 2 i) as `steps(i, n)` says for the n-th request of question i."""

    def __init__(self, steps):
        self.steps = steps
        self.models = {"data": [{"id": "twice", "owned_by": "test"}]}
        self.requests = []  # (question, step, body) in order of arrival
        self.delay = 0.0
        self._counts = collections.Counter()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.send_json(200, server.models)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    server.answer(self, body)

            def send_json(self, status, answer, *, missing=0, headers=()):
                content = json.dumps(answer).encode()
                self.send_raw(status, content[: len(content) - missing], len(content), headers)

            def send_raw(self, status, content, length, headers=()):
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
                if len(content) < length:
                    self.close_connection = True

        class Http(ThreadingHTTPServer):
            request_queue_size = 128  # the default of 5 drops connections, which come back a second later
            daemon_threads = True

        self._http = Http(("127.0.0.1", 0), Handler)
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def asked(self):
        """How often each question was."""
        return collections.Counter(question for question, _, _ in self.requests)

    def answer(self, handler, body):
        chat = handler.path == "/v1/chat/completions"
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        question = int(re.findall(r"twice (\d+)", text)[-1])
        with self._lock:
            step = self.steps(question, self._counts[question], body)
            self._counts[question] += 1
            self.requests.append((question, step, body))
        time.sleep(SLOW if step == "slow" else self.delay)
        answer = completion(2 * question, step, chat)
        if step in STATUS:
            headers = [("Retry-After", "0")] if step == "429" else []
            told = f"busy, and no {handler.headers['Authorization']}"
            handler.send_json(STATUS[step], {"error": told}, headers=headers)
        elif step == "truncated":
            handler.send_json(200, answer, missing=20)
        elif step in ("dropped", "reset"):
            if step == "reset":
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
        elif step == "chunks cut":
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            handler.wfile.write(b'8\r\n{"choice\r\n')
            handler.close_connection = True
        elif step == "drip":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.05)
        elif step in SLOW_HEADS:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n" if step == "slow headers" else b"")
            for _ in range(200):
                handler.wfile.write(SLOW_HEADS[step])
                time.sleep(0.05)
        elif step == "not json":
            handler.send_raw(200, b"<html>", 6)
        elif step == "deep":
            handler.send_raw(200, DEEP, len(DEEP))
        elif step == "no choices":
            handler.send_json(200, {"choices": []})
        else:
            handler.send_json(200, answer)


def completion(number, step, chat):
    """An OpenAI answer that says `number`, or another one, or none."""
    text = {
        "wrong": f"#### {number + 1}",
        "cut": "So we have 1 and then",
        "unmarked": f"I get {number}",
        "nothing": "I give up.",
    }.get(step, f"First 7.\n#### {number}.00")
    reason = {"cut": "length", "aborted": "abort"}.get(step, "stop")
    choice = {"index": 0, "finish_reason": reason}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"choices": [choice], "usage": {"completion_tokens": 9}}


def by_pattern(question, attempt, body):
    steps = PATTERN[question % len(PATTERN)]
    return steps[min(attempt, len(steps) - 1)]


def always_right(question, attempt, body):
    return "right"


@pytest.fixture
def serve():
    """Start a server with its own steps."""
    started = []

    def start(steps=by_pattern):
        started.append(Server(steps))
        return started[-1]

    yield start
    for server in started:
        server.close()


def questions(folder, count=COUNT):
    file = folder / "questions.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"What is twice {i}?", "answer": str(2 * i)}) + "\n" for i in range(count))
    )
    return file


def command(server, folder, *more, out="run.jsonl", count=COUNT):
    asked = ["eval", "gsm8k", "--base-url", server.url, "--data", questions(folder, count), "--num-shots", 0]
    asked += ["--out", folder / out, "--timeout", TIMEOUT, "--concurrency", 8, "--json", "--pause", 0.01, *more]
    return [str(each) for each in asked]


def run_json(capfd, argv):
    code = cli.main(argv)
    out, err = capfd.readouterr()
    assert code == cli.OK, err
    return json.loads(out)


def assert_scored_by_pattern(score):
    assert score["answers"] == COUNT and score["length_stops"] == COPIES
    assert score["extractors"]["marked"]["right"] == RIGHT_BY_MARK
    assert score["extractors"]["last"]["right"] == RIGHT_BY_LAST
    assert score["extractors"]["marked"]["no_answer"] == 2 * COPIES and score["extractors"]["last"]["no_answer"] == 0


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_score_is_the_patterns(capfd, tmp_path, serve, api):
    server = serve()
    result = run_json(capfd, command(server, tmp_path, "--api", api))
    assert_scored_by_pattern(result["score"])
    assert result["score"]["failed_requests"] == FAILURES
    assert result["arm"]["model"] == "twice" and result["arm"]["server"] == "test"
    assert server.asked() == {i: len(PATTERN[i % len(PATTERN)]) for i in range(COUNT)}
    errors = collections.Counter(row["error"].partition(":")[0] for row in read_run(tmp_path / "run.jsonl").errors)
    assert errors["no answer within 1.5 s"] == COPIES and errors["finish_reason 'abort'"] == COPIES
    assert errors["HTTP 429"] == COPIES and errors["HTTP 500"] == 2 * COPIES
    assert sum(count for error, count in errors.items() if error.startswith("body cut off")) == 2 * COPIES
    for _, _, body in server.requests:
        assert body["model"] == "twice" and body["temperature"] == 0 and body["max_tokens"] == 2048
        assert ("stop" in body) == (api == "completions")


def test_scoring_again_needs_no_server(capfd, tmp_path, serve):
    server = serve()
    first = run_json(capfd, command(server, tmp_path))
    server.close()
    assert run_json(capfd, ["eval", "score", str(tmp_path / "run.jsonl"), "--json"])["score"] == first["score"]
    assert cli.main(["eval", "score", str(tmp_path / "run.jsonl")]) == cli.OK
    assert f"{RIGHT_BY_MARK} of {COUNT}" in capfd.readouterr().out


def stored_keys(file):
    """Questions whose answers stand in whole lines of the file."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    return [row["index"] for row in map(json.loads, lines) if row["kind"] == "answer"]


def test_kill_9_and_going_on(capfd, tmp_path, serve):
    server, file = serve(), tmp_path / "run.jsonl"
    server.delay = 0.05
    argv, stored = command(server, tmp_path), []
    for least in (5, 15, 25):  # killed three times
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen([sys.executable, "-m", "headfit.cli", *argv], env=environment)
        deadline = time.monotonic() + 60
        while len(stored_keys(file)) < least:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        time.sleep(0.2)  # requests that were under way arrive
        assert server.requests and not set(server.asked()) & set(stored)
        stored = stored_keys(file)
        assert least <= len(stored) < COUNT
        del server.requests[:]
    server.delay = 0.0
    assert_scored_by_pattern(run_json(capfd, argv)["score"])
    assert server.requests and not set(server.asked()) & set(stored)
    assert sorted(stored_keys(file)) == list(range(COUNT))


def test_a_complete_run_asks_nothing(capfd, tmp_path, serve):
    server = serve(always_right)
    first = run_json(capfd, command(server, tmp_path))
    content, asked = (tmp_path / "run.jsonl").read_bytes(), len(server.requests)
    assert run_json(capfd, command(server, tmp_path)) == first
    assert (tmp_path / "run.jsonl").read_bytes() == content and len(server.requests) == asked


def test_used_up_attempts_fail_the_run_and_are_no_wrong_answer(capfd, tmp_path, serve):
    broken = {"now": True}
    server = serve(lambda i, attempt, body: "500" if i == 30 and broken["now"] else "right")
    argv = command(server, tmp_path, "--attempts", 3)
    assert cli.main(argv) == cli.FAILED
    out, err = capfd.readouterr()
    assert out == "" and "question 30 repeat 0: HTTP 500" in err and "the same command goes on" in err
    assert server.asked()[30] == 3
    stored = stored_keys(tmp_path / "run.jsonl")
    assert 0 < len(stored) < COUNT and 30 not in stored
    assert cli.main(["eval", "score", str(tmp_path / "run.jsonl")]) == cli.BAD_INPUT
    assert f"{COUNT - len(stored)} of {COUNT} answers are missing" in capfd.readouterr().err
    broken["now"] = False
    del server.requests[:]
    score = run_json(capfd, argv)["score"]
    assert score["extractors"]["marked"]["right"] == COUNT and score["failed_requests"] == 3
    assert not set(server.asked()) & set(stored)


def test_a_refusal_for_good_is_not_repeated(capfd, tmp_path, serve):
    server = serve(lambda i, attempt, body: "401")
    assert cli.main(command(server, tmp_path, "--concurrency", 1)) == cli.FAILED
    assert "HTTP 401" in capfd.readouterr().err and len(server.requests) == 1


def test_repeats_draw_with_seeds_of_their_own(capfd, tmp_path, serve):
    server = serve(lambda i, attempt, body: ["right", "wrong"][body["seed"] % 2])
    more = ("--repeats", 4, "--temperature", 1.0, "--top-p", 0.9, "--thinking", "off", "--seed", 3)
    score = run_json(capfd, command(server, tmp_path, *more, count=6))["score"]
    assert score["answers"] == 24 and score["extractors"]["marked"]["right"] == 12
    bodies = [body for _, _, body in server.requests]
    assert len({body["seed"] for body in bodies}) == 24
    assert all(body["chat_template_kwargs"]["enable_thinking"] is False and body["top_p"] == 0.9 for body in bodies)


def test_shots_stand_before_the_question(capfd, tmp_path, serve):
    server, shots = serve(always_right), tmp_path / "shots.jsonl"
    rows = [{"question": f"What is half of {2 * i}?", "answer": f"Half.\n#### {i}"} for i in range(7)]
    shots.write_text("\n".join(map(json.dumps, rows)))
    result = run_json(capfd, command(server, tmp_path, "--shots", shots, "--num-shots", 5, "--limit", 1))
    text = server.requests[0][2]["messages"][0]["content"]
    assert text.startswith("Question: What is half of 0?\nAnswer: Half.\n#### 0\n\nQuestion: What is half of 2?")
    assert text.endswith("#### 4\n\nQuestion: What is twice 0?\nAnswer:")
    assert result["settings"]["num_shots"] == 5 and result["settings"]["shots"] == "shots.jsonl"
    argv = command(server, tmp_path, "--shots", tmp_path / "questions.jsonl", "--num-shots", 1, out="other.jsonl")
    assert cli.main(argv) == cli.BAD_INPUT
    assert "shot 1: is one of the scored questions" in capfd.readouterr().err


def chat_answer(**message):
    reason = message.pop("reason", "stop")
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}


def test_reasoning_that_the_server_keeps_apart_is_kept(monkeypatch):
    answers = iter(
        [
            chat_answer(content="#### 4", reasoning_content="2 + 2"),
            chat_answer(content=None, reasoning_content="2 + 2 is", reason="length"),
            chat_answer(content=""),
        ]
    )
    monkeypatch.setattr(Endpoint, "_call", lambda *args: next(answers))
    endpoint = Endpoint("http://localhost/v1", "chat", 1.0)
    assert endpoint.ask("", {}) == Reply("#### 4", "stop", "2 + 2")
    assert endpoint.ask("", {}) == Reply("", "length", "2 + 2 is")
    assert endpoint.ask("", {}) == Reply("", "stop")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"message": "text", "finish_reason": "stop"}]},
        {"choices": chat_answer(content="a")["choices"] * 2},
        {"error": {"message": "busy"}},
        chat_answer(content=None),
        chat_answer(content=["part"]),
        chat_answer(content="a", reason=None),
        chat_answer(content="a", reason="content_filter"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(monkeypatch, answer):
    monkeypatch.setattr(Endpoint, "_call", lambda *args: answer)
    with pytest.raises(RequestError) as refused:
        Endpoint("http://localhost/v1", "chat", 1.0).ask("", {})
    assert refused.value.retryable


@pytest.mark.parametrize("step", ["drip", *SLOW_HEADS])
def test_the_deadline_holds_for_the_whole_answer(serve, step):
    server = serve(lambda i, attempt, body: step)
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"no answer within 0\.5 s"):
        Endpoint(server.url, "chat", 0.5).ask("What is twice 3?", {})
    assert time.monotonic() - start < 2


def test_the_deadline_holds_while_nothing_is_read():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "chat", 0.5)
        start = time.monotonic()
        with pytest.raises(RequestError, match=r"no answer within 0\.5 s"):
            endpoint.ask("a" * (1 << 25), {})
        assert time.monotonic() - start < 2


def test_what_the_server_repeats_of_the_key_is_not_stored(capfd, tmp_path, serve, monkeypatch):
    server = serve(lambda i, attempt, body: "401")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert cli.main(command(server, tmp_path, "--concurrency", 1)) == cli.FAILED
    err = capfd.readouterr().err
    assert "busy, and no Bearer (API key)" in err and KEY not in err
    assert KEY.encode() not in (tmp_path / "run.jsonl").read_bytes()
    assert KEY not in repr(Endpoint(server.url, "chat", 1.0, KEY))


@pytest.mark.parametrize("end", ["\n", "\r\nX-Other: 1", " ", "\x00", "\u2026"])
def test_a_key_that_no_header_holds_is_refused_unseen(end):
    with pytest.raises(
        ValueError, match=r"OPENAI_API_KEY: \(not shown\) has .* at position 14 of .*, allowed: "
    ) as refused:
        Endpoint("http://localhost/v1", "chat", 1.0, KEY + end)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{KEY}@host/v1",
        f"user:{KEY}@host/v1",
        f"http://user:{KEY}/[@host/v1",
        f"http://host/v1?key={KEY}",
        f"http://host/v1#{KEY}",
    ],
)
def test_a_password_or_key_in_the_address_is_refused_unseen(capfd, tmp_path, serve, url):
    assert cli.main(command(serve(), tmp_path, "--base-url", url)) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert "base_url: (not shown) holds" in err and "allowed: http://" in err and "OPENAI_API_KEY" in err
    assert KEY not in err and err.count("\n") == 1 and not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("url", ["http://h:x/v1", "http://h:0/v1", "http://[::1/v1", "http://a..b/v1", "http://h/v 1"])
def test_an_address_of_no_server_is_refused(url):
    with pytest.raises(ValueError, match=r"base_url: 'http://.*', allowed: http://host:port/v1"):
        Endpoint(url, "chat", 1.0)


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [
        ("3", (3, 3)),
        (email.utils.formatdate(time.time() + 600, usegmt=True), (1, 600)),
        (email.utils.formatdate(time.time() - 600, usegmt=True), (0, 0)),
        ("soon", None),
    ],
    ids=["seconds", "date", "past", "neither"],
)
def test_the_server_says_when_to_ask_again(wait, seconds):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answer = f"HTTP/1.1 503 Busy\r\nRetry-After: {wait}\r\nContent-Length: 0\r\n\r\n".encode()

        def reply():
            connection = listening.accept()[0]
            connection.recv(1 << 16)
            connection.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        with pytest.raises(RequestError, match="HTTP 503") as refused:
            Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "chat", 5.0).models()
    found = refused.value.retry_after
    assert found is None if seconds is None else seconds[0] <= found <= seconds[1]


def test_a_body_of_any_depth_is_asked_for_again(capfd, tmp_path, serve):
    server = serve(lambda i, attempt, body: "right" if attempt else "deep")
    score = run_json(capfd, command(server, tmp_path, count=3))["score"]
    assert score["extractors"]["marked"]["right"] == 3 and score["failed_requests"] == 3


@pytest.mark.parametrize("depth", [5, 500])
def test_what_is_shown_of_an_answer_has_an_end(monkeypatch, depth):
    deep = json.loads("[" * depth + "]" * depth)
    for answer in ({"choices": deep}, chat_answer(content=deep), chat_answer(content="a", reason=deep)):
        monkeypatch.setattr(Endpoint, "_call", lambda *args, answer=answer: answer)
        with pytest.raises(RequestError) as refused:
            Endpoint("http://localhost/v1", "chat", 1.0).ask("", {})
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("models", "code", "part"),
    [
        ([], cli.BAD_INPUT, "--model: not given, allowed: a name; the server lists no model"),
        ([{"id": "a"}, {"id": "b"}], cli.BAD_INPUT, "--model: not given, allowed: one of a, b"),
        ([{"id": 1}, {"id": 2}], cli.FAILED, "GET /models: unexpected answer {'data': [{'id': 1}"),
    ],
)
def test_models_that_leave_none_to_choose(capfd, tmp_path, serve, models, code, part):
    server = serve(always_right)
    server.models = {"data": models}
    assert cli.main(command(server, tmp_path)) == code
    err = capfd.readouterr().err
    assert part in err and err.count("\n") == 1
    assert run_json(capfd, command(server, tmp_path, "--model", "b", count=2))["arm"]["model"] == "b"


def test_a_server_that_is_not_there(capfd, tmp_path, serve):
    server = serve()
    server.close()
    for more in ((), ("--model", "twice")):
        assert cli.main(command(server, tmp_path, *more)) == cli.FAILED
        assert "refused" in capfd.readouterr().err
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_whose_server_hangs(tmp_path, serve, default_signals, sent, code):
    server, file = serve(lambda i, attempt, body: "drip" if i > 8 else "right"), tmp_path / "run.jsonl"
    argv = command(server, tmp_path, "--timeout", 600, "--concurrency", 2)
    process = subprocess.Popen([sys.executable, "-m", "headfit.cli", *argv], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(stored_keys(file)) < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    err = process.communicate(timeout=20)[1]
    assert process.returncode == code and err.startswith("headfit: error: ") and err.count("\n") == 1
    assert len(read_run(file).answers) >= 8


def test_another_run_is_not_mixed_in(capfd, tmp_path, serve):
    server = serve(always_right)
    run_json(capfd, command(server, tmp_path))
    assert cli.main(command(server, tmp_path, "--max-tokens", 99)) == cli.BAD_INPUT
    assert "max_tokens 2048 there, 99 now" in capfd.readouterr().err
    assert len(read_run(tmp_path / "run.jsonl").answers) == COUNT


def test_the_same_questions_from_another_file_go_on_and_compare(capfd, tmp_path, serve):
    server, shot = serve(always_right), {"question": "What is half of 4?", "answer": "2"}
    for name, row in (("a", shot), ("b", shot | {"source": "elsewhere"}), ("c", shot | {"answer": "2.0"})):
        (tmp_path / f"shots-{name}.jsonl").write_text(json.dumps(row))
    copy = tmp_path / "copy.jsonl"

    def ask(data, shots, out):
        more = ("--data", data, "--shots", tmp_path / f"shots-{shots}.jsonl", "--num-shots", 1)
        return command(server, tmp_path, *more, out=out)

    run_json(capfd, ask(questions(tmp_path), "a", "run.jsonl"))
    copy.write_text("\n" + (tmp_path / "questions.jsonl").read_text())
    del server.requests[:]
    run_json(capfd, ask(copy, "b", "run.jsonl"))
    assert not server.requests
    run_json(capfd, ask(copy, "b", "other.jsonl"))
    files = [str(tmp_path / "run.jsonl"), str(tmp_path / "other.jsonl")]
    found = run_json(capfd, ["eval", "compare", *files, "--json"])
    assert found["verdict"] == "no drop shown" and "data" not in found["settings"]
    assert [arm["data"] for arm in found["arms"]] == ["questions.jsonl", "copy.jsonl"]
    assert [arm["shots"] for arm in found["arms"]] == ["shots-a.jsonl", "shots-b.jsonl"]
    assert cli.main(ask(copy, "c", "run.jsonl")) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert "prompts_sha256" in err and "shots 'shots-a.jsonl' there, 'shots-c.jsonl' now" in err


RUN = {"task": "gsm8k", "num_questions": 2, "repeats": 1, "stop": []}
ANSWER = {"kind": "answer", "index": 0, "repeat": 0, "gold": "4", "text": "#### 4", "finish_reason": "stop"}
GONE = object()


def changed(row, changes):
    return {name: value for name, value in (row | changes).items() if value is not GONE}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"settings": GONE}, "line 1: settings: missing, allowed: an object"),
        ({"settings": []}, "line 1: settings: [], allowed: an object"),
        ({"arm": GONE}, "line 1: arm: missing, allowed: an object"),
        ({"arm": {"server": [[[[[[]]]]]]}}, "line 1: nested too deep, allowed: 5 levels"),
    ],
)
def test_a_first_line_that_is_no_runs_is_refused(capfd, tmp_path, changes, part):
    assert_no_run(capfd, tmp_path, part, changed({"kind": "run", "format": 1, "settings": RUN, "arm": {}}, changes))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"task": 3}, "task: 3, allowed: a text"),
        ({"num_questions": 0}, "num_questions: 0, allowed: an integer of 1 or more"),
        ({"num_questions": 10**9}, "num_questions x repeats: 1000000000, allowed: 1 to 10000000"),
        ({"repeats": 0}, "repeats: 0, allowed"),
        ({"repeats": True}, "repeats: True, allowed"),
        ({"repeats": GONE}, "repeats: missing, allowed"),
        ({"stop": GONE}, "stop: missing, allowed: a list of texts"),
        ({"stop": [""]}, "stop: [''], allowed: a list of texts"),
    ],
)
def test_settings_of_no_run_are_refused(capfd, tmp_path, changes, part):
    run = {"kind": "run", "format": 1, "settings": changed(RUN, changes), "arm": {}}
    assert_no_run(capfd, tmp_path, f"line 1: settings: {part}", run)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"text": GONE}, "text: missing, allowed: a text"),
        ({"text": None}, "text: None, allowed: a text"),
        ({"text": 4}, "text: 4, allowed: a text"),
        ({"gold": GONE}, "gold: missing, allowed: a text that states a number"),
        ({"gold": 4}, "gold: 4, allowed"),
        ({"gold": "many"}, "gold: answer: 'many' states no number"),
        ({"finish_reason": GONE}, "finish_reason: missing, allowed: stop or length"),
        ({"finish_reason": "abort"}, "finish_reason: 'abort', allowed"),
        ({"index": [1]}, "unknown, uncalled for or there twice"),
        ({"index": False}, "unknown, uncalled for or there twice"),
        ({"index": 0.0}, "unknown, uncalled for or there twice"),
        ({"kind": "error", "repeat": 1}, "unknown, uncalled for or there twice"),
    ],
)
def test_an_answer_that_cannot_be_scored_is_refused(capfd, tmp_path, changes, part):
    run = {"kind": "run", "format": 1, "settings": RUN, "arm": {}}
    assert_no_run(capfd, tmp_path, f"line 2: {part}", run, changed(ANSWER, changes))


def test_a_line_of_any_depth_is_refused(capfd, tmp_path):
    (tmp_path / "run.jsonl").write_bytes(DEEP + b"\n")
    assert_no_run(capfd, tmp_path, "line 1: not JSON (maximum recursion depth exceeded")


def assert_no_run(capfd, folder, part, *rows):
    """Scoring and comparing the file, and going on with it, are refused in one line that names it."""
    file = folder / "run.jsonl"
    if rows:
        file.touch()
        append(file, rows)
    content = file.read_bytes()
    go_on = ["eval", "gsm8k", "--local", "tiny", "--data", str(questions(folder, 2)), "--num-shots", "0"]
    go_on += ["--out", str(file), "--device", "cpu", "--max-tokens", "5"]
    for argv in (["eval", "score", str(file)], ["eval", "compare", str(file), str(file)], go_on):
        assert cli.main(argv) == cli.BAD_INPUT
        out, err = capfd.readouterr()
        assert out == "" and f"headfit: error: {file} {part}" in err and err.count("\n") == 1, err
    assert file.read_bytes() == content


def test_devices_and_folders_are_no_files(capfd, tmp_path, serve):
    server = serve(always_right)
    for out in ("/dev/full", tmp_path):
        assert cli.main(command(server, tmp_path, "--out", out)) == cli.BAD_INPUT
        assert f"{out}: not a regular file, allowed: " in capfd.readouterr().err
    argv = command(server, tmp_path, "--data", "/dev/zero")
    for each in (argv, ["eval", "score", "/dev/zero"]):
        assert cli.main(each) == cli.BAD_INPUT
        assert "/dev/zero: a device, allowed: a file" in capfd.readouterr().err


def test_more_answers_than_memory_holds_are_refused(capfd, tmp_path, serve):
    assert cli.main(command(serve(), tmp_path, "--repeats", 2**31 - 1)) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert "num_questions x repeats: " in err and not (tmp_path / "run.jsonl").exists()


def test_the_comparison_is_printed_whatever_else_fails(capfd, tmp_path, serve, monkeypatch):
    run_json(capfd, command(serve(always_right), tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = str(tmp_path / "run.jsonl")
    for more in (("--plot", str(tmp_path / "a.png")), ("--report", str(tmp_path / "none" / "a.md"))):
        assert cli.main(["eval", "compare", file, file, *more]) == cli.BAD_INPUT
        out, err = capfd.readouterr()
        assert "Verdict: " in out and err.count("\n") == 1


@pytest.mark.parametrize("answer", ["18.0", "18", '"18."', '"18%"', '"18 %."', "1.8e1", '"It is so.\\n#### 18."'])
def test_answers_that_state_a_number(capfd, tmp_path, serve, answer):
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"question": "What is twice 9?", "answer": {answer}}}\n')
    score = run_json(capfd, command(serve(always_right), tmp_path, "--data", file))["score"]
    assert score["extractors"]["marked"]["right"] == 1


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ('{"question": "a", "answer": NaN}', "'NaN' states no number"),
        ('{"question": "a", "answer": 1e999999999}', "states no number"),
        ('{"question": "a", "answer": [1]}', "which may be a number"),
        ('{"question": "half \\ud83d", "answer": 1}', "'\\ud83d', half of a surrogate pair, allowed: Unicode text"),
        (DEEP.decode(), "not JSON (maximum recursion depth"),
    ],
    ids=["nan", "large", "list", "surrogate", "deep"],
)
@pytest.mark.parametrize("target", ["--base-url", "--local"])
def test_a_line_that_is_no_question_is_refused(capfd, tmp_path, target, row, part):
    file = tmp_path / "data.jsonl"
    file.write_text(row + "\n")
    where = {"--base-url": "http://localhost:1/v1", "--local": "tiny"}[target]
    argv = [
        "eval",
        "gsm8k",
        target,
        where,
        "--data",
        str(file),
        "--num-shots",
        "0",
        "--out",
        str(tmp_path / "run.jsonl"),
    ]
    assert cli.main(argv) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert f"{file} line 1: " in err and part in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--num-shots", 5), "--num-shots 5: allowed with --data: --shots FILE"),
        (("--limit", 45), "45 questions asked for, allowed: 0 to 44"),
        (("--base-url", "localhost:1"), "base_url: 'localhost:1', allowed: http://"),
        (("--local", "tiny"), "not allowed with argument"),
        (("--data", "/none.jsonl"), "/none.jsonl"),
        (("--temperature", "-1"), "--temperature"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(capfd, tmp_path, serve, more, part):
    server = serve()
    assert cli.main(command(server, tmp_path, *map(str, more))) == cli.BAD_INPUT
    err = capfd.readouterr().err
    assert part in err and err.count("\n") == 1 and not server.requests
    assert not (tmp_path / "run.jsonl").exists()


def test_a_small_cap_on_aime_is_warned_of(capfd, tmp_path, serve):
    server = serve(always_right)
    argv = command(server, tmp_path, "--max-tokens", 4096, "--repeats", 1)
    argv[1] = "aime25"
    assert cli.main(argv) == cli.OK
    assert "--max-tokens 4096 cuts long reasoning off" in capfd.readouterr().err
    assert server.requests[0][2]["messages"][0]["content"].endswith("within \\boxed{}.")


def test_sampled_arms_of_one_model_seldom_differ(capfd, tmp_path, serve):
    """Negative control: 20 pairs of arms that differ in their seed alone."""

    def drawn(i, attempt, body):
        def uniform(*key):
            return zlib.crc32(repr(key).encode()) / 2**32

        return "right" if uniform(i, body["seed"]) < 0.3 + 0.65 * uniform(i) else "wrong"

    server = serve(drawn)
    for seed in range(40):
        out, more = f"seed{seed}.jsonl", ("--temperature", 1.0, "--seed", seed, "--timeout", 30)
        run_json(capfd, command(server, tmp_path, *more, out=out, count=50))
    found, shares = [], []
    for seed in range(0, 40, 2):
        pair = [str(tmp_path / f"seed{each}.jsonl") for each in (seed, seed + 1)]
        comparison = run_json(capfd, ["eval", "compare", *pair, "--json"])
        found.append(comparison["differences"]["marked"])
        shares.append(comparison["scores"][0]["extractors"]["marked"]["accuracy"])
    assert sum(each["mcnemar_p"] < 0.05 for each in found) <= 3
    assert all(each["losses"] + each["gains"] >= 5 for each in found)  # the arms do differ by chance
    assert 0.4 < sum(shares) / len(shares) < 0.85
