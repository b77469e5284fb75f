"""Evaluate models on questions with checkable answers: generation with vLLM, grading with
math-verify, intervals.
"""
