"""Where the coordinator listens for the sidecars of other nodes. Text in, text out; nothing is resolved or opened.

Every rank works the address out from its own environment, so that all nodes agree on it without talking.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping

from ckpt_proto.identity import check_job_id

VARIABLE = "CKPT_SIDECAR_COORDINATOR"
LOCAL = "local"
"""Value of :data:`VARIABLE` that says: all ranks are on this node, no network."""

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Derived ports: below what Linux gives to outgoing connections (32768 and up) and Kubernetes to node ports."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")


def coordinator_address(environment: Mapping[str, str], job_id: str, world_size: int) -> str:
    """The coordinator's ``host:port``; empty if all ranks are on one node and no network is needed.

    ``CKPT_SIDECAR_COORDINATOR`` wins. Else ``LOCAL_WORLD_SIZE`` says whether this is one node, and the host is
    ``MASTER_ADDR``, which is rank 0's node. The port comes from the job id, not from ``MASTER_PORT``: that one is
    torchrun's own store, and under elastic rendezvous it is another after every restart. ``NODE_RANK`` is not looked
    at, because elastic restarts renumber the nodes.

    Raises:
        ValueError: a variable has no valid value, or is missing on several nodes; the text says what to set.
    """
    given = environment.get(VARIABLE, "").strip()
    if given:
        return "" if given == LOCAL else _given_address(given)
    local_world_size = _local_world_size(environment)
    if world_size == 1 or local_world_size == world_size:
        return ""
    host = environment.get("MASTER_ADDR", "").strip()
    if not host:
        if local_world_size is None:
            return ""  # no launcher at all: nothing says that there is a second node
        raise ValueError(
            f"{local_world_size} of {world_size} ranks are on this node and MASTER_ADDR is not set, so the other "
            f"nodes' sidecars cannot be found: start with torchrun, or set {VARIABLE}=HOST:PORT on every node (HOST "
            f"is rank 0's node; '{LOCAL}' if all ranks are on one node)"
        )
    try:
        bare = _check_host(host.removeprefix("[").removesuffix("]"))
    except ValueError as error:
        raise ValueError(f"MASTER_ADDR: {error}: set it, or {VARIABLE}=HOST:PORT, on every node") from None
    if local_world_size is None and is_loopback(bare):
        return ""  # no other node could have reached rank 0 there
    return join_address(bare, derived_port(job_id))


def derived_port(job_id: str) -> int:
    """The port of a job: the same in every process and release, because all nodes must come to the same one."""
    digest = hashlib.sha256(b"ckpt-sidecar coordinator " + check_job_id(job_id).encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:8], "big") % (LAST_PORT - FIRST_PORT + 1)


def check_coordinator_address(address: str) -> str:
    """Return ``address`` if it is empty (one node) or ``host:port`` that can be connected to.

    Raises:
        ValueError: it is neither; the text says what is wrong.
    """
    if address and split_address(address)[1] == 0:
        raise ValueError(f"address {address!r} has port 0; 1 to 65535 can be connected to")
    return address


def split_address(address: str) -> tuple[str, int]:
    """``(host, port)`` of ``host:port``; an IPv6 host stands in brackets there and without them here. Port 0 is left to
    the caller: it can be bound, but not connected to.

    Raises:
        ValueError: it is no such address.
    """
    host, colon, digits = address.rpartition(":")
    if not colon:
        raise ValueError(f"address {address[:300]!r} is not HOST:PORT")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and int(digits) <= 65_535):
        raise ValueError(f"address {address[:300]!r}: port {digits[:20]!r} is not a number from 1 to 65535")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError(f"address {address[:300]!r}: put an IPv6 host into brackets, as in [fd00::1]:{digits}")
    return _check_host(host[1:-1] if bracketed else host, ipv6=bracketed), int(digits)


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``: ``localhost``, 127.0.0.0/8 or ::1. Names are not looked up."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _given_address(given: str) -> str:
    try:
        return check_coordinator_address(given)
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE}: {error}; it can be HOST:PORT, or '{LOCAL}' if all ranks are on one node"
        ) from None


def _check_host(host: str, *, ipv6: bool | None = None) -> str:
    """Return ``host`` if it is a name or a numeric address; it goes into socket addresses and log lines."""
    if ipv6 or (ipv6 is None and ":" in host):
        number, percent, zone = host.partition("%")
        if percent and not _ZONE.fullmatch(zone):
            raise ValueError(f"{host[:300]!r} has no valid zone")
        try:
            ipaddress.IPv6Address(number)
        except ValueError:
            raise ValueError(f"{host[:300]!r} is no IPv6 address") from None
        return host
    if not _NAME.fullmatch(host) or ".." in host:
        raise ValueError(f"{host[:300]!r} is no host name")
    if host.replace(".", "").isdigit():
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"{host[:300]!r} is no IPv4 address") from None
    return host


def _local_world_size(environment: Mapping[str, str]) -> int | None:
    text = environment.get("LOCAL_WORLD_SIZE", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"the environment variable LOCAL_WORLD_SIZE is {text[:40]!r}, expected a positive number")
    return int(text)
