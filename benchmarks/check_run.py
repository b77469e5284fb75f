"""Did a run go well? Checks assertions about the metrics in its log.

    python benchmarks/check_run.py RUN 'mean(reward[-20:]) > mean(reward[:20])'
    python benchmarks/check_run.py RUN --recipe trl_qurl/lab/recipes/own/lora_w4.yaml

An assertion compares two terms by <, <=, > or >=. A term is a number, or the mean, median, min or
max of a metric's logged values; a slice, as in Python, selects some of them. A recipe has its
assertions in comments ("# assert: ..."). The exit status is 1 if an assertion does not hold, and 2
if one cannot be checked.
"""

import argparse
import operator
import re
import statistics
import sys
from pathlib import Path

from trl_qurl.lab.runs import Run, read_run

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
FUNCTIONS = {"mean": statistics.mean, "median": statistics.median, "min": min, "max": max}
TERM = re.compile(rf"({'|'.join(FUNCTIONS)})\(([\w/@.]+)(?:\[(-?\d+)?:(-?\d+)?\])?\)")
IN_RECIPES = re.compile(r"^# assert: (.+)$", re.MULTILINE)


def holds(assertion: str, run: Run) -> tuple[bool, str]:
    """Return whether an assertion holds, and both sides as numbers.

    Raises:
        ValueError: The assertion is malformed, or the run lacks values of a metric.
    """
    left, *rest = re.split(r"\s*(<=|>=|<|>)\s*", assertion.strip())
    if len(rest) != 2:
        raise ValueError(
            f"{assertion!r} is not a comparison of two terms, such as 'mean(reward[-20:]) > 0.8'."
        )
    comparison, right = rest
    values = evaluate(left, run), evaluate(right, run)
    return COMPARISONS[comparison](*values), f"{values[0]:.4g} {comparison} {values[1]:.4g}"


def evaluate(term: str, run: Run) -> float:
    """The value of one side of an assertion."""
    match = TERM.fullmatch(term)
    if match is None:
        try:
            return float(term)
        except ValueError:
            raise ValueError(
                f"{term!r} is neither a number nor, for example, median(mismatch/kl_k3[-5:])."
            ) from None
    function, metric, start, end = match.groups()
    logged = [value for _, value in run.series(metric)]
    selected = logged[slice(int(start) if start else None, int(end) if end else None)]
    if not selected:
        raise ValueError(
            f"{term}: {run.path} has {len(logged)} values of {metric}, none of them selected."
        )
    return float(FUNCTIONS[function](selected))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output_dir of a run, or its run.jsonl")
    parser.add_argument("assertions", nargs="*", metavar="ASSERTION")
    parser.add_argument("--recipe", type=Path, help="check the assertions of this recipe, too")
    arguments = parser.parse_args()
    assertions = [
        *arguments.assertions,
        *(IN_RECIPES.findall(arguments.recipe.read_text()) if arguments.recipe else ()),
    ]
    if not assertions:
        parser.error("there is nothing to check: give an assertion, or a --recipe that has some")
    status = 0
    try:
        run = read_run(arguments.run)
        for assertion in assertions:
            fine, values = holds(assertion, run)
            status |= not fine
            print(f"{'ok' if fine else 'FAILED':<8}{assertion}    ({values})")
    except (OSError, ValueError) as error:
        print(f"check_run: error: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
