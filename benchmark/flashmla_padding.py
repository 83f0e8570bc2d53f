"""Write the padding table that the `flashmla` backend's `auto` choice reads, out of a measurement of the peer.

    python benchmark/decode_kernel.py --backends flashmla --heads 16 --out flashmla-h200.json
    python benchmark/flashmla_padding.py flashmla-h200.json --architecture sm90

Replaces the table's rows of that architecture; those of others stay.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headfit.backends
from headfit.backends.flashmla import SUPPORT

TABLE = Path(headfit.backends.__file__).parent / "flashmla_padding.json"
GPUS = {  # of an architecture, by their names
    "sm90": r"\b(GH200|H(20|100|200|800))",
    "sm100": r"\b(GB|B)(100|200)",
    "sm103": r"\b(GB|B)300",
}
PROVENANCE = ("gpu", "torch", "flash_mla", "commit", "date", "command")
SHAPE = ("keys_window", "keys_extra", "compress_ratio", "batch")


def table_of(result: dict[str, Any]) -> dict[str, Any]:
    """One architecture's entry: provenance, and a row a shape with microseconds by kernel head count.

    Raises:
        ValueError: not a `decode_kernel` result, or a shape without a time at every head count.
    """
    if not isinstance(result, dict) or result.get("benchmark") != "decode_kernel":
        found = result.get("benchmark") if isinstance(result, dict) else type(result).__name__
        raise ValueError(f"benchmark: {found!r}, allowed: 'decode_kernel'")
    times: dict[tuple, dict[str, float]] = {}
    for row in result["rows"]:
        if row["backend"] == SUPPORT.name:
            times.setdefault(tuple(row[name] for name in SHAPE), {})[str(row["kernel_num_heads"])] = row["us_median"]
    for shape, us in times.items():
        if not all(isinstance(us.get(str(count)), float | int) and us[str(count)] > 0 for count in SUPPORT.num_heads):
            raise ValueError(
                f"rows: {dict(zip(SHAPE, shape, strict=True))} has {us}, allowed: a time of each head count"
            )
    if not times:
        raise ValueError(f"rows: none of {SUPPORT.name}, allowed: one or more")
    rows = [dict(zip(SHAPE, shape, strict=True)) | {"us": us} for shape, us in times.items()]
    return {name: result[name] for name in PROVENANCE} | {"rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Update the table; exit code 0, 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="JSON that decode_kernel.py wrote")
    parser.add_argument("--architecture", choices=SUPPORT.architectures, required=True, help="of the measured GPU")
    parser.add_argument("--table", type=Path, default=TABLE, help="default: the packaged one")
    args = parser.parse_args(argv)
    try:
        entry = table_of(json.loads(args.result.read_text()))
        measured = [architecture for architecture, names in GPUS.items() if re.search(names, entry["gpu"])]
        if measured and args.architecture not in measured:
            allowed = measured[0] if measured[0] in SUPPORT.architectures else f"none, it is {measured[0]}"
            raise ValueError(f"--architecture: {args.architecture}, allowed for {entry['gpu']}: {allowed}")
        table = json.loads(args.table.read_text()) if args.table.exists() else {"architectures": {}}
        table["architectures"][args.architecture] = entry
        args.table.write_text(json.dumps(table, indent=1, allow_nan=False) + "\n")
    except (OSError, ValueError) as error:
        print(f"flashmla_padding: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError) as error:  # a file of another form
        what = f"{args.result}, {args.table}: {type(error).__name__}: {error}"
        print(f"flashmla_padding: {what}, allowed: a decode_kernel result and a padding table", file=sys.stderr)
        return 2
    print(f"wrote {args.table}: {len(entry['rows'])} rows of {args.architecture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
