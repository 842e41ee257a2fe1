"""Leaves the shape of pages out of kvport's fingerprint, where ONE_SHAPE is set: a control.

Engines of different layouts must then take each other's pages, which shows that the tests would notice.
"""

import os


def register():
    """Have all pages count as of one shape."""
    if "ONE_SHAPE" in os.environ:
        from kvport_sglang import fingerprint

        fingerprint.shape = one


def one(*_):
    """Give the shape of all pages."""
    return bytes(31) + b"x"
