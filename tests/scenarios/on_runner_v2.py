"""With Model Runner V2, runs train.py, then fresh_engine.py, and prints their records:
on_runner_v2.py CHECKPOINT ARGUMENTS. In one process, because vLLM's imports take half of the time;
so the fresh engine has what the process keeps of the others.
"""

import runpy
import sys
from pathlib import Path

import child  # noqa: F401, puts the tests' modules on the path
import support.model_runner_v2  # noqa: F401, before vLLM

if __name__ == "__main__":
    _, checkpoint, *arguments = sys.argv
    for name, given in (("train.py", arguments), ("fresh_engine.py", [checkpoint])):
        script = str(Path(__file__).with_name(name))
        sys.argv = [script, *given]
        runpy.run_path(script, run_name="__main__")
