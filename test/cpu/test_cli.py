"""The command line: every refusal is one line, every answer is text or one JSON object."""

import importlib.metadata
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headfit import cli, doctor, memory
from headfit.backends import BACKEND_NAMES

PROMPTS = ["Tom has 3\f pens.", "Ann buys 4 cups\u2028 and 5 more for her café."]
TEMPLATE = "{{ bos_token }}{% for message in messages %}Question: {{ message['content'] }}\nAnswer:{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random model and a byte-level tokenizer of 500 merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from headfit.assets.word_problems import make_problems
    from headfit.testing.models import hf_config, random_model

    folder = tmp_path_factory.mktemp("model")
    random_model(hf_config((0, 4, 128), vocab_size=758)).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=758, special_tokens=list(special.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [text for problem in make_problems(300, 0) for text in (problem.context, problem.question, problem.solution)],
        trainer,
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(model, tmp_path):
    """The model's folder again, to break."""
    return shutil.copytree(model, tmp_path / "copy")


def assert_refused(capfd, code, parts, *argv):
    """The command fails with `code` and one line on stderr that holds every part."""
    assert cli.main([str(arg) for arg in argv]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("headfit: error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert not [part for part in parts if str(part) not in err], err


def run_json(capfd, *argv):
    assert cli.main([*map(str, argv), "--json"]) == cli.OK
    return json.loads(capfd.readouterr().out)


def generate(model, *argv):
    return ["generate", "--model", model, "--device", "cpu", "--max-new-tokens", 5, *argv]


def with_prompts(*argv):
    return [*argv, *(part for prompt in PROMPTS for part in ("--prompt", prompt))]


def test_a_missing_path_is_refused(capfd, tmp_path):
    parts = [tmp_path / "none", "no such file or folder"]
    assert_refused(capfd, cli.BAD_INPUT, parts, *generate(tmp_path / "none"))
    assert_refused(capfd, cli.BAD_INPUT, [tmp_path / "config.json", "no such file"], *generate(tmp_path))
    assert_refused(capfd, cli.BAD_INPUT, ["--model: empty"], *generate(""))


def test_another_architecture_is_refused(capfd, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert_refused(capfd, cli.BAD_INPUT, [copy, "model_type", "llama", "deepseek_v4"], *generate(copy))


def test_a_corrupt_safetensors_file_is_refused(capfd, copy):
    file = copy / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert_refused(capfd, cli.BAD_INPUT, [file, "safetensors"], *generate(copy, "--prompt", "a"))


def test_a_missing_tensor_is_named(capfd, copy):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("wq_b.weight"))
    del tensors[gone]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert_refused(capfd, cli.BAD_INPUT, ["wq_b.weight"], *generate(copy, "--prompt", "a"))


def test_a_missing_tokenizer_or_chat_template_is_refused(capfd, copy):
    (copy / "chat_template.jinja").unlink()
    assert_refused(capfd, cli.BAD_INPUT, ["chat template", "--raw"], *generate(copy, "--prompt", "a"))
    (copy / "tokenizer.json").write_text("{}")
    assert_refused(capfd, cli.BAD_INPUT, [copy, "tokenizer does not load"], *generate(copy, "--prompt", "a"))
    (copy / "tokenizer.json").unlink()
    assert_refused(capfd, cli.BAD_INPUT, [copy, "tokenizer.json"], *generate(copy, "--prompt", "a"))


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--attn-tp", 3], ["attn_tp_size 3", "num_heads 16", "o_groups 8", "1, 2, 4, 8"]),
        (["--attn-tp", 16], ["attn_tp_size 16", "o_groups 8", "1, 2, 4, 8"]),
        (["--prompt", "a", "--prompt", " "], ["--prompt 2", "empty prompt"]),
        (
            ["--max-context", 10, "--prompt", "a prompt longer than ten tokens"],
            ["prompt 1", "--max-new-tokens 5", "10", "--max-context"],
        ),
        (["--max-new-tokens", 5000, "--prompt", "a"], ["prompt 1", "5000", "4096", "max_position_embeddings"]),
        (["--max-context", 5000], ["--max-context 5000", "4096"]),
        (["--backend", "fastest"], ["backend", "fastest", "auto", *BACKEND_NAMES]),
        (["--kv-format", "int3"], ["--kv-format", "int3", "auto", "model", "fp8"]),
        (["--temperature", "-1"], ["--temperature", "-1", "0 to"]),
        (["--temperature", "0.0001"], ["temperature: 0.0001", "0 (greedy), 0.001 or more"]),
        (["--top-p", "nan"], ["--top-p", "nan"]),
        (["--seed", "x"], ["--seed", "x"]),
        (["--attn-tp", 0], ["--attn-tp", "0"]),
        (["--prompt", "a", "--prompts-file", "b"], ["--prompts-file", "--prompt"]),
        (["--prompts-file", "/nowhere/b"], ["/nowhere/b"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if value and str(value[0]).startswith("--") else "",
)
def test_bad_options_are_refused(capfd, model, argv, parts):
    assert_refused(capfd, cli.BAD_INPUT, parts, *generate(model, *argv))


def test_cuda_is_refused_where_there_is_none(capfd, model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    argv = ["generate", "--model", model, "--device", "cuda", "--attn-tp", 2]
    assert_refused(capfd, cli.BAD_INPUT, ["cuda needs 2 GPUs", "found 0"], *argv)


@pytest.mark.parametrize(
    ("content", "parts"),
    [(b"one\n\ntwo\n", ["line 2", "empty prompt"]), (b"", ["holds no prompt"]), (b"\xff\xfe", ["not UTF-8"])],
)
def test_a_bad_prompts_file_is_refused(capfd, model, tmp_path, content, parts):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert_refused(capfd, cli.BAD_INPUT, [file, *parts], *generate(model, "--prompts-file", file))


def test_too_little_memory_is_said_before_loading(capfd, model, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 100 * 2**20)
    parts = ["2 ranks of", "need about", "cpu memory, available 100.0 MiB"]
    assert_refused(capfd, cli.FAILED, parts, *generate(model, "--attn-tp", 2, "--prompt", "a"))


def test_a_command_is_required(capfd):
    assert_refused(capfd, cli.BAD_INPUT, ["required: generate | plan | doctor"])
    assert_refused(capfd, cli.BAD_INPUT, ["serve", "generate", "plan", "doctor"], "serve")


def test_two_ranks_answer_as_one_does(capfd, model, one_thread, tmp_path):
    one = run_json(capfd, *with_prompts(*generate(model)))
    assert {name: one[name] for name in ("model", "attn_tp_size", "backend", "kv_format", "dtype", "device")} == {
        "model": str(model),
        "attn_tp_size": 1,
        "backend": "reference",
        "kv_format": "model",
        "dtype": "float32",
        "device": "cpu",
    }
    assert [result["prompt"] for result in one["results"]] == PROMPTS
    assert all(set(result) == {"prompt", "text", "finish_reason"} for result in one["results"])
    assert all(isinstance(result["text"], str) and result["text"] for result in one["results"])
    file = tmp_path / "prompts.txt"
    file.write_bytes("\r\n".join([*PROMPTS, ""]).encode("utf-8-sig"))
    argv = generate(model, "--attn-tp", 2, "--json", "--prompts-file", file)
    two = run_command(*argv)
    assert two.stderr == ""
    assert json.loads(two.stdout) == one | {"attn_tp_size": 2}


def test_options_reach_the_run(capfd, model, one_thread):
    argv = with_prompts(*generate(model))
    greedy = run_json(capfd, *argv)["results"]
    for size in (1, 2**31 - 1):
        assert run_json(capfd, *argv, "--max-batch", size, "--max-context", 600)["results"] == greedy
    assert run_json(capfd, *argv, "--raw")["results"] != greedy
    sampled = [run_json(capfd, *argv, "--temperature", 2, "--seed", seed)["results"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert run_json(capfd, *argv, "--kv-format", "fp8")["kv_format"] == "fp8"


def test_without_a_prompt_samples_are_answered(capfd, model, one_thread):
    assert cli.main([*map(str, generate(model)), "--max-new-tokens", "1"]) == cli.OK
    out, err = capfd.readouterr()
    assert err == ""
    assert out.startswith(f"{model}: attention TP 1, backend reference (")
    assert out.count("right answer: ") == 5
    assert "[5] (after " in out and "of 5 answered right" in out


def run_command(*argv, **popen):
    return subprocess.run(
        [sys.executable, "-m", "headfit.cli", *map(str, argv)], capture_output=True, text=True, **popen
    )


@pytest.mark.parametrize(
    ("closed", "argv", "code"),
    [(">&-", "plan --num-heads 64", 0), ("2>&-", "generate --model none --json", 2)],
)
def test_closed_streams_are_no_error(closed, argv, code):
    command = f'exec "$0" -m headfit.cli {argv} {closed}'
    ended = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_what_the_encoding_of_stdout_lacks_is_escaped(model, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.main([*map(str, generate(model)), "--prompt", PROMPTS[1]]) == cli.OK
    assert b"her caf\\xe9." in sys.stdout.buffer.getvalue()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "SIGTERM", "SIGHUP"])
def test_a_killed_rank_and_signals_end_the_run(model, tmp_path, default_signals, how):
    """SIGKILL goes to a rank, SIGHUP to the command alone, the others to the whole group of processes."""
    argv = generate(model, "--attn-tp", 2, "--max-new-tokens", 3000, "--prompt", "a")
    process = subprocess.Popen(
        [sys.executable, "-m", "headfit.cli", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("headfit-ranks-*/store")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    signum = signal.Signals[how]
    if how in ("SIGHUP", "SIGTERM"):
        process.send_signal(signum)
    if how in ("SIGINT", "SIGTERM"):  # as a terminal's Ctrl-C does, and `timeout`, which signals twice
        os.killpg(process.pid, signum)
    if how == "SIGKILL":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(next(int(child) for child in children if "spawn_main" in _command_line(child)), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    message = (
        "of 2 died (killed by SIGKILL" if how == "SIGKILL" else "interrupted" if how == "SIGINT" else f"ended by {how}"
    )
    assert process.returncode == (cli.FAILED if how == "SIGKILL" else 128 + signum)
    assert out == "" and err.startswith("headfit: error: ") and message in err and err.count("\n") == 1, err
    assert not list(tmp_path.glob("headfit*"))


def _command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_doctor_says_what_there_is(capfd, model):
    plain = run_json(capfd, "doctor")
    wanted = {"headfit", "python", "platform", "packages", "sglang_plugin", "cpu", "gpus", "backend", "memory"}
    assert set(plain) == wanted
    assert set(plain["packages"]) >= {"torch", "transformers", "triton", "flash_mla", "sgl_kernel", "sglang"}
    assert plain["backend"]["auto"] in BACKEND_NAMES and plain["backend"]["reason"]
    assert isinstance(plain["sglang_plugin"]["registered"], bool)
    assert plain["memory"] is None
    assert cli.main(["doctor", "--model", str(model), "--device", "cpu"]) == cli.OK
    assert "each rank needs" in capfd.readouterr().out


@pytest.mark.parametrize(
    "listed, loaded",
    [("", True), ("headfit", True), ("other, headfit ", True), ("other", False), (",", False), (" ", False)],
)
def test_doctor_reads_sglangs_list_of_plugins(capfd, monkeypatch, listed, loaded):
    """As SGLang does: an empty variable allows all plugins, a list without a name none."""
    entry = importlib.metadata.EntryPoint("headfit", "headfit.hosts.sglang:register", doctor.PLUGIN_GROUP)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [entry])
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    excluded = run_json(capfd, "doctor")["sglang_plugin"]["excluded_by"]
    assert excluded == (None if loaded else f"SGLANG_PLUGINS={listed}")


def test_doctor_names_a_setting_with_which_no_server_starts(capfd, monkeypatch):
    allowed = "allowed: auto, sparse_mqa_cuda, unified_kv_triton, flashmla, off, reference"
    monkeypatch.setenv("HEADFIT_BACKEND", "sparse_mqa")
    assert cli.main(["doctor"]) == cli.FAILED
    out = capfd.readouterr().out
    assert f"; HEADFIT_BACKEND: 'sparse_mqa', {allowed}; a server does not start with that\n" in out
    assert out.splitlines()[-1].startswith("  backends: ")
    assert cli.main(["doctor", "--json"]) == cli.FAILED
    plugin = json.loads(capfd.readouterr().out)["sglang_plugin"]
    assert plugin["settings"] is None and plugin["obstacle"] == f"HEADFIT_BACKEND: 'sparse_mqa', {allowed}"


@pytest.mark.parametrize("registered", [True, False])
def test_doctor_says_nothing_of_a_server_that_does_not_load_the_plugin(capfd, monkeypatch, registered):
    entry = importlib.metadata.EntryPoint("headfit", "headfit.hosts.sglang:register", doctor.PLUGIN_GROUP)
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [entry] if registered else [])
    monkeypatch.setenv("HEADFIT_BACKEND", "sparse_mqa")
    if registered:
        monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert cli.main(["doctor"]) == cli.OK
    out = capfd.readouterr().out
    assert "HEADFIT_BACKEND: 'sparse_mqa', allowed: auto" in out and "does not start" not in out
    assert ("not loaded: SGLANG_PLUGINS=other" if registered else "not registered in") in out


@pytest.mark.parametrize("backend", ["sparse_mqa_cuda", "unified_kv_triton"])
def test_doctor_names_a_kernel_that_the_plugin_cannot_have(capfd, monkeypatch, backend):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("HEADFIT_BACKEND", backend)
    assert cli.main(["doctor"]) == cli.FAILED
    reason = f"HEADFIT_BACKEND={backend} cannot be had: backend {backend}: needs a CUDA GPU, the device is cpu"
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("  SGLang plugin: ")]
    settings = f"HEADFIT_BACKEND={backend} HEADFIT_CHECK=0"
    assert line.endswith(f"; {settings}; {reason}; a server does not start with that")
    assert lines[-1].startswith("  backends: ")
    assert cli.main(["doctor", "--json"]) == cli.FAILED
    assert json.loads(capfd.readouterr().out)["sglang_plugin"]["obstacle"] == reason


def test_doctor_names_a_library_that_the_plugin_cannot_have(capfd, monkeypatch):
    def create(name, **_):
        raise ImportError("libnvrtc does not load: planted")

    monkeypatch.setattr("headfit.backends.create", create)
    monkeypatch.setenv("HEADFIT_BACKEND", "sparse_mqa_cuda")
    assert cli.main(["doctor"]) == cli.FAILED
    wanted = "; HEADFIT_BACKEND=sparse_mqa_cuda cannot be had: libnvrtc does not load: planted; a server does not start"
    assert wanted in capfd.readouterr().out


def test_doctor_names_a_check_that_would_compare_nothing(capfd, monkeypatch):
    """`auto` leaves all to the server without a GPU, and the plugin then refuses the check."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("HEADFIT_CHECK", "1")
    assert cli.main(["doctor", "--json"]) == cli.FAILED
    obstacle = json.loads(capfd.readouterr().out)["sglang_plugin"]["obstacle"]
    assert obstacle == "HEADFIT_CHECK=1 cannot be had: backend sparse_mqa_cuda: needs a CUDA GPU, the device is cpu"


@pytest.mark.parametrize("backend", ["auto", "flashmla", "off", "reference"])
def test_doctor_accepts_what_needs_no_kernel_of_ours(capfd, monkeypatch, backend):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("HEADFIT_BACKEND", backend)
    assert run_json(capfd, "doctor")["sglang_plugin"]["obstacle"] is None


def test_doctor_estimates_a_rank(capfd, model, monkeypatch):
    argv = ["doctor", "--model", model, "--device", "cpu", "--max-context", 1000]
    one, two = (run_json(capfd, *argv, "--attn-tp", size)["memory"] for size in (1, 2))
    # One rank holds the whole file, whose tensors are float32 here, headers aside.
    file = (model / "model.safetensors").stat().st_size
    assert abs(one["attention_bytes"] + one["experts_bytes"] + one["other_bytes"] - file) < 0.01 * file
    assert two["experts_bytes"] == one["experts_bytes"] / two["expert_shards"]
    assert one["other_bytes"] == two["other_bytes"] and one["cache_bytes"] == two["cache_bytes"]
    assert one["attention_bytes"] / 2 < two["attention_bytes"] < one["attention_bytes"]
    assert two["needed_bytes"] == 2 * two["rank_bytes"]
    assert one["fits"] and one["rank_bytes"] > one["other_bytes"]
    twice = run_json(capfd, *argv, "--max-batch", 2)["memory"]
    assert 1.9 < twice["cache_bytes"] / one["cache_bytes"] <= 2
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**20)
    assert cli.main(list(map(str, argv))) == cli.FAILED
    assert "does not fit" in capfd.readouterr().out
