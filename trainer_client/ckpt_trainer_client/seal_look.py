"""Whether a region is sealed, for a client that hears nothing of its sidecar."""

from __future__ import annotations

import logging
from pathlib import Path

from ckpt_proto.errors import RegionError
from ckpt_proto.region import Seal, seal_path

logger = logging.getLogger(__name__)


def is_sealed(region: Path) -> bool:
    """Whether nobody has broken the seal yet, as a stand-in does when it has made the shard durable.

    One that cannot be read counts as whole: nobody may fill a region of which that is not certain.
    """
    path = seal_path(region)
    if not path.exists():
        return False
    try:
        seal = Seal(path)
        try:
            return seal.read() is not None
        finally:
            seal.close()
    except RegionError as error:
        logger.warning("the seal %s cannot be read: %s", path, error)
        return True
