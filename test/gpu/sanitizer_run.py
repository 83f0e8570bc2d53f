"""Small launches for compute-sanitizer: `python sanitizer_run.py racecheck`.

One block a token, a cluster, and two persistent blocks that walk over tokens of which some have no key.
"""

import sys
from dataclasses import replace

import torch

from headfit.kernels import sparse_mqa_cuda as kernel
from headfit.testing.cases import Case, PackedFp8Format, make_case

LAUNCHES = {"block a token": (1, 3, 3), "cluster": (2, 3, 6), "persistent": (1, 8, 2)}  # cluster size, tokens, blocks

if sys.argv[1] == "racecheck":  # it does not follow one lane's arrival for its warp
    kernel._DEBUG_DEFINES["RACECHECK"] = 1
for name, (size, num_tokens, num_blocks) in LAUNCHES.items():

    def plan(tokens: int, num_heads: int, *_, size: int = size, num_blocks: int = num_blocks) -> kernel.LaunchPlan:
        return replace(kernel._layout(8, size, tokens, num_heads, kernel._cluster_slots(0)), num_blocks=num_blocks)

    kernel._plan = plan
    case = Case(num_tokens=num_tokens, num_heads=8, num_keys=(128, 100), lengths="ragged", absent=0.2)
    arguments = make_case(case, num_blocks, kv_format=PackedFp8Format(), device="cuda", dtype=torch.bfloat16)
    if name == "persistent":
        for region in ("window", "compressed"):
            arguments[region].lengths[3:6] = 0
    kernel.sparse_mqa_cuda(regions=(arguments.pop("window"), arguments.pop("compressed")), **arguments)
    torch.cuda.synchronize()
print(f"ran {len(LAUNCHES)} launches")
