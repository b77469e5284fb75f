"""`trl-qurl report`: the paper's figures from the logs of runs, in one HTML page that needs no network.

`write` is the way in. Runs are read and put into groups (`runs`, `settings`, `groups`, `facets`), their metrics become
curves (`curves`, `seconds`) as the list of questions asks (`questions`, `plots`), and those become pictures
(`pictures`, `bars`) and a page (`summary`, `page`, `template.html`). `live` draws them in a notebook, also while the
run goes on (`child`). Nothing here needs torch, TRL or vLLM.
"""
