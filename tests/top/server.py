"""A server that answers as it is told, and metrics as vLLM gives them."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 500.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 4000.0
vllm:cache_config_info{block_size="16",engine="0"} 1.0
"""
OASIS = """# TYPE vllm:oasiskv_requests gauge
vllm:oasiskv_requests{engine="0",model_name="tiny",state="dense"} 1.0
vllm:oasiskv_requests{engine="0",model_name="tiny",state="sparse"} 2.0
vllm:oasiskv_refusals_total{engine="0",model_name="tiny",reason="store"} 7.0
vllm:oasiskv_transitions_total{engine="0",model_name="tiny"} 5.0
vllm:oasiskv_context_blocks{engine="0",model_name="tiny",state="sparse"} 100.0
vllm:oasiskv_resident_blocks{engine="0",model_name="tiny",state="sparse"} 40.0
vllm:oasiskv_sparse_steps_total{engine="0",model_name="tiny"} 10.0
vllm:oasiskv_wanted_tiles_total{engine="0",model_name="tiny"} 1000.0
vllm:oasiskv_missed_tiles_total{engine="0",model_name="tiny"} 50.0
vllm:oasiskv_fetched_bytes_total{engine="0",model_name="tiny"} 1.048576e+07
vllm:oasiskv_fetch_cap_bytes_total{engine="0",model_name="tiny"} 2.097152e+07
vllm:oasiskv_transfer_wait_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 9.0
vllm:oasiskv_transfer_wait_seconds_bucket{engine="0",le="0.003",model_name="tiny"} 10.0
vllm:oasiskv_transfer_wait_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 10.0
vllm:oasiskv_transfer_wait_seconds_count{engine="0",model_name="tiny"} 10.0
vllm:oasiskv_transfer_wait_seconds_sum{engine="0",model_name="tiny"} 0.005
vllm:oasiskv_store_blocks{engine="0",model_name="tiny",state="used"} 256.0
vllm:oasiskv_store_blocks{engine="0",model_name="tiny",state="kept"} 256.0
vllm:oasiskv_store_blocks{engine="0",model_name="tiny",state="free"} 512.0
vllm:oasiskv_block_bytes{engine="0",model_name="tiny"} 1.048576e+06
"""
BODY = VLLM + OASIS


def grown(body, times):
    """The same metrics with every counter ``times`` as large."""
    lines = []
    for line in body.splitlines():
        name, _, value = line.rpartition(" ")
        counts = any(part in line for part in ("_total{", "_bucket{", "_count{", "_sum{"))
        lines.append(f"{name} {float(value) * times}" if counts else line)
    return "\n".join(lines) + "\n"


@contextmanager
def serving(answer):
    """The address of a server that calls ``answer(handler)`` for each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def giving(body, status=200):
    """An answer for ``serving``."""

    def answer(handler):
        data = body.encode() if isinstance(body, str) else body
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer
