"""A child for supervisor tests: serves /health with the standard library only, and misbehaves on request.

cheap_child.py PORT [--die-after S] [--ignore-term] [--grandchildren FILE] [--never-ready] [--count FILE]
"""

import argparse
import http.server
import os
import signal
import sys
import threading
import time


def grandchildren(path: str) -> None:
    """A plain child, and a daemon that double-forked into its own session; their pids go to the file."""
    read_end, write_end = os.pipe()
    plain = os.fork()
    if plain == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
        os._exit(0)
    middle = os.fork()
    if middle == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(write_end, str(os.getpid()).encode())
            time.sleep(300)
        os._exit(0)
    os.waitpid(middle, 0)
    daemon_pid = int(os.read(read_end, 32))
    with open(path + ".new", "w") as file:
        file.write(f"{os.getpid()} {plain} {daemon_pid}")
    os.rename(path + ".new", path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die-after", type=float)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--grandchildren")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--count")
    options = parser.parse_args()
    if options.count:
        with open(options.count, "a") as file:
            file.write(f"{time.monotonic()}\n")
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (print("draining", flush=True), os._exit(0)))
    if options.grandchildren:
        grandchildren(options.grandchildren)
    if options.die_after is not None:
        timer = threading.Timer(options.die_after, lambda: (print("about to die", flush=True), os._exit(7)))
        timer.daemon = True
        timer.start()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if options.never_ready else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    print(f"listening on {options.port}", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
