"""`trl-qurl report`: the paper's figures from the logs of runs, in one HTML page that needs no network.

`page` reads runs, puts them into `groups`, turns their metrics into `curves` as the list of `questions` asks, and
these into `figures`. `live` draws them in a notebook, also while the run goes on. Nothing here needs torch or TRL.
"""
