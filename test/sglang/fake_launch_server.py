"""What `sglang_server_check.py` asks of an SGLang server, without a model: copied to be `sglang/launch_server.py`.

Log-probabilities depend on the sinks that the arm would see, plus rounding of the arm's own. `FAKE_FAULT` names what
this server gets wrong.
"""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import sglang_server_model as model
from safetensors.torch import load_file

WISHES = json.loads(os.environ["HEADFIT_SERVER_CHECK"])
STOCK = os.environ["HEADFIT_BACKEND"] == "off"
FAULT = os.environ.get("FAKE_FAULT", "")
NUM_LAYERS = 6
DP = "--enable-dp-attention" in sys.argv


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    sinks = 0.0
    runs = 0
    idle = False
    workers: tuple[subprocess.Popen, ...] = ()

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer({"version": "0.0.1", "tp_size": int(flag("--tp-size"))})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            return self.answer(self.generate(body))
        if self.path == "/flush_cache":
            Handler.idle = True
            return self.answer({})
        assert self.idle, "an update of a server that may still be busy"
        Handler.idle = False
        if self.path == "/update_weights_from_tensor":
            assert len(body["serialized_named_tensors"]) == int(flag("--tp-size"))
            tensors = dict(pickle.loads(b64decode(body["serialized_named_tensors"][0])))
        elif self.path == "/update_weights_from_disk":
            tensors = load_file(Path(body["model_path"], "model.safetensors"))
        assert len(tensors) == NUM_LAYERS
        if (not STOCK or FAULT == "fresh stock") and FAULT != "stale plugin":
            before = model.sink_values(0, num_heads(), 0)[0]
            Handler.sinks = float(tensors["layers.0.attn.attn_sink"][0] - before)
        return self.answer({"success": FAULT != "no update"})

    def generate(self, body):
        if FAULT == "slow answer":
            time.sleep(300)
        Handler.runs += 1
        write_workers(Handler.runs, [worker.pid for worker in self.workers])
        steps = body["sampling_params"]["max_new_tokens"]
        forced = model.forced_tokens().tolist()
        noise = random.Random(Handler.runs + 100 * STOCK + 200 * WISHES["pad_to"])
        moved = self.sinks + (1.0 if WISHES["neighbour_sinks"] else 0.0)
        if FAULT == "graph of 1" and not STOCK and len(body["input_ids"]) == 1:
            moved += 0.15  # little in the mean of all sequences
        if FAULT == "dp graphs" and DP and "--disable-cuda-graph" not in sys.argv:
            moved += 1.0
        answers = []
        for prompt in body["input_ids"]:
            start = len(prompt) - 1 + (FAULT == "unforced")
            answer = {"output_ids": forced[start : start + steps], "meta_info": {}}
            if "token_ids_logprob" in body:
                watched = body["token_ids_logprob"][0]
                answer["meta_info"]["output_token_ids_logprobs"] = [
                    [[-10.0 + moved + noise.gauss(0, 0.01), token, None] for token in watched] for _ in range(steps)
                ]
            answers.append(answer)
        return answers

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def num_heads() -> int:
    return json.loads(Path(flag("--model-path"), "config.json").read_text())["num_attention_heads"]


def attn_tp(worker: int) -> tuple[int, int]:
    if "HEADFIT_LONE_RANK" in os.environ and FAULT != "whole layers":
        rank, _, size = os.environ["HEADFIT_LONE_RANK"].partition("/")
        return int(rank) if FAULT != "rank 0" else 0, int(size)
    return (0, 1) if DP else (worker, int(flag("--tp-size")))


def write_workers(runs, pids):
    calls = [100 * runs] * NUM_LAYERS
    left = calls if STOCK else [int(FAULT == "left a call")] + [0] * (NUM_LAYERS - 1)
    plugin = {"active": not STOCK, "served_layers": NUM_LAYERS, "num_layers": NUM_LAYERS, "passed_on": {}}
    if not STOCK:
        plugin["shape"] = "cached"
    row = {"step": 0, "compress_ratio": 0, "ours": 1.8e-3, "stock": 1.7e-3, "fault": 0.1, "refused": True}
    rows = [row | {"layer": layer} for layer in range(NUM_LAYERS) if WISHES["check_every"]]
    if FAULT in ("unchecked layer", "no error of stock", "no number", "quiet check"):
        rows[-1:] = {
            "unchecked layer": [],
            "no error of stock": [row | {"layer": NUM_LAYERS - 1, "stock": 0.0}],
            "no number": [row | {"layer": NUM_LAYERS - 1, "ours": float("nan"), "fault": float("inf")}],
            "quiet check": [row | {"layer": NUM_LAYERS - 1, "refused": False}],
        }[FAULT]
    for number, pid in enumerate(pids):
        rank, size = attn_tp(number)
        seen = {"pid": pid, "decode_calls": calls, "stock_calls": left, "plugin": plugin, "rows": rows}
        seen["outside_calls"] = [int(FAULT == "outside"), 0]
        seen["layers"] = [[rank, size, num_heads() // size]]
        Path(WISHES["folder"], f"worker-{pid}.json").write_text(json.dumps(seen))


def end_with_a_worker(*_):
    if any(worker.poll() is not None for worker in Handler.workers):
        print("a worker was killed", flush=True)
        for worker in Handler.workers if FAULT != "left worker" else ():
            worker.kill()
        os._exit(1)


if __name__ == "__main__":
    if FAULT == "no start":
        sys.exit("planted end")
    assert Path(flag("--model-path"), "config.json").is_file()
    signal.signal(signal.SIGCHLD, end_with_a_worker)
    Handler.workers = tuple(
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) for _ in range(int(flag("--tp-size")))
    )
    if FAULT == "slow start":
        print("still starting", flush=True)
        time.sleep(300)
    print("[2026] INFO headfit 0 in SGLang 0.0.1: decode kernel: fake", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()
