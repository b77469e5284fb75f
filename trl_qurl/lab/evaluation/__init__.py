"""How good is a model at questions with checkable answers: generation by vLLM, grading by math-verify, intervals."""

from trl_qurl.lab.grading import is_correct

__all__ = ["is_correct"]
