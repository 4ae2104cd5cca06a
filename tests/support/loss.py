"""The sentences with which a rank tells that another is lost: which of them, a clock decides."""

from __future__ import annotations

import re

__all__ = ["loss_of", "tells_of_loss"]

#: Of a rank that answers nobody. Whoever waits for it may time out first, or the watch may notice.
_SILENT = (
    r"rank {rank} (?:\(it serves the store of the group\) )?has not answered for \d+ s",
    r"rank {rank}, which serves the rendezvous store at \S+, has not answered within \d+:\d\d:\d\d",
    r"ranks \[{rank}\] of \d+ did not come within \d+:\d\d:\d\d",
)
#: Of one whose process has ended, which its peers see sooner than its silence, where they look.
_ENDED = (
    r"rank {rank} was killed by {signal}",
    r"rank {rank} ended without a word: killed, crashed or in os._exit",
)


def loss_of(rank: int, signal: str = "") -> str:
    """Return a regular expression of each true sentence about a rank that was lost.

    Args:
        rank: the lost rank.
        signal: the name of the signal that has ended its process; it lives and hangs if empty.
    """
    told = [*_SILENT, *(_ENDED if signal else ())]
    return f"(?:{'|'.join(one.format(rank=rank, signal=signal) for one in told)})"


def tells_of_loss(text: str, rank: int, signal: str = "") -> bool:
    """Return whether a text has one of these sentences; see :func:`loss_of`."""
    return re.search(loss_of(rank, signal), text) is not None
