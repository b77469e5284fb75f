"""One process of an examination: it runs one function of a module here and writes each line as soon as it has it.

    python -m trl_qurl.lab.doctor.worker MODULE.FUNCTION ARGUMENT RESULT

An exception becomes a record of its own.
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
    """Run the function; the exit status is 1 if it raised."""
    call, argument, result = argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server is ended with this process
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
