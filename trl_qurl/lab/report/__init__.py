"""`trl-qurl report`: plot the paper's figures from run logs, in one self-contained HTML page.

`page` reads runs, sorts them into `groups`, turns their metrics into `curves` for each of the `questions`, and draws
`figures`. `live` draws them in a notebook, even during a run. Nothing here needs torch or TRL.
"""
