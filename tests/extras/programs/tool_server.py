"""A scripted MCP server without the package: `python tool_server.py` over standard input and
output, `… PORT` over HTTP.

Its tools do what tests need: keep a count, fail, wait, say too much, and die.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "title": "Text"}},
    "required": ["text"],
    "title": "echoArguments",
}
SECONDS = {"type": "object", "properties": {"seconds": {"type": "number", "default": 0}}}
NOTHING = {"type": "object", "properties": {}}
TOOLS = {
    "misfit": ("Gives a result that does not fit its schema.", NOTHING),
    "count": ("Counts its calls.", NOTHING),
    "echo": ("Says a text.", TEXT),
    "fail": ("Fails.", NOTHING),
    "wait": ("Waits.", SECONDS),
    "flood": ("Says a lot.", NOTHING),
    "die": ("Ends the server.", NOTHING),
    "task": ("Says which task it serves.", NOTHING),
    "where": ("Says its folder, its words and its variable OWN, and leaves a file.", NOTHING),
    "leave": ("Starts a process in a session of its own, and says its number.", NOTHING),
}
CALLS = 0


def called(name, arguments):
    """(text, whether the tool failed)"""
    global CALLS
    CALLS += 1
    if name == "die":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "wait":
        if "NOTE" in os.environ:
            with open(os.environ["NOTE"], "w") as note:
                note.write(str(os.getpid()))
        time.sleep(arguments["seconds"])
    if name == "where":
        with open("left", "x"):
            pass
        return json.dumps([os.getcwd(), sys.argv[1:], os.environ.get("OWN")]), False
    if name == "leave":
        words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        left = subprocess.Popen(words, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
        return str(left.pid), False
    said = {
        "count": CALLS,
        "echo": arguments.get("text"),
        "fail": "no luck",
        "flood": "x" * 100_000,
        "task": os.environ.get("RLKIT_TASK"),
    }
    return str(said.get(name, "done")), name == "fail"


def answered(method, params):
    """The result of a request, or None where there is no such method."""
    if method == "initialize":
        info = {"name": "scripted", "version": "1"}
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": info,
        }
    if method == "tools/list":  # one tool a page
        place = int(params.get("cursor") or 0)
        name, (description, schema) = list(TOOLS.items())[place]
        tool = {"name": name, "description": description, "inputSchema": schema}
        if name == "misfit":
            tool["outputSchema"] = {**SECONDS, "required": ["seconds"]}
        page = {"tools": [tool]}
        return page | ({"nextCursor": str(place + 1)} if place + 1 < len(TOOLS) else {})
    if method == "tools/call":
        text, failed = called(params["name"], params.get("arguments") or {})
        misfit = {"structuredContent": {"seconds": None}} if params["name"] == "misfit" else {}
        return {"content": [{"type": "text", "text": text}], "isError": failed, **misfit}
    return {} if method == "ping" else None


def reply(line):
    request = json.loads(line)
    if "id" not in request:
        return None
    result = answered(request.get("method"), request.get("params") or {})
    body = (
        {"error": {"code": -32601, "message": "no such method"}}
        if result is None
        else {"result": result}
    )
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        said = reply(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(202 if said is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said or b"")))
        self.end_headers()
        self.wfile.write(said or b"")

    def do_GET(self):
        self.send_error(405)

    def handle(self):
        with suppress(ConnectionError):  # a client that hung up
            super().handle()

    def log_message(self, *words):
        pass


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
        print(server.server_address[1], flush=True)
        server.serve_forever()
    for line in sys.stdin.buffer:
        if said := reply(line):
            sys.stdout.buffer.write(said + b"\n")
            sys.stdout.buffer.flush()
