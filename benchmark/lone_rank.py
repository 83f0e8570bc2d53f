"""One rank of an attention TP on one GPU, without the other ranks: an SGLang plugin, and how a server gets it.

With `HEADFIT_LONE_RANK=3/8` and this plugin, every attention layer of a server that is started with TP 1 is rank 3's of
8: that rank's heads, output groups, weights and run of the sinks, padded as the server pads a rank. Nothing is summed
over ranks, so that the model's output is no model's; the decode calls are those of the rank. For SGLang 0.5.16, whose
layers take their rank as an argument.
"""

import argparse
import functools
import importlib
import inspect
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "HEADFIT_LONE_RANK"
OWNER = "MqaAttentionBase"
SAID = "headfit lone rank: "  # what a worker's log says then, before "16 of 128 heads (attention TP rank 3 of 8)"

logger = logging.getLogger("headfit.lone_rank")


def parse(text: str) -> tuple[int, int]:
    """(rank, size) of `R/N`.

    Raises:
        ValueError: another text, or no rank of that many.
    """
    numbers = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if numbers is None or not int(numbers[1]) < int(numbers[2]):
        raise ValueError(f"{text!r}, allowed: R/N with R from 0 to N - 1")
    return int(numbers[1]), int(numbers[2])


def argument(text: str) -> str:
    """An argparse type: `text` where `parse` takes it."""
    try:
        parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def write_entry_points(folder: Path, plugins: Mapping[str, str]) -> None:
    """A distribution in `folder` of nothing but entry points, by which SGLang finds plugins.

    plugins: name -> module:function.
    """
    info = folder / "headfit_benchmark-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headfit-benchmark\nVersion: 0.0.0\n")
    lines = [f"{name} = {target}\n" for name, target in plugins.items()]
    (info / "entry_points.txt").write_text("".join(["[sglang.srt.plugins]\n", *lines]))


def register() -> None:
    """The entry point. The constructor is changed before SGLang puts any plugin's hook around it.

    Raises:
        SystemExit: the variable is no rank, or this server's layers take none. SGLang would log an `Exception` and go
            on with whole layers.
    """
    from headfit.hosts.sglang.capabilities import MODEL
    from headfit.hosts.sglang.plugin import runs_a_model

    if VARIABLE not in os.environ or not runs_a_model():
        return
    try:
        rank, size = parse(os.environ[VARIABLE])
    except ValueError as error:
        raise SystemExit(f"{VARIABLE}: {error}") from error
    owner = getattr(importlib.import_module(MODEL), OWNER, object)
    original = owner.__init__
    if not {"attn_tp_rank", "attn_tp_size"} <= set(inspect.signature(original).parameters):
        raise SystemExit(f"{VARIABLE}: this SGLang's layers take no attention-TP rank")
    said = False

    @functools.wraps(original)
    def one_rank(self, *args, **kwargs) -> None:
        nonlocal said
        original(self, *args, **kwargs | {"attn_tp_rank": rank, "attn_tp_size": size})
        if not said:
            said = True
            heads = f"{self.n_local_heads} of {self.n_heads} heads"
            logger.warning("%s%s (attention TP rank %d of %d)", SAID, heads, rank, size)

    owner.__init__ = one_rank
