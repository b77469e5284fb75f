"""What rollouts cost, as it is counted up between two looks."""

from dataclasses import dataclass


@dataclass
class RolloutCost:
    """Seconds and tokens on this process since the last look. `sync_s` contains `quantize_s`, and digests if any."""

    quantize_s: float = 0.0
    sync_s: float = 0.0
    check_s: float = 0.0
    sent_bytes: int = 0
    generate_s: float = 0.0
    tokens: int = 0

    def add_tensor(self, seconds: float, size: int) -> None:
        """Count seconds of gathering and rounding, and the bytes that came of it."""
        self.quantize_s += seconds
        self.sent_bytes += size
