"""Parts that several test modules share."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.training")
