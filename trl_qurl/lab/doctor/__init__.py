"""`trl-qurl doctor`: will this environment run trl-qurl, and if not, what is the remedy?

`environment` inspects without importing torch. `device` asks torch, and `trial` trains a tiny policy; both run in a
`child` process, so a crash or a hang becomes a line of the `report`. `command` runs them in order.
"""
