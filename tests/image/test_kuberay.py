"""The image has the programs that KubeRay runs in a pod."""

import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# KubeRay's BaseWgetHealthCommand: of every release for Ray before 2.53, before 1.6.0 for any Ray.
PROBE = "wget --tries 1 -T 2 -q -O- http://localhost:{port}/api/local_raylet_healthz | grep success"


class Raylet(BaseHTTPRequestHandler):
    """Answers as Ray's agent on a healthy node."""

    def do_GET(self) -> None:
        """Respond to the path of the probe alone."""
        self.send_response(200 if self.path == "/api/local_raylet_healthz" else 404)
        self.end_headers()
        self.wfile.write(b"success")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def test_the_probe_of_a_healthy_node_succeeds() -> None:
    """Without one of its programs no pod becomes ready, and Kubernetes restarts each after 630 s."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Raylet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["bash", "-c", PROBE.format(port=server.server_port)]
        done = subprocess.run(
            command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
        )
        server.shutdown()
    assert (done.returncode, done.stdout, done.stderr) == (0, "success\n", "")
