"""`fake_server.py PORT [--fail-every N]`: what `serving.py` asks of an SGLang server, at a speed that its arm sets."""

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
    fail_every = 0
    lock = threading.Lock()
    served = 0
    busy = False

    def log_message(self, *args):
        pass

    def do_GET(self):
        info = {"version": "0.0.1", "tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "model_path": "none"}
        if "FAKE_TP_SIZE" in os.environ:
            info |= {"tp_size": int(os.environ["FAKE_TP_SIZE"]), "enable_dp_attention": False}
        self._answer(200, json.dumps(info).encode() if self.path == "/server_info" else b"ok")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            print(self.path, flush=True)
            if self.path == "/start_profile":
                _write_trace(Path(os.environ["SGLANG_TORCH_PROFILER_DIR"]))
            Handler.busy = not Handler.busy  # the first flush comes too early
            return self._answer(400 if self.path == "/flush_cache" and Handler.busy else 200, b"{}")
        with self.lock:
            Handler.served += 1
            fails = self.fail_every and Handler.served % self.fail_every == 0
        if fails:
            return self._answer(400, b'{"error": {"message": "planted"}}')
        assert body["stream"] and all(isinstance(token, int) for token in body["input_ids"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        wanted = body["sampling_params"]["max_new_tokens"]
        time.sleep(5 * STEP)
        for count in range(1, wanted + 1):
            reason = {"type": "length", "length": wanted} if count == wanted else None
            meta = {"id": "x", "finish_reason": reason, "prompt_tokens": 1, "completion_tokens": count}
            event = b"data: " + json.dumps({"output_ids": [1] * count, "meta_info": meta}).encode() + b"\n\n"
            self._chunk(event[:20])  # events need not come whole
            self._chunk(event[20:])
            if count < wanted:
                time.sleep(STEP)
        print(
            f"Decode batch, #running-req: 2, #token: 9, cuda graph: True, gen throughput (token/s): {2 / STEP}",
            flush=True,
        )
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


def _write_trace(folder):
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [("sparse_mqa", 25.0), ("gemm", 75.0)]
    events = [{"cat": "kernel", "name": name, "dur": time} for name, time in kernels]
    with gzip.open(folder / "1-TP-0.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)


if __name__ == "__main__":
    if "--fail-every" in sys.argv:
        Handler.fail_every = int(sys.argv[sys.argv.index("--fail-every") + 1])
    if "--die" in sys.argv:
        sys.exit("planted end")
    if os.environ.get("HEADFIT_BACKEND") != "off" and "--silent" not in sys.argv:
        print(
            "[2026] INFO: headfit 0 in SGLang 0.0.1: decode kernel: fake\nINFO headfit answered 1 decode calls",
            flush=True,
        )
    if "HEADFIT_LONE_RANK" in os.environ and "--whole" not in sys.argv:
        rank, _, size = os.environ["HEADFIT_LONE_RANK"].partition("/")
        (folder, _) = os.environ["PYTHONPATH"].split(os.pathsep)[:2]
        assert "lone_rank:register" in next(Path(folder).glob("*.dist-info/entry_points.txt")).read_text()
        heads = f"{64 // int(size)} of 64 heads" if "--other-heads" not in sys.argv else "4 of 64 heads"
        print(f"WARNING headfit lone rank: {heads} (attention TP rank {rank} of {size})", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
