"""`worker.py VERSION`: each scenario of `checks` in a process of its own, as SGLang's workers are; JSON on stdout.

SGLang is imported once and every scenario starts from there by a fork, before any plugin is loaded. The launcher's side
is checked here too: it loads the plugins and hooks nothing.
"""

import importlib
import json
import logging
import multiprocessing
import os
import sys
import traceback

import stand_ins


def main(version: str) -> None:
    os.environ.update(SGLANG_PLUGINS="", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    stand_ins.install()
    import torch

    torch.set_num_threads(1)
    import checks

    for name in ("models.deepseek_v4_nextn", "model_executor.model_runner", "layers.attention.deepseek_v4_backend"):
        importlib.import_module(f"sglang.srt.{name}")
    _install_kernel(version)
    context = multiprocessing.get_context("fork")
    results = {}
    for scenario, (environment, functions) in checks.SCENARIOS.items():
        if version not in checks.ONLY_IN.get(scenario, (version,)):
            continue
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(sender, version, scenario, environment, functions))
        process.start()
        sender.close()
        try:
            results |= receiver.recv()
        except EOFError:
            results |= {f"{scenario}/{function.__name__}": "the process died" for function in functions}
        process.join()
    results["launcher/nothing_is_hooked"] = _attempt(_launcher)
    print("RESULTS " + json.dumps(results))


def _install_kernel(version: str) -> None:
    """The kernel's function where this version calls it."""
    from flash_mla_stand_in import flash_mla_with_kvcache

    for name in ("flash_mla", "sgl_kernel.flash_mla") if version != "0.5.23" else ("flash_mla",):
        importlib.import_module(name).flash_mla_with_kvcache = flash_mla_with_kvcache


def _run(sender, version, scenario, environment, functions) -> None:
    import checks
    import server_checks

    logger = logging.getLogger("headfit")
    logger.addHandler(checks.Recorder())
    logger.setLevel(logging.INFO)
    os.environ.update(environment)
    if scenario.endswith("changed_signature"):
        _change_signature()
    if scenario == "failed_hook":
        _fail_a_hook()
    if scenario in server_checks.SCENARIOS:
        server_checks.install()
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit as end:  # of the whole worker
        checks.ENDS.append(str(end))
    if scenario == "failed_hook":
        import layers

        layers.build(128, 0, 8)
    sender.send({f"{scenario}/{f.__name__}": _attempt(f, version) for f in functions})


def _attempt(function, *args) -> str:
    try:
        function(*args)
        return "ok"
    except Exception:
        return traceback.format_exc()


def _change_signature() -> None:
    from sglang.srt.models.deepseek_v4 import MQALayer

    forward = MQALayer.forward

    def changed(self, x, token_positions, forward_batch):
        return forward(self, x, token_positions, forward_batch)

    MQALayer.forward = changed


def _fail_a_hook() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry._apply_target.__func__

    def failing(cls, target, hooks):
        if target.endswith("MQALayer.forward"):
            raise RuntimeError("planted")
        return apply(cls, target, hooks)

    HookRegistry._apply_target = classmethod(failing)


def _launcher() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    assert not HookRegistry._hooks


if __name__ == "__main__":
    main(sys.argv[1])
