"""Runs app.smoke.pairs with a transfer that flips one bit of one number: what broken P2P does. For tests only."""

from __future__ import annotations

import sys

from app.smoke import pairs

honest = pairs.transfer


def flips_a_bit(source, target) -> None:  # type: ignore[no-untyped-def]
    honest(source, target)
    target[12345] ^= 1 << 7


pairs.transfer = flips_a_bit
pairs.main(sys.argv[1:])
