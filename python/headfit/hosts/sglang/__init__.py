"""SGLang as a host: a plugin that runs a rank's exact heads in a stock server and keeps its attention sinks right.

SGLang finds `register` through the entry point group `sglang.srt.plugins` and calls it in the launcher and in every
worker process. What it then does, file by file:

- `settings`: the environment variables, all of them.
- `capabilities`: reads the installed server's code and names what to hook, or says why not.
- `sinks`: a layer's sink as a view of its parameter, per rank and padded, never a copy that could go stale.
- `seam`: the decode kernel's function, answered by a headfit backend for the rank's own heads.
- `plugin`: the hooks, which kernel runs and why, and the worker's one log line.
"""

from headfit.hosts.sglang.plugin import register, status

__all__ = ["register", "status"]
