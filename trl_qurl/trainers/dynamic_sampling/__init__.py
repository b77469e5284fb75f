"""DAPO's dynamic sampling: replaces groups whose rewards are all equal with groups of other prompts."""
