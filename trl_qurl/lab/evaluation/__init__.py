"""How good is a model at questions with checkable answers: generation by vLLM, grading by math-verify, intervals."""
