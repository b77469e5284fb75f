"""`python -m trl_qurl`, the same as the command `trl-qurl`."""

import sys

from trl_qurl.cli import main

sys.exit(main())
