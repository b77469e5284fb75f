"""Run one function of this package in a separate process, and write each line as soon as it is ready.

    python -m trl_qurl.lab.doctor.worker MODULE.FUNCTION ARGUMENT RESULT

An exception is written as a separate record.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the function; return exit status 1 if it raised."""
    call, argument, result = argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets `finally` blocks stop a server
    module, _, function = call.partition(".")
    with Path(result).open("a", encoding="utf-8") as file:
        try:
            for line in getattr(import_module(f"trl_qurl.lab.doctor.{module}"), function)(argument):
                print(json.dumps(asdict(line)), file=file, flush=True)
        except Exception as error:
            traceback.print_exc()
            message = " ".join(str(error).split()) or "no message"
            print(json.dumps({"error": f"{type(error).__name__}: {message}"}), file=file, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
