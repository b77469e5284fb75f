"""What rollouts cost, added up between two reads."""

from dataclasses import dataclass

from trl_qurl.rollout.sync import SyncReport


@dataclass
class RolloutCost:
    """
    Seconds, bytes and tokens on this process since the last read.

    Attributes:
        quantize_s: Gathering and rounding.
        sync_s: Whole syncs; contains `quantize_s`, and digests where there are any.
        check_s: Digests and probes.
        sent_bytes: Tensors made for the engine.
        generate_s: Generation.
        tokens: Completion tokens.
    """

    quantize_s: float = 0.0
    sync_s: float = 0.0
    check_s: float = 0.0
    sent_bytes: int = 0
    generate_s: float = 0.0
    tokens: int = 0

    def add_sync(self, report: SyncReport) -> None:
        """Add the cost of a sync.

        Args:
            report: What it did.
        """
        self.quantize_s += report.quantize_s
        self.sync_s += report.sync_s
        self.check_s += report.check_s
        self.sent_bytes += report.sent_bytes
