"""A directory of ranks: where decode ranks find the prefill ranks of a fleet.

Prefill ranks register address, public key and generation; decode ranks ask for a fleet and get
its ranks once all are there. One small HTTP service (`kvconnect bootstrap`), all in memory:
after a restart of it the ranks' refreshes fill it again.
"""

from kvconnect.disagg.bootstrap.client import Announcement, Directory
from kvconnect.disagg.bootstrap.server import DirectoryServer
from kvconnect.disagg.bootstrap.table import Entry

__all__ = ["Announcement", "Directory", "DirectoryServer", "Entry"]
