"""DAPO's dynamic sampling: groups whose rewards are all equal are replaced by groups of other prompts."""
