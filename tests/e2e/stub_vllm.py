"""Looks like a vLLM server to router and supervisor, with the standard library only: health, model card, metrics.

It holds KV for nobody once there is a file HELD/PORT with its process id in it; so its successor holds nothing. Called
as `vllm serve` is; HELD comes from the environment (STUB_HELD).
"""

import http.server
import json
import os
import sys
from pathlib import Path

PORT = int(sys.argv[sys.argv.index("--port") + 1])
MINE = Path(os.environ["STUB_HELD"]) / str(PORT)


def usage() -> float:
    return 0.25 if MINE.exists() and MINE.read_text() == str(os.getpid()) else 0.0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        card = {"id": "m", "object": "model", "max_model_len": 400}
        gauges = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": usage()}
        answers = {
            "/health": "",
            "/v1/models": json.dumps({"object": "list", "data": [card]}),
            "/metrics": "".join(f"vllm:{name} {value}\n" for name, value in gauges.items()),
        }
        text = answers.get(self.path)
        self.send_response(404 if text is None else 200)
        data = (text or "").encode()
        self.send_header("content-type", "application/json" if data.startswith(b"{") else "text/plain")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
