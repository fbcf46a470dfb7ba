"""A process with the faults of a server: `python fake_vllm.py MODE PORT`. Only for testing how faults are handled."""

import http.server
import json
import os
import signal
import subprocess
import sys
import time

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Api(http.server.BaseHTTPRequestHandler):
    model = "m"

    def do_GET(self) -> None:
        body = {"data": [{"id": self.model}]} if self.path == "/v1/models" else {}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        pass


def serve(port: int) -> None:
    http.server.HTTPServer(("127.0.0.1", port), Api).serve_forever()


def main(mode: str, port: int) -> None:
    match mode:
        case "silent-exit":
            sys.exit(1)
        case "hang":
            print("INFO one line", flush=True)
            time.sleep(600)
        case "deep-error":
            print("(EngineCore pid=7) ERROR 11-30 12:21:58 [core.py:1] ValueError: the real reason", flush=True)
            for i in range(300):
                print(f"(APIServer pid=8) ERROR 11-30 12:21:58 [x.py:1]   File line {i}", flush=True)
            print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
            sys.exit(1)
        case "slow":
            for i in range(8):
                print(f"INFO step {i}", flush=True)
                time.sleep(0.4)
            serve(port)
        case "stubborn-child":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", CHILD])
            print(f"child {child.pid}", flush=True)
            serve(port)
        case "wrong-model":
            Api.model = "other"
            serve(port)
        case "dies-later":
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
            serve(port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
