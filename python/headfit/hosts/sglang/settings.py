"""The plugin's settings: environment variables, documented here and nowhere else.

    | variable          | values, the default first                                | meaning                      |
    |-------------------|----------------------------------------------------------|------------------------------|
    | `HEADFIT_BACKEND` | `auto`, `sparse_mqa_cuda`, `unified_kv_triton`,          | which kernel decodes: below  |
    |                   | `flashmla`, `off`, `reference`                           |                              |
    | `HEADFIT_CHECK`   | `0`, `1`                                                 | compare eager calls          |
    | `SGLANG_PLUGINS`  | SGLang's own: the plugins it loads, by name; unset: all  | ours is `headfit`            |

`auto` runs `sparse_mqa_cuda` where it is the faster one (Hopper, up to 64 heads a rank) and leaves the server's own
FlashMLA elsewhere, saying why. `flashmla` keeps the server's kernel and only puts sinks and padding right. `off` hooks
nothing. `reference` is PyTorch, far too slow to serve with: for checks.

`HEADFIT_CHECK=1` compares every call that headfit answers outside a CUDA-graph capture, head by head, with the
reference under the layer's own sinks, and raises where they differ; start the server with `--disable-cuda-graph` to
have every decode step compared. With `off` and `flashmla` there is nothing to compare, and it is not allowed.

A value that is not allowed keeps the server from starting, and so does what is asked for, another backend than `auto`
or the check, and cannot be had.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

BACKENDS = ("auto", "sparse_mqa_cuda", "unified_kv_triton", "flashmla", "off", "reference")
NOT_OURS = ("flashmla", "off")  # the server's own kernel answers every call
_SWITCH = {"0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """One process's settings. `backend` is one of `BACKENDS`; `check` compares eager calls with the reference."""

    backend: str = "auto"
    check: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Settings":
        """Read the variables of the module docstring.

        Raises:
            ValueError: naming the variable, its value and what is allowed.
        """
        environment = os.environ if environment is None else environment
        backend = environment.get("HEADFIT_BACKEND", "auto")
        if backend not in BACKENDS:
            raise ValueError(f"HEADFIT_BACKEND: {backend!r}, allowed: {', '.join(BACKENDS)}")
        check = environment.get("HEADFIT_CHECK", "0")
        if check not in _SWITCH:
            raise ValueError(f"HEADFIT_CHECK: {check!r}, allowed: 0, 1")
        if _SWITCH[check] and backend in NOT_OURS:
            raise ValueError(
                f"HEADFIT_CHECK: 1, allowed with HEADFIT_BACKEND={backend}: 0, for headfit answers no call"
            )
        return cls(backend=backend, check=_SWITCH[check])

    @property
    def asked(self) -> str:
        """What must be had, as variables; empty where headfit may leave all to the server."""
        wanted = [f"HEADFIT_BACKEND={self.backend}"] if self.backend != "auto" else []
        return " ".join([*wanted, "HEADFIT_CHECK=1"] if self.check else wanted)

    def as_environment(self) -> dict[str, str]:
        """The variables and their values, as `headfit doctor` shows them."""
        values = asdict(self)
        return {f"HEADFIT_{name.upper()}": str(int(v)) if isinstance(v, bool) else v for name, v in values.items()}
