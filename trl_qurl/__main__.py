"""`python -m trl_qurl`, the same as the command `trl-qurl`."""

from trl_qurl.cli import main

raise SystemExit(main())
