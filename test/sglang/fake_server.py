"""`fake_server.py PORT [faults]`: what `serving.py` asks of an SGLang server, at a speed that its arm sets.

A fault is planted by name; with `--fail-every N` and the like every Nth request gets it.
"""

import argparse
import gzip
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# Seconds a token: the plugin's server is the faster one.
STEP = float(os.environ.get("FAKE_STEP", 0.02 if os.environ.get("HEADFIT_BACKEND") == "off" else 0.01))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults = argparse.Namespace()
    lock = threading.Lock()
    served = 0
    busy = False

    def log_message(self, *args):
        pass

    def do_GET(self):
        info = {"version": "0.0.1", "tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "model_path": "none"}
        if "FAKE_TP_SIZE" in os.environ:
            info |= {"tp_size": int(os.environ["FAKE_TP_SIZE"]), "dp_size": 1, "enable_dp_attention": False}
        if self.faults.no_info:
            info = {}
        self._answer(200, json.dumps(info).encode() if self.path == "/server_info" else b"ok")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            print(self.path, flush=True)
            if self.path == "/flush_cache" and self.faults.hang:
                time.sleep(60)
            if self.path == "/start_profile":
                print(self.faults.say_late, flush=True)
                _write_trace(Path(os.environ["SGLANG_TORCH_PROFILER_DIR"]), self.faults)
            Handler.busy = not Handler.busy  # the first flush comes too early
            return self._answer(400 if self.path == "/flush_cache" and Handler.busy else 200, b"{}")
        with self.lock:
            Handler.served += 1
            fails, garbles, aborts, shortens = (
                every > 0 and Handler.served % every == 0
                for every in (
                    self.faults.fail_every,
                    self.faults.garble_every,
                    self.faults.abort_every,
                    self.faults.shorten_every,
                )
            )
        if Handler.served == self.faults.die_at and os.environ["HEADFIT_BACKEND"] != "off":
            os._exit(3)
        if fails or (self.faults.refuse_long and body["sampling_params"]["max_new_tokens"] > 100):
            return self._answer(400, b'{"error": {"message": "planted"}}')
        if garbles:
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1\r\n\r\n")
            return None
        assert body["stream"] and all(isinstance(token, int) for token in body["input_ids"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        wanted = body["sampling_params"]["max_new_tokens"]
        time.sleep(5 * STEP)
        if self.faults.retract and os.environ["HEADFIT_BACKEND"] == "off":
            for rank in range(self.faults.workers):
                _log(f"[2026 TP{rank}] KV cache pool is full. Retract requests. #retracted_reqs: 1")
            _log("[2026 TP0] Decode batch, #running-req: 1, #queue-req: 7")
        last = 1 if aborts else wanted - shortens
        for count in range(1, last + 1):
            end = {"type": "length", "length": wanted}
            if aborts:
                end = {"message": "planted {abort}", "status_code": 500, "type": "abort"}
            reason = end if count == last else None
            meta = {"id": "x", "finish_reason": reason, "prompt_tokens": 1, "completion_tokens": count}
            event = b"data: " + json.dumps({"output_ids": [1] * count, "meta_info": meta}).encode() + b"\n\n"
            self._chunk(event[:20])  # events need not come whole
            self._chunk(event[20:])
            if count < last:
                time.sleep(STEP)
        _log(f"Decode batch, #running-req: 2, #token: 9, cuda graph: True, gen throughput (token/s): {2 / STEP}")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _log(line):
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # whole, whatever the other requests' threads print


def _write_trace(folder, faults):
    """A trace of ten decode steps, its second half `slow_trace` seconds after its first."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [("sparse_mqa", 2.5), ("gemm", 7.5)] * (9 if faults.prefill_in_trace else 10)
    events = [{"cat": "kernel", "name": name, "dur": time} for name, time in kernels]
    data = gzip.compress(json.dumps({"traceEvents": events}).encode())
    stream = (folder / "1-TP-0.trace.json.gz").open("wb", buffering=0)
    stream.write(data[: len(data) // 2])

    def end():
        time.sleep(faults.slow_trace)
        stream.write(data[len(data) // 2 :])
        stream.close()

    threading.Thread(target=end).start()


def _parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    for name in ("fail", "garble", "abort", "shorten"):
        parser.add_argument(f"--{name}-every", type=int, default=0)
    parser.add_argument("--die-at", type=int, help="the plugin's server ends at that request")
    parser.add_argument("--slow-start", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--slow-trace", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=int(os.environ.get("FAKE_TP_SIZE", 4)))
    parser.add_argument("--answering", type=int, default=64, help="of the workers, how many answer calls")
    parser.add_argument("--kernel", default="fake (asked for)", help="what the workers say that they run")
    parser.add_argument("--say", default="", help="one more line of the plugin's server")
    parser.add_argument("--say-late", default="", help="a line of a profiled server")
    for name in (
        "die",
        "silent",
        "whole",
        "other-heads",
        "no-info",
        "hang",
        "retract",
        "prefill-in-trace",
        "refuse-long",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def _say_what_runs(faults):
    if os.environ.get("HEADFIT_BACKEND") != "off" and not faults.silent:
        for rank in range(faults.workers):
            said = f"process {100 + rank} on cpu: 6 layers; decode kernel: {faults.kernel}; sinks: views"
            print(f"[2026 TP{rank}] INFO: headfit 0 in SGLang 0.0.1, {said}")
            if not faults.kernel.startswith("the server's own") and rank < faults.answering:
                print(f"INFO headfit answered 1 decode calls of 1 layers in process {100 + rank}")
        print(faults.say, flush=True)
    if "HEADFIT_LONE_RANK" in os.environ and not faults.whole:
        rank, _, size = os.environ["HEADFIT_LONE_RANK"].partition("/")
        (folder, _) = os.environ["PYTHONPATH"].split(os.pathsep)[:2]
        assert "lone_rank:register" in next(Path(folder).glob("*.dist-info/entry_points.txt")).read_text()
        heads = "4 of 64 heads" if faults.other_heads else f"{64 // int(size)} of 64 heads"
        print(f"WARNING headfit lone rank: {heads} (attention TP rank {rank} of {size})", flush=True)


if __name__ == "__main__":
    Handler.faults = _parse()
    if Handler.faults.die:
        sys.exit("planted end")
    print("fake server starts", flush=True)
    time.sleep(Handler.faults.slow_start)
    _say_what_runs(Handler.faults)
    ThreadingHTTPServer(("127.0.0.1", Handler.faults.port), Handler).serve_forever()
