"""`trl-qurl doctor`: will this environment run trl-qurl, and if not, what is the remedy?

`environment` inspects without importing torch. `device` asks torch, `trial` trains a tiny policy
and compares its engine with a new one, and `server` trains with an engine on another GPU. These run
in processes of their own, so a crash or a hang becomes a line of the `report`. `command` runs all.
"""
