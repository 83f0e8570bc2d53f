"""An SGLang plugin for one GPU: the attention layers of one rank of an attention TP, without the other ranks.

`HEADFIT_LONE_RANK=3/8` makes every attention layer of a server that is started with TP 1 rank 3's of 8: that rank's
heads, weights and run of the sinks, padded as the server pads a rank. Nothing is summed over ranks, so that the model's
output is no model's; the decode calls are those of the rank.
"""

import functools
import importlib
import inspect
import os
import re

from headfit.hosts.sglang.capabilities import MODEL
from headfit.hosts.sglang.plugin import runs_a_model

VARIABLE = "HEADFIT_LONE_RANK"
OWNER = "MqaAttentionBase"


def parse(text: str) -> tuple[int, int]:
    """(rank, size) of `R/N`.

    Raises:
        ValueError: another text, or no rank of that many.
    """
    numbers = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if numbers is None or not int(numbers[1]) < int(numbers[2]):
        raise ValueError(f"{text!r}, allowed: R/N with R from 0 to N - 1")
    return int(numbers[1]), int(numbers[2])


def register() -> None:
    """The entry point. The constructor is changed before SGLang puts any plugin's hook around it.

    Raises:
        ValueError: the variable is no rank, or this server's layers take none.
    """
    if VARIABLE not in os.environ or not runs_a_model():
        return
    rank, size = parse(os.environ[VARIABLE])
    owner = getattr(importlib.import_module(MODEL), OWNER, object)
    original = owner.__init__
    if not {"attn_tp_rank", "attn_tp_size"} <= set(inspect.signature(original).parameters):
        raise ValueError(f"{VARIABLE}: this SGLang's layers take no attention-TP rank")

    @functools.wraps(original)
    def one_rank(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs | {"attn_tp_rank": rank, "attn_tp_size": size})

    owner.__init__ = one_rank
