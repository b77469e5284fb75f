"""Evaluate models on questions: answers by vLLM, grades by math-verify, intervals."""
