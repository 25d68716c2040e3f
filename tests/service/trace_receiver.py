"""A receiver of OTLP over HTTP as a process: writes each span that it decodes as a line of JSON. Prints its port."""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/x-protobuf"
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        with Path(sys.argv[1]).open("a") as file:
            for resource in sent.resource_spans:
                service = {one.key: one.value.string_value for one in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    said = {
                        "path": self.path,
                        "key": self.headers.get("x-key"),
                        "service": service.get("service.name"),
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "span": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "begins_s": span.start_time_unix_nano / 1e9,
                        "ends_s": span.end_time_unix_nano / 1e9,
                        "job": next(one.value.string_value for one in span.attributes if one.key == "orc.job_id"),
                        "is_error": span.status.code == 2,
                    }
                    print(json.dumps(said), file=file, flush=True)
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    print(server.server_address[1], flush=True)
    server.serve_forever()
