"""Runs another scenario with Model Runner V2: on_runner_v2.py SCRIPT ARGUMENTS. Prints its record."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import support.model_runner_v2  # noqa: F401, before vLLM

if __name__ == "__main__":
    script = Path(__file__).with_name(sys.argv[1])
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")
