"""The key that the sidecars of a job have in common, and who is let in with it.

Beyond loopback, sidecars talk only with a key or not at all (unless told ``--peer-insecure``): whoever reaches the
coordinator's port could otherwise veto, fake or read every save of the job. The mechanism is CURVE: encrypted and
authenticated in both directions.

One file holds one secret key, the same on every node. The coordinator's sidecar is the server with that key pair; the
others know it by its public half, and authenticate with the very same pair. So there is one secret to hand out and one
to change, and nobody keeps a list of nodes, which an elastic job could not keep either.

The file may be read by its owner alone, who is this user or root. A Kubernetes secret is a link to a file in a hidden
directory beside it, owned by root, mode 0400, or 0440 when the pod has an ``fsGroup``: so a link is followed if it
stays below its own directory, and the group may read a file of root.

Authentication is a ZAP handler of our own: pyzmq's needs a thread or an event loop of its own (its handler is a
coroutine), and all it would do is compare one key.
"""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ckpt_proto.coordinator_address import is_loopback, split_address
from ckpt_proto.errors import CheckpointError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"ckpt-sidecar"
_ZAP_VERSION = b"1.0"
_MAX_FILE_BYTES = 4096
_HEADER = (
    "# Secret key with which the sidecars of a job authenticate each other (CURVE, Z85).\n"
    "# Give the same file to every node; whoever can read it can talk to the coordinator.\n"
)


class PeerKeyError(CheckpointError):
    """The key file cannot be made, read or trusted; the text names it and what to do."""


@dataclass(frozen=True)
class PeerKeys:
    """One CURVE key pair, both halves in Z85 (40 characters). The secret half is in no repr and no log."""

    public: bytes
    secret: bytes = field(repr=False)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Let only those in who have this key; call it before bind, with a :class:`Doorkeeper` in the same context."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without it libzmq lets everybody in who knows the public key, should the handler ever not be there.
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def join(self, socket: zmq.Socket[bytes]) -> None:
        """Authenticate with this key, and talk only to a server that has it; call it before connect."""
        socket.set(zmq.CURVE_SERVERKEY, self.public)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)


def keys_for(address: str, key_file: Path | None, *, insecure: bool) -> PeerKeys | None:
    """The keys with which to listen on or connect to ``address`` (``host:port``); None: without.

    Raises:
        PeerKeyError: the address can be reached from other machines, and there is neither a key file nor permission
            to do without; or the file cannot be used.
        ValueError: the address is none.
    """
    if key_file is not None:
        return read_keys(key_file)
    if not is_loopback(split_address(address)[0]) and not insecure:
        raise PeerKeyError(
            f"the coordinator's address {address} can be reached from other machines and there is no key: make one "
            "with 'ckpt-sidecar keygen FILE', give it to every node, and name it with --peer-key-file or "
            "CKPT_SIDECAR_PEER_KEY_FILE; or set CKPT_SIDECAR_COORDINATOR=local if all ranks are on one node; or, on a "
            "network where everybody may be trusted, --peer-insecure"
        )
    return None


def write_new_keys(path: Path) -> PeerKeys:
    """Draw a key and keep it in a new file of mode 0600.

    Raises:
        PeerKeyError: the file exists (nobody is locked out by a second run) or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise PeerKeyError(f"{path} exists and is not overwritten: remove it, or name another file") from None
    except OSError as error:
        raise PeerKeyError(f"the key file {path} cannot be made: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(f"{_HEADER}{secret.decode()}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        os.unlink(path)  # half a key would be refused by every later run, and is of no use
        raise PeerKeyError(f"the key file {path} cannot be written: {error.strerror}") from error
    return PeerKeys(public, secret)


def read_keys(path: Path) -> PeerKeys:
    """The key pair in a file that :func:`write_new_keys` has made.

    Raises:
        PeerKeyError: it is not there, somebody else may have read or written it, or holds no key.
    """
    lines = [line.strip() for line in _read_private(path).splitlines()]
    found = [line for line in lines if line and not line.startswith(b"#")]
    if len(found) != 1 or len(found[0]) != 40:
        raise PeerKeyError(f"{path} holds no key: expected one line of 40 characters, as 'ckpt-sidecar keygen' writes")
    try:
        return PeerKeys(zmq.curve_public(found[0]), found[0])
    except (ValueError, zmq.ZMQError):
        raise PeerKeyError(f"{path} holds no key: its 40 characters are no Z85") from None


def _read_private(path: Path) -> bytes:
    try:
        # Looked at through the descriptor: what is checked is what is read, whatever happens to the name meanwhile.
        fd = os.open(_real_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PeerKeyError(f"the key file {path} cannot be opened: {error.strerror}") from error
    try:
        _check_private(path, os.fstat(fd))
        return os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)


def _real_path(path: Path) -> Path:
    """Where ``path`` leads, if that is below its own directory."""
    directory = Path(os.path.realpath(path.parent))
    real = Path(os.path.realpath(path, strict=True))
    if directory not in real.parents:
        raise PeerKeyError(f"the key file {path} is a link to {real}, outside its own directory: name the file itself")
    return real


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise PeerKeyError(f"the key file {path} is no regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise PeerKeyError(
            f"the key file {path} belongs to user {found.st_uid}, who can read and change it: it must belong to user "
            f"{os.geteuid()} or root"
        )
    allowed = 0o640 if found.st_uid == 0 else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~allowed:
        raise PeerKeyError(f"the key file {path} has mode {mode:04o}, so others have access to it: chmod 0600 {path}")


def zap_answer(request: list[bytes], public: bytes) -> tuple[list[bytes], str]:
    """The answer to one ZAP request, and why it was refused; empty if it was not.

    ``public`` is the one key that is let in, in Z85.
    """
    version, request_id, domain, address, _identity, mechanism, *credentials = [*request, *[b""] * (6 - len(request))]
    reason = ""
    if version != _ZAP_VERSION or domain != ZAP_DOMAIN:
        reason = f"a ZAP request of version {version[:20]!r}, domain {domain[:20]!r}"
    elif mechanism != b"CURVE" or len(credentials) != 1:
        reason = f"mechanism {mechanism[:20]!r} instead of CURVE"
    elif not hmac.compare_digest(credentials[0], z85.decode(public)):
        reason = "another key than that of this job"
    if reason:
        reason = f"{address[:60].decode(errors='replace').removeprefix('::ffff:')}: {reason}"
        return [_ZAP_VERSION, request_id, b"400", b"key refused", b"", b""], reason
    return [_ZAP_VERSION, request_id, b"200", b"OK", b"peer", b""], ""
