"""An HTTP server for tests that prints nothing where a client hangs up."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer


class QuietServer(ThreadingHTTPServer):
    """Its own mistakes are printed, as by every server of socketserver."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
