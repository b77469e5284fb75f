"""`trl-qurl doctor`: test what works on this machine, and report one line per check.

`lines` defines every line. `packages`, `driver` and `machine` inspect without heavy imports. `device`, `training` and
`server` run real tests in separate processes (`worker`), so a crash or a hang becomes a line of the report.
`examination` runs them in order, and `report` formats the lines as text or JSON.
"""
