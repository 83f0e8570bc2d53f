"""FlashMLA's fp8 sparse decode kernel: the head counts that it is compiled for.

Source: the dispatch of https://github.com/deepseek-ai/FlashMLA's sparse decode, which accepts these counts only.
`headfit plan` shows what padding it would take. Calling it is not implemented yet.
"""

from headfit.backends.base import KernelSupport

SUPPORT = KernelSupport(name="flashmla", architectures=("sm90", "sm100"), num_heads=(64, 128))
