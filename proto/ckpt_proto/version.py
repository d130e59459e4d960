"""The protocol version and the one compatibility rule.

Two sides talk when their ``PROTOCOL_VERSION`` is equal. Within one version a message may gain fields that have a
default (an older side ignores them); anything else — a field removed, a meaning changed — raises the number.
"""

from __future__ import annotations

PROTOCOL_VERSION = 1
