"""`trl-qurl doctor`: what works on this machine, by trying it; one line per check.

`lines` names every line. `packages`, `driver` and `machine` look without importing anything heavy; `device`,
`training` and `server` try, each in a process of its own (`worker`), so that a crash or a hang is a line of the
report. `examination` runs them in order, and `report` writes the lines as text or JSON.
"""
