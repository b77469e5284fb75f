"""`trl-qurl doctor`: will this environment run trl-qurl, and if not, what is the remedy?

`environment` inspects without importing torch. `device` asks torch, `trial` trains a tiny policy,
`fresh` compares an engine that was reloaded with a new one, and `server` loses a server. These run
in a `child` process, so a crash or a hang becomes a line of the `report`. `command` runs all.
"""
